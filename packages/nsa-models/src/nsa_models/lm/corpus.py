"""Where documents come from: text files, folders, JSONL, parquet, Hugging Face data sets, Python's
documentation.

A corpus gives the documents of an epoch in an order that its seed fixes, from any place on, so that
a position in it is two integers.
"""

from __future__ import annotations

import json
import mmap
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from nsa_core.errors import InvalidInput
from nsa_core.util.extras import needed
from nsa_core.util.text import describe_error

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu:sample-10BT"
_CUT = 16384  # bytes: a text file is cut at the first blank line, or line end, behind as many


class Corpus(Protocol):
    """Documents in epochs."""

    name: str

    def epoch(self, epoch: int, start: int) -> Iterator[str]:
        """The documents of an epoch in its order, from the ``start``-th on."""
        ...


class ListCorpus:
    """Documents held in memory."""

    def __init__(self, documents: list[str], name: str, seed: int = 0) -> None:
        self.documents, self.name, self.seed = documents, name, seed

    def epoch(self, epoch: int, start: int) -> Iterator[str]:
        """In an order of the epoch's own."""
        for number in shuffled(len(self.documents), self.seed, epoch)[start:].tolist():
            yield self.documents[number]


class FileCorpus:
    """Documents of local files, read when they are wanted; their places alone are held.

    Lines of JSONL and pieces of text come in one order of the epoch's own; groups of rows of
    parquet, which are costly to read, come one after another in such an order, and so do the rows
    inside each.
    """

    def __init__(self, paths: list[Path], name: str, field: str = "text", seed: int = 0) -> None:
        self.name, self.seed = name, seed
        self._spans: list[_Spans] = []
        self._tables: list[_Table] = []
        for path in paths:
            kind = path.suffix.lower()
            if kind == ".parquet":
                self._tables.append(_Table(path, field))
            else:
                self._spans.append(
                    _Lines(path, field) if kind in (".jsonl", ".ndjson") else _Spans(path)
                )
        self._firsts = torch.tensor([0, *(len(s) for s in self._spans)]).cumsum(0)
        self._groups = [(table, group) for table in self._tables for group in range(table.groups)]

    def epoch(self, epoch: int, start: int) -> Iterator[str]:
        """See :class:`Corpus`."""
        order = shuffled(len(self._groups) + 1, self.seed, epoch).tolist()
        for run in order:
            size = (
                self._groups[run - 1][0].rows(self._groups[run - 1][1])
                if run
                else int(self._firsts[-1])
            )
            if start >= size:
                start -= size
                continue
            numbers = shuffled(size, self.seed, epoch, run)[start:]
            start = 0
            if run:
                table, group = self._groups[run - 1]
                yield from table.read(group, numbers.tolist())
                continue
            owners = torch.searchsorted(self._firsts, numbers, right=True) - 1
            for owner, number in zip(owners.tolist(), (numbers - self._firsts[owners]).tolist()):
                yield self._spans[owner].read(number)


class HubCorpus:
    """A data set of Hugging Face, streamed in its own order: the same in every epoch."""

    def __init__(self, name: str, field: str = "text") -> None:
        self.name, self.field = name, field
        library = needed("datasets", "Hugging Face data sets need", "nsa-models[train]")
        path, _, part = name.partition(":")
        try:
            self._stream: Any = library.load_dataset(
                path, part or None, split="train", streaming=True
            )
        except (OSError, ValueError, RuntimeError, LookupError) as error:
            raise InvalidInput(
                f"the data set {name} cannot be opened: {describe_error(error)}"
            ) from error

    def epoch(self, epoch: int, start: int) -> Iterator[str]:
        """See :class:`Corpus`; what lies before ``start`` is passed over."""
        for row in self._stream.skip(start):
            yield _field_of(row, self.field, self.name)


def open_corpus(data: str, field: str = "text", seed: int = 0) -> Corpus:
    """The corpus that ``data`` names: a file, a folder, ``python-docs``, ``fineweb-edu`` or
    ``hf:NAME[:CONFIG]``.

    A text file is one document up to about 16 KiB, and cut at blank lines into as many as it takes
    beyond that. Of a folder come all files that are text, JSONL or parquet, hidden ones left out.

    Raises:
        InvalidInput: there is nothing of that name, or no document in it.
        BackendUnavailable: a library that it needs is not installed.
    """
    if data == "python-docs":
        from nsa_bench.python_docs import library_documents

        return ListCorpus(library_documents(), data, seed)
    if data == "fineweb-edu" or data.startswith("hf:"):
        return HubCorpus(FINEWEB_EDU if data == "fineweb-edu" else data.removeprefix("hf:"), field)
    path = Path(data)
    if not path.exists():
        raise InvalidInput(
            f"--data {data}: no such file or folder, and not python-docs, fineweb-edu or hf:NAME"
        )
    paths = [path]
    if path.is_dir():
        found = (
            p
            for p in sorted(path.rglob("*"))
            if not any(part[0] == "." for part in p.relative_to(path).parts)
        )
        paths = [
            p for p in found if p.is_file() and (p.suffix.lower() == ".parquet" or _is_text(p))
        ]
    elif path.suffix.lower() != ".parquet" and not _is_text(path):
        raise InvalidInput(f"{path} is no UTF-8 text, JSONL or parquet")
    if not paths:
        raise InvalidInput(f"{path} holds no text, JSONL or parquet")
    return FileCorpus(paths, path.name, field, seed)


def shuffled(count: int, *seeds: int) -> torch.Tensor:
    """0 .. count-1 in an order that the seeds fix."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed(*seeds)))


def mixed(*seeds: int | str) -> int:
    """One seed of several."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(repr(seeds).encode(), digest_size=7).digest(), "little")


class _Spans:
    """A file cut into pieces: ``read(i)`` is the i-th."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bounds = array("Q", [0])
        size = path.stat().st_size
        if size:
            with (
                open(path, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                while self._bounds[-1] < size:
                    self._bounds.append(self._next(content, self._bounds[-1], size))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def read(self, number: int) -> str:
        """The piece, bytes that are no UTF-8 replaced by U+FFFD."""
        with open(self.path, "rb") as file:
            file.seek(self._bounds[number])
            return file.read(self._bounds[number + 1] - self._bounds[number]).decode(
                "utf-8", errors="replace"
            )

    def _next(self, content: mmap.mmap, start: int, size: int) -> int:
        if size - start <= 2 * _CUT:
            return size
        for mark in (b"\n\n", b"\n", b" "):
            found = content.find(mark, start + _CUT, start + 2 * _CUT)
            if found >= 0:
                return found + len(mark)
        cut = start + 2 * _CUT
        while cut > start + _CUT and content[cut] & 0xC0 == 0x80:  # inside a character
            cut -= 1
        return cut


class _Lines(_Spans):
    """A file of JSON objects, one a line."""

    def __init__(self, path: Path, field: str) -> None:
        self._field = field
        super().__init__(path)

    def read(self, number: int) -> str:
        """The object's text; "" for an empty line."""
        line = super().read(number)
        if not line.strip():
            return ""
        try:
            return _field_of(json.loads(line), self._field, f"{self.path}, line {number + 1}")
        except json.JSONDecodeError as error:
            raise InvalidInput(f"{self.path}, line {number + 1} is no JSON: {error}") from error

    def _next(self, content: mmap.mmap, start: int, size: int) -> int:
        found = content.find(b"\n", start)
        return size if found < 0 else found + 1


class _Table:
    """A parquet file, a group of rows at a time."""

    def __init__(self, path: Path, field: str) -> None:
        library = _arrow("pyarrow.parquet")
        errors = (OSError, ValueError, _arrow("pyarrow").ArrowException)
        self._field, self._path = field, path
        try:
            self._file: Any = library.ParquetFile(path)
        except errors as error:
            raise InvalidInput(
                f"{path} cannot be read as parquet: {describe_error(error)}"
            ) from error
        names = self._file.schema_arrow.names
        if field not in names:
            raise InvalidInput(f"{path} has no column {field!r}; it has {', '.join(names)}")
        self.groups: int = self._file.num_row_groups

    def rows(self, group: int) -> int:
        """Rows of a group."""
        count: int = self._file.metadata.row_group(group).num_rows
        return count

    def read(self, group: int, numbers: list[int]) -> Iterator[str]:
        """The texts of some rows; "" where there is none."""
        column = self._file.read_row_group(group, columns=[self._field]).column(0)
        for number in numbers:
            yield column[number].as_py() or ""


def _field_of(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        has = type(row).__name__
        if isinstance(row, dict):
            has = ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())
        raise InvalidInput(f"{where} has no text under {field!r} (--text-field); it has {has}")
    return str(row[field])


def _is_text(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(8192)
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4 and b"\0" not in head  # cut inside a character
    return b"\0" not in head


def _arrow(name: str) -> Any:
    return needed(name, "parquet files need", "nsa-models[train]")
