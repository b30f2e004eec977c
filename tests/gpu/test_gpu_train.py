"""Training on a GPU: no leak at full size, one loss curve whoever computes it, and no wait inside a
step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import subprocess
import sys

import pytest
import torch

from nsa_core import NSAConfig
from nsa_core.contract import SLOTS
from nsa_core.dispatch.registry import default_registry
from nsa_models.lm import log
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.data import batch_of
from nsa_models.lm.model import IGNORED, LanguageModel
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.sentinel import leak_sentinel
from nsa_models.lm.task import DataSpec, open_data
from nsa_models.lm.trainer import Trainer

pytestmark = pytest.mark.gpu
# Blocks and window of the paper's sizes, few layers: what differs between backends is the
# attention.
MODEL = LMConfig(NSAConfig(dim=256, n_heads=4, n_kv_heads=2), 2)
SPECS = {e.name: e.spec for e in default_registry().entries if e.status == "ready" and e.spec}
OFFERING = {slot: [name for name, spec in SPECS.items() if slot in spec.slots] for slot in SLOTS}
TRIPLES = [
    t
    for t in itertools.product(*(OFFERING[slot] for slot in ("cmp", "sel", "win")))
    if t != ("sdpa",) * 3
]
STEPS = 100


def trainer(backends=None, task="python-docs", length=1024, **options) -> Trainer:
    torch.manual_seed(0)
    data = open_data(DataSpec(task, length, vocab_size=256, held_out_rows=4))
    recipe = Recipe(**{"steps": STEPS, "batch": 4, "learning_rate": 3e-4, "warmup": 20, **options})
    return Trainer(LanguageModel(MODEL, backends), data, recipe, World(torch.device("cuda")))


def losses(made: Trainer, steps: int = STEPS) -> torch.Tensor:
    return torch.tensor([made.step().read()[0] for _ in range(steps)])


@pytest.fixture(scope="module")
def curve():
    """The losses of the sdpa backend in each precision."""
    kept: dict[str, torch.Tensor] = {}

    def of(precision: str) -> torch.Tensor:
        if precision not in kept:
            kept[precision] = losses(trainer("sdpa", precision=precision))
            assert kept[precision][-10:].mean() < kept[precision][:10].mean() - 0.5  # it learns
        return kept[precision]

    return of


@pytest.mark.parametrize("triple", TRIPLES, ids="-".join)
def test_report_row_17_every_triple_of_backends_gives_the_loss_curve(triple, curve):
    precision = "bfloat16" if "fa2" in triple else "float32"
    backends = dict(zip(("cmp", "sel", "win"), triple)) | {"select": "sdpa", "combine": "sdpa"}
    found = losses(trainer(backends, precision=precision))
    apart = (found - curve(precision)).abs().max().item()
    print(f"row 17: {'-'.join(triple)} {precision}: at most {apart:.2e} apart over {STEPS} steps")
    assert apart <= 1e-3


def test_packed_rows_train_as_rows_do():
    found = []
    for packed in (False, True):
        made = trainer(task="uniform", precision="float32")
        made.data.rows.packed = packed
        found.append(losses(made, 20))
    assert (found[0] - found[1]).abs().max() <= 1e-3


@pytest.mark.parametrize(
    "how", ["compile", "graph", "recompute", "compile and graph", "graph in parts"]
)
def test_how_a_step_runs_does_not_change_its_loss(how):
    task = "uniform" if "graph" in how else "python-docs"
    options = {"task": task, "precision": "bfloat16", "accumulate": 2 if "parts" in how else 1}
    plain = losses(trainer(**options), 20)
    ways = how.removesuffix(" in parts").split(" and ")
    found = losses(trainer(**options, **dict.fromkeys(ways, True)), 20)
    assert (
        found - plain
    ).abs().max() <= 5e-3  # fused products round once where separate ones round twice


class SomeIgnored:
    """Rows of which every other one has few targets."""

    def __init__(self, rows):
        self._rows, self._turn = rows, 0

    def __getattr__(self, name):
        return getattr(self._rows, name)

    def __next__(self):
        row, self._turn = next(self._rows), self._turn + 1
        few = [IGNORED] * (len(row.targets) - 8) + row.targets[-8:]
        return row._replace(targets=few) if self._turn % 2 else row


def test_a_graph_weighs_each_batch_by_its_own_targets():
    found = []
    for graph in (False, True):
        made = trainer(task="uniform", precision="bfloat16", batch=1, graph=graph)
        made.data.rows = SomeIgnored(made.data.rows)
        # norms of the gradients
        found.append(torch.tensor([made.step().read()[2] for _ in range(6)]))
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=0)


def test_no_step_waits_for_the_device():
    made = trainer(task="uniform", precision="bfloat16")
    losses(made, 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        done = [made.step() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(math.isfinite(x) for d in done for x in d.read())


def test_neither_a_batch_nor_the_numbers_of_a_step_wait_for_later_work():
    # its tokens are more than 64 KiB
    made = trainer(task="uniform", precision="bfloat16", batch=16)
    losses(made, 3)
    done = made.step()
    torch.cuda._sleep(4_000_000_000)  # cycles: two seconds
    assert math.isfinite(done.read()[0])
    batch_of([next(made.data.rows) for _ in range(16)], packed=False).to("cuda")
    assert not torch.cuda.current_stream().query()  # it sleeps on
    torch.cuda.synchronize()


def test_a_resumed_run_goes_on(tmp_path):
    pytest.importorskip("safetensors")
    from nsa_models.lm import checkpoint

    options = {"precision": "bfloat16"}
    expected = losses(trainer(**options), 6)
    first = trainer(**options)
    found = losses(first, 3)
    first.save(tmp_path / checkpoint.FILE)
    kept = checkpoint.read(tmp_path)
    data = open_data(DataSpec("python-docs", 1024, held_out_rows=4))
    second = Trainer(kept.model(), data, first.recipe, World(torch.device("cuda")), kept)
    assert (torch.cat((found, losses(second, 3))) - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("times", [1, 2, 4])
def test_nothing_leaks_at_full_size(times):
    model = dataclasses.replace(size("m7c_125m"), n_layers=2, vocab_size=64)
    recipe = Recipe(
        steps=500, batch=4, learning_rate=1e-3, warmup=50, weight_decay=0.0, precision="bfloat16"
    )
    found = leak_sentinel(model, times * model.layer.window_size, recipe=recipe, device="cuda")
    print(f"leak sentinel at {times} w: {found.loss:.4f}, ln V {found.floor:.4f}")
    assert found.quiet, found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_gpus_give_the_loss_of_one(tmp_path: pathlib.Path, kind: str) -> None:
    pytest.importorskip("safetensors")
    options = [
        "train",
        "--device",
        "cuda",
        "--length",
        "512",
        "--batch",
        "8",
        "--steps",
        "20",
        "--warmup",
        "5",
    ]
    found = []
    for name, launcher in (
        ("one", []),
        ("two", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]),
    ):
        out = tmp_path / name
        command = [
            sys.executable,
            *launcher,
            "-m",
            "nsa_cli",
            *options,
            "--out",
            str(out),
            "--parallel",
            kind,
        ]
        subprocess.run(command, check=True)
        found.append(torch.tensor([r["loss"] for r in log.read_log(out / log.FILE)[1][1:]]))
    print(f"{kind}: at most {(found[0] - found[1]).abs().max():.2e} apart")
    assert (found[0] - found[1]).abs().max() <= 1e-3
