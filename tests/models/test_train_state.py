"""State that survives errors: locked runs, full disks, and altered checkpoints."""

from __future__ import annotations

import contextlib
import errno
import json
import os
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
from nsa_core.util import atomic_files
from nsa_models.lm import checkpoint, log, run_folder
from nsa_models.lm import train as train_module
from nsa_models.lm.parallel import World

pytest.importorskip("safetensors")
SMALL = ["--device", "cpu", "--data", "uniform", "--length", "32", "--batch", "2"]
SMALL += ["--held-out-rows", "1"]
HOLD = """
import pathlib, sys, time
from nsa_models.lm.run_folder import locked

with locked(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = train_module.measure_peaks.__globals__["Peaks"](1e9, 1e9)
    monkeypatch.setattr(train_module, "measure_peaks", lambda *_: peaks)


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
def run(nsa: Callable, tmp_path: pathlib.Path) -> pathlib.Path:
    """Return the folder of a finished run of one step on text."""
    (tmp_path / "text.jsonl").write_text(
        "".join(f'{{"text": "document {n} {"and so on " * n}"}}\n' for n in range(40))
    )
    data = ["--data", str(tmp_path / "text.jsonl"), "--held-out", "0.3"]
    done = nsa("train", "--out", str(tmp_path / "run"), *SMALL, *data, "--steps", "1")
    assert done.code == 0, done.err
    return tmp_path / "run"


@pytest.mark.slow
def test_a_second_training_in_a_folder_is_refused_until_the_first_one_dies(nsa, run, tmp_path):
    out = ["--out", str(run)]
    with holder(run) as process:
        for arguments in ([*SMALL], ["--resume"], ["--force", *SMALL]):
            done = nsa("train", *out, *arguments)
            assert done.code == 2, done
            assert re.search(rf"in use by process {process.pid} on \S+ since 20\d\d-", done.err)
        texts = nsa("generate", "--checkpoint", str(run), "--max-new-tokens", "2")
        assert (texts.code, texts.err) == (0, "")
        assert checkpoint.read(run).facts["step"] == 1
        process.kill()  # SIGKILL
    left = {path.name for path in run.iterdir()} - {checkpoint.FILE, log.FILE}
    assert left == {run_folder._LOCK, run_folder._HOLDER}
    assert nsa("train", *out, "--resume", "--steps", "2").code == 0
    assert {path.name for path in run.iterdir()} == {checkpoint.FILE, log.FILE}


def test_a_folder_with_only_a_lock_or_leftovers_of_a_killed_process_is_free(nsa, tmp_path):
    out = tmp_path / "new"
    with holder(out) as process:  # the folder did not exist
        process.kill()
    (out / ".checkpoint.safetensors.0123abcd.tmp").write_bytes(b"half a checkpoint")
    assert nsa("train", "--out", str(out), *SMALL, "--steps", "1").code == 0
    assert {path.name for path in out.iterdir()} == {checkpoint.FILE, log.FILE}


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


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_before_the_first_file_leaves_nothing_and_says_how_to_start(
    nsa, tmp_path, monkeypatch, number
):
    out, arguments = tmp_path / "my run", ["--steps", "1", *SMALL]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(
                "nsa_models.lm.task.open_data",
                lambda *_: signal.raise_signal(getattr(signal, number)),
            )
            done = nsa("train", "--out", str(out), *arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    lines = done.err.splitlines()
    assert done.code == {"SIGINT": 130, "SIGTERM": 143}[number], done.err
    assert lines[0].endswith("nothing is saved yet. To start again:")
    assert not out.exists()
    assert nsa(*shlex.split(lines[1])[1:]).code == 0
    assert checkpoint.read(out).facts["step"] == 1


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

    world = World(torch.device("cpu"), rank, launched=True)
    monkeypatch.setattr("nsa_models.lm.parallel.join", lambda _: world)
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
            "nsa: ended by Ctrl-C; the checkpoint is unchanged. To go on:",
            f"nsa train --out {run} --resume",
        ],
    )


def fail_writes(
    monkeypatch: pytest.MonkeyPatch, number: int, fails: Callable[[pathlib.Path], bool]
) -> None:
    """Let atomic writes of the paths that ``fails`` accepts raise the error ``number``."""
    replace = atomic_files._replace

    def failing(path: str | pathlib.Path, content: bytes, force: bool) -> None:
        if fails(pathlib.Path(path)):
            raise OSError(number, os.strerror(number))
        replace(path, content, force)

    monkeypatch.setattr(atomic_files, "_replace", failing)


@pytest.mark.few_cases("30")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_checkpoint_that_cannot_be_written_is_kept_elsewhere(
    nsa, run, tmp_path, monkeypatch, number
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = (run / checkpoint.FILE).read_bytes()
    resume = ["train", "--out", str(run), "--resume", "--steps", "3", "--save-every", "2"]
    with monkeypatch.context() as patch:
        fail_writes(patch, number, lambda p: p == run / checkpoint.FILE)
        done = nsa(*resume)
    assert done.code == 5, done.err
    first, copied, command = done.err.splitlines()
    assert first.startswith(
        f"nsa: could not write {run / checkpoint.FILE}: {os.strerror(number)}; "
    )
    assert (run / checkpoint.FILE).read_bytes() == old
    source, target = shlex.split(copied)[1:]
    assert f"step 2 is kept in {source}. To go on, first make room:" in first
    pathlib.Path(target).write_bytes(pathlib.Path(source).read_bytes())
    assert nsa(*shlex.split(command)[1:], "--steps", "3").code == 0
    assert [r["step"] for r in log.read_log(run / log.FILE)[1]] == [0, 1, 2, 3]


def test_a_log_that_cannot_be_written_saves_the_steps_before(nsa, run, monkeypatch):
    write = log.Log.write

    def failing(self: log.Log, record: dict) -> None:
        if record["step"] == 3:
            with atomic_files.writing(self._path):
                raise OSError(errno.ENOSPC, "No space left on device")
        write(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(log.Log, "write", failing)
        done = nsa("train", "--out", str(run), "--resume", "--steps", "5")
    assert done.code == 5
    assert "log.jsonl: No space left on device; free some space" in done.err
    assert f"step 3 of 5 is saved in {run / checkpoint.FILE}" in done.err
    assert checkpoint.read(run).facts["step"] == 3
    assert nsa("train", "--out", str(run), "--resume", "--steps", "5").code == 0


def rewrite(file: pathlib.Path, change: Callable[[dict], None]) -> None:
    """Change the metadata in the header of a safetensors file; the tensors stay."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    values = {k: json.loads(v) for k, v in header["__metadata__"].items() if k != "format"}
    change(values)
    header["__metadata__"] |= {k: json.dumps(v) for k, v in values.items()}
    header["__metadata__"] = {
        k: v for k, v in header["__metadata__"].items() if k == "format" or k in values
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


ALTERED = {
    "config.n_layers does not match": lambda h: h["config"].update(n_layers=1),
    "config.layer does not match": lambda h: h["config"]["layer"].update(window_size=5),
    "facts.step does not match": lambda h: h["facts"].update(step=7),
    "facts.tokens is missing": lambda h: h["facts"].pop("tokens"),
    "facts.more was added": lambda h: h["facts"].update(more=1),
    "tokenizer.kind does not match": lambda h: h["tokenizer"].update(kind="tokenizers"),
    "tokenizer.kind is missing": lambda h: h.pop("tokenizer"),
    "facts.train is missing": lambda h: h.pop("facts"),
    "no digests in its header": lambda h: h.pop("digests"),
    "facts.data does not match": lambda h: h["digests"].update({"facts.data": "0" * 16}),
}


def test_an_altered_checkpoint_is_refused_with_the_field(nsa, run, tmp_path):
    file = run / checkpoint.FILE
    original = file.read_bytes()
    rewrite(file, lambda header: None)
    assert nsa("generate", "--checkpoint", str(run), "--max-new-tokens", "1").code == 0
    flipped = bytearray(original)
    flipped[-1] ^= 1
    for message, content in (
        (r"tensor \S+ does not match its digest", bytes(flipped)),
        ("cannot be read as a checkpoint", original[:-40]),
        *ALTERED.items(),
    ):
        file.write_bytes(original if callable(content) else content)
        if callable(content):
            rewrite(file, content)
        with pytest.raises(InvalidInput, match=message) as caught:
            checkpoint.read(run)
        assert str(caught.value).startswith(str(file))
    text, picture = tmp_path / "text.jsonl", tmp_path / "picture"
    for command in (
        ["generate", "--checkpoint", str(run)],
        ["train", "--out", str(run), "--resume"],
        ["inspect", "--text", str(text), "--checkpoint", str(run), "--out", str(picture)],
    ):
        done = nsa(*command)
        assert (done.code, f"{file} was altered" in done.err) == (2, True), done.err
    assert not picture.exists()


def test_a_checkpoint_of_another_run_is_refused_beside_the_log(nsa, run, tmp_path):
    other = tmp_path / "other"
    assert nsa("train", "--out", str(other), *SMALL, "--steps", "1").code == 0
    (run / checkpoint.FILE).write_bytes((other / checkpoint.FILE).read_bytes())
    done = nsa("train", "--out", str(run), "--resume", "--steps", "2")
    assert (done.code, "log.jsonl belongs to another run" in done.err) == (2, True)
    assert log.read_log(run / log.FILE)[0]["data"]["data"].endswith("text.jsonl")


def test_the_digest_of_a_tensor_covers_its_dtype_shape_and_values():
    from nsa_core.util.safetensors_io import _digests

    tensors = [
        torch.zeros(2, 3),
        torch.zeros(3, 2),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 3).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(1e-30)),
        torch.zeros(0, 3),
    ]
    assert len({_digests({}, {"x": tensor})["tensor x"] for tensor in tensors}) == 5
    transposed = torch.zeros(3, 2).T  # not contiguous
    assert _digests({}, {"x": transposed}) == _digests({}, {"x": tensors[0]})


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_time_leaves_a_run_that_goes_on_or_starts_again(nsa, tmp_path, number):
    """Signals at 12 times: importing torch, reading data, the first steps, and saving."""
    phases = set()
    for index in range(12):
        out = tmp_path / f"run-{index}"
        command = ["train", "--out", str(out), *SMALL, "--steps", "100000", "--save-every", "1"]
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        code += f"from nsa_cli.app import main; print('ready', flush=True); main({command!r})"
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert child.stdout is not None
            child.stdout.readline()
            until = time.monotonic() + 60
            if index >= 8:  # in the loop, where a process saves after each step
                while not (out / log.FILE).exists() and time.monotonic() < until:
                    time.sleep(0.005)
            time.sleep(index * 0.25 if index < 8 else (index - 8) * 0.1)
            child.send_signal(number)
            _, err = child.communicate(timeout=60)
        finally:
            child.kill()
        if child.returncode == -number:
            assert not out.exists()  # the command had not begun
            continue
        assert child.returncode == 128 + number, (index, err)
        assert "Traceback" not in err, (index, err)
        assert "Exception ignored" not in err, (index, err)
        lines = err.splitlines()
        if "nothing is saved yet" in err:
            phases.add("nothing")
            assert not (out / checkpoint.FILE).exists()
        elif "is saved in" in err:
            phases.add("saved")
            step = checkpoint.read(out).facts["step"]
            assert f"step {step} of 100000 is saved in" in err
            assert nsa("train", "--out", str(out), "--resume", "--steps", str(step + 1)).code == 0
        if index % 4 == 0 and lines[-1].startswith("nsa train"):
            again = [*shlex.split(lines[-1])[1:], "--steps", "1", "--save-every", "1"]
            done = nsa(*again) if "--resume" not in again else None
            assert done is None or done.code == 0, done
    assert phases == {"nothing", "saved"}
