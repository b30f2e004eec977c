"""Saves: a kill or an error at any write leaves the old run or the new one, and it goes on."""

from __future__ import annotations

import errno
import os
import pathlib
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import nsa_models.hf as hf
from hf_models import DENSE_CONFIGS, NSA, SIZES
from killed_writes import killed_at
from nsa_core.util import atomic_files
from nsa_core.util.atomic_files import NotWritten
from nsa_models.hf import conversion
from nsa_models.lm import model_folder, run_folder, saving
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.parallel import World
from nsa_models.lm.run_folder import CONFIG, INDEX
from nsa_models.lm.tokens import TOKENIZER, TOKENIZER_CONFIG
from nsa_models.lm.trainer import Trainer
from rank_processes import run_on_ranks
from training_cases import are_equal, tensors_of, trainer_of

FILES = [CONFIG, INDEX, TOKENIZER, TOKENIZER_CONFIG]


@pytest.fixture
def trainer() -> Trainer:
    return trainer_of(0, 1)


def save(trainer: Trainer, folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Train one step and save it; return the tensors of the run."""
    trainer.step()
    folder.mkdir(exist_ok=True)
    trainer.save(folder)
    return tensors_of(folder)


def files_of(folder: pathlib.Path) -> list[str]:
    """Return the names of all files, without what differs between saves."""
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(re.sub(r"-?\d+-\w{8}-1-of-1.safetensors|\w{8}[.]tmp", "", name) for name in names)


@pytest.mark.parametrize("is_first", [True, False], ids=["first save", "second save"])
def test_a_kill_at_any_write_leaves_the_old_run_or_the_new_one(trainer, tmp_path, is_first):
    old = save(trainer, tmp_path / "old")
    new = save(trainer, tmp_path / "new")
    out, steps, is_killed, resumed = tmp_path / "run", [], True, set()
    while is_killed:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir() if is_first else shutil.copytree(tmp_path / "old", out)
        with killed_at(len(steps)) as effects:
            trainer.save(out)
        is_killed = effects.dead
        step = open_folder(out).training.step if (out / INDEX).exists() else 0
        steps.append(step)
        assert step == 0 or are_equal(tensors_of(out), {1: old, 2: new}[step])
        if (state := (step, *files_of(out))) in resumed:
            continue
        resumed.add(state)
        with run_folder.locked(out):  # removes what was half written
            again = trainer_of(0, 1, resume=out) if step else trainer
            assert again.tokens == (step or 2) * 4 * 33
            again.save(out)
        assert files_of(out) == sorted([*FILES, "model", "optimizer/"])
    before = 0 if is_first else 1
    assert steps == sorted(steps)
    assert len(steps) > 20
    # One effect, the replacement of the index, makes the new run valid; later ones remove files.
    assert {*steps} == {before, 2}
    assert effects.names[steps.index(2) - 1].startswith("os.rename")


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False], ids=["first save", "second save"])
def test_a_kill_of_any_process_at_any_write_leaves_the_old_run_or_the_new_one(tmp_path, is_first):
    case = ("killed_saves", {"folder": str(tmp_path), "is_first": is_first})
    (results,) = run_on_ranks(2, [case], ["training_cases"])
    assert not isinstance(results[0], str), results
    kills, new = results[0]
    assert kills > 30
    assert 0 < new < kills


@pytest.mark.parametrize("count", [2, 4])
def test_no_process_writes_much_more_than_its_share(trainer, count):
    trainer.step()
    worlds = [World(torch.device("cpu"), rank, count) for rank in range(count)]
    sizes = [
        sum(tensor.nbytes for tensors in parts for tensor in tensors.values())
        for parts in (
            saving._own_tensors(trainer.model, trainer.optimizer, world, None) for world in worlds
        )
    ]
    whole = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert sum(sizes) == 3 * whole  # with both moments
    assert max(sizes) < 1.5 * sum(sizes) / count


def test_a_resumed_run_writes_no_text_again(trainer, tmp_path):
    """A kill between a new text and the new index would leave a folder that is refused."""
    save(trainer, tmp_path)
    before = {path: path.stat().st_ino for path in tmp_path.glob("*.json") if path.name != INDEX}
    assert len(before) == 3  # config.json and two files of the tokenizer
    save(trainer_of(0, 1, resume=str(tmp_path)), tmp_path)
    assert {path: path.stat().st_ino for path in before} == before


def test_every_file_is_on_the_disk_before_the_index_names_it(trainer, tmp_path):
    (out := tmp_path / "run").mkdir()
    trainer.step()
    with killed_at(None) as effects:
        trainer.save(out)
    assert not effects.dead
    names = effects.names
    (replaced,) = (
        n for n, name in enumerate(names) if name.startswith(f"os.rename {out}/.{INDEX}")
    )
    synced = {name.removeprefix("fsync ") for name in names[:replaced]}
    tensors = {str(path) for path in out.rglob("*.safetensors")}
    assert len(tensors) == 2
    assert synced >= {*tensors, str(out), str(out / "optimizer")}
    texts = (f"{out}/.{name}." for name in (CONFIG, TOKENIZER, TOKENIZER_CONFIG, INDEX))
    assert all(any(name.startswith(text) for name in synced) for text in texts)
    assert f"fsync {out}" in names[replaced:]


def test_a_kill_at_any_write_of_a_conversion_leaves_no_folder_or_a_whole_one(tmp_path):
    source, target = tmp_path / "dense", tmp_path / "nsa"
    dense = AutoModelForCausalLM.from_config(DENSE_CONFIGS["llama"](**SIZES))
    dense.save_pretrained(source)
    model, number, is_killed = hf.convert(dense, NSA).model, 0, True
    while is_killed:
        with killed_at(number) as effects:
            conversion.write(model, open_folder(source), target)
        is_killed, number = effects.dead, number + 1
        if target.exists() and any(target.iterdir()):
            assert open_folder(target).config.attention == "nsa"
            shutil.rmtree(target)
    assert number > 10


@pytest.mark.parametrize("failing", ["model-", "optimizer/", INDEX])
def test_a_save_that_fails_leaves_the_last_one(trainer, tmp_path, monkeypatch, failing):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = tmp_path / "run"
    old = save(trainer, out)
    replace, write = atomic_files._replace, saving._write_tensors

    def fails(path):
        if path.is_relative_to(out) and path.relative_to(out).as_posix().startswith(failing):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing_tensors(file, tensors, step):
        with atomic_files.writing(file):
            fails(file)
        write(file, tensors, step)

    with monkeypatch.context() as patch:
        patch.setattr(
            atomic_files, "_replace", lambda path, *rest: (fails(path), replace(path, *rest))
        )
        patch.setattr(saving, "_write_tensors", failing_tensors)
        trainer.step()
        with pytest.raises(NotWritten, match="No space left"):
            trainer.save(out)
    assert are_equal(tensors_of(out), old)
    if failing != INDEX:  # else the next save removes the files
        assert files_of(out) == sorted([*FILES, "model", "optimizer/"])
    assert trainer.saved_step == 1
    # The run is kept in the temporary folder instead.
    assert open_folder(trainer.rescued).training.step == 2
    shutil.copytree(trainer.rescued, out, dirs_exist_ok=True)
    assert trainer_of(0, 1, resume=out).step_number == 2


def test_a_run_that_is_replaced_while_it_is_read_is_the_new_one(trainer, tmp_path, monkeypatch):
    save(trainer, tmp_path / "run")
    check, saved = model_folder._check_own, []

    def replaced(*arguments):
        monkeypatch.setattr(model_folder, "_check_own", check)
        saved.append(save(trainer, tmp_path / "run"))
        return check(*arguments)

    monkeypatch.setattr(model_folder, "_check_own", replaced)
    opened = open_folder(tmp_path / "run")
    assert opened.training.step == 2
    with opened._reader(opened.files) as read:
        assert all(torch.equal(read(name), saved[0][name]) for name in opened.files)
