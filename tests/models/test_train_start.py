"""Before `nsa train` trains: locks, missing libraries, and signals that save nothing."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from nsa_core.errors import InvalidInput
from nsa_core.util import interruption
from nsa_models.lm import log, run_folder
from nsa_models.lm import train as train_module
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.parallel import World

pytestmark = pytest.mark.usefixtures("no_timing")
SMALL = ["--device", "cpu", "--data", "uniform", "--length", "32", "--batch", "2"]
SMALL += ["--held-out-rows", "1"]
FILES = {"config.json", "model.safetensors.index.json", "optimizer", log.FILE}
HOLD = """
import pathlib, sys, time
from nsa_models.lm.run_folder import locked

with locked(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def holder(folder: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that locks ``folder``, and wait until it has."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def run(nsa: Callable, text: str, tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the folder of a finished run of one step on text."""
    options = [text if word == "uniform" else word for word in SMALL]
    options += ["--held-out", "0.3", "--steps", "1"]
    done = nsa("train", "--out", str(tmp_path / "run"), *options)
    assert done.code == 0, done.err
    return tmp_path / "run"


def names(folder: pathlib.Path) -> set[str]:
    """Return the names of the files, without those of weights."""
    return {path.name for path in folder.iterdir() if not path.name.startswith("model-")}


@pytest.mark.slow
def test_a_second_training_in_a_folder_is_refused_until_the_first_one_dies(nsa, run, tmp_path):
    out, files = ["--out", str(run)], names(run)
    with holder(run) as process:
        for arguments in ([*SMALL], ["--resume"], ["--force", *SMALL]):
            done = nsa("train", *out, *arguments)
            assert done.code == 2, done
            assert re.search(rf"in use by process {process.pid} on \S+ since 20\d\d-", done.err)
        texts = nsa("generate", "--checkpoint", str(run), "--max-new-tokens", "2")
        assert (texts.code, texts.err[:17]) == (0, "next: nsa inspect")
        assert open_folder(run).training.step == 1
        process.kill()  # SIGKILL
    assert names(run) - files == {run_folder._LOCK, run_folder._HOLDER}
    assert nsa("train", *out, "--resume", "--steps", "2").code == 0
    assert names(run) == files


def test_a_folder_with_only_a_lock_or_leftovers_of_a_killed_process_is_free(nsa, tmp_path):
    out = tmp_path / "new"
    with holder(out) as process:  # the folder did not exist
        process.kill()
    (out / ".config.json.0123abcd.tmp").write_bytes(b"half a file")
    assert nsa("train", "--out", str(out), *SMALL, "--steps", "1").code == 0
    assert names(out) == FILES


def test_only_the_first_process_under_torchrun_locks(nsa, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise InvalidInput("this process opens its data")

    monkeypatch.setattr("nsa_models.lm.task.open_data", refuse)
    errors = {}
    with run_folder.locked(tmp_path):
        for rank in (0, 1):
            world = World(torch.device("cpu"), rank)
            monkeypatch.setattr("nsa_models.lm.parallel.join", lambda _, world=world: world)
            errors[rank] = nsa("train", "--out", str(tmp_path), *SMALL).err
    assert "in use by process" in errors[0]
    assert "this process opens its data" in errors[1]


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [
        (signal.SIGINT, 130, "Ctrl-C"),
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGHUP, 129, "SIGHUP"),
    ],
)
@pytest.mark.parametrize("where", ["nsa_models.lm.task.open_data", "nsa_cli.train._model"])
def test_a_signal_before_the_first_file_leaves_nothing_and_says_how_to_start(
    nsa, tmp_path, monkeypatch, where, number, code, name
):
    out, arguments = tmp_path / "my run", ["--steps", "1", *SMALL]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(where, lambda *_: signal.raise_signal(number))
            done = nsa("train", "--out", str(out), *arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    first, command = done.err.splitlines()
    assert (done.code, first) == (
        code,
        f"nsa: ended by {name}; nothing is saved yet. To start again:",
    )
    assert not out.exists()
    assert nsa(*shlex.split(command)[1:]).code == 0
    assert open_folder(out).training.step == 1


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("nsa_models.lm.parallel.join", None),
        ("nsa_models.lm.parallel.join", ImportError("cannot load module more than once")),
        ("measure_peaks", None),
    ],
)
def test_a_signal_that_an_import_swallows_ends_the_run_all_the_same(
    nsa, tmp_path, monkeypatch, where, error
):
    module, name = where.rpartition(".")[0], where.rpartition(".")[2]
    target = sys.modules[module] if module else train_module
    original = getattr(target, name)

    def swallows(*arguments: object) -> object:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        if error is not None:
            raise error
        return original(*arguments)

    monkeypatch.setattr(target, name, swallows)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = nsa("train", "--out", str(tmp_path / "run"), *SMALL, "--steps", "3")
    finally:
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert done.code == 130, done
    assert "ended by Ctrl-C; " in done.err
    assert (tmp_path / "run").exists() == (name == "measure_peaks")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_command_that_starts_again_starts_torchrun_again(nsa, tmp_path, monkeypatch, rank):
    """The training ends before the trainer exists, and only the first process says so."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    world = World(torch.device("cpu"), rank)
    monkeypatch.setattr("nsa_models.lm.parallel.join", lambda _: world)
    monkeypatch.setattr("nsa_cli.torchrun.launched", lambda: True)
    monkeypatch.setattr("nsa_models.lm.task.open_data", interrupted)
    out = tmp_path / "run"
    done = nsa("train", "--out", str(out), "--data", "uniform", "--parallel", "fsdp")
    again = f"torchrun --nproc-per-node 1 -m nsa_cli train --out {out} --data uniform"
    lines = [
        "nsa: ended by Ctrl-C; nothing is saved yet. To start again:",
        f"{again} --parallel fsdp",
    ]
    assert (done.code, done.err.splitlines()) == (130, lines if rank == 0 else [])


def test_a_signal_before_a_resumed_run_goes_on_names_the_same_command(nsa, run, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nsa_models.lm.task.open_data", interrupted)
    done = nsa("train", "--out", str(run), "--resume")
    assert (done.code, done.err.splitlines()) == (
        130,
        [
            "nsa: ended by Ctrl-C; the saved run is unchanged. To go on:",
            f"nsa train --out {run} --resume",
        ],
    )


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("safetensors", ["train", "--out", "new"], "train"),
        ("tokenizers", ["train", "--out", "new", "--tokenizer", "t.json"], "train"),
        ("matplotlib", ["train", "--out", "new", "--png", "x.png"], "plot"),
        ("safetensors", ["generate", "--checkpoint", "model"], "train"),
    ],
)
def test_a_missing_library_is_named_before_any_work(
    nsa, module, arguments, extra, tmp_path, monkeypatch
):
    (tmp_path / "t.json").write_text("no tokenizer")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("no config")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    for work in ("nsa_models.lm.task.open_data", "nsa_models.lm.model_folder.open_folder"):
        monkeypatch.setattr(work, lambda *_: pytest.fail("work began"))
    done = nsa(*arguments)
    assert (done.code, done.err) == (
        3,
        f"nsa: nsa {arguments[0]} needs {module}, which is not installed:\n"
        f"  pip install 'nsa-cli[{extra}]'\n",
    )
    assert not (tmp_path / "new").exists()


def test_all_missing_libraries_are_named_at_once(nsa, tmp_path, monkeypatch):
    for module in ("safetensors", "tokenizers", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "t.json").write_text("no tokenizer")
    monkeypatch.chdir(tmp_path)
    done = nsa("train", "--out", "new", "--tokenizer", "t.json", "--svg", "x.svg")
    assert done.err == (
        "nsa: nsa train needs safetensors, tokenizers, matplotlib, which are not installed:\n"
        "  pip install 'nsa-cli[train,plot]'\n"
    )


@pytest.mark.slow
def test_a_signal_at_any_time_leaves_a_run_that_goes_on_or_starts_again(nsa, tmp_path):
    """Signals at 12 times: importing torch, reading data, the first steps, and saving."""
    phases = set()
    for index in range(12):
        out, number = tmp_path / f"run-{index}", interruption.SIGNALS[index % 3]
        command = ["train", "--out", str(out), *SMALL, "--steps", "100000", "--save-every", "1"]
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        code += f"from nsa_cli.app import main; print('ready', flush=True); main({command!r})"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
            try:
                child.stdout.readline()
                until = time.monotonic() + 60
                # Two before the first step, and later ones in the loop, which saves each step.
                begun = None if index < 6 else out if index < 8 else out / log.FILE
                while begun is not None and not begun.exists() and time.monotonic() < until:
                    time.sleep(0.005)
                time.sleep(index * 0.25 if index < 6 else max(0, index - 8) * 0.1)
                child.send_signal(number)
                _, err = child.communicate(timeout=60)
            finally:
                child.kill()
        if child.returncode == -number:
            assert not out.exists()  # the command had not begun
            continue
        assert child.returncode == 128 + number, (index, err)
        assert not re.search("Traceback|Exception ignored", err), (index, err)
        if "nothing is saved yet" in err:
            phases.add("nothing")
            assert not (out / run_folder.INDEX).exists()
        elif "is saved in" in err:
            phases.add("saved")
            step = open_folder(out).training.step
            assert f"step {step} of 100000 is saved in" in err
            assert nsa("train", "--out", str(out), "--resume", "--steps", str(step + 1)).code == 0
    assert phases == {"nothing", "saved"}
