"""What `nsa tune` measured here: the order in which `auto` tries backends that would all run a
request.

A record holds for one device, torch version, shape class and slot, and only while the backends that
take the request are those that were measured, in the same versions. Anything else, a corrupt file
included, is ignored: `auto` then follows the priorities that the backends state. A record never
admits a backend that its probe refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nsa_core.contract import Request
from nsa_core.util.atomic_files import user_cache, write_atomic
from nsa_core.util.text import one_line

SCHEMA_VERSION = 1
_log = logging.getLogger("nsa")


@dataclasses.dataclass(frozen=True)
class Record:
    """Times of one slot's backends: ms per call, forward, or forward and backward for requests with
    gradients.
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
        """ "1.2 ms against sdpa 4.5 ms at 8192 tokens, 2026-01-31", the first being the chosen
        backend's.
        """
        (_, best), *rest = sorted(self.times_ms.items(), key=lambda item: (item[1], item[0]))
        others = ", ".join(f"{one_line(name)} {time:.3g} ms" for name, time in rest)
        return (
            f"{best:.3g} ms{' against ' + others if others else ''} at {self.tokens} tokens,"
            f" {one_line(self.date)}"
        )


def path() -> Path:
    """Where the records are kept."""
    return user_cache() / "tuned.json"


def shape_class(request: Request) -> str:
    """What a record holds for: heads, widths, blocks, dtype, and whether gradients are wanted."""
    heads = f"{request.n_heads}/{request.n_kv_heads}/{request.head_dim}/{request.v_head_dim}"
    blocks = ",".join(map(str, request.geometry.as_ints()))
    return f"{heads} {blocks} {request.dtype} {'training' if request.needs_grad else 'inference'}"


def torch_version() -> str:
    """The installed torch, without importing it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


@functools.cache
def processor_name() -> str:
    """The processor's model as the system tells it."""
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def choose(request: Request, device: str, accepted: Mapping[str, str]) -> tuple[str, str] | None:
    """(backend, sentence) of the fastest among ``accepted`` (name -> version), or None where
    nothing valid is known.
    """
    if len(accepted) < 2 or request.varlen or request.deterministic or request.phase != "prefill":
        return None  # nothing to choose, or not what was measured
    key = (device, torch_version(), shape_class(request), request.slot)
    for record in reversed(load()):
        if (record.device, record.torch, record.shape_class, record.slot) != key:
            continue
        if any(record.versions.get(name) != its for name, its in accepted.items()):
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
    """The records; none where the file is missing, unreadable or malformed."""
    try:
        document = json.loads(path().read_text(encoding="utf-8"))
        if document["schema_version"] != SCHEMA_VERSION:
            return []
        return [_record(entry) for entry in document["records"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _log.info("ignored %s: %s", path(), one_line(error))
        return []


def _record(entry: Any) -> Record:
    record = Record(**entry)
    words = (
        record.device,
        record.torch,
        record.shape_class,
        record.slot,
        record.date,
        *record.versions.values(),
    )
    numbers = [record.tokens, *record.times_ms.values()]
    if not all(isinstance(word, str) for word in words):
        raise ValueError("a text field is no text")
    if not all(isinstance(n, (int, float)) and 0 < n < float("inf") for n in numbers):
        raise ValueError("a time is no positive number")
    if not record.times_ms.keys() <= record.versions.keys():
        raise ValueError("a backend without a version")
    return record


def save(records: Iterable[Record]) -> Path:
    """Add ``records`` to the file, in place of older ones for the same device, torch, shape class
    and slot.

    Raises:
        OSError: the cache directory cannot be written to.
    """
    kept = {(r.device, r.torch, r.shape_class, r.slot): r for r in [*load(), *records]}
    document = {
        "schema_version": SCHEMA_VERSION,
        "records": [dataclasses.asdict(r) for r in kept.values()],
    }
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, json.dumps(document, indent=1) + "\n", force=True)
    return file
