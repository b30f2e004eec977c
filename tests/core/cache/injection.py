"""Errors injected into operations on a cache, and operations to inject them into."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from caches import layer_of, poisoned_cache, tokens
from nsa_core import NSACache, NSAttention
from nsa_core.cache import step

ROOM, BATCH, ROLLBACK, MAX_STEP = 90, 3, 5, 4
ERRORS = (RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt)
Cache = NSACache
Operation = Callable[[NSAttention, Cache, dict[str, Any]], torch.Tensor | None]


class RaiseAt(TorchDispatchMode):
    """Raise an error instead of running operator number ``number``, and the ``more`` after it."""

    def __init__(self, number: int | None, error: type[BaseException], more: int = 0) -> None:
        super().__init__()
        self.numbers = range(0) if number is None else range(number, number + more + 1)
        self.error, self.count = error, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        if self.count - 1 in self.numbers:
            raise self.error(f"injected at {function}")
        return function(*args, **(kwargs or {}))


class RaiseAtOpcode:
    """Raise KeyboardInterrupt before opcode number ``number`` of the layer's and cache's code.

    Python itself checks for signals at few opcodes. Before others, among them those that call
    ``__exit__`` of a ``with torch.no_grad():``, the interrupt would leave gradients switched off.
    """

    def __init__(self, number: int | None) -> None:
        self.number, self.count = number, 0

    def __enter__(self) -> RaiseAtOpcode:
        self._former, self._gradients = sys.gettrace(), torch.is_grad_enabled()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._former)
        torch.set_grad_enabled(self._gradients)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if "/nsa_core/cache/" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.count += 1
            if self.count - 1 == self.number:
                raise KeyboardInterrupt
        return self._trace


class Scenario(NamedTuple):
    """An operation on a cache with a history.

    Attributes:
        history: lengths of the sequences before the operation.
        operation: the operation; it returns the output of a step.
        before: changes the cache after ``history``; keeps objects such as snapshots in a dict.
        rows: value of MAX_CHUNK_ROWS.
        compress: the kind of phi.
    """

    history: tuple[int, int, int]
    operation: Operation
    before: Operation = lambda attn, cache, objects: None
    rows: int = step.MAX_CHUNK_ROWS
    device_counts: bool = False


def append(rows: int, new: list[int] | None = None, seed: int = 3) -> Operation:
    """A step of ``rows`` rows."""

    def operation(attn: NSAttention, cache: Cache, objects: dict[str, Any]) -> torch.Tensor:
        return attn(tokens(attn, BATCH, rows, seed=seed), cache=cache, new=new)

    return operation


def in_turn(*operations: Operation) -> Operation:
    """Several operations, of which the last one's output counts."""

    def operation(attn: NSAttention, cache: Cache, objects: dict[str, Any]) -> torch.Tensor | None:
        return [run(attn, cache, objects) for run in operations][-1]

    return operation


def take_snapshot(attn: NSAttention, cache: Cache, objects: dict[str, Any]) -> None:
    objects["snapshot"] = cache.snapshot(0)


def reorder(*order: int) -> Operation:
    return lambda attn, cache, objects: cache.reorder(order)


def crop(*lengths: int) -> Operation:
    return lambda attn, cache, objects: cache.crop(lengths)


def load(attn: NSAttention, cache: Cache, objects: dict[str, Any]) -> None:
    cache.load(objects["snapshot"], 1)


def reserve_workspace(attn: NSAttention, cache: Cache, objects: dict[str, Any]) -> None:
    cache.reserve_workspace(3)


SCENARIOS = {
    "prefill": Scenario((0, 0, 0), append(33)),
    "ragged prefill beside a sequence": Scenario((9, 0, 0), append(30, [0, 30, 12])),
    "prefill after a crop to zero": Scenario((4, 4, 4), append(9), crop(0, 0, 0)),
    "one token": Scenario((60, 44, 2), append(1)),
    "one token that completes a block": Scenario((59, 43, 7), append(1)),
    "several tokens": Scenario((61, 44, 2), append(4)),
    "ragged tokens": Scenario((61, 46, 0), append(4, [4, 0, 2])),
    "tokens counted on the device": Scenario((61, 46, 0), append(4), device_counts=True),
    "chunk": Scenario((40, 17, 1), append(25)),
    "ragged chunk": Scenario((40, 17, 1), append(25, [0, 25, 7])),
    "cut into chunks": Scenario((40, 17, 1), append(13), rows=6),
    "cut into short steps": Scenario((40, 17, 1), append(9), rows=1),
    "one token after a crop": Scenario((61, 44, 9), append(1), crop(57, 44, 4)),
    "several tokens after a crop": Scenario((61, 44, 9), append(4), crop(57, 44, 4)),
    "one token on shared pages": Scenario((61, 44, 9), append(1), reorder(0, 0, 1)),
    "several tokens beside a snapshot": Scenario((47, 44, 9), append(4), take_snapshot),
    "crop": Scenario((61, 44, 9), crop(57, 44, 4)),
    "reset": Scenario((61, 44, 9), lambda attn, cache, objects: cache.reset([0, 2])),
    "reorder": Scenario((61, 44, 9), reorder(2, 0, 2)),
    "reorder of some": Scenario((61, 44, 9), reorder(0, 0, 2)),
    "snapshot": Scenario((61, 44, 9), take_snapshot),
    "load": Scenario((61, 44, 9), load, in_turn(take_snapshot, append(4, [1, 4, 2]))),
    "load on nothing": Scenario((61, 0, 9), load, take_snapshot),
    "reserve": Scenario((30, 44, 9), lambda attn, cache, objects: cache.reserve(80)),
    "reserve_workspace": Scenario((30, 44, 9), reserve_workspace),
}


class Run:
    """A cache with the history of a scenario, and the operation to run on it."""

    def __init__(
        self, attn: NSAttention, scenario: Scenario, page_size: int | None, **sizes: int
    ) -> None:
        self.attn, self.scenario, self.objects = attn, scenario, dict[str, Any]()
        sizes = {"max_rollback": ROLLBACK, "max_step": MAX_STEP, **sizes}
        self.cache = poisoned_cache(attn, BATCH, ROOM, page_size=page_size, **sizes)
        if any(scenario.history):
            append(max(scenario.history), list(scenario.history), seed=1)(attn, self.cache, {})
        scenario.before(attn, self.cache, self.objects)

    def operate(self) -> torch.Tensor | None:
        return self.scenario.operation(self.attn, self.cache, self.objects)

    def state(self) -> tuple[Any, ...]:
        """Return the cache's public state: lengths, pages and capacity."""
        cache, table = self.cache, self.cache.table
        pages = None if cache.pages is None else (cache.pages.free, cache.pages.rows)
        entries = []
        for b, row in enumerate([[b] for b in range(BATCH)] if pages is None else pages[1]):
            entries.append(table.entries[b, : len(row)].tolist() == row)
        lengths, room = cache.lengths.tolist(), table.device_room.tolist()
        return lengths, cache.host_lengths(), cache.peaks, pages, entries, table.room, room

    def retry(self) -> list[torch.Tensor]:
        """Outputs of the operation and of what follows."""
        y = self.operate()
        return [*([] if y is None else [y]), *self.go_on()]

    def retry_briefly(self) -> list[torch.Tensor]:
        y = self.operate()
        return [*([] if y is None else [y]), append(2, seed=5)(self.attn, self.cache, {})]

    def go_on(self) -> list[torch.Tensor]:
        """Outputs of three steps, a crop and a step."""
        run = [append(1, seed=5), append(4, [3, 0, 4], seed=6), append(1, seed=7)]
        outputs = [step(self.attn, self.cache, {}) for step in run]
        self.crop()
        return [*outputs, append(2, seed=8)(self.attn, self.cache, {})]

    def crop_and_go_on(self) -> list[torch.Tensor]:
        self.crop()
        return self.go_on()

    def crop(self) -> None:
        """Crop as far as the cache allows."""
        lengths = self.cache.host_lengths()
        least = [peak - ROLLBACK for peak in self.cache.peaks]
        self.cache.crop([max(0, min(n, low)) for n, low in zip(lengths, least)])

    def free_all(self) -> int | None:
        """Number of free pages after all sequences and snapshots are gone."""
        self.objects.clear()
        self.cache.reset()
        return None if self.cache.pages is None else self.cache.pages.free - self.cache.pages.total


def layer() -> NSAttention:
    return layer_of(compress="linear")
