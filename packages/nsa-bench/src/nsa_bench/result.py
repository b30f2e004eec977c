"""The result file: dataclasses, written as JSON with a schema_version, and read back with every
field checked.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from pathlib import Path
from typing import Any, NoReturn

from nsa_bench.gate import Gate
from nsa_bench.roofline import Peaks
from nsa_bench.timing import FAILED, Performance
from nsa_core.errors import InvalidInput
from nsa_core.util.interruption import Interruption

SCHEMA_VERSION = 1
KIND = "nsa-bench"

Series = tuple[str, str, str, str, int]  # shape, dtype, inputs, phase, batch


@dataclasses.dataclass(frozen=True)
class Part:
    """One step of the core on its own: compress, cmp, select, sel, win or combine."""

    backend: str
    performance: Performance | None
    reason: str
    flops: int
    bytes: int
    floor_fraction: float | None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One subject (a combination, a dense kernel, a whole layer, or somebody else's NSA) on one
    problem in one phase.

    ``performance`` is null where ``reason`` says why: the gate failed, out of memory, time limit,
    refused. ``ratio_to_dense`` is the fastest dense kernel's time over this one's: above 1 this is
    faster.
    """

    kind: str  # combo, dense, layer or rival
    subject: str
    shape: str
    dtype: str
    inputs: str  # random or real; of decode, how the cache lies: "random, pages of 128"
    phase: str  # forward, backward, both or decode
    batch: int
    length: int  # tokens; of decode, those in the cache
    performance: Performance | None
    reason: str
    peak_memory_bytes: int | None
    flops: int
    bytes: int
    floor_ms: float
    floor_fraction: float | None
    ratio_to_dense: float | None
    parts: dict[str, Part]

    @property
    def series(self) -> Series:
        """What is measured apart from the length and the subject."""
        return (self.shape, self.dtype, self.inputs, self.phase, self.batch)

    @property
    def shares(self) -> dict[str, float]:
        """Each slot's time over the whole time; of a decode step by its slots."""
        if self.performance is None:
            return {}
        whole = self.performance.median_ms
        return {
            name: part.performance.median_ms / whole
            for name, part in self.parts.items()
            if part.performance
        }


@dataclasses.dataclass(frozen=True)
class Crossover:
    """From which length on a combination is faster than the fastest dense kernel; null: at no
    measured length.

    ``eager_length``: the same where both are called without a CUDA graph; ``sentence`` tells of it
    where they differ.
    """

    subject: str
    shape: str
    dtype: str
    inputs: str
    phase: str
    batch: int
    length: int | None
    sentence: str
    eager_length: int | None = None


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """Which signal ended a run before its last cell, and how many cells it left, the one that it
    cut short included.
    """

    signal: str
    cells_left: int
    cells: int

    @classmethod
    def by(cls, stop: Interruption, left: int, cells: int) -> Interrupted | None:
        """None where nothing was left."""
        return cls(stop.name, left, cells) if left else None


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything one run of the bench found out."""

    settings: dict[str, Any]  # seed, lengths, shapes, blocks, threads, ...
    environment: dict[str, Any]  # device, driver, clocks, versions, git commit
    combos: dict[str, dict[str, str]]  # name -> slot -> "backend version"
    skipped: dict[str, str]  # dense kernel or rival -> why it cannot run
    peaks: dict[str, Peaks]  # per dtype
    gates: list[Gate]
    measurements: list[Measurement]
    crossovers: list[Crossover]
    seconds: float
    interrupted: Interrupted | None = None
    kind: str = KIND
    schema_version: int = SCHEMA_VERSION

    @property
    def failed(self) -> bool:
        """Some combination is not correct, or broke while it was timed."""
        reasons = [
            r
            for m in self.measurements
            if m.kind == "combo"
            for r in (m.reason, *_reasons(m.parts))
        ]
        return any(reason.startswith(FAILED) for reason in reasons) or any(
            not gate.ok for gate in self.gates
        )

    def to_json(self) -> str:
        """The result file's text."""
        fields = []
        for name, value in dataclasses.asdict(self).items():
            if isinstance(
                value, list
            ):  # an entry a line: small, and a difference of two files can be read
                rows = ",\n  ".join(json.dumps(entry, allow_nan=False) for entry in value)
                fields.append(f'"{name}": [\n  {rows}\n ]')
            else:
                fields.append(f'"{name}": {json.dumps(value, allow_nan=False)}')
        return "{\n " + ",\n ".join(fields) + "\n}\n"


def _reasons(parts: dict[str, Part]) -> list[str]:
    return [part.reason for part in parts.values()]


def read_result(path: Path) -> Result:
    """The result in a file.

    Raises:
        InvalidInput: the file cannot be read, is no JSON, or is no result of this schema; the field
            is named.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InvalidInput(f"{path} is not a result of nsa bench")
    if document.get("schema_version") != SCHEMA_VERSION:
        found = document.get("schema_version")
        raise InvalidInput(
            f"{path} has schema_version {found!r}, this version reads {SCHEMA_VERSION}"
        )
    try:
        result = _value(Result, document, "")
    except _WrongError as error:
        raise InvalidInput(f"{path}: {error}") from error
    assert isinstance(result, Result)  # _value makes what it is asked for
    unknown = {m.dtype for m in result.measurements} - result.peaks.keys()
    if unknown:
        raise InvalidInput(f"{path}: peaks has no rates of {', '.join(sorted(unknown))}")
    return result


class _WrongError(Exception):
    """A field that does not have its type."""


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(kind: Any, found: Any, where: str) -> Any:
    """``found`` as ``kind``: a dataclass, dict, list, union with None, or a plain type."""
    if kind is Any:
        return found
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if found is None else _value(arguments[0], found, where)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)  # a class, not an instance
        return _record(kind, found, where)
    if origin is dict and isinstance(found, dict):
        return {key: _value(arguments[1], item, f"{where}.{key}") for key, item in found.items()}
    if origin is list and isinstance(found, list):
        return [_value(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(found)]
    if kind is float and isinstance(found, int) and not isinstance(found, bool):
        return float(found)
    if origin is None and isinstance(found, kind) and (kind is bool or not isinstance(found, bool)):
        return found
    raise _WrongError(
        f"{where.lstrip('.')} must be {getattr(kind, '__name__', kind)}, got {str(found)[:60]!r}"
    )


def _record(kind: type, found: Any, where: str) -> Any:
    if not isinstance(found, dict):
        raise _WrongError(
            f"{where.lstrip('.') or 'the file'} must be an object, got {str(found)[:60]!r}"
        )
    fields, hints = dataclasses.fields(kind), _hints(kind)
    missing = [f.name for f in fields if f.name not in found and f.default is dataclasses.MISSING]
    if missing:
        raise _WrongError(f"{where.lstrip('.') or 'the file'} lacks {', '.join(missing)}")
    given = [f.name for f in fields if f.name in found]  # files of before there was a field lack it
    return kind(**{name: _value(hints[name], found[name], f"{where}.{name}") for name in given})
