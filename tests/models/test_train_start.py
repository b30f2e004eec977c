"""Before `nsa train` and `nsa generate` work: missing libraries, and signals that save nothing."""

from __future__ import annotations

import pathlib
import shlex
import signal
import sys

import pytest

from nsa_models.lm import checkpoint
from nsa_models.lm import train as train_module

SMALL = ["--device", "cpu", "--length", "32", "--batch", "2", "--held-out-rows", "1"]


@pytest.fixture
def text(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the path of a file with sixty documents; training measures no peak rates."""
    peaks = train_module.measure_peaks.__globals__["Peaks"](1e9, 1e9)
    monkeypatch.setattr(train_module, "measure_peaks", lambda *_: peaks)
    lines = (f'{{"text": "this is document {n}, {"and so on, " * n}the end"}}\n' for n in range(60))
    (tmp_path / "text.jsonl").write_text("".join(lines))
    return str(tmp_path / "text.jsonl")


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [
        (signal.SIGINT, 130, "Ctrl-C"),
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGHUP, 129, "SIGHUP"),
    ],
)
def test_a_signal_before_the_first_checkpoint_prints_how_to_start_again(
    nsa, text, tmp_path, monkeypatch, number, code, name
):
    out = tmp_path / "run"
    arguments = ["--out", str(out), "--data", text, "--steps", "1", *SMALL]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("nsa_cli.train._model", lambda *_: signal.raise_signal(number))
            done = nsa("train", *arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    again, command = done.err.splitlines()
    assert (done.code, again) == (
        code,
        f"nsa: ended by {name}; nothing is saved yet. To start again:",
    )
    assert nsa(*shlex.split(command)[1:]).code == 0
    assert checkpoint.read(out).facts["data"]["length"] == 32


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("safetensors", ["train", "--out", "new"], "train"),
        ("tokenizers", ["train", "--out", "new", "--tokenizer", "t.json"], "train"),
        ("datasets", ["train", "--out", "new", "--data", "fineweb-edu"], "train"),
        ("datasets", ["train", "--out", "new", "--data", "hf:some/thing"], "train"),
        ("pyarrow", ["train", "--out", "new", "--data", "x.parquet"], "train"),
        ("pyarrow", ["train", "--out", "new", "--data", "."], "train"),
        ("matplotlib", ["train", "--out", "new", "--png", "x.png"], "plot"),
        ("safetensors", ["generate", "--checkpoint", "new"], "train"),
    ],
)
def test_a_missing_library_is_named_before_any_work(
    nsa, module, arguments, extra, tmp_path, monkeypatch
):
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    for work in ("nsa_models.lm.task.open_data", "nsa_models.lm.checkpoint.read"):
        monkeypatch.setattr(work, lambda *_: pytest.fail("work began"))
    done = nsa(*arguments)
    assert (done.code, done.err) == (
        3,
        f"nsa: nsa {arguments[0]} needs {module}, which is not installed:\n"
        f"  pip install 'nsa-cli[{extra}]'\n",
    )
    assert not (tmp_path / "new").exists()


def test_all_missing_libraries_are_named_at_once(nsa, tmp_path, monkeypatch):
    for module in ("safetensors", "pyarrow", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    done = nsa("train", "--out", str(tmp_path / "new"), "--data", "x.parquet", "--svg", "x.svg")
    assert done.err == (
        "nsa: nsa train needs safetensors, pyarrow, matplotlib, which are not installed:\n"
        "  pip install 'nsa-cli[train,plot]'\n"
    )


def test_a_run_with_a_log_but_no_checkpoint_starts_again_by_force(nsa, text, tmp_path, monkeypatch):
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt  # as the second Ctrl-C

    arguments = ["--out", str(tmp_path / "run"), "--data", text, "--steps", "1", *SMALL]
    with monkeypatch.context() as patch:
        patch.setattr("nsa_models.lm.trainer.Trainer.step", stopped)
        done = nsa("train", *arguments)
    command = done.err.splitlines()[-1]
    assert (done.code, command.endswith(" --force")) == (130, True)
    assert nsa(*shlex.split(command)[1:]).code == 0
