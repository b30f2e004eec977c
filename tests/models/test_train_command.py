"""`nsa train` and `nsa generate`: files, output and refused arguments."""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import Any, get_args

import click
import pytest
import torch
import typer

from nsa_bench.roofline import Peaks
from nsa_cli import app, torchrun, train_interrupted, train_options
from nsa_cli.choices import errors_name_options
from nsa_core import InvalidInput
from nsa_core.util import atomic_files
from nsa_models.inspect import open_subject
from nsa_models.lm import log, parallel, saving
from nsa_models.lm import train as train_module
from nsa_models.lm.config import SIZES
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.recipe import KINDS, Recipe
from nsa_models.lm.run_folder import INDEX
from nsa_models.lm.task import TASKS, DataSpec

pytestmark = pytest.mark.usefixtures("no_timing")
ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = [
    "--device",
    "cpu",
    "--length",
    "32",
    "--batch",
    "2",
    "--held-out-rows",
    "1",
    "--eval-every",
    "2",
]
NO_TORCHRUN = (
    "--parallel {kind} divides a training over processes of torchrun, which did not start"
    " this one: start N processes with torchrun --nproc-per-node N -m nsa_cli train and the same"
    " options, or leave --parallel out to train on one process"
)


def test_no_share_above_the_matrix_rate_is_printed(nsa, text, tmp_path, monkeypatch):
    peaks = Peaks(1.0, 1.0)
    monkeypatch.setattr(train_module, "measure_peaks", lambda *_: peaks)
    out = ("train", "--out", str(tmp_path / "run"), "--data", text, "--steps", "2")
    lines = nsa(*out, *SMALL).out.splitlines()
    assert "measurement failed" in lines[2]
    assert "%" not in "".join(lines)
    assert max(map(len, lines[:3])) <= 80


def test_a_run_writes_files_resumes_and_generates(nsa, text, tmp_path):
    out, plot = tmp_path / "run", tmp_path / "loss.svg"
    trained = nsa(
        "train", "--out", str(out), "--data", text, "--steps", "4", *SMALL, "--svg", str(plot)
    )
    assert (trained.code, trained.err) == (0, "")
    assert [line.split()[0] for line in trained.out.splitlines()[:-2]] == [
        "step",
        "0",
        "2",
        "4",
        "held-out",
    ]
    assert f"Trained on 256 tokens of {text}; the model is in {out}" in trained.out
    assert f"\nnext: nsa generate --checkpoint {out} --prompt 'The '\n" in trained.out
    (weights,) = (p.name for p in out.glob("model-*"))
    assert re.fullmatch(r"model-4-[0-9a-f]{8}-1-of-1\.safetensors", weights)
    assert sorted(p.name for p in out.iterdir()) == [
        *("config.json", log.FILE, weights, INDEX, "optimizer"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    assert plot.read_bytes().startswith(b"<?xml")
    assert open_folder(out).training.data.length == 32

    resumed = nsa("train", "--out", str(out), "--resume", "--steps", "5")
    entropy = trained.out.splitlines()[-3]
    assert (resumed.code, entropy in resumed.out) == (0, True)  # the same held-out rows
    resumed_at_end = nsa("train", "--out", str(out), "--resume")
    assert (
        resumed_at_end.code,
        "nothing to do up to --steps 5: step 5 is done; give more" in resumed_at_end.out,
    ) == (0, True)
    assert [r["step"] for r in log.read_log(out / log.FILE)[1]] == [0, 1, 2, 3, 4, 5]

    texts = [
        nsa("generate", "--checkpoint", str(out), "--prompt", "this", "--max-new-tokens", "8")
        for _ in range(2)
    ]
    assert texts[0].code == 0
    assert texts[0].out == texts[1].out
    assert texts[0].out.startswith("this")
    coldest = ("--max-new-tokens", "8", "--temperature", "5e-324", "--prompt", "this")
    greedy = (*coldest[:3], "0", *coldest[4:])
    cold = [nsa("generate", "--checkpoint", str(out), *options) for options in (coldest, greedy)]
    assert cold[0] == cold[1]
    assert cold[0].code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--data empty",
            "--data empty contains no text, JSONL or parquet file; give a file or folder",
        ),
        ("--data .txt", "--data .txt contains no text: give documents with text"),
        ("--data short.txt", "--data short.txt is one document, and training needs two, one of"),
        ("--data dir/one.txt", "--data dir/one.txt is one document, and training needs two,"),
        ("--data /dev/null", "--data /dev/null is neither a folder nor a regular file"),
        ("--data recal", "--data recal: no such file or folder; did you mean 'recall'?; give an"),
        ("--data=", "--data '': no such file or folder; give an existing path, python-docs"),
        ("--data hf:", "--data hf:: no such file or folder; give an existing path, python-docs"),
        (
            "--data recall --length 32 --vocab 8",
            "--vocab must be at least 16 for rows of 32 tokens",
        ),
        ("--data bytes", "--data bytes is not a UTF-8 text, JSONL or parquet file; give a"),
    ],
)
def test_unusable_data_is_refused(nsa, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / ".hidden").mkdir(parents=True)
    (tmp_path / "dir").mkdir()
    files = {".txt": b"", "short.txt": b"x" * 2**15, "dir/one.txt": b"x", "bytes": b"\xff"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    done = nsa("train", "--out", "new", *options.split())
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"nsa: {message}" in done.err
    assert not (tmp_path / "new").exists()


@pytest.mark.few_cases("fsdp")
@pytest.mark.parametrize("kind", KINDS)
def test_a_single_process_of_torchrun_may_name_its_parallelism(
    nsa, text, tmp_path, monkeypatch, kind
):
    out = tmp_path / "run"
    options = ["--data", text, "--steps", "1", "--parallel", kind, *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr("nsa_cli.torchrun.launched", lambda: True)
        assert nsa("train", "--out", str(out), *options).code == 0
    assert open_folder(out).training.recipe.parallel == kind
    # Without torchrun, a resumed run may leave the option out, but not repeat it.
    again = ["train", "--out", str(out), "--device", "cpu", "--resume", "--steps", "2"]
    refused = nsa(*again, "--parallel", kind)
    assert (refused.code, refused.err) == (2, f"nsa: {NO_TORCHRUN.format(kind=kind)}\n")
    assert nsa(*again).code == 0
    assert open_folder(out).training.step == 2


def test_field_names_inside_a_path_are_not_replaced():
    text = "my data 5/length must be read; {}batch 3 does not"
    with (
        pytest.raises(InvalidInput) as caught,
        errors_name_options({"data": "data", "length": "length", "batch": "batch"}),
    ):
        raise InvalidInput(text.format(""))
    assert str(caught.value) == text.format("--")


def test_a_forced_new_run_removes_the_old_one(nsa, text, tmp_path, monkeypatch):
    out = ["--out", str(tmp_path / "run"), "--data", text, "--steps", "1", *SMALL]
    assert nsa("train", *out).code == 0

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt  # as the second Ctrl-C

    with monkeypatch.context() as patch:
        patch.setattr("nsa_models.lm.trainer.Trainer.step", killed)
        stopped = nsa("train", *out, "--force")
    again = stopped.err.splitlines()[-1]
    assert (stopped.code, again.endswith(" --force")) == (130, True)
    done = nsa("train", "--out", str(tmp_path / "run"), "--resume")
    assert (done.code, "give --force instead of --resume" in done.err) == (2, True)
    assert nsa(*shlex.split(again)[1:]).code == 0


@pytest.mark.parametrize("command", ["train --out new", "tune", "bench", "backends explain"])
def test_a_missing_device_is_refused_before_any_work(nsa, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for device, code, text in (
        ("gpu", 2, "--device must be auto, cpu, cuda or cuda:N, got"),
        ("cuda:99", None, "--device cuda:99 "),
    ):
        done = nsa(*command.split(), "--device", device)
        assert (done.code, text in done.err) == (code or done.code, True)
        assert done.code in (2, 3)
    assert not list(tmp_path.iterdir())


def test_the_plot_compares_selected_with_random_blocks(nsa, text, tmp_path):
    run, plot = tmp_path / "run", tmp_path / "loss.svg"
    options = ["128" if word == "32" else word for word in SMALL]
    options += ["--steps", "1", "--svg", str(plot)]
    assert nsa("train", "--out", str(run), "--data", text, *options).code == 0
    record = log.read_log(run / log.FILE)[1][-1]
    pairs = zip(record["selected_mass"], record["random_mass"])
    for layer, (selected, random) in enumerate(pairs):
        label = f"layer {layer}: {selected:.0%}, random {random:.0%}"
        assert label in plot.read_text(encoding="utf-8")


@pytest.mark.parametrize("task", ["uniform", "recall"])
def test_tasks_train_with_the_default_options(nsa, tmp_path, task):
    options = ("--steps", "1", "--held-out-rows", "1", "--batch", "1", "--device", "cpu")
    done = nsa("train", "--out", str(tmp_path / "run"), "--data", task, *options)
    assert (done.code, "Trained on 256 tokens" in done.out) == (0, True), done.err


def test_tasks_print_their_best_loss_or_accuracy(nsa, tmp_path, monkeypatch):
    options = ["--steps", "1", *SMALL, "--vocab", "16"]
    done = nsa("train", "--out", str(tmp_path / "u"), "--data", "uniform", *options)
    assert re.search(
        r"loss of the last 1 steps: \d\.\d{4}; no model expects less than ln 16 = 2\.7726,",
        done.out,
    )
    done = nsa("train", "--out", str(tmp_path / "r"), "--data", "recall", *options)
    assert "right answers on held-out rows:" in done.out
    run, new = str(tmp_path / "r"), str(tmp_path / "new")
    for command in (["generate"], ["inspect", "--out", new]):
        with monkeypatch.context() as patch:
            patch.setattr("torch.nn.Module.to", lambda *_: pytest.fail("a model was built"))
            done = nsa(*command, "--checkpoint", run)
        message = f"nsa: --checkpoint: {run} was trained on a task, which has no tokenizer; give a"
        assert (done.code, done.err.startswith(message)) == (2, True)
    with pytest.raises(InvalidInput, match=f"^checkpoint: {run} was trained on a task"):
        open_subject(run)


def test_options_cover_existing_fields_and_sizes():
    assert set(train_options.CHANGEABLE_ON_RESUME) <= set(Recipe.__dataclass_fields__)
    assert set(train_options.RENAMED) <= set(Recipe.__dataclass_fields__) | set(
        DataSpec.__dataclass_fields__
    )
    assert get_args(get_args(train_options.Size)[0]) == tuple(SIZES)
    assert get_args(get_args(train_options.Parallel)[0]) == KINDS
    assert tuple(TASKS) == train_options.TASKS


@pytest.mark.few_cases("28")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_run_that_cannot_be_written_is_kept_elsewhere(nsa, text, tmp_path, monkeypatch, number):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out, write = tmp_path / "run", saving._write_tensors
    assert nsa("train", "--out", str(out), "--data", text, "--steps", "1", *SMALL).code == 0

    def failing(file: pathlib.Path, *arguments: Any) -> None:
        if file.is_relative_to(out):
            with atomic_files.writing(file):
                raise OSError(number, os.strerror(number))
        write(file, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "_write_tensors", failing)
        resume = ["--resume", "--steps", "3", "--save-every", "2"]
        done = nsa("train", "--out", str(out), *resume)
    assert done.code == 5, done.err
    first, copied, command = done.err.splitlines()
    assert re.match(rf"nsa: could not write {out}/model-2-\S+: {os.strerror(number)}; ", first)
    assert open_folder(out).training.step == 1
    kept = shlex.split(copied)[2].removesuffix("/.")
    assert f"step 2 is kept in {kept}. To go on, first make room:" in first
    assert subprocess.run(shlex.split(copied), check=False).returncode == 0
    assert nsa(*shlex.split(command)[1:], "--steps", "3").code == 0
    assert open_folder(out).training.step == 3
    assert [r["step"] for r in log.read_log(out / log.FILE)[1]] == [0, 1, 2, 3]


def test_a_resumed_run_opens_the_data_that_its_folder_names(nsa, text, tmp_path, monkeypatch):
    out = ["train", "--out", str(tmp_path / "run"), "--device", "cpu"]
    options = ["--length", "32", "--batch", "2", "--held-out-rows", "1", "--steps", "1"]
    assert nsa(*out, "--data", text, "--held-out", "0.3", *options).code == 0

    def refuse(spec, tokenizer):
        raise InvalidInput(f"opened {spec.data}")

    monkeypatch.setattr("nsa_models.lm.task.open_data", refuse)
    resumed = nsa(*out, "--resume", "--steps", "2")
    assert (resumed.code, f"opened {text}" in "".join(resumed.err.split("\n  "))) == (2, True)


def test_a_resumed_run_refuses_other_data(nsa, tmp_path):
    data, out = tmp_path / "data", str(tmp_path / "run")
    data.mkdir()
    for name in "abcd":
        (data / f"{name}.txt").write_text(f"document {name} and so on, " * 100)
    assert nsa("train", "--out", out, "--data", str(data), "--steps", "1", *SMALL).code == 0
    (data / "a.txt").write_text("another document")
    resumed = nsa("train", "--out", out, "--device", "cpu", "--resume", "--steps", "2")
    message = " ".join(resumed.err.split())
    assert (resumed.code, "the data has changed since the run was saved" in message) == (2, True)
    assert f"start another run from its weights with --checkpoint {out}" in message


def test_an_altered_run_is_refused_by_every_command(nsa, text, tmp_path):
    run, new = str(tmp_path / "run"), str(tmp_path / "new")
    dense = str(tmp_path / "dense")
    steps = ["--data", text, "--steps", "1", *SMALL]
    assert nsa("train", "--out", run, *steps).code == 0
    assert nsa("train", "--out", dense, *steps, "--attention", "dense").code == 0
    files = {}
    for folder in (run, dense):
        (files[folder],) = pathlib.Path(folder).glob("model-*")
        content = bytearray(files[folder].read_bytes())
        content[-1] ^= 1
        files[folder].write_bytes(content)
    for command in (
        ["generate", "--checkpoint", run],
        ["train", "--out", run, "--resume"],
        ["train", "--out", new, "--checkpoint", run, "--data", text, *SMALL],
        ["inspect", "--text", text, "--checkpoint", run, "--out", new],
        ["convert", "--checkpoint", dense, "--out", new],
    ):
        file = files[dense if dense in command else run]
        done = nsa(*command)
        assert (done.code, f"{file} was altered" in done.err) == (2, True), done.err
    assert not (tmp_path / "new").exists()


def test_the_next_command_continues_on_the_same_device_and_processes(nsa, tmp_path, monkeypatch):
    run = str(tmp_path / "run")
    done = nsa("train", "--out", run, "--data", "uniform", "--steps", "1", *SMALL)
    command = f"train --out {run} --device cpu --resume"
    assert done.out.splitlines()[-1] == f"next: nsa {command} --steps 2"
    context = click.Context(typer.main.get_command(app.app).commands["train"])
    context.params = {"out": run, "device": "cpu"}
    world = parallel.World(torch.device("cpu"), size=2)
    training = train_interrupted.Training(context, {"out", "device"}, world)
    monkeypatch.setattr(torchrun, "launched", lambda: True)
    resume = shlex.join(training.resume_command())
    assert resume == f"torchrun --nproc-per-node 2 -m nsa_cli {command}"


def test_a_damaged_log_is_kept_and_said(text, tmp_path):
    run = tmp_path / "run"
    nsa = [sys.executable, "-m", "nsa_cli", "train", "--out", str(run)]
    subprocess.run([*nsa, "--data", text, "--steps", "1", *SMALL], check=True, capture_output=True)
    (run / log.FILE).write_text("half")
    words = [*nsa, "--resume", "--steps", "2"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    (aside,) = run.glob("log.jsonl.damaged-*")
    assert aside.read_text() == "half"
    assert (
        f"nsa: warning: {run / log.FILE} could not be read. It is kept as {aside.name}, and a new"
        " log begins.\n"
    ) in done.stderr
    assert [r["step"] for r in log.read_log(run / log.FILE)[1]] == [2]


@pytest.mark.slow
def test_the_commands_in_the_training_docs_run(nsa, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "how-to" / "train.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    used = ("train", "generate", "convert", "inspect")
    help_text = "".join(nsa(command, "--help").out for command in used)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    commands = [line for line in lines if line.startswith(("nsa train", "nsa gen", "torchrun"))]
    for word in re.findall(r"(?<!torchrun )--[a-z][a-z-]*", page):
        assert re.search(rf"{word}\b", help_text) or word == "--nproc-per-node", word
    assert len(commands) == 8
    monkeypatch.chdir(tmp_path)
    train, generate = (shlex.split(command)[1:] for command in commands[:2])
    small = {"--steps": "1", "--data": str(ROOT / "docs"), "--held-out": "0.3"}
    small |= dict(zip(SMALL[:-2:2], SMALL[1:-2:2]))
    options = {**dict(zip(train[1::2], train[2::2])), **small}
    assert nsa(train[0], *itertools.chain(*options.items())).code == 0
    assert (tmp_path / "run.png").exists()
    assert generate[-2:] == ["--max-new-tokens", "200"]
    assert nsa(*generate[:-1], "3").out.startswith("The function returns ")
