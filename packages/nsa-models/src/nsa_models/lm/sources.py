"""Open a corpus by its name: files, folders, data sets of Hugging Face, Python's documentation."""

from __future__ import annotations

import functools
import itertools
import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch.utils.data import ConcatDataset, Dataset

from nsa_core.errors import InvalidInput
from nsa_core.util.extras import require_module
from nsa_core.util.text import did_you_mean
from nsa_models.lm.corpus import Corpus, Group
from nsa_models.lm.fingerprint import Documents, Fingerprint, fingerprint_of_files
from nsa_models.lm.text_files import CUT, LINES, named, text_files

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu:sample-10BT"
# Bytes of a line of JSONL or characters of a document. Encoding a document takes many times that.
_LONGEST = 1 << 26
_BUFFER = 1 << 20


def open_corpus(data: str, field: str = "text", seed: int = 0) -> Corpus:
    """Open a corpus.

    A text file of more than 32 KiB is split into documents of 16 to 32 KiB, at blank lines if
    possible. A folder gives all its text, JSONL and parquet files, except hidden ones.

    Args:
        data: A file, a folder, ``python-docs``, ``fineweb-edu`` or ``hf:NAME[:CONFIG]``.
        field: Name of the text field of JSONL, parquet and Hugging Face rows.
        seed: Seed of the document order.

    Raises:
        InvalidInput: The data does not exist, contains no supported file, or cannot be read.
        BackendUnavailable: A required library is not installed.
    """
    if data == "python-docs":
        from nsa_bench.python_docs import library_documents

        return Corpus(library_documents(), data, seed)
    if data == "fineweb-edu" or (data.startswith("hf:") and data != "hf:"):
        name = FINEWEB_EDU if data == "fineweb-edu" else data.removeprefix("hf:")
        return _open_hub(name, field, seed)
    if not (data and Path(data).exists()):
        names = ("python-docs", "fineweb-edu", "uniform", "recall")
        raise InvalidInput(
            f"--data {data or repr(data)}: no such file or folder{did_you_mean(data, names)}; give"
            f" an existing path, {', '.join(names)} or hf:NAME"
        )
    files = text_files(Path(data))
    name = f"--data {data}"
    return _corpus_of(files, name, field, seed, lambda: fingerprint_of_files(files))


def _corpus_of(
    files: Mapping[str, Path | str],
    name: str,
    field: str,
    seed: int,
    fingerprint: Callable[[], Fingerprint],
) -> Corpus:
    """Return the documents of files; a parquet file may be a URL that fsspec opens."""
    kinds = {path: Path(path).suffix.lower() for path in files.values()}
    # First, because a missing library should be named before all lines of other files are counted.
    parquet = [path for path, kind in kinds.items() if kind == ".parquet"]
    groups = [group for path in parquet for group in _parquet_groups(path, field)]
    parts = [
        _JsonLines(Path(path), field) if kind in LINES else _TextFile(Path(path))
        for path, kind in kinds.items()
        if kind != ".parquet"
    ]
    documents: Documents = ConcatDataset(parts) if parts else []
    return Corpus(documents, name, seed, groups, fingerprint)


class _TextFile(Dataset[str]):
    """A text file split into documents, of which only the bounds are held in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with named(str(path)), open(path, "rb", buffering=_BUFFER) as file:
            self._bounds = array("Q", itertools.accumulate(self._sizes(file), initial=0))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, number: int) -> str:
        """Return a document; invalid UTF-8 is replaced by U+FFFD."""
        return self._content(number).decode("utf-8", errors="replace")

    def _content(self, number: int) -> bytes:
        start, end = self._bounds[number : number + 2]
        with open(self._path, "rb") as file:
            file.seek(start)
            content = file.read(end - start)
        if len(content) < end - start:
            raise InvalidInput(f"{self._path} has become shorter since it was opened")
        return content

    def _sizes(self, file: BinaryIO) -> Iterator[int]:
        """Yield the number of bytes of each document."""
        content = b""
        while content := content + file.read(2 * CUT + 1 - len(content)):
            size = len(content)
            if size > 2 * CUT:
                size = self._cut(content)
            yield size
            content = content[size:]

    def _cut(self, content: bytes) -> int:
        for mark in (b"\n\n", b"\n", b" "):
            position = content.find(mark, CUT, 2 * CUT)
            if position >= 0:
                return position + len(mark)
        cut = 2 * CUT
        # Do not cut inside a UTF-8 character.
        while cut > CUT and content[cut] & 0xC0 == 0x80:
            cut -= 1
        return cut


class _JsonLines(_TextFile):
    """A file with one JSON object per line."""

    def __init__(self, path: Path, field: str) -> None:
        self._field = field
        super().__init__(path)

    def __getitem__(self, number: int) -> str:
        """Return the text of a line's object; "" for an empty line."""
        line, where = self._content(number).strip(), f"{self._path}, line {number + 1}"
        if not line:
            return ""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", error)
            raise InvalidInput(f"{where} is not JSON: {reason}") from error
        return _text_of(row, self._field, where)

    def _sizes(self, file: BinaryIO) -> Iterator[int]:
        lines = iter(functools.partial(file.readline, _LONGEST + 1), b"")
        for number, line in enumerate(lines, 1):
            if len(line) > _LONGEST:
                raise InvalidInput(
                    f"{self._path}, line {number} has more than {_LONGEST:,} bytes; divide it into"
                    " several documents"
                )
            yield len(line)


def _parquet_groups(path: Path | str, field: str) -> list[Group]:
    """Return the row groups of a parquet file, each of which is read when its turn comes."""
    library = require_module("pyarrow.parquet", "parquet files need", "nsa-models[train]")
    with named(f"{path} as parquet"):
        opened = path
        if "://" in str(path):
            fsspec = require_module("fsspec", "parquet files of a URL need", "nsa-models[train]")
            opened = fsspec.open(str(path), "rb").open()
        file = library.ParquetFile(opened)
    names = file.schema_arrow.names
    if field not in names:
        raise InvalidInput(
            f"{path} has no column {field!r} (--text-field); it has {', '.join(names)}"
        )

    def load(group: int) -> Callable[[int], str]:
        where = f"{path}, row group {group + 1}"
        with named(where):
            column = file.read_row_group(group, columns=[field]).column(0)

        def read(number: int) -> str:
            row = f"{where}, row {number + 1}"
            with named(row):
                return _text_of({field: column[number].as_py()}, field, row)

        return read

    return [
        Group(file.metadata.row_group(group).num_rows, functools.partial(load, group))
        for group in range(file.num_row_groups)
    ]


def _open_hub(name: str, field: str, seed: int) -> Corpus:
    """Open the split ``train`` of a data set.

    If its files are parquet, nothing is downloaded in advance: the footers of the files say which
    rows each row group has, and a row group is read when its turn comes. Otherwise `datasets`
    downloads the data set and keeps it as Arrow tables on the disk, whose rows are read at random.

    Args:
        name: NAME or NAME:CONFIG, where NAME is a name on the Hub or a local folder.
        field: Name of the text field.
        seed: Seed of the order.
    """
    library = require_module("datasets", "Hugging Face data sets need", "nsa-models[train]")
    path, _, part = name.partition(":")
    with named(f"data set {name}"):
        builder = library.load_dataset_builder(path, part or None)
        files = [str(file) for file in (builder.config.data_files or {}).get("train", [])]

        def content() -> Fingerprint:
            if Path(path).is_dir():
                return fingerprint_of_files({os.path.relpath(f, path): Path(f) for f in files})
            return {name: f"revision {builder.hash}"}

        if files and all(file.endswith(".parquet") for file in files):
            by_name = dict(zip(files, files))
            return _corpus_of(by_name, f"--data hf:{name}", field, seed, content)
        table = library.load_dataset(path, part or None, split="train")
    return Corpus(_Column(table, field, name), f"--data hf:{name}", seed, (), content)


class _Column:
    """The texts of a table of `datasets`, which stays on the disk."""

    def __init__(self, table: Any, field: str, name: str) -> None:
        self._table, self._field, self._name = table, field, name

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, number: int) -> str:
        return _text_of(self._table[number], self._field, f"{self._name}, row {number + 1}")


def _text_of(row: Any, field: str, where: str) -> str:
    """Return the text of a row, which may be too long or of another type; "" for a null."""
    if not (isinstance(row, dict) and field in row and isinstance(row[field], str | None)):
        content = type(row).__name__
        if isinstance(row, dict):
            content = ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())
        raise InvalidInput(f"{where} has no text under {field!r} (--text-field); it has {content}")
    text = row[field] or ""
    if len(text) > _LONGEST:
        raise InvalidInput(
            f"{where} has {len(text):,} characters, more than {_LONGEST:,}; divide it into several"
            " documents"
        )
    return str(text)
