"""A model folder of a stranger is data: five doors read it, and each damage is one sentence.

No door loads code, a kernel or a pickle, connects, asks a question, follows a link out of the
folder, waits for a pipe, or writes beside its output.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM

from damaged_folders import (
    CONFIG,
    DAMAGES,
    FILES,
    INDEX,
    REPLACED,
    WEIGHTS,
    Damage,
    Folder,
    edit,
    weights_of,
)
from nsa_cli.app import main
from nsa_core import InvalidInput, NSAConfig
from nsa_models.hf.folder import load_model
from nsa_models.lm import config_json
from nsa_models.lm import train as train_module
from nsa_models.lm.model_folder import file_facts, index_digest, open_folder
from nsa_models.lm.tokens import ByteTokenizer

SMALL = (
    "--device",
    "cpu",
    "--length",
    "32",
    "--batch",
    "2",
    "--held-out-rows",
    "1",
    "--steps",
    "1",
)
STAGE = ("--steps", "1", "--length", "96")
DOORS = {
    "generate": ("generate", "--checkpoint", "{folder}", "--prompt", "x", "--max-new-tokens", "2"),
    "convert": ("convert", "--checkpoint={folder}", "--out={out}", "--text={text}", *STAGE),
    "inspect": ("inspect", "--checkpoint", "{folder}", "--text", "{text}", "--out", "{out}"),
    "train --checkpoint": (
        *("train", "--checkpoint={folder}", "--out={out}", "--data={text}"),
        *SMALL,
    ),
    "train --resume": ("train", "--resume", "--out", "{folder}", "--device", "cpu"),
}
SECONDS, MEBIBYTES = 20, 700


def seal(folder: Folder, files: bool = True) -> None:
    """Give the index of a run the sizes and digests of its files, as a forger would."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        plain = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
        plain = [p for p in plain if p.stat().st_size < 10**9]
        index = json.loads((folder / INDEX).read_text() if folder / INDEX in plain else "")
        own = index["metadata"]["nsa"]
        if files:
            plain.remove(folder / INDEX)
            own["files"] = {p.relative_to(folder).as_posix(): file_facts(p) for p in plain}
        own["digest"] = index_digest(index)
        (folder / INDEX).write_text(json.dumps(index))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a folder with a run, and with two models as save_pretrained writes them."""
    top = tmp_path_factory.mktemp("originals")
    lines = (f'{{"text": "document {n}, {"and so on, " * n}the end"}}\n' for n in range(60))
    (top / "text.jsonl").write_text("".join(lines))
    (top / "tokenizer.json").write_text(ByteTokenizer().files()["tokenizer.json"])
    with pytest.MonkeyPatch.context() as patch:
        peaks = train_module.measure_peaks.__globals__["Peaks"](1e9, 1e9)
        patch.setattr(train_module, "measure_peaks", lambda *_: peaks)
        for kind in ("nsa", "dense"):
            words = ("--data", f"{top}/text.jsonl", "--attention", kind)
            words += ("--tokenizer", f"{top}/tokenizer.json")
            with pytest.raises(SystemExit, match="0"):
                main(["train", "--out", f"{top}/run {kind}", *words, *SMALL])
            plain = shutil.copytree(top / f"run {kind}", top / kind)
            weights_of(plain).rename(plain / WEIGHTS)
            for name in (INDEX, "log.jsonl"):
                (plain / name).unlink()
            shutil.rmtree(plain / "optimizer")
    return top


@pytest.fixture
def place(tmp_path: Folder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    """Return an empty folder, beside which a secret lies; nothing may connect, ask or hang."""

    def refuse(*arguments: Any, **options: Any) -> None:
        pytest.fail(f"a door connects or asks: {arguments}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("builtins.input", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    read, write = os.pipe()  # a read of standard input would block
    monkeypatch.setattr(sys, "stdin", os.fdopen(read))
    handler = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a door hangs"))
    signal.alarm(SECONDS)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (tmp_path / "place").mkdir()
    pictures = importlib.import_module("nsa_models.inspect.save")  # they take seconds
    monkeypatch.setattr(pictures, "save", lambda *_: None)
    monkeypatch.chdir(tmp_path / "place")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield tmp_path / "place"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    os.close(write)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEBIBYTES << 10
    assert [p.name for p in (tmp_path / "outside").iterdir()] == ["secret"]
    assert (tmp_path / "outside" / "secret").read_text() == "secret"
    assert not list(tmp_path.rglob("marker"))
    assert not list(tmp_path.glob("place/out/**/*.py"))  # convert copies no code


def open_door(door: str, damage: Damage, originals: Folder, nsa: Any) -> Any:
    """Damage a copy of the folder that a door reads, and return the result of the door."""
    kind = {"convert": "dense", "train --resume": "run nsa"}.get(door, "nsa")
    folder = shutil.copytree(originals / kind, pathlib.Path("folder"))
    damage(folder)
    if door == "train --resume":
        seal(folder)
    names = {"folder": folder, "out": "out", "text": originals / "text.jsonl"}
    return nsa(*(word.format(**names) for word in DOORS[door]))


def check_refused(result: Any, words: str) -> None:
    """Check that one sentence names the file and the remedy, and that nothing is written."""
    assert (result.code, result.out) == (2, ""), result
    assert re.fullmatch(rf"nsa: [^\n]*({words})[^\n]*\n", result.err), result.err
    assert len(result.err) < 700
    assert not pathlib.Path("out").exists()


@pytest.mark.few_cases
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_one_sentence_or_has_no_effect(damage, door, originals, place, nsa):
    change, words = DAMAGES[damage]
    result = open_door(door, change, originals, nsa)
    if words is None:
        assert result.code == 0, result.err
    else:
        check_refused(result, words)


@pytest.mark.few_cases
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("name", FILES)
def test_no_door_opens_what_is_no_file_of_the_folder(name, how, door, originals, place, nsa):
    def damage(folder: Folder) -> None:
        file = weights_of(folder) if name == WEIGHTS else folder / name
        file.unlink(missing_ok=True)
        REPLACED[how](file)

    refusals = "is a link, a pipe or a device|is not a plain file|leads out|cannot be read"
    check_refused(open_door(door, damage, originals, nsa), rf"folder/[a-z0-9_.-]+ ({refusals})")


@pytest.mark.parametrize("how", ["FIFO", "link out", "link to nothing"])
@pytest.mark.parametrize("name", [".nsa-train.txt", ".nsa-train.lock", "log.jsonl", "optimizer"])
def test_a_resumed_run_writes_through_nothing(name, how, originals, place, nsa):
    def damage(folder: Folder) -> None:
        if name == "optimizer":
            (folder / name).rename("elsewhere")
        else:
            (folder / name).unlink(missing_ok=True)
        REPLACED[how](folder / name)

    result = open_door("train --resume", damage, originals, nsa)
    check_refused(result, f"{re.escape(name)} is a link, a pipe or a device")


VALUES = [None, True, -1, 0, 10**9, 0.5, 1e300, "x", [], [[1]], ["x"], {}, {"a": {"b": 1}}]


def refusals(folder: Folder, change: Any, load: bool = False) -> list[Any]:
    """Return the values that a folder may not have; other errors than a sentence are raised."""
    refused = []
    for value in VALUES:
        change(value)
        try:
            opened = open_folder(folder)
            if load:
                load_model(opened)
        except InvalidInput as error:
            refused.append(value)
            if "\n" in (sentence := str(error)) or len(sentence) > 700:
                raise
    return refused


FIELDS = {
    (): typing.get_type_hints(config_json._Fields),
    ("nsa",): [field.name for field in dataclasses.fields(NSAConfig)],
    ("rope_parameters",): ["rope_type", "rope_theta", "factor", "low_freq_factor"],
}


@pytest.mark.parametrize("part", FIELDS)
def test_a_value_of_any_type_in_any_field_of_a_config_is_one_sentence(part, originals, place):
    signal.alarm(10 * SECONDS)
    folder = shutil.copytree(originals / "nsa", pathlib.Path("folder"))
    text = (folder / CONFIG).read_text()

    def change(value: Any) -> None:
        (folder / CONFIG).write_text(text)
        edit(CONFIG, *part, **{name: value})(folder)

    for name in FIELDS[part]:
        refused = refusals(folder, change, load=True)
        assert len(refused) > 5 or part == ("rope_parameters",), (name, refused)


@pytest.mark.parametrize("part", [(), ("recipe",), ("data",)])
def test_a_value_of_another_type_in_a_training_is_one_sentence(part, originals, place):
    signal.alarm(10 * SECONDS)
    folder = shutil.copytree(originals / "run nsa", pathlib.Path("folder"))
    text = (folder / INDEX).read_text()
    fields = json.loads(text)["metadata"]["nsa"]["training"]
    for key in part:
        fields = fields[key]

    def change(value: Any) -> None:
        (folder / INDEX).write_text(text)
        edit(INDEX, "metadata", "nsa", "training", *part, **{name: value})(folder)
        seal(folder, files=False)

    for name, old in fields.items():
        kinds = {type(old), int} if type(old) is float else {type(old)}
        allowed = [value for value in VALUES if type(value) in kinds]
        allowed += [None] * (name == "tokenizer")
        refused = refusals(folder, change)
        assert [v for v in VALUES if not any(v is one for one in [*refused, *allowed])] == []


def test_a_task_of_other_words_is_not_resumed(originals, place, nsa):
    damage = edit(INDEX, "metadata", "nsa", "training", "data", data="uniform", vocab_size=300)
    result = open_door("train --resume", damage, originals, nsa)
    check_refused(
        result, "--resume: folder has a vocabulary of 256, but the data has ids up to 299"
    )


def test_a_model_of_transformers_loads_no_kernel(originals, place):
    folder = shutil.copytree(originals / "nsa", pathlib.Path("folder"))
    for name in ("attn_implementation", "_attn_implementation"):
        for value in ("a/b", "kernels-community/flash-attn", {"": "a/b"}):
            edit(CONFIG, **{name: value})(folder)
            with pytest.raises(InvalidInput, match="attn_implementation must be 'nsa' or None"):
                AutoModelForCausalLM.from_pretrained(folder)
        shutil.copy(originals / "nsa" / CONFIG, folder / CONFIG)
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 2
