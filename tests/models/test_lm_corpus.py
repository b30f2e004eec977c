"""Corpora and tokenizers: every file type gives all its text; a missing library has a hint."""

from __future__ import annotations

import json
import sys
import types

import pytest

import standins
from nsa_bench.python_docs import library_documents, library_text
from nsa_core import InvalidInput
from nsa_core.errors import BackendUnavailable
from nsa_models.lm import corpus as corpus_module
from nsa_models.lm.corpus import Lane, ListCorpus
from nsa_models.lm.sources import open_corpus
from nsa_models.lm.task import DataSpec, open_data
from nsa_models.lm.tokens import ByteTokenizer, FileTokenizer, read_tokenizer, tokenizer_from_dict


def epoch(path, number=0, start=0, **options):
    return list(open_corpus(str(path), **options).epoch(number, start))


@pytest.mark.parametrize("mark", ["\n\n", "\n", " ", ""])
def test_a_long_text_is_split_without_loss(tmp_path, monkeypatch, mark):
    monkeypatch.setattr(corpus_module, "_CUT", 50)
    text = mark.join(f"pärt{n}" * 3 for n in range(200))
    file = tmp_path / "long.txt"
    file.write_text(text, encoding="utf-8")
    parts = epoch(file)
    assert sum(map(len, parts)) == len(text)
    assert sorted("".join(parts)) == sorted(text)  # no character is split
    assert all(part in text and len(part.encode()) <= 100 for part in parts)
    assert mark == "" or sum(part.endswith(mark) for part in parts) >= len(parts) - 1
    file.write_text("short", encoding="utf-8")
    assert epoch(file) == ["short"]


def test_a_folder_gives_its_visible_text_files(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n\n{"text": "four", "id": 4}\n')
    (tmp_path / "D.JSONL").write_text('{"text": "five"}')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 and more")
    (tmp_path / ".hidden").write_text("secret")
    assert sorted(epoch(tmp_path)) == ["", "five", "four", "one", "three", "two"]
    assert open_corpus(str(tmp_path)).name == tmp_path.name


def test_epochs_differ_in_order_and_start_at_any_document(tmp_path):
    lines = [json.dumps({"body": f"number {n}"}) for n in range(50)]
    for name, part in (("a.jsonl", lines[:20]), ("b.ndjson", lines[20:])):
        (tmp_path / name).write_text("\n".join(part))
    first, second = epoch(tmp_path, field="body"), epoch(tmp_path, 1, field="body")
    assert first != second
    assert sorted(first) == sorted(second) == sorted(f"number {n}" for n in range(50))
    assert epoch(tmp_path, field="body") == first
    assert epoch(tmp_path, field="body", seed=1) != first
    for start in (1, 19, 49, 50):
        assert epoch(tmp_path, start=start, field="body") == first[start:]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            b'{"text": "good"}\n{"text": 3}\n',
            "line 2 has no text under 'text' (--text-field); it has text (int)",
        ),
        (b'{"text": "good"}\n[1]\n', "line 2 has no text under 'text' (--text-field); it has list"),
        (b'{"text": "good"}\n{"text"\n', "line 2 is not JSON"),
    ],
)
def test_the_error_of_a_bad_line_names_it(tmp_path, content, text):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        epoch(file)
    assert text in str(caught.value)


def test_paths_without_text_are_refused(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\0\1\2")
    with pytest.raises(InvalidInput, match=r"x\.bin is not a UTF-8 text"):
        open_corpus(str(tmp_path / "x.bin"))
    with pytest.raises(InvalidInput, match="contains no text"):
        open_corpus(str(tmp_path))
    with pytest.raises(InvalidInput, match="no such file or folder"):
        open_corpus(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("library", "data"), [("datasets", "hf:someone/something"), ("pyarrow", "x.parquet")]
)
def test_a_missing_library_is_named_with_its_hint(tmp_path, monkeypatch, library, data):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.parquet", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        BackendUnavailable,
        match=rf"need {library}, which is not installed; pip install 'nsa-models\[train\]'",
    ):
        open_corpus(data if ":" in data else str(tmp_path / data))


@pytest.fixture
def hub(monkeypatch):
    """Return ``hub(files, rows)``, which fakes `datasets` with these data files and rows."""

    def fake(files, rows=None):
        calls = []

        def load_dataset_builder(*arguments):
            calls.append(arguments)
            return types.SimpleNamespace(config=types.SimpleNamespace(data_files=files))

        library = types.SimpleNamespace(
            load_dataset_builder=load_dataset_builder, load_dataset=lambda *_, split: rows[split]
        )
        monkeypatch.setitem(sys.modules, "datasets", library)
        return calls

    return fake


@pytest.mark.slow
def test_a_data_set_of_parquet_is_read_by_row_group(tmp_path, hub):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("fsspec")
    names = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for name in names:
        texts = [f"{name.stem}{n}" for n in range(30)]
        parquet.write_table(arrow.table({"text": texts}), name, row_group_size=10)
    calls = hub({"train": [f"file://{name}" for name in names], "test": ["x.csv"]})
    corpus = open_corpus("fineweb-edu")
    documents = list(corpus.epoch(0, 0))
    assert sorted(documents) == sorted(f"{stem}{n}" for stem in "ab" for n in range(30))
    assert documents != list(corpus.epoch(1, 0))
    read, groups = type(corpus._tables[0]).read, []
    corpus._tables[0].read = corpus._tables[1].read = lambda group, rows: groups.append(group) or []
    list(corpus.epoch(0, 35))
    assert len(groups) == 3  # of 6: nothing before document 35 is read
    del corpus._tables[0].read, corpus._tables[1].read
    assert corpus._tables[0].read.__func__ is read
    assert list(corpus.epoch(0, 35)) == documents[35:]
    open_corpus("hf:someone/plain")
    assert calls == [("HuggingFaceFW/fineweb-edu", "sample-10BT"), ("someone/plain", None)]


def test_a_data_set_of_other_files_is_read_from_its_arrow_table(hub):
    hub({"train": ["x.json.gz"]}, {"train": [{"text": f"row {n}"} for n in range(9)]})
    corpus = open_corpus("hf:someone/else")
    documents = list(corpus.epoch(0, 0))
    assert sorted(documents) == [f"row {n}" for n in range(9)]
    assert list(corpus.epoch(0, 6)) == documents[6:]
    assert corpus.documents[2:4] == ["row 2", "row 3"]
    hub({}, {"train": [{"body": "x"}]})
    with pytest.raises(InvalidInput, match="someone/else, row 1 has no text under 'text'"):
        list(open_corpus("hf:someone/else").epoch(0, 0))
    hub({}, {})
    with pytest.raises(InvalidInput, match="data set someone/else cannot be opened: KeyError"):
        open_corpus("hf:someone/else")


@pytest.mark.slow
def test_the_library_opens_local_data_sets(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for kind in ("tables", "lines"):
        (tmp_path / kind).mkdir()
    texts = [f"row {n}" for n in range(20)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "tables" / "a.parquet")
    (tmp_path / "lines" / "a.jsonl").write_text("".join(f'{{"text": "{t}"}}\n' for t in texts))
    tables, lines = (open_corpus(f"hf:{tmp_path / kind}") for kind in ("tables", "lines"))
    assert isinstance(tables, corpus_module.FileCorpus)
    assert isinstance(lines, corpus_module.ListCorpus)
    for corpus in (tables, lines):
        assert sorted(corpus.epoch(0, 0)) == sorted(texts)


@pytest.mark.parametrize("kind", ["list", "text", "few groups", "many groups"])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_lanes_share_an_epoch_without_overlap(tmp_path, kind, lanes):
    texts = [f"row {n}" for n in range(70)]
    if kind == "list":
        corpus = ListCorpus(texts, "list")
    elif kind == "text":
        (tmp_path / "x.jsonl").write_text("".join(f'{{"text": "{t}"}}\n' for t in texts))
        corpus = open_corpus(str(tmp_path))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = {"few groups": 30, "many groups": 2}[kind]
        parquet.write_table(
            arrow.table({"text": texts}), tmp_path / "x.parquet", row_group_size=rows
        )
        corpus = open_corpus(str(tmp_path))
    for number in (0, 1, 5):
        parts = [list(corpus.epoch(number, 0, Lane(lane, lanes))) for lane in range(lanes)]
        assert sorted(text for part in parts for text in part) == sorted(texts)
        assert all(parts)
        for start in (1, len(parts[0]) // 2, len(parts[0])):
            assert list(corpus.epoch(number, start, Lane(0, lanes))) == parts[0][start:]
    if kind == "many groups":  # each lane reads whole groups if it gets four or more of them
        numbers = {int(text.split()[1]) for text in parts[0]}
        assert all({n, n ^ 1} <= numbers for n in numbers)


def test_a_lane_of_a_small_corpus_has_every_document_in_some_epoch():
    corpus = ListCorpus(["one", "two"], "small")
    for lane in range(5):
        texts = {text for number in range(60) for text in corpus.epoch(number, 0, Lane(lane, 5))}
        assert texts == {"one", "two"}


@pytest.fixture(params=["the library", "a stand-in"])
def write_parquet(request, monkeypatch):
    """Return ``write(path, columns, rows per group)`` for pyarrow or for its fake."""
    if request.param == "the library":
        arrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        return lambda path, columns, group: parquet.write_table(
            arrow.table(columns), path, row_group_size=group
        )
    stand_in = types.SimpleNamespace(
        ParquetFile=standins.ParquetFile, ArrowException=standins.ArrowException
    )
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    return lambda path, columns, group: path.write_text(
        json.dumps({"columns": columns, "group": group})
    )


def test_parquet_is_read_in_shuffled_row_groups(tmp_path, write_parquet):
    file = tmp_path / "x.parquet"
    texts = [f"row {n}" for n in range(25)] + [None]
    write_parquet(file, {"text": texts, "n": list(range(26))}, 10)
    documents = epoch(file)
    assert sorted(documents) == sorted(t or "" for t in texts)
    assert documents != epoch(file, 1)
    for start in (3, 10, 17, 26):
        assert epoch(file, start=start) == documents[start:]
    with pytest.raises(
        InvalidInput, match=r"has no column 'body' \(--text-field\); it has text, n"
    ):
        open_corpus(str(file), field="body")
    file.write_bytes(b"PAR1")
    with pytest.raises(InvalidInput, match="cannot be read as parquet"):
        open_corpus(str(file))


@pytest.mark.slow
def test_python_docs_is_a_corpus_without_downloads():
    documents = library_documents()
    assert len(documents) == len(set(documents)) > 1000
    assert documents[0].encode() == library_text(1)[: len(documents[0].encode())]
    data = open_data(DataSpec("python-docs", held_out_rows=3))
    assert (len(data.held_out), data.vocab_size) == (3, 256)
    assert next(data.rows) not in data.held_out


def test_the_byte_tokenizer_round_trips_text():
    tokenizer = ByteTokenizer()
    text = "ünï \U0001f600 text\n"
    assert tokenizer.decode([tokenizer.end, *tokenizer.encode(text), tokenizer.end]) == text
    assert max(tokenizer.encode(text)) < tokenizer.end < tokenizer.vocab_size
    assert tokenizer_from_dict(tokenizer.to_dict()).encode(text) == tokenizer.encode(text)
    with pytest.raises(InvalidInput, match="got 'other'"):
        tokenizer_from_dict({"kind": "other"})


@pytest.fixture(params=["the library", "a stand-in"])
def tokenizers(request, monkeypatch):
    """Return the library, or its fake."""
    if request.param == "the library":
        return pytest.importorskip("tokenizers")
    stand_in = types.SimpleNamespace(Tokenizer=standins.Tokenizer)
    monkeypatch.setitem(sys.modules, "tokenizers", stand_in)
    return stand_in


def tokenizer_json(vocab):
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    return json.dumps(
        {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    )


@pytest.mark.usefixtures("tokenizers")
def test_a_tokenizer_json_encodes_decodes_and_is_restored(tmp_path):
    vocab = {"[UNK]": 0, "one": 1, "two": 2, "</s>": 3}
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(vocab))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.encode("two one </s> three"), tokenizer.end, tokenizer.vocab_size) == (
        [2, 1, 0],
        3,
        64,
    )
    assert tokenizer.decode([3, 2, 1, 60, 3]) == "two one"
    restored = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert restored.encode("two one") == [2, 1]
    del vocab["</s>"]
    assert FileTokenizer(tokenizer_json(vocab)).end == 3  # a new id after the last one
    for broken in ("{}", "no JSON"):
        with pytest.raises(InvalidInput, match=r"cannot be read as a tokenizer\.json"):
            FileTokenizer(broken)


def test_a_tokenizer_json_without_its_library_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BackendUnavailable, match="needs tokenizers, which is not installed"):
        read_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_tokenizer(tmp_path / "absent.json")
