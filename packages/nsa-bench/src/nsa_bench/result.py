"""The result file: dataclasses, written as JSON and read back with every field checked."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from nsa_bench.roofline import PARTS, Peaks
from nsa_bench.timing import FAILED, Performance
from nsa_core.errors import InvalidInput
from nsa_core.limits import COUNT, read_at_most, shown
from nsa_core.util.text import escape_control, one_line

SCHEMA_VERSION = 1
KIND = "nsa-bench"
# Suffixes of subjects in a decode result.
UNFUSED, EAGER, LAYER = DECODE_SUFFIXES = (", slots one by one", ", eager", ", layer step")

# Parts that add up to more of the whole call were not timed alike: side effects of caches, and
# kernels that run side by side in the whole call, account for less.
_LARGEST_SUM = 1.25

LARGEST = 10**30  # of numbers such as flops: above any count of a legal shape
_LEAST = 1e-12  # of numbers that divide others
_COUNTS = ("batch", "length", "eager_length")
_TIMES = ("median_ms", "q1_ms", "q3_ms", "samples_ms")  # of parts, also differences of two times
_DIVISORS = (*_TIMES, "flops_per_s", "bytes_per_s", "floor_ms", "ratio_to_dense")
_NAMES = ("kind", "subject", "shape", "dtype", "inputs", "phase", "backend", "combo", "device")
_LARGEST_FILE = 1 << 26  # bytes; the results of a long run have a few hundred thousand
_NAME_LENGTH, _TEXT_LENGTH, _DEPTH = 200, 10_000, 20
_KINDS = ("combo", "dense", "layer", "rival")
Place = tuple[str | int, ...]  # of a value in a result file: ("measurements", 0, "length")
# The fields that are read of the two tables which hold anything else too.
_KNOWN: dict[Place, dict[str, Any]] = {
    ("settings",): {"threads": int, "methods": dict[str, str], "inputs": list[str]},
    ("environment",): {"device": str, "versions": dict[str, str], "git_commit": str | None},
}
Series = tuple[str, str, str, str, int]  # shape, dtype, inputs, phase, batch


@dataclasses.dataclass(frozen=True)
class Gate:
    """The verdict that decides whether a combination may be timed.

    ``failures`` holds one line per tensor whose error exceeds its limit.
    """

    combo: str
    shape: str
    dtype: str
    ok: bool
    case: str
    seconds: float
    failures: list[str]


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
    def median_ms(self) -> float:
        """Return the median of a timed measurement."""
        assert self.performance is not None  # callers pass timed measurements only
        return self.performance.median_ms

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


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything that one run of the benchmark measured.

    All texts are on one line and free of control characters, because plugins and files of strangers
    bring them. Only those of ``environment`` may have several lines.
    """

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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            clean = escape_control if field.name == "environment" else one_line
            object.__setattr__(self, field.name, _map_texts(clean, getattr(self, field.name)))

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
        key = f"{m.subject}, {m.shape} {m.dtype}"
        return backends_at(self.combos, key, m.length) or self.combos.get(m.subject, {})

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


def backends_at(combos: Mapping[str, dict[str, str]], key: str, length: int) -> dict[str, str]:
    """Return the backends under ``key``, or under the last "key from N tokens on" up to a length.

    Empty if there is neither.
    """
    longer = re.compile(re.escape(key) + r" from (\d+) tokens on")
    keys = {int(found[1]): name for name in combos if (found := longer.fullmatch(name))}
    reached = max((first for first in keys if first <= length), default=0)
    return combos.get(keys.get(reached, key), {})


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


def _map_texts(change: Callable[[str], str], value: Any) -> Any:
    """Return ``value`` with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(change, item) for item in value]
    if isinstance(value, dict):
        return {change(name): _map_texts(change, item) for name, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **_map_texts(change, fields))
    return value


def read_result(path: Path) -> Result:
    """Read a result file.

    Raises:
        InvalidInput: The file cannot be read, is too long, is not JSON, or is not a result of this
            schema; the message names the field.
    """
    try:
        content = read_at_most(path, _LARGEST_FILE)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}; give a file") from error
    try:
        document = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{path} is not JSON ({error}); give a file that --json wrote"
        ) from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InvalidInput(f"{path} is not a result of nsa bench; give a file that --json wrote")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise InvalidInput(
            f"{path} has schema_version {shown(document.get('schema_version'))}; this version of"
            f" nsa-bench reads {SCHEMA_VERSION}"
        )
    try:
        result: Result = _record(Result, document, ())
        _check_names(result)
    except _WrongError as error:
        raise InvalidInput(f"{path}: {error}") from error
    return result


class _WrongError(Exception):
    """A field is missing, or its value is not of its type or out of its range."""


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


def _check_names(result: Result) -> None:
    """Check the names by which tables and plots look something up."""
    if "threads" not in result.settings:
        raise _WrongError("settings lacks threads")
    for index, m in enumerate(result.measurements):
        place = f"measurements[{index}]"
        if m.kind not in _KINDS:
            raise _WrongError(f"{place}.kind must be one of {', '.join(_KINDS)}, got {m.kind!r}")
        if unknown := m.parts.keys() - set(PARTS):
            names = ", ".join(sorted(unknown))
            raise _WrongError(f"{place}.parts may have {', '.join(PARTS)}, got {names}")
        if m.dtype not in result.peaks:
            raise _WrongError(f"peaks has no rates of {m.dtype}")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _value(kind: Any, value: Any, place: Place) -> Any:
    """Convert JSON to ``kind``: a dataclass, dict, list, union with None, or a plain type."""
    if len(place) > _DEPTH:
        raise _WrongError(f"{_words(place[:3])} is nested more than {_DEPTH} levels deep")
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _value(arguments[0], value, place)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)  # a class, not an instance
        return _record(kind, value, place)
    if isinstance(value, dict) and (origin is dict or kind is Any):
        known, other = _KNOWN.get(place, {}), arguments[1] if arguments else Any
        return {
            _text(name, place): _value(known.get(name, other), item, (*place, name))
            for name, item in value.items()
        }
    if isinstance(value, list) and (origin is list or kind is Any):
        other = arguments[0] if arguments else Any
        return [_value(other, item, (*place, index)) for index, item in enumerate(value)]
    if isinstance(value, str) and kind in (str, Any):
        return _text(value, place)
    if (kind is float and type(value) in (int, float)) or (kind is int and type(value) is int):
        return _number(kind, value, place)
    if kind is Any or (kind is bool and isinstance(value, bool)):
        return value
    name = getattr(kind, "__name__", kind)
    raise _WrongError(f"{_words(place)} must be {name}, got {shown(value)}")


def _text(value: str, place: Place) -> str:
    """Check a text: a name that is too long makes a table or a plot beyond any screen."""
    is_name = _name(place) in _NAMES
    limit = _NAME_LENGTH if is_name else _TEXT_LENGTH
    if len(value) > limit or (is_name and len(value.splitlines()) > 1):
        lines = " on one line" * is_name
        raise _WrongError(
            f"{_words(place)} must have at most {limit} characters{lines}, got {len(value)}"
        )
    return value


def _number(kind: type, value: float, place: Place) -> float:
    """Check the range of a number; the float may be infinite, as 1e999 in a file is."""
    name = _name(place)
    lowest: float = 1 if name in _COUNTS else _LEAST if name in _DIVISORS else 0
    if name in _TIMES and "parts" in place:
        lowest = -LARGEST
    limit = COUNT if name in _COUNTS else LARGEST
    if not lowest <= value <= limit:
        raise _WrongError(f"{_words(place)} must be from {lowest} to {limit}, got {shown(value)}")
    number: float = kind(value)
    return number


def _record(kind: type, value: Any, place: Place) -> Any:
    if not isinstance(value, dict):
        raise _WrongError(f"{_words(place)} must be an object, got {shown(value)}")
    fields, hints = dataclasses.fields(kind), _hints(kind)
    missing = [f.name for f in fields if f.name not in value and f.default is dataclasses.MISSING]
    if missing:
        raise _WrongError(f"{_words(place)} lacks {', '.join(missing)}")
    present = [f.name for f in fields if f.name in value]  # older files lack newer fields
    return kind(**{name: _value(hints[name], value[name], (*place, name)) for name in present})


def _name(place: Place) -> str:
    """Return the name of the field that a value belongs to, if need be as an item of its list."""
    return next((part for part in reversed(place) if isinstance(part, str)), "")


def _words(place: Place) -> str:
    """Write a place as "measurements[0].length"."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part:.80}" for part in place)
    return "".join(parts).lstrip(".") or "the file"
