"""Corpora and tokenizers: all text of all files, errors that name the place, and fingerprints."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import types

import pytest
import torch

from nsa_bench.python_docs import library_documents, library_text
from nsa_core import InvalidInput
from nsa_core.errors import BackendUnavailable
from nsa_models.lm import fingerprint, sources
from nsa_models.lm.corpus import Corpus, Lane
from nsa_models.lm.sources import open_corpus
from nsa_models.lm.task import DataSpec, open_data
from nsa_models.lm.tokens import ByteTokenizer, FileTokenizer, read_tokenizer


def epoch(path, number=0, **options):
    return list(open_corpus(str(path), **options).epoch(number, 0))


def write_jsonl(path, texts, field="text"):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def write_parquet(path, texts, rows=10, field="text"):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(arrow.table({field: texts, "n": range(len(texts))}), path, rows)
    return path


@pytest.fixture
def alarm():
    """Fail a test that waits for a pipe."""
    usual = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for a pipe"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, usual)


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
def test_a_long_text_is_split_without_loss(tmp_path, monkeypatch, mark):
    monkeypatch.setattr(sources, "CUT", 50)
    text = mark.join(f"pärt{n}" * 3 for n in range(200))
    file = tmp_path / "long.txt"
    file.write_text(text, encoding="utf-8")
    corpus = open_corpus(str(file))
    parts = list(corpus.epoch(0, 0))
    assert "".join(map(corpus._groups[0].load(), range(len(parts)))) == text
    assert all(len(part.encode()) <= 100 for part in parts)
    assert mark == "" or sum(part.endswith(mark) for part in parts) >= len(parts) - 1
    file.write_text("short", encoding="utf-8")
    assert epoch(file) == ["short"]


@pytest.mark.usefixtures("alarm")
def test_a_folder_gives_its_visible_text_files(tmp_path):
    (tmp_path / "b.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    write_jsonl(tmp_path / "deep" / "c.JSONL", ["three", None, "four"])
    (tmp_path / "deep" / "d.ndjson").write_bytes(
        b'\xef\xbb\xbf{"text": "five"}\r\n \n{"text": "\\ud800"}'
    )
    write_parquet(tmp_path / "e.parquet", ["six", None])
    write_parquet(tmp_path / "no rows.parquet", [])
    (tmp_path / "half a character.txt").write_bytes(b"x" * 8191 + "é".encode())
    (tmp_path / "late.txt").write_bytes(b"y" * 8192 + b"\xff")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 and more")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "a.txt").write_text("secret")
    os.mkfifo(tmp_path / "pipe.txt")
    for name, target in (("self", "."), ("loop.txt", "loop.txt"), ("gone.txt", "nothing")):
        (tmp_path / name).symlink_to(target)
    texts = ["", "", "", "\ud800", "five", "four", "one", "six", "three", "two"]
    texts += ["x" * 8191 + "é", "y" * 8192 + "\ufffd"]
    assert sorted(epoch(tmp_path)) == sorted(texts)
    assert open_corpus(str(tmp_path)).name == f"--data {tmp_path}"


@pytest.mark.parametrize("kind", ["list", "files", "few groups", "many groups", "files and groups"])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_lanes_share_an_epoch_without_overlap(tmp_path, kind, lanes):
    texts = [f"row {n}" for n in range(70)]
    rows, in_files = 30 if kind == "few groups" else 2, 30 if "files" in kind else 0
    in_files = 70 if kind == "files" else in_files
    write_jsonl(tmp_path / "a" / "x.jsonl", texts[: in_files // 2], "body")
    write_jsonl(tmp_path / "a" / "y.jsonl", texts[in_files // 2 : in_files], "body")
    if "groups" in kind:
        write_parquet(tmp_path / "a" / "x.parquet", texts[in_files:], rows, "body")
    corpus, other = (
        Corpus(texts, "list", seed)
        if kind == "list"
        else open_corpus(str(tmp_path / "a"), "body", seed)
        for seed in (0, 1)
    )
    orders = [list(c.epoch(n, 0)) for c, n in ((corpus, 0), (corpus, 1), (other, 0))]
    assert orders[0] != orders[1] != orders[2] != orders[0] == list(corpus.epoch(0, 0))
    for number in (0, 1, 5):
        parts = [list(corpus.epoch(number, 0, Lane(lane, lanes))) for lane in range(lanes)]
        assert sorted(text for part in parts for text in part) == sorted(texts)
        assert all(parts)
        for start in range(len(parts[0]) + 2):
            assert list(corpus.epoch(number, start, Lane(0, lanes))) == parts[0][start:]
    if kind == "many groups":  # each lane reads whole groups if it gets four or more of them
        numbers = {int(text.split()[1]) for text in parts[0]}
        assert all({n, n ^ 1} <= numbers for n in numbers)


def test_a_lane_of_a_small_corpus_has_every_document_in_some_epoch():
    corpus = Corpus(["one", "two"], "small")
    for lane in range(5):
        texts = {text for number in range(60) for text in corpus.epoch(number, 0, Lane(lane, 5))}
        assert texts == {"one", "two"}


def half(path):
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def parquet(texts, change=lambda path: None):
    """Return a function that writes a parquet file and damages it."""
    return lambda path: change(write_parquet(path, texts))


def overwrite_rows(path):
    path.write_bytes(b"PAR1" + b"\xff" * 60 + path.read_bytes()[64:])


# name of a file, its content or a function that writes it, a part of the error
BROKEN = [
    ("x.jsonl", lambda path: None, "x.jsonl: no such file or folder; give an existing path"),
    ("loop", lambda path: path.symlink_to("loop"), "loop: no such file or folder"),
    ("pipe", os.mkfifo, "pipe is neither a folder nor a regular file"),
    ("memory", lambda path: path.symlink_to("/proc/self/mem"), "memory cannot be read: OSError"),
    ("binary", b"\0\1\2", "binary is not a UTF-8 text, JSONL or parquet file"),
    ("x.txt", "text".encode("utf-16"), "x.txt is not a UTF-8 text"),
    ("x.jsonl", b'\n{"text": 3}', "line 2 has no text under 'text' (--text-field); it has text"),
    ("x.jsonl", b'{"text": 3, "b": []}', "(--text-field); it has text (int), b (list)"),
    ("x.jsonl", b'{"text": ""}\n{"body": ""}', "line 2 has no text under 'text'"),
    ("x.jsonl", b"[1]\n", "line 1 has no text under 'text' (--text-field); it has list"),
    ("x.jsonl", b'{"text": ""}\n{"text"', "x.jsonl, line 2 is not JSON: Expecting ':' delimiter"),
    ("x.ndjson", b'\n{"text": "\xff"}', "x.ndjson, line 2 is not JSON: 'utf-8' codec can't decode"),
    ("x.jsonl", b'{"text": ""}\n' + b"\0" * 512, "x.jsonl, line 2 is not JSON"),
    ("x.jsonl", b"[" * 200_000, "x.jsonl, line 1 is not JSON: maximum recursion depth exceeded"),
    ("x.jsonl", b'{"text": ""}\n' + b"a" * 300_000, "line 2 has more than 200,000 bytes; divide"),
    ("x.parquet", parquet(["a" * 200_001]), "row 1 has 200,001 characters, more than 200,000"),
    ("x.parquet", parquet(["a"] * 99, half), "x.parquet as parquet cannot be read: ArrowInvalid"),
    ("x.parquet", b"", "x.parquet as parquet cannot be read: ArrowInvalid"),
    ("x.parquet", parquet(["b" * 99] * 5, overwrite_rows), "row group 1 cannot be read: OSError"),
    ("x.parquet", parquet([7]), "x.parquet, row group 1, row 1 has no text under 'text'"),
    ("x.parquet", parquet([b"\xff"]), "(--text-field); it has text (bytes)"),
]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="has pipes, and a file that cannot be read")
@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(("name", "content", "message"), BROKEN, ids=[row[2] for row in BROKEN])
def test_an_error_names_the_file_and_the_place(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(sources, "_LONGEST", 200_000)
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        content(file)
    with pytest.raises(InvalidInput) as caught:
        epoch(file)
    assert f"{file}" in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_column_that_is_not_there_and_a_file_that_shrinks_are_named(tmp_path):
    file = write_parquet(tmp_path / "x.parquet", ["a"])
    with pytest.raises(
        InvalidInput, match=r"has no column 'body' \(--text-field\); it has text, n"
    ):
        open_corpus(str(file), field="body")
    file.rename(tmp_path / ".x")
    with pytest.raises(InvalidInput, match="contains no text, JSONL or parquet file"):
        open_corpus(str(tmp_path))
    file = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    corpus = open_corpus(str(file))
    half(file)
    with pytest.raises(InvalidInput, match=r"a\.jsonl has become shorter since it was opened"):
        list(corpus.epoch(0, 0))


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    list_folder = os.scandir

    def refuse(path):
        if "closed" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", refuse)  # root may list every folder
    with pytest.raises(InvalidInput, match=r"cannot be read: PermissionError.*closed"):
        open_corpus(str(tmp_path))


@pytest.mark.parametrize(
    ("library", "read", "name"),
    [
        ("datasets", open_corpus, "hf:someone/something"),
        ("pyarrow", open_corpus, "x.parquet"),
        ("pyarrow", open_corpus, "."),
        ("tokenizers", read_tokenizer, "tokenizer.json"),
    ],
)
def test_a_missing_library_is_named_with_its_hint(tmp_path, monkeypatch, library, read, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.parquet", None)
    for file in ("a.jsonl", "x.parquet", "tokenizer.json"):
        (tmp_path / file).touch()
    monkeypatch.setattr(sources, "_JsonLines", lambda *_: pytest.fail("lines were counted"))
    message = rf"needs? {library}, which is not installed; pip install 'nsa-models\[train\]'"
    with pytest.raises(BackendUnavailable, match=message):
        read(name)


def test_a_data_set_of_parquet_is_read_by_row_group(tmp_path, monkeypatch):
    fsspec, calls = pytest.importorskip("fsspec"), []
    with fsspec.open_files("memory://a/*.parquet", "wb", num=2) as files:
        for number, file in enumerate(files):
            texts = [f"{number}{n}" for n in range(30)]
            file.write(write_parquet(tmp_path / "x.parquet", texts).read_bytes())
    urls = [f"memory://a/{n}.parquet" for n in range(2)]

    def load_dataset_builder(*arguments):
        calls.append(arguments)
        config = types.SimpleNamespace(data_files={"train": urls, "test": ["x.csv"]})
        return types.SimpleNamespace(config=config, hash="0a1b")

    library = types.SimpleNamespace(load_dataset_builder=load_dataset_builder)
    monkeypatch.setitem(sys.modules, "datasets", library)
    corpus = open_corpus("fineweb-edu")
    documents, loaded = list(corpus.epoch(0, 0)), []
    assert sorted(documents) == sorted(f"{stem}{n}" for stem in "01" for n in range(30))
    corpus._groups[1:] = [
        group._replace(load=lambda g=group: loaded.append(g) or g.load())
        for group in corpus._groups[1:]
    ]
    assert list(corpus.epoch(0, 35)) == documents[35:]
    assert len(loaded) == 3  # of 6: nothing before document 35 is read
    assert corpus.fingerprint() == {sources.FINEWEB_EDU: "revision 0a1b"}
    open_corpus("hf:someone/plain")
    assert calls == [("HuggingFaceFW/fineweb-edu", "sample-10BT"), ("someone/plain", None)]
    del urls[:], library.load_dataset_builder
    with pytest.raises(InvalidInput, match="data set someone/else cannot be read: AttributeError"):
        open_corpus("hf:someone/else")


def test_the_library_opens_local_data_sets(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [f"row {n}" for n in range(20)]
    files = [
        write_parquet(tmp_path / "tables" / "a.parquet", texts),
        write_jsonl(tmp_path / "lines" / "a.jsonl", texts),
    ]
    for file, from_table in zip(files, (False, True)):
        corpus = open_corpus(f"hf:{file.parent}")
        documents = list(corpus.epoch(0, 0))
        assert sorted(documents) == sorted(texts)
        assert list(corpus.epoch(0, 6)) == documents[6:]
        assert (len(corpus._groups) == 1) == from_table
        assert corpus.name == f"--data hf:{file.parent}"
        assert corpus.fingerprint() == open_corpus(str(file.parent)).fingerprint()
    with pytest.raises(InvalidInput, match=r"lines, row \d+ has no text under 'n'"):
        list(open_corpus(f"hf:{tmp_path / 'lines'}", field="n").epoch(0, 0))


def overwrite(place):
    """Return a function that overwrites a byte of a.txt."""

    def change(folder):
        with open(folder / "a.txt", "r+b") as file:
            file.seek(place)
            file.write(b"#")

    return change


def exchange(folder):
    """Exchange a.txt and b/b.txt, which have the same length."""
    (folder / "a.txt").rename(folder / "c")
    (folder / "b" / "b.txt").rename(folder / "a.txt")
    (folder / "c").rename(folder / "b" / "b.txt")


OTHER = "a.txt has other content in its 1,000 bytes"
EDITS = {
    "first byte": (overwrite(0), [OTHER]),
    "middle byte": (overwrite(567), [OTHER]),
    "last byte": (overwrite(999), [OTHER]),
    "longer": (overwrite(1000), ["a.txt has 1,001 bytes, had 1,000 bytes"]),
    "shorter": (lambda f: half(f / "a.txt"), ["a.txt has 500 bytes, had 1,000 bytes"]),
    "renamed": (lambda f: (f / "a.txt").rename(f / "c.txt"), ["a.txt is missing", "c.txt is new"]),
    "exchanged": (exchange, [OTHER, OTHER.replace("a.txt", "b/b.txt")]),
    "touched": (lambda f: os.utime(f / "a.txt", (1, 1)), []),
    "hidden": (lambda f: (f / ".c").write_text("c"), []),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_fingerprint_changes_with_the_content_alone(tmp_path, monkeypatch, name):
    monkeypatch.setattr(fingerprint, "_CHUNK", 100)
    monkeypatch.setattr(fingerprint, "_BLOCK", 30)
    (tmp_path / "one" / "b").mkdir(parents=True)
    (tmp_path / "one" / "a.txt").write_text("0123456789" * 100)
    (tmp_path / "one" / "b" / "b.txt").write_text("9876543210" * 100)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    change, sentences = EDITS[name]
    change(tmp_path / "two")
    old, new = (open_corpus(str(tmp_path / folder)).fingerprint() for folder in ("one", "two"))
    assert fingerprint.changes(json.loads(json.dumps(old)), new) == sentences
    assert (old == new) == (not sentences)


def test_tasks_and_documents_have_fingerprints():
    task = open_data(DataSpec("recall", 64, held_out_rows=1))
    assert task.fingerprint == {"recall": "length 64, vocab_size 64, seed 0"}
    other = open_data(DataSpec("recall", 64, seed=1, held_out_rows=1))
    assert other.changes(task.fingerprint) == [
        "recall has length 64, vocab_size 64, seed 1, had length 64, vocab_size 64, seed 0"
    ]
    lists = (["ab", "c"], ["a", "bc"], ["ab", "c", ""])
    assert len({str(Corpus(texts, "list").fingerprint()) for texts in lists}) == 3


@pytest.mark.slow
def test_python_docs_is_a_corpus_without_downloads():
    documents = library_documents()
    assert len(documents) == len(set(documents)) > 1000
    assert documents[0].encode() == library_text(1)[: len(documents[0].encode())]
    data = open_data(DataSpec("python-docs", held_out_rows=3))
    assert (len(data.held_out), data.vocab_size) == (3, 256)
    assert next(data.rows) not in data.held_out
    assert data.fingerprint == open_data(DataSpec("python-docs", seed=1)).fingerprint


def test_data_leaves_the_global_random_states_alone(tmp_path):
    write_parquet(tmp_path / "x.parquet", [f"row {n}" for n in range(99)])
    before = random.getstate(), torch.get_rng_state().tolist()
    for name in (str(tmp_path), "uniform", "recall"):
        data = open_data(DataSpec(name, 64))
        assert data.fingerprint
        assert next(data.rows.lane(1, 2))
    assert (random.getstate(), torch.get_rng_state().tolist()) == before


def test_the_error_names_every_wrong_field_of_a_description():
    message = (
        "length must be an integer >= 2, got 1; seed must be an integer >= 0, got '0';"
        " held_out must lie between 0 and 1, got None; data must be a text, got 3"
    )
    with pytest.raises(InvalidInput, match=message):
        DataSpec(3, 1, held_out=None, seed="0")


def test_the_byte_tokenizer_round_trips_text():
    tokenizer = ByteTokenizer()
    text = "ünï \U0001f600 text\n"
    assert tokenizer.decode([tokenizer.end, *tokenizer.encode(text), tokenizer.end]) == text
    assert max(tokenizer.encode(text)) < tokenizer.end < tokenizer.vocab_size
    pytest.importorskip("tokenizers")
    restored = FileTokenizer(tokenizer.files()["tokenizer.json"])
    assert (restored.encode(text), restored.end) == (tokenizer.encode(text), tokenizer.end)


def tokenizer_json(vocab):
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    return json.dumps(
        {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    )


def test_a_tokenizer_json_encodes_decodes_and_is_restored(tmp_path):
    pytest.importorskip("tokenizers")
    vocab = {"[UNK]": 0, "one": 1, "two": 2, "</s>": 3}
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(vocab))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("two one </s> \ud800") == [2, 1, 0]  # the last is no valid text
    assert (tokenizer.end, tokenizer.vocab_size) == (3, 64)
    assert tokenizer.decode([3, 2, 1, 60, 3]) == "two one"
    restored = FileTokenizer(tokenizer.files()["tokenizer.json"])
    assert (restored.encode("two one"), restored.end) == ([2, 1], 3)
    del vocab["</s>"]
    assert FileTokenizer(tokenizer_json(vocab)).end == 3  # a new id after the last one
    for broken in ("{}", "no JSON"):
        with pytest.raises(InvalidInput, match=r"cannot be read as a tokenizer\.json"):
            FileTokenizer(broken)
    with pytest.raises(InvalidInput, match=r"absent\.json cannot be read"):
        read_tokenizer(tmp_path / "absent.json")
