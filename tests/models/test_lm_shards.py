"""Checkpoints of several processes: shards that any number of processes reads, never half."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from nsa_core import InvalidInput
from nsa_core.util import atomic_files, safetensors_io
from nsa_core.util.atomic_files import NotWritten
from nsa_models.lm import checkpoint, shards
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import DataSpec

pytest.importorskip("safetensors")
SAVE = """
import pathlib, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from nsa_models.lm import checkpoint
from nsa_models.lm.config import size
from nsa_models.lm.model import LanguageModel

def worker(rank, folder, count):
    folder = pathlib.Path(folder)
    if count > 1:
        store = dist.FileStore(str(folder.parent / "store"), count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    model = LanguageModel(size("tiny"))
    if count > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    facts = {"train": {}, "data": {}, "position": [], "tokens": 0}
    for step in range(int(sys.argv[3]), 10**6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
        tensors = checkpoint.collect_tensors(model, optimizer)
        path = folder / checkpoint.FILE
        checkpoint.write(path, tensors, model.config, facts | {"step": step}, None, count > 1)

if __name__ == "__main__":
    count = int(sys.argv[2])
    if count == 1:
        worker(0, sys.argv[1], 1)
    torch.multiprocessing.spawn(worker, (sys.argv[1], count), nprocs=count)
"""


@pytest.fixture
def group():
    """Join a process group of one process, in which tensors are sharded as in a larger one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(config):
    """Return a model of uneven sizes and its optimizer after a step; both are sharded."""
    from torch.distributed.fsdp import fully_shard

    model = LanguageModel(config)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(24)[None], targets=torch.arange(24)[None]).backward()
    optimizer.step()
    return model, optimizer


def save(folder, model, optimizer, step=1, together=True):
    facts = {
        "train": dataclasses.asdict(Recipe()),
        "data": dataclasses.asdict(DataSpec("uniform")),
        "position": [],
        "step": step,
        "tokens": 0,
    }
    tensors = checkpoint.collect_tensors(model, optimizer)
    checkpoint.write(folder / checkpoint.FILE, tensors, model.config, facts, None, together)


@pytest.mark.slow
def test_shards_are_read_into_any_layout(group, config, tmp_path):
    model, optimizer = trained(config)
    save(tmp_path, model, optimizer)
    saved = checkpoint.read(tmp_path)
    shard = next(path for path in tmp_path.iterdir() if path.name != checkpoint.FILE)
    expected = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in checkpoint.collect_tensors(model, optimizer).items()
    }
    assert len(expected) == 4 * len(list(model.parameters()))
    everything = saved.tensors
    assert all(torch.equal(everything[name], tensor) for name, tensor in expected.items())
    assert everything.keys() - expected.keys() == {"random.cpu"}
    other, moments = trained(config)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    saved.restore(other, moments)
    restored = checkpoint.collect_tensors(other, moments)
    for name, tensor in checkpoint.collect_tensors(model, optimizer).items():
        assert type(restored[name]) is type(tensor)
        assert torch.equal(
            getattr(restored[name], "_local_tensor", restored[name]),
            getattr(tensor, "_local_tensor", tensor),
        )
    dist.destroy_process_group()
    try:
        alone = saved.model()  # as `nsa generate` reads it
        assert all(torch.equal(p, expected[f"model.{n}"]) for n, p in alone.named_parameters())
        optimizer = torch.optim.AdamW(alone.parameters())
        saved.restore(alone, optimizer)
        assert all(
            torch.equal(value, expected[name])
            for name, value in checkpoint.collect_tensors(alone, optimizer).items()
        )
        # A later save of one process is one file, and the shards go.
        save(tmp_path, alone, optimizer, 2, together=False)
        assert not shard.exists()
        assert checkpoint.read(tmp_path).tensors.keys() == everything.keys()
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_a_tensor_of_several_chunks_is_read_in_any_cut(group, tmp_path):
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    from nsa_core.util import safetensors_io

    whole = torch.arange(35.0).reshape(7, 5)
    chunks = []
    for number, (first, end) in enumerate([(0, 3), (3, 6), (6, 7)]):
        name = shards.shard_name("0" * 8, number, 3)
        safetensors_io.write(tmp_path / name, shards.FORMAT, {"x": whole[first:end].clone()}, {})
        chunks.append(shards.Chunk([first, 0], [end - first, 5], name, "x"))
    index = {"x": shards.Entry("float32", [7, 5], chunks)}
    assert torch.equal(shards.whole(tmp_path, index["x"]), whole)
    for target in (
        torch.zeros(7, 5),
        distribute_tensor(torch.zeros(7, 5), init_device_mesh("cpu", (1,)), [Shard(1)]),
    ):
        shards.load(tmp_path, {"x": target}, index)
        assert torch.equal(getattr(target, "_local_tensor", target), whole)
    for name in ("x", "y"):
        with pytest.raises(InvalidInput, match=rf"{name} must be float32 \[7, 6\], got"):
            shards.load(tmp_path, {name: torch.zeros(7, 6)}, index)


def test_a_process_reads_the_cut_of_a_shard_that_it_needs(tmp_path):
    """The plan of a process that reads rows 2 and 3 of a shard with the rows 3 to 6 of a tensor."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    from nsa_core.util import safetensors_io

    class Planner:
        def resolve_tensor(self, item):
            return target.narrow(0, item.dest_offsets[0], item.lengths[0])

        def commit_tensor(self, item, tensor):
            committed.append(item)

    target, committed, rows = torch.zeros(4, 2), [], torch.arange(14.0).reshape(7, 2)
    safetensors_io.write(tmp_path / "shard", shards.FORMAT, {"x": rows[3:].clone()}, {})
    chunks = [
        shards.Chunk([0, 0], [3, 2], "other", "x"),
        shards.Chunk([3, 0], [4, 2], "shard", "x"),
    ]
    reader = shards._Reader(tmp_path, {"x": shards.Entry("float32", [7, 2], chunks)})
    where = MetadataIndex("x", torch.Size([3, 0])), torch.Size([2, 0])
    item = ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex("x"),
        torch.Size([1, 0]),
        *where,
        torch.Size([2, 2]),
    )
    reader.read_data(LoadPlan([item]), Planner()).wait()
    assert target.tolist() == [[0, 0], *rows[5:7].tolist(), [0, 0]]
    assert committed == [item]


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (shards.Entry("bfloat16", [2], []), r"a must be float32 \[2\], got bfloat16 \[2\]"),
        (shards.Entry("float32", [3], []), r"a must be float32 \[2\], got float32 \[3\]"),
        (None, r"a must be float32 \[2\], got None"),
    ],
)
def test_tensors_of_another_dtype_or_shape_are_refused(tmp_path, stored, message):
    index = {} if stored is None else {"a": stored}
    with pytest.raises(InvalidInput, match=message):
        shards.load(tmp_path, {"a": torch.zeros(2)}, index)


@pytest.mark.parametrize("kind", ["nsa-language-model 1", "nsa-language-model 9"])
def test_a_checkpoint_of_another_format_is_refused_with_a_remedy(tmp_path, kind):
    path = tmp_path / checkpoint.FILE
    safetensors_io.write(path, kind, {}, {})
    remedy = "another version of this library: read it with that version, or write it again"
    with pytest.raises(InvalidInput, match=f"header says '{kind}'.*{remedy}"):
        checkpoint.read(tmp_path)
    other = tmp_path / "other"
    safetensors_io.write(other, "nsa-tensors 2", {}, {})
    with pytest.raises(InvalidInput, match=r"header says 'nsa-tensors 2'$"):
        checkpoint.read(other)


def test_absent_and_altered_shards_are_refused(group, config, tmp_path):
    save(tmp_path, *trained(config))
    shard = next(path for path in tmp_path.iterdir() if path.name != checkpoint.FILE)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"tensor \S+ does not match its digest") as caught:
        checkpoint.read(tmp_path)
    assert str(caught.value).startswith(str(shard))
    # Each of several processes checks its share of the files.
    refused = 0
    for rank in (0, 1):
        try:
            checkpoint.read(tmp_path, rank, 2)
        except InvalidInput:
            refused += 1
    assert refused == 1
    shard.unlink()
    with pytest.raises(InvalidInput, match=rf"needs {shard.name} beside it; put back all files"):
        checkpoint.read(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["shard", "index"])
def test_a_save_that_fails_leaves_the_last_checkpoint(
    group, config, tmp_path, monkeypatch, failing
):
    model, optimizer = trained(config)
    save(tmp_path, model, optimizer)
    replace = atomic_files._replace

    def full(path, content, force):
        if (pathlib.Path(path).name == checkpoint.FILE) == (failing == "index"):
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(path, content, force)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "_replace", full)
        with pytest.raises(NotWritten, match="No space left"):
            save(tmp_path, model, optimizer, 2)
    saved = checkpoint.read(tmp_path)
    assert saved.facts["step"] == 1
    assert len(saved.tensors) > 20
    save(tmp_path, model, optimizer, 3)
    assert checkpoint.read(tmp_path).facts["step"] == 3
    assert len(list(tmp_path.iterdir())) == 2  # what the failed save left is gone


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, processes):
    folder, moments, step = tmp_path / "run", random.Random(0), 0
    folder.mkdir()
    seen = set()
    for kills in range(30):
        if kills >= 6 and len(seen) > 1:
            break
        (tmp_path / "store").unlink(missing_ok=True)
        (tmp_path / "save.py").write_text(SAVE)
        command = [sys.executable, str(tmp_path / "save.py"), str(folder), str(processes)]
        child = subprocess.Popen([*command, str(step + 1)], start_new_session=True)
        try:
            until = time.monotonic() + 60
            before = (folder / checkpoint.FILE).stat().st_mtime_ns if step else 0
            while time.monotonic() < until:
                if (folder / checkpoint.FILE).exists() and before != (
                    folder / checkpoint.FILE
                ).stat().st_mtime_ns:
                    break
                time.sleep(0.005)
            time.sleep(moments.random() * 0.3)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        time.sleep(0.05)
        seen.add(len(list(folder.iterdir())))
        saved = checkpoint.read(folder)
        assert saved.facts["step"] > step
        step = saved.facts["step"]
        tensors = saved.tensors
        assert sum(tensor.numel() for tensor in tensors.values()) > 500_000
        assert all(
            bool((tensor == step).all()) for name, tensor in tensors.items() if "model." in name
        )
    assert len(seen) > 1  # some kills were in the middle of a save
