"""The log of a training run: JSON lines, beginning with a header."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from nsa_core.errors import InvalidInput
from nsa_core.util.atomic_files import write_atomic, writing
from nsa_core.util.text import describe_error

KIND, SCHEMA_VERSION = "nsa-train-log", 1
FILE = "log.jsonl"


class Log:
    """Appends records to a log file.

    A new run overwrites the file. A run resumed at ``step`` keeps it and drops the records that it
    repeats: those of later steps, and all of them at step 0. A log that cannot be read is kept
    under another name, with a warning.

    Args:
        path: The file.
        facts: The header.
        step: The step at which the run is resumed; None for a new run.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], step: int | None = None) -> None:
        header = {"kind": KIND, "schema_version": SCHEMA_VERSION, **facts}
        records: list[dict[str, Any]] = []
        if step is not None and path.exists():
            try:
                old, records = read_log(path)
            except InvalidInput:
                aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
                with writing(path):
                    path.rename(aside)
                warnings.warn(
                    f"{path} could not be read. It is kept as {aside.name}, and a new log begins.",
                    stacklevel=1,
                )
            else:
                header = self._checked(path, old, header)
        kept = [record for record in records if record["step"] <= step] if step else []
        lines = "".join(json.dumps(line) + "\n" for line in (header, *kept))
        write_atomic(path, lines, force=True)
        self._path = path
        with writing(path):
            self._file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115  # see close()

    @staticmethod
    def _checked(path: Path, old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        """Return the header ``old`` of a resumed log, which must be of the same model and data."""
        for name in ("model", "data"):
            own, theirs = json.loads(json.dumps(new.get(name))), old.get(name)
            if own != theirs:
                raise InvalidInput(
                    f"{path} belongs to another run than the model beside it: its {name} is"
                    f" {theirs}, the model's is {own}; put back the files of one run"
                )
        return old

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record and flush it.

        Raises:
            NotWritten: The operating system refuses the write.
        """
        with writing(self._path):
            self._file.write(json.dumps(dict(record)) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # a record that was not written is reported by write
            self._file.close()


def read_log(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a log; an incomplete last line is ignored.

    Returns:
        The header and the records.

    Raises:
        InvalidInput: The file cannot be read, or is not a log of this version.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        header = json.loads(lines[0])
        if header.get("kind") != KIND or header.get("schema_version") != SCHEMA_VERSION:
            raise InvalidInput(f"{path} is not a {KIND} of schema version {SCHEMA_VERSION}")
        records = [json.loads(line) for line in lines[1:-1]]
        if not all(type(record["step"]) is int for record in records):
            raise InvalidInput(f"{path}: every record must have an integer step")
        return header, records
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{path} cannot be read as a log: {describe_error(error)}") from error
