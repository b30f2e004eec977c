"""Corpora: text files, folders, JSONL, parquet, Hugging Face data sets, Python's documentation.

The seed fixes the order of an epoch's documents. An epoch is dealt to lanes, one per row of a step,
and a lane can start at any of its documents, which arithmetic finds. A position in a lane is
therefore two integers, and a process reads the documents of its own lanes only.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from nsa_core.errors import InvalidInput
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error

# Bytes. A text of more than 2 * _CUT bytes is cut after _CUT to 2 * _CUT bytes: at the first blank
# line there, else at a line end, else at a space, else at the limit.
_CUT = 16384
# Whole row groups of parquet are dealt to lanes if each lane gets at least so many.
_GROUPS_PER_LANE = 4


@dataclasses.dataclass(frozen=True)
class Lane:
    """Lane ``number`` of ``count`` lanes, to which the documents of an epoch are dealt.

    A lane takes every ``count``-th item of a shuffled order. Its first item moves with the epoch,
    so that every lane has documents in some epochs, even of a corpus with fewer items than lanes.
    """

    number: int = 0
    count: int = 1

    def items(self, epoch: int) -> slice:
        """Return which positions of an order belong to this lane."""
        return slice((self.number - epoch) % self.count, None, self.count)


WHOLE = Lane()


class Corpus(Protocol):
    """Documents in epochs."""

    name: str

    def epoch(self, epoch: int, start: int, lane: Lane = WHOLE) -> Iterator[str]:
        """Yield a lane's documents of an epoch in their order, beginning with number ``start``."""
        ...


class ListCorpus:
    """Documents of a sequence, such as a list or a column of a table on the disk."""

    def __init__(self, documents: Sequence[str], name: str, seed: int = 0) -> None:
        self.documents, self.name, self.seed = documents, name, seed

    def epoch(self, epoch: int, start: int, lane: Lane = WHOLE) -> Iterator[str]:
        """Yield the documents in a new order per epoch; see :class:`Corpus`."""
        order = permutation(len(self.documents), self.seed, epoch)[lane.items(epoch)]
        for number in order[start:].tolist():
            yield self.documents[number]


class FileCorpus:
    """Documents of files; only their positions are held in memory.

    Each epoch has its own order. Lines of JSONL and parts of text files are shuffled together.
    Parquet is expensive to read at random, so its row groups are read one after another in a
    shuffled order, and the rows are shuffled within each group. Lanes get whole row groups, or,
    if there are too few for that, rows of every group.

    Args:
        paths: Files; a parquet file may be a URL that fsspec opens.
        name: Name of the corpus in messages.
        field: Name of the text field of JSONL and parquet.
        seed: Seed of the order.
    """

    def __init__(
        self, paths: Sequence[Path | str], name: str, field: str = "text", seed: int = 0
    ) -> None:
        self.name, self.seed = name, seed
        self._spans: list[_TextFile] = []
        self._tables: list[_ParquetFile] = []
        for path in paths:
            kind = Path(path).suffix.lower()
            if kind == ".parquet":
                self._tables.append(_ParquetFile(path, field))
            else:
                self._spans.append(
                    _JsonLines(Path(path), field)
                    if kind in (".jsonl", ".ndjson")
                    else _TextFile(Path(path))
                )
        self._firsts = torch.tensor([0, *(len(s) for s in self._spans)]).cumsum(0)
        self._groups = [(table, group) for table in self._tables for group in range(table.groups)]

    def epoch(self, epoch: int, start: int, lane: Lane = WHOLE) -> Iterator[str]:
        """Yield the documents of an epoch; see :class:`Corpus`."""
        for source, rows in self._sources(epoch, lane):
            size = len(range(self._size(source))[rows])
            if start >= size:
                start -= size
                continue
            order = permutation(self._size(source), self.seed, epoch, source)[rows]
            order = order[start:].contiguous()
            start = 0
            if source:
                table, group = self._groups[source - 1]
                yield from table.read(group, order.tolist())
                continue
            files = torch.searchsorted(self._firsts, order, right=True) - 1
            for file, number in zip(files.tolist(), (order - self._firsts[files]).tolist()):
                yield self._spans[file].read(number)

    def _sources(self, epoch: int, lane: Lane) -> Iterator[tuple[int, slice]]:
        """Yield a lane's sources of documents, in order, and which shuffled rows of them it gets.

        Source 0 is all JSONL lines and text parts; source i is parquet row group i - 1.
        """
        whole_groups = len(self._groups) >= _GROUPS_PER_LANE * lane.count
        turn = 0
        for source in permutation(len(self._groups) + 1, self.seed, epoch).tolist():
            if not source or not whole_groups:
                yield source, lane.items(epoch)
                continue
            if (turn + epoch) % lane.count == lane.number:
                yield source, slice(None)
            turn += 1

    def _size(self, source: int) -> int:
        if not source:
            return int(self._firsts[-1])
        table, group = self._groups[source - 1]
        return table.rows(group)


def permutation(count: int, *seeds: int) -> torch.Tensor:
    """Return 0 .. count-1 in an order that the seeds determine."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(combine_seeds(*seeds)))


def combine_seeds(*seeds: int | str) -> int:
    """Hash several seeds into one."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(repr(seeds).encode(), digest_size=7).digest(), "little")


class _TextFile:
    """A text file split into documents; ``read(i)`` returns document i."""

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
                    self._bounds.append(self._document_end(content, self._bounds[-1], size))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def read(self, number: int) -> str:
        """Return a document; invalid UTF-8 is replaced by U+FFFD."""
        with open(self.path, "rb") as file:
            file.seek(self._bounds[number])
            return file.read(self._bounds[number + 1] - self._bounds[number]).decode(
                "utf-8", errors="replace"
            )

    def _document_end(self, content: mmap.mmap, start: int, size: int) -> int:
        if size - start <= 2 * _CUT:
            return size
        for mark in (b"\n\n", b"\n", b" "):
            position = content.find(mark, start + _CUT, start + 2 * _CUT)
            if position >= 0:
                return position + len(mark)
        cut = start + 2 * _CUT
        # Do not cut inside a UTF-8 character.
        while cut > start + _CUT and content[cut] & 0xC0 == 0x80:
            cut -= 1
        return cut


class _JsonLines(_TextFile):
    """A file with one JSON object per line."""

    def __init__(self, path: Path, field: str) -> None:
        self._field = field
        super().__init__(path)

    def read(self, number: int) -> str:
        """Return the text of a line's object; "" for an empty line."""
        line = super().read(number)
        if not line.strip():
            return ""
        try:
            return field_of(json.loads(line), self._field, f"{self.path}, line {number + 1}")
        except json.JSONDecodeError as error:
            raise InvalidInput(f"{self.path}, line {number + 1} is not JSON: {error}") from error

    def _document_end(self, content: mmap.mmap, start: int, size: int) -> int:
        newline = content.find(b"\n", start)
        return size if newline < 0 else newline + 1


class _ParquetFile:
    """A parquet file, read one row group at a time."""

    def __init__(self, path: Path | str, field: str) -> None:
        library = _arrow("pyarrow.parquet")
        errors = (OSError, ValueError, _arrow("pyarrow").ArrowException)
        self._field, self._path = field, path
        try:
            self._file: Any = library.ParquetFile(_opened(path))
        except errors as error:
            raise InvalidInput(
                f"{path} cannot be read as parquet: {describe_error(error)}"
            ) from error
        names = self._file.schema_arrow.names
        if field not in names:
            raise InvalidInput(
                f"{path} has no column {field!r} (--text-field); it has {', '.join(names)}"
            )
        self.groups: int = self._file.num_row_groups

    def rows(self, group: int) -> int:
        """Return the number of rows in a group."""
        count: int = self._file.metadata.row_group(group).num_rows
        return count

    def read(self, group: int, numbers: list[int]) -> Iterator[str]:
        """Yield the texts of the given rows; "" for a null."""
        column = self._file.read_row_group(group, columns=[self._field]).column(0)
        for number in numbers:
            yield column[number].as_py() or ""


def field_of(row: Any, field: str, where: str) -> str:
    """Return the text of a row.

    Raises:
        InvalidInput: The row has no text under ``field``; the message says what it has.
    """
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        content = type(row).__name__
        if isinstance(row, dict):
            content = ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items())
        raise InvalidInput(f"{where} has no text under {field!r} (--text-field); it has {content}")
    return str(row[field])


def is_text(path: Path) -> bool:
    """Return whether a file begins as UTF-8 text."""
    with open(path, "rb") as file:
        head = file.read(8192)
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        # An error in the last bytes only means that the head ends inside a character.
        return error.start > len(head) - 4 and b"\0" not in head
    return b"\0" not in head


def _opened(path: Path | str) -> Any:
    """Return a local path as it is, and a URL as an open file."""
    if "://" not in str(path):
        return path
    return (
        require_module("fsspec", "parquet files of a URL need", "nsa-models[train]")
        .open(str(path), "rb")
        .open()
    )


def _arrow(name: str) -> Any:
    return require_module(name, "parquet files need", "nsa-models[train]")
