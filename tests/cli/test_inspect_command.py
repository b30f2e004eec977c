"""`nsa inspect`: files, output at several widths, and refused arguments."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from safetensors.torch import save_file

from nsa_models.lm import saving, weights
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.config_json import json_of
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.tokens import ByteTokenizer
from screen import assert_readable

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch) -> None:
    """Draw nothing: tests/models/test_inspect.py tests the pictures."""
    monkeypatch.setattr("nsa_models.inspect.draw.detail", lambda *_: b"a picture")
    monkeypatch.setattr("nsa_models.inspect.draw.overview", lambda *_: b"a picture")


@pytest.fixture
def text(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_bytes(b"a text of many words, \xff\n" * 60)
    return "notes.txt"


def test_files_and_findings_are_written(nsa, text, tmp_path):
    command = ("inspect", "--text", text, "--device", "cpu", "--out", "picture")
    result = nsa(*command, "--max-tokens", "200")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("No layer gains over random blocks by more than a point; layer ")
    assert [line.split()[1] for line in lines[1:3]] == ["gates", "most-read"]
    assert lines[3:5] == [
        "Cut to the first 200 of 1,561 tokens (--max-tokens).",
        "Untrained weights: this shows the mechanism, not learning.",
    ]
    assert lines[-3].startswith("Written to picture: inspect.html, selection.png, ")
    assert lines[-2] == "next: python -m webbrowser picture/inspect.html"
    assert lines[-1] == "next: nsa train --out run"
    assert len(list((tmp_path / "picture").iterdir())) == 5
    refused = nsa(*command)
    assert (refused.code, refused.out) == (2, "")
    assert "and 2 more; give a new folder, or --force to overwrite its pictures" in refused.err
    assert nsa(*command, "--force", "--dtype", "bfloat16", "--seed", "3", "--layer", "0").code == 0


@pytest.mark.slow
def test_the_output_fits_a_terminal(terminal, text):
    command = ("inspect", "--text", text, "--device", "cpu", "--force", "--out", "p")
    texts = {columns: terminal(*command, columns=columns)[1] for columns in (80, 100, 2000)}
    for columns in (80, 100):
        assert_readable(texts[columns], texts[2000], columns)


def _write_model(folder: Path, config: LMConfig) -> None:
    model = LanguageModel(config)
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors |= weights.split(name, parameter.detach(), config)
    tokenizer = ByteTokenizer()
    values = json_of(config, 32, tokenizer.end)
    folder.mkdir()
    for name, text in saving.text_files(values, tokenizer.files()).items():
        (folder / name).write_text(text)
    save_file({n: x.contiguous() for n, x in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layer", "2"), "--layer must be 0 to 1, got 2"),
        (("--max-tokens", "64"), "nsa: --max-tokens must be more than 64, got 64: each query"),
        (
            ("--max-tokens", "9", "--text", "short"),
            "nsa: --text must have more than 64 tokens, got 61",
        ),
        (("--checkpoint", "mixed", "--layer", "0"), "--layer must be 1, a layer with NSA, got 0"),
        (("--checkpoint", "mixed", "--max-tokens", "9"), "16 tokens, so fewer tokens leave no"),
        (("--checkpoint", "notes.txt"), "notes.txt is a file: give the folder of a model"),
        (("--checkpoint", "x", "--seed", "1"), "--seed sets untrained weights"),
        (("--dtype", "float32,float16"), "--dtype must be one dtype, got float32, float16"),
        (("--text", "none"), "--text none: No such file or directory"),
        (("--text", "."), "--text .: Is a directory"),
        (("--text", "empty"), "empty must contain text, got only white space"),
        (("--out", "notes.txt"), "notes.txt is not a folder"),
    ],
)
def test_unusable_arguments_are_refused_by_one_message(nsa, text, tmp_path, arguments, message):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "short").write_text("x" * 60)
    if "mixed" in arguments:
        _write_model(tmp_path / "mixed", size("tiny", nsa_layers=(1,)))
    values = {"--text": text, "--out": "picture", "--device": "cpu"}
    values |= dict(zip(arguments[::2], arguments[1::2]))
    result = nsa("inspect", *(word for pair in values.items() for word in pair))
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert not (tmp_path / "picture").exists()


def test_commands_print_a_next_command_that_works(nsa, tmp_path, monkeypatch):
    """A run on short rows, a converted model and an inspection each lead to the next command."""
    monkeypatch.chdir(tmp_path)
    small = ["--steps", "1", "--length", "32", "--batch", "2", "--held-out-rows", "1"]
    assert nsa("train", "--out", "dense", "--attention", "dense", *small).code == 0
    converted = nsa("convert", "--checkpoint", "dense", "--out", "run")
    words = shlex.split(converted.out.splitlines()[-1].removeprefix("next: nsa "))
    assert words == [
        "train",
        "--checkpoint",
        "run",
        "--data",
        "python-docs",
        "--out",
        "run-trained",
    ]
    assert nsa(*words, *small).code == 0
    generated = nsa("generate", "--checkpoint", "run-trained", "--max-new-tokens", "1")
    words = shlex.split(generated.err.removeprefix("next: nsa "))
    assert words == ["inspect", "--checkpoint", "run-trained", "--out", "run-trained-blocks"]
    inspected = nsa(*words)
    assert (inspected.code, inspected.err) == (0, "")
    assert "Cut to the first 128 of " in inspected.out  # twice the 64 tokens that a query selects
    again = nsa("generate", "--checkpoint", "run-trained", "--max-new-tokens", "1")
    assert again.err == "next: nsa inspect --checkpoint run-trained --out run-trained-blocks-2\n"
