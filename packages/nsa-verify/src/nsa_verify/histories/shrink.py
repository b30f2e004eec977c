"""Shrink a failing history: fewer operations, sequences and tokens, and simpler sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from nsa_core.errors import InvalidInput
from nsa_verify.histories.history import BASE, KINDS, History, Operation, Sizes

_FIELDS = ("shared_kv", "qk_norm", "gate", "scale", "rope_before_compress", "rope", "compress")


def shrink(
    history: History, fails: Callable[[History], int | None], attempts: int = 120
) -> History:
    """Return a small history that fails, too.

    Args:
        history: A history that fails.
        fails: Returns the number of the operation at which a history fails; None if it passes.
        attempts: Number of histories to try.
    """
    last = fails(history)
    if last is None:
        return history
    history = _first_operations(history, last + 1)
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(history):
            if attempts <= 0:
                return history
            attempts -= 1
            last = fails(smaller)
            if last is not None:
                history, progress = _first_operations(smaller, last + 1), True
                break
    return history


def _first_operations(history: History, count: int) -> History:
    return dataclasses.replace(history, operations=history.operations[:count])


def _smaller(history: History) -> Iterator[History]:
    """List smaller histories, the smallest first."""
    operations = history.operations
    for b in range(history.sizes.batch):
        if history.sizes.batch > 1:
            yield _without_sequence(history, b)
    for i in range(len(operations)):
        if not _renumbers(operations, i):
            rest = operations[:i] + operations[i + 1 :]
            yield dataclasses.replace(history, operations=rest)
    base = Sizes(max_len=history.sizes.max_len, batch=history.sizes.batch)
    for name in ("num_pages", "page_size", "max_step", "chunk_rows", "max_rollback", "seed"):
        if getattr(history.sizes, name) != getattr(base, name):
            changes = {name: getattr(base, name)} | (
                {"num_pages": 0} if name == "page_size" else {}
            )
            yield dataclasses.replace(history, sizes=dataclasses.replace(history.sizes, **changes))
    for name in _FIELDS:
        if getattr(history.config, name) != getattr(BASE, name):
            yield _with_config(history, **{name: getattr(BASE, name)})
    if (history.config.n_heads, history.config.n_kv_heads) != (1, 1):
        yield _with_config(history, n_heads=1, n_kv_heads=1)
    for i, operation in enumerate(operations):
        for simpler in _simpler(operation):
            changed = (*operations[:i], simpler, *operations[i + 1 :])
            yield dataclasses.replace(history, operations=changed)


def _renumbers(operations: tuple[Operation, ...], i: int) -> bool:
    """Return whether later operations name snapshots by numbers that a removal would change."""
    later = operations[i + 1 :]
    return operations[i].kind == "save" and any(o.kind in ("load", "release") for o in later)


def _with_config(history: History, **changes: Any) -> History:
    try:
        config = dataclasses.replace(history.config, **changes)
    except InvalidInput:
        return history
    return dataclasses.replace(history, config=config)


def _without_sequence(history: History, b: int) -> History:
    """Remove sequence ``b`` and the operations on it alone."""
    operations = []
    for operation in history.operations:
        values, kind = operation.values, operation.kind
        if kind == "reorder":
            values = tuple(max(i - (i >= b), 0) for i in _without(values, b))
        elif not KINDS[kind]:
            values = _without(values, b)
        elif kind in ("reset", "save", "load"):
            values = (*values[:-1], max(values[-1] - (values[-1] >= b), 0))
        operations.append(dataclasses.replace(operation, values=values))
    sizes = dataclasses.replace(history.sizes, batch=history.sizes.batch - 1)
    return History(history.config, sizes, tuple(operations))


def _without(values: tuple[int, ...], b: int) -> tuple[int, ...]:
    return values[:b] + values[b + 1 :]


def _simpler(operation: Operation) -> Iterator[Operation]:
    """List simpler forms of an operation: less padding, smaller numbers."""
    if operation.padding and max(operation.values):
        yield dataclasses.replace(operation, padding=0)
    if operation.kind in ("step", "crop", "reserve"):
        for i, value in enumerate(operation.values):
            for less in dict.fromkeys((0, value // 2, value - 1)):
                if 0 <= less < value:
                    values = (*operation.values[:i], less, *operation.values[i + 1 :])
                    yield dataclasses.replace(operation, values=values)
