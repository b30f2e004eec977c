"""The result file: dataclasses, written as JSON and read back with every field checked."""

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
from nsa_core.contract import LONG_SEQUENCE
from nsa_core.errors import InvalidInput
from nsa_core.limits import COUNT, shown
from nsa_core.plan.default_plan import is_long
from nsa_core.util.interruption import Interruption

SCHEMA_VERSION = 1
KIND = "nsa-bench"
# Suffixes of subjects in a decode result.
UNFUSED, EAGER, LAYER = DECODE_SUFFIXES = (", slots one by one", ", eager", ", layer step")

# Parts that add up to more of the whole call were not timed alike: side effects of caches, and
# kernels that run side by side in the whole call, account for less.
_LARGEST_SUM = 1.25

_COUNTS = ("batch", "length", "eager_length", "failed_length")
LARGEST = 10**30  # of the other integers, such as flops: above any count of a legal shape
Series = tuple[str, str, str, str, int]  # shape, dtype, inputs, phase, batch


@dataclasses.dataclass(frozen=True)
class Part:
    """One kernel of the core timed alone: compress, cmp, select, sel, causal, win or combine.

    In short sequences the call runs causal attention, "causal", in place of select and sel.
    """

    backend: str
    performance: Performance | None
    reason: str
    flops: int
    bytes: int
    floor_fraction: float | None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One subject on one problem in one phase.

    A subject is a combination, a dense kernel, a whole layer, or another library's NSA. If
    ``performance`` is null, ``reason`` states why: failed gate, out of memory, time limit, or
    refused. ``ratio_to_dense`` is the fastest dense kernel's time over this one's; above 1 the
    subject is faster.
    """

    kind: str  # combo, dense, layer or rival
    subject: str
    shape: str
    dtype: str
    inputs: str  # random or real; for decode the kind of cache: "random, pages of 128"
    phase: str  # forward, backward, both or decode
    batch: int
    length: int  # tokens; for decode, tokens in the cache
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
        """Return the problem without its length: shape, dtype, inputs, phase and batch."""
        return (self.shape, self.dtype, self.inputs, self.phase, self.batch)

    @property
    def timed_parts(self) -> dict[str, Performance]:
        """Return the times of the parts that have one, if the whole has one too."""
        if self.performance is None:
            return {}
        return {name: p.performance for name, p in self.parts.items() if p.performance is not None}


@dataclasses.dataclass(frozen=True)
class Crossover:
    """The length from which a combination is faster than the fastest dense kernel.

    ``length`` is null if the combination is slower at the longest measured length. ``eager_length``
    is the crossover without CUDA graphs; ``sentence`` states it if the two differ.
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

    @property
    def series(self) -> Series:
        """Return the problem without its length, as that of a measurement."""
        return (self.shape, self.dtype, self.inputs, self.phase, self.batch)


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """The signal that ended a run early, and the number of unfinished cells."""

    signal: str
    cells_left: int
    cells: int

    @classmethod
    def by(cls, stop: Interruption, left: int, cells: int) -> Interrupted | None:
        """Return the interruption of a run; None if no cell is left."""
        return cls(stop.name, left, cells) if left else None


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything that one run of the benchmark measured."""

    settings: dict[str, Any]  # seed, lengths, shapes, blocks, threads, ...
    environment: dict[str, Any]  # device, driver, clocks, versions, git commit
    combos: dict[str, dict[str, str]]  # name -> slot -> "backend version"
    skipped: dict[str, str]  # dense kernel or rival -> reason why it cannot run
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
        """Return whether a combination is not correct, or failed while it was timed."""
        combos = [m for m in self.measurements if m.kind == "combo"]
        reasons = [m.reason for m in combos]
        reasons += [part.reason for m in combos for part in m.parts.values()]
        wrong = any(not gate.ok for gate in self.gates)
        return wrong or any(reason.startswith(FAILED) for reason in reasons)

    @property
    def timed_nothing(self) -> bool:
        """Return whether no combination has a time."""
        return not any(m.performance for m in self.measurements if m.kind == "combo")

    def shares(self, m: Measurement) -> dict[str, float]:
        """Return the time of each part of a measurement over the time of its whole call.

        For decode, the whole is the step run slot by slot. Both are timed by the same clock: as
        CUDA graphs or without launches to wait for, otherwise all are launched from Python. Empty
        if :meth:`not_comparable` gives a reason.
        """
        return {} if self.not_comparable(m) else _ratios(m)

    def not_comparable(self, m: Measurement) -> str:
        """Return why the times of the parts are no shares of the whole call; "" if they are."""
        ratios = _ratios(m)
        if not ratios:
            return ""
        if "causal" not in ratios and "backward" in self._backends(m) and m.phase != "forward":
            return "one fused kernel runs the backward of the whole call, in place of these kernels"
        longest = max(ratios, key=lambda name: ratios[name])
        if ratios[longest] > 1:
            return f"{longest} took longer than the whole call that contains it"
        if sum(ratios.values()) > _LARGEST_SUM:
            return f"together, the parts took over {_LARGEST_SUM * 100:.0f} % of the whole call"
        if min(ratios.values()) < 0:
            return "the times of the parts are differences of two times, and one is negative"
        return ""

    def _backends(self, m: Measurement) -> dict[str, str]:
        """Return the backends of a combination, as :attr:`combos` has them for its problem."""
        where = f"{m.subject}, {m.shape} {m.dtype}"
        if is_long(m.length, False):
            where += f" from {LONG_SEQUENCE} tokens on"
        return self.combos.get(where) or self.combos.get(m.subject, {})

    def to_json(self) -> str:
        """Return the text of the result file, with one entry of a list per line.

        Short lines keep the file small and its diffs readable.
        """
        fields = []
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, list):
                rows = ",\n  ".join(json.dumps(entry, allow_nan=False) for entry in value)
                fields.append(f'"{name}": [\n  {rows}\n ]')
            else:
                fields.append(f'"{name}": {json.dumps(value, allow_nan=False)}')
        return "{\n " + ",\n ".join(fields) + "\n}\n"


def _ratios(m: Measurement) -> dict[str, float]:
    """Return the time of each part over the time of the whole call, by the same clock."""
    parts = m.timed_parts
    if m.performance is None or not parts:
        return {}
    uncaptured = any(
        p.not_captured or p.method == "within events" for p in (m.performance, *parts.values())
    )
    whole_ms = m.performance.eager_ms if uncaptured else m.performance.median_ms
    return {
        name: (p.eager_ms if uncaptured else p.median_ms) / whole_ms for name, p in parts.items()
    }


def read_result(path: Path) -> Result:
    """Read a result file.

    Raises:
        InvalidInput: The file cannot be read, is not JSON, or is not a result of this schema; the
            message names the field.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InvalidInput(f"{path} is not a result of nsa bench; give a file that --json wrote")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise InvalidInput(
            f"{path} has schema_version {document.get('schema_version')!r}; this version of"
            f" nsa-bench reads {SCHEMA_VERSION}"
        )
    try:
        result: Result = _record(Result, document, "")
    except _WrongError as error:
        raise InvalidInput(f"{path}: {error}") from error
    unknown = {m.dtype for m in result.measurements} - result.peaks.keys()
    if unknown:
        raise InvalidInput(f"{path}: peaks has no rates of {', '.join(sorted(unknown))}")
    return result


class _WrongError(Exception):
    """A field has the wrong type or is missing."""


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(kind: Any, value: Any, path: str) -> Any:
    """Convert JSON to ``kind``: a dataclass, dict, list, union with None, or a plain type."""
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _value(arguments[0], value, path)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)  # a class, not an instance
        return _record(kind, value, path)
    if origin is dict and isinstance(value, dict):
        return {key: _value(arguments[1], item, f"{path}.{key}") for key, item in value.items()}
    if origin is list and isinstance(value, list):
        return [_value(arguments[0], item, f"{path}[{index}]") for index, item in enumerate(value)]
    if type(value) is int and (kind is float or kind is int):
        limit = COUNT if path.rpartition(".")[2] in _COUNTS else LARGEST
        lowest = 0 if kind is int else -LARGEST
        if not lowest <= value <= limit:
            text = f"{path.lstrip('.')} must be from {lowest} to {limit}, got {shown(value)}"
            raise _WrongError(text)
        return kind(value)
    if origin is None and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise _WrongError(
        f"{path.lstrip('.')} must be {getattr(kind, '__name__', kind)}, got {str(value)[:60]!r}"
    )


def _record(kind: type, value: Any, path: str) -> Any:
    if not isinstance(value, dict):
        raise _WrongError(
            f"{path.lstrip('.') or 'the file'} must be an object, got {str(value)[:60]!r}"
        )
    fields, hints = dataclasses.fields(kind), _hints(kind)
    missing = [f.name for f in fields if f.name not in value and f.default is dataclasses.MISSING]
    if missing:
        raise _WrongError(f"{path.lstrip('.') or 'the file'} lacks {', '.join(missing)}")
    present = [f.name for f in fields if f.name in value]  # older files lack newer fields
    return kind(**{name: _value(hints[name], value[name], f"{path}.{name}") for name in present})
