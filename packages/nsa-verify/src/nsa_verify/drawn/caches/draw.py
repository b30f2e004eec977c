"""Draw histories: layers and caches from a covering design, operations at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsa_verify.drawn.caches.history import (
    KV,
    LAYOUTS,
    NEWEST,
    AnyHistory,
    History,
    LayerHistory,
    Operation,
    PoolHistory,
)
from nsa_verify.drawn.caches.model import Model
from nsa_verify.drawn.design import Design, Row

# Histories in float64, and in each other dtype.
_COUNTS = {"quick": (8, 3), "full": (72, 24), "interpreter": (0, 0)}
_OPERATIONS = 14  # of a history
# For any two parameters and any value of each, at least one history has both values.
_LEVELS: Mapping[str, tuple[Any, ...]] = {
    "heads": ((1, 1), (2, 1), (2, 2), (6, 2), (9, 9)),  # query heads, kv heads
    "widths": ((8, 8), (16, 16), (6, 9)),  # Dk, Dv
    "stride": (2, 4),  # d
    "compress": (1, 2, 3),  # l / d
    "select": (16, 8, 24),  # l', at least l; some kernels take no block below 16
    "blocks": ((3, 1, 2), (1, 0, 0), (4, 0, 1), (17, 2, 1)),  # n, init, local
    "window": (1, 5, 12, 80),
    "phi": ("mean", "mlp", "linear", "conv", "attn_pool"),
    "rope": ("after", "before", "none"),
    "options": ({}, {"shared_kv": True}, {"qk_norm": True, "gate": "mlp"}, {"scale": -0.7}),
    "batch": (1, 2, 4),
    "pages": (0, 1, 3),  # blocks per page; 0: no pages
    "scarce": (False, True),
    "max_rollback": (0, 1, 9),
    "max_step": (1, 5, 64),
    "chunk_rows": (3, 11, 8192),
}


# Fewer parameters of a layer: what depends on pages is drawn in full.
_POOL_COUNTS = {"quick": (6, 2), "full": (48, 16), "interpreter": (0, 0)}
_POOL_LEVELS: Mapping[str, tuple[Any, ...]] = {
    **{
        name: _LEVELS[name]
        for name in ("heads", "stride", "compress", "select", "blocks", "window", "phi", "rope")
    },
    "widths": ((8, 8), (16, 16)),
    "options": _LEVELS["options"][:3],
    "batch": (1, 2, 4),
    "pages": (1, 3),  # blocks per page of sel
    "max_rollback": (0, 1, 9),
    "cmp_page": (1, 3, 8),
    "newest": NEWEST,
    "newest_page": (1, 5, 64),
    "layout": LAYOUTS,
    "kv": KV,
}


def history_design(preset: str, dtypes: Sequence[str]) -> Design:
    """Return the design of the histories of a preset, first those in float64.

    The first histories of a longer design are those of a shorter one. Histories beyond the preset
    are in float64 too.
    """
    return _design(_COUNTS[preset], dtypes, _LEVELS, _history)


def pool_design(preset: str, dtypes: Sequence[str]) -> Design:
    """Return the design of the histories of nsa_decode; as :func:`history_design`."""
    return _design(_POOL_COUNTS[preset], dtypes, _POOL_LEVELS, _pool_history)


def _design(
    counts: tuple[int, int],
    dtypes: Sequence[str],
    levels: Mapping[str, tuple[Any, ...]],
    history: Callable[[Row, int, int, str], LayerHistory],
) -> Design:
    exact, others = counts
    rest = [dtype for dtype in dtypes if dtype != "float64"]
    wanted = ["float64"] * exact + [dtype for dtype in rest for _ in range(others)]

    def build(row: Row, number: int, seed: int) -> LayerHistory:
        dtype = wanted[number] if number < len(wanted) else "float64"
        return history(row, number, seed, dtype)

    return Design(levels, build, count=len(wanted))


def _history(row: Row, number: int, seed: int, dtype: str) -> History:
    rng = random.Random(f"{seed} {number}")
    fields = _fields(row, number, dtype, rng)
    max_len, page = fields["max_len"], fields["page_size"]
    needed = row["batch"] * -(-max_len // page) if page else 0
    history = History(
        **fields,
        num_pages=max(-(-max_len // page), needed * 2 // 3) if page and row["scarce"] else 0,
        **{name: row[name] for name in ("max_step", "chunk_rows")},
    )
    return _with_operations(history, rng, ACTIONS)


def _pool_history(row: Row, number: int, seed: int, dtype: str) -> PoolHistory:
    rng = random.Random(f"{seed} {number}")
    fields = _fields(row, number, dtype, rng)
    fields |= {name: row[name] for name in ("cmp_page", "newest", "newest_page", "layout", "kv")}
    history = PoolHistory(**fields, chunks=number % 2 == 1)
    return _with_operations(history, rng, POOL_ACTIONS)


def _fields(row: Row, number: int, dtype: str, rng: random.Random) -> dict[str, Any]:
    """Return the fields of a LayerHistory."""
    heads, groups = row["heads"]
    size = row["compress"] * row["stride"]
    select = max(row["select"], size)
    return {
        "dtype": dtype,
        "l": size,
        "d": row["stride"],
        "block": select,
        "n": row["blocks"][0],
        "init": row["blocks"][1],
        "local": row["blocks"][2],
        "w": row["window"],
        "h": heads // groups,
        "groups": groups,
        "dk": row["widths"][0],
        "dv": row["widths"][1],
        "compress": row["phi"],
        "max_len": rng.randint(3 * select, 5 * select + 12),
        "page_size": row["pages"] * select,
        "seed": number,
        **{name: row[name] for name in ("rope", "batch", "max_rollback")},
        **row["options"],
    }


def _with_operations(history: AnyHistory, rng: random.Random, actions: Sequence[str]) -> AnyHistory:
    drawn: list[Operation] = []
    model = Model(history)
    while len(drawn) < _OPERATIONS:
        chosen = actions if drawn else ("step",)
        operation = draw_operation(rng, history, model, chosen)
        if not model.exists(operation):
            continue
        drawn.append(operation)
        if not model.refused(operation) and not model.may_lack_pages(operation):
            model.apply(operation)
    return history.replace(operations=tuple(drawn))


POOL_ACTIONS = ("step",) * 7 + ("crop", "fork", "fork", "move", "move", "reset")
ACTIONS = ("step",) * 6 + ("crop", "crop", "reorder", "reset", "save", "load", "load", "reserve")


def draw_operation(
    rng: random.Random, history: LayerHistory, model: Model, actions: Sequence[str] = ACTIONS
) -> Operation:
    """Draw an operation, one of ``actions``; a few are refused by the cache."""
    action = rng.choice(actions)
    sequence = rng.randrange(history.batch)
    if action == "step":
        return _step(rng, history, model)
    if action == "crop":
        furthest = history.max_rollback + rng.choice((0, 0, 0, 0, 1))
        floors = [max(0, min(len(s.tokens), s.peak - furthest)) for s in model.sequences]
        lengths = [rng.randint(floor, n) for floor, n in zip(floors, model.lengths)]
        return Operation("crop", tuple(lengths))
    if action == "reorder":
        order = [rng.randrange(history.batch) for _ in range(history.batch)]
        return Operation("reorder", tuple(order))
    if action == "reserve":
        grown = [min(n + rng.randint(0, 9), history.max_len) for n in model.lengths]
        return Operation("reserve", tuple(grown))
    if action == "fork":
        return Operation("fork", (rng.randrange(history.batch), sequence))
    if action == "move":
        return Operation("move", (sequence,))
    if action == "load" and model.snapshots:
        number = rng.randrange(len(model.snapshots))
        if rng.random() < 0.25:
            return Operation("release", (number,))
        return Operation("load", (number, sequence))
    return Operation("reset" if action == "reset" else "save", (sequence,))


def _step(rng: random.Random, history: LayerHistory, model: Model) -> Operation:
    """Draw a step of one token, of several, up to an edge of a block, or to the end of the cache.

    One in twenty is longer than the cache, which refuses it.
    """
    room = [history.max_len - n for n in model.lengths]
    longest = rng.choice((1, 1, 1, getattr(history, "max_step", 2), 5, 12, 30))
    edges = [history.l, history.block, history.w]
    edges += [history.page_size or history.block, history.max_len]
    new = []
    for length, left in zip(model.lengths, room):
        count = rng.choice((0, longest, longest, rng.randint(0, longest)))
        if rng.random() < 0.3:
            edge = rng.choice(edges)
            count = edge - length % edge + rng.choice((-1, 0, 0, 1))
        new.append(max(0, min(count, left)))
    if rng.random() < 0.05:
        new[rng.randrange(len(new))] = max(room) + 1
    padding = rng.choice((0, 0, 0, 2)) if max(new) else 1
    return Operation("step", tuple(new), padding)
