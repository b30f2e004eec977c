"""The files of a corpus, and the errors of reading them."""

from __future__ import annotations

import codecs
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from nsa_core.errors import InvalidInput, NSAError
from nsa_core.util.text import describe_error

# Bytes. A text of more than 2 * CUT bytes is cut after CUT to 2 * CUT bytes: at the first blank
# line there, else at a line end, else at a space, else at the limit.
CUT = 16384
LINES = (".jsonl", ".ndjson")
# The reason why a corpus of no document, or of one, cannot be trained on.
TOO_FEW = (
    "contains no text: give documents with text",
    "is one document, and training needs two, one of them held out: give more documents, or a text"
    " of more than 32 KiB, which is split",
)


def text_files(path: Path) -> dict[str, Path]:
    """Return the files of a path that can be read as text, JSONL or parquet, by relative name.

    Args:
        path: A file, or a folder, whose hidden files and folders are left out.

    Raises:
        InvalidInput: There is none, or a file or folder cannot be read.
    """
    files = {path.name: path} if path.is_file() else _visible_files(path)
    texts = {name: file for name, file in files.items() if _is_supported(file)}
    if not texts:
        problem = "is not a UTF-8" if path.is_file() else "contains no"
        raise InvalidInput(
            f"--data {path} {problem} text, JSONL or parquet file; give a file or folder with text"
        )
    return texts


def _visible_files(path: Path) -> dict[str, Path]:
    if not path.is_dir():
        raise InvalidInput(
            f"--data {path} is neither a folder nor a regular file, so it cannot be reread"
        )
    files: dict[str, Path] = {}
    with named(f"--data {path}"):
        for parent, folders, names in os.walk(path, onerror=_raise):
            folders[:] = [name for name in folders if name[0] != "."]
            visible = (Path(parent, name) for name in names if name[0] != ".")
            files |= {p.relative_to(path).as_posix(): p for p in visible if p.is_file()}
    return {name: files[name] for name in sorted(files)}


def _raise(error: OSError) -> None:
    raise error


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
    """Name the file in an error of the system, or of the library that reads it."""
    try:
        yield
    except NSAError:
        raise
    except Exception as error:
        raise InvalidInput(f"{where} cannot be read: {describe_error(error)}") from error


def _is_supported(path: Path) -> bool:
    """Return whether a file is called JSONL or parquet, or begins as UTF-8 text."""
    if path.suffix.lower() in (*LINES, ".parquet"):
        return True
    with named(str(path)), open(path, "rb") as file:
        head = file.read(8192)
    try:  # the head may end inside a character
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
