"""Records of `nsa tune`: `auto` prefers the backend that was measured as the fastest.

A record applies to one device, torch version, shape class and slot, and only while every backend
that accepts the request was measured in its present version. `auto` ignores all other records, and
follows the backends' priorities; it warns of a file that it cannot read. A record cannot select a
backend whose probe refuses the request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import platform
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nsa_core.contract import Request
from nsa_core.errors import InvalidInput
from nsa_core.util.atomic_files import check_folder_writable, user_cache, write_atomic, writing
from nsa_core.util.text import describe_error, one_line

SCHEMA_VERSION = 1
_LONGEST_MS = 1e12


@dataclasses.dataclass(frozen=True)
class Record:
    """Measured times of the backends of one slot.

    Attributes:
        device: Name of the GPU or of the processor.
        torch: Version of torch.
        shape_class: Result of :func:`shape_class`.
        slot: The slot.
        times_ms: backend -> milliseconds per call: forward, and for requests with gradients
            forward and backward together.
        versions: backend -> version of its distribution.
        tokens: Tokens of the timed sequence.
        date: Date of the measurement, such as "2026-01-31".
    """

    device: str
    torch: str
    shape_class: str
    slot: str
    times_ms: dict[str, float]
    versions: dict[str, str]
    tokens: int
    date: str

    def sentence(self) -> str:
        """Return the times as text, the fastest first and without its backend's name.

        Example: "1.2 ms against sdpa 4.5 ms at 8192 tokens, 2026-01-31".
        """
        ranking = sorted(self.times_ms.items(), key=lambda item: (item[1], item[0]))
        (_, fastest), *slower = ranking
        others = ", ".join(f"{one_line(name)} {_ms(time)}" for name, time in slower)
        return (
            f"{_ms(fastest)}{' against ' + others if others else ''} at {self.tokens} tokens,"
            f" {one_line(self.date)}"
        )


def _ms(time: float) -> str:
    """Return three significant digits and the unit, such as 2100 ms."""
    return f"{float(f'{time:.3g}'):g} ms"


def path() -> Path:
    """Return the path of the file that holds the records."""
    return user_cache() / "tuned.json"


def shape_class(request: Request) -> str:
    """Return the properties of ``request`` that a record must match.

    They are head counts, head widths, block geometry, dtype, and training or inference.
    """
    heads = f"{request.n_heads}/{request.n_kv_heads}/{request.head_dim}/{request.v_head_dim}"
    blocks = ",".join(map(str, request.geometry.as_ints()))
    return f"{heads} {blocks} {request.dtype} {'training' if request.needs_grad else 'inference'}"


def torch_version() -> str:
    """Return the version of the installed torch, without importing it, or "none"."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


@functools.cache
def processor_name() -> str:
    """Return the model name of the processor, as the operating system reports it."""
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def choose(
    records: Sequence[Record], request: Request, device: str, accepted: Mapping[str, str]
) -> tuple[str, str] | None:
    """Return the fastest backend among ``accepted`` and its measurement, or None.

    Args:
        records: The saved records, the newest last.
        request: The request of one slot.
        device: Name of the GPU or of the processor.
        accepted: Name of each backend that accepts the request -> version of its distribution.

    Returns:
        (backend, :meth:`Record.sentence`), or None if no valid record exists or there is nothing
        to choose from.
    """
    if len(accepted) < 2 or request.varlen or request.deterministic or request.phase != "prefill":
        return None  # a single candidate, or a kind of request that `nsa tune` does not measure
    key = (device, torch_version(), shape_class(request), request.slot)
    for record in reversed(records):
        if (record.device, record.torch, record.shape_class, record.slot) != key:
            continue
        if any(record.versions.get(name) != present for name, present in accepted.items()):
            return None
        times = {name: time for name, time in record.times_ms.items() if name in accepted}
        if not times:
            return None
        return (
            min(times, key=lambda name: (times[name], name)),
            dataclasses.replace(record, times_ms=times).sentence(),
        )
    return None


def load() -> list[Record]:
    """Return the records; [] if the file is missing, or, with a warning, if it is not readable."""
    try:
        return read()
    except InvalidInput as error:
        warnings.warn(one_line(error), stacklevel=2)
        return []


def read() -> list[Record]:
    """Return the records; [] if the file is missing.

    Raises:
        InvalidInput: The file is unreadable or malformed.
    """
    try:
        text = path().read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InvalidInput(
            f"{path()} cannot be read and is not used: {describe_error(error)}"
        ) from error
    try:
        document = json.loads(text)
        if document["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"its schema_version is not {SCHEMA_VERSION}")
        return [_record(entry) for entry in document["records"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"{path()} is not a file of nsa tune and is not used: {describe_error(error)};"
            " nsa tune --reset deletes it"
        ) from error


def _record(entry: Any) -> Record:
    """Return ``entry``, one element of the file's list, as a checked Record."""
    record = Record(**entry)
    texts = (
        record.device,
        record.torch,
        record.shape_class,
        record.slot,
        record.date,
        *record.versions.values(),
    )
    numbers = [record.tokens, *record.times_ms.values()]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("device, torch, shape_class, slot, date and versions must be strings")
    if not all(isinstance(n, (int, float)) and 0 < n < _LONGEST_MS for n in numbers):
        raise ValueError(f"tokens and times_ms must be positive and below {_LONGEST_MS:.0e}")
    if not record.times_ms or not record.times_ms.keys() <= record.versions.keys():
        raise ValueError("times_ms must have a backend, and every backend must be in versions")
    if " " not in record.shape_class:
        raise ValueError("shape_class must end with a use, such as inference")
    return record


def check_writable() -> None:
    """Check, before a long tuning, that the file can be written after it.

    Raises:
        InvalidInput: The cache directory is not writable.
        NotWritten: The disk is full or broken.
    """
    folder = path().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(
            f"{folder} cannot be created: {error.strerror}; set XDG_CACHE_HOME to a folder that"
            " can be written"
        ) from error
    check_folder_writable(folder)


def save(records: Iterable[Record]) -> Path:
    """Add ``records`` to the file, and return its path.

    A record replaces an older one of the same device, torch version, shape class and slot.

    Raises:
        NotWritten: The cache directory is not writable, or the disk is full.
    """
    old: list[Record] = []
    with contextlib.suppress(InvalidInput):  # a corrupt file is replaced
        old = read()
    newest = {(r.device, r.torch, r.shape_class, r.slot): r for r in [*old, *records]}
    document = {
        "schema_version": SCHEMA_VERSION,
        "records": [dataclasses.asdict(r) for r in newest.values()],
    }
    file = path()
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(document, indent=1) + "\n", force=True)
    return file
