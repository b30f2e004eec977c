"""Draw histories: configurations and sizes from a covering design, operations at random."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

from nsa_verify.generated.design import Row, longer_design
from nsa_verify.histories.history import BASE, History, Operation, Sizes
from nsa_verify.histories.model import Model

# For any two parameters and any value of each, at least one history has both values.
LEVELS: dict[str, tuple[Any, ...]] = {
    "heads": ((1, 1), (2, 1), (2, 2), (6, 2), (9, 9)),  # query heads, kv heads
    "widths": ((8, 8), (16, 16), (6, 9)),  # Dk, Dv
    "stride": (2, 4),  # d
    "compress": (1, 2, 3),  # l / d
    "select": (3, 4, 6),  # l' / d
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


@functools.lru_cache(maxsize=8)
def draw_histories(count: int, seed: int = 0, operations: int = 14) -> tuple[History, ...]:
    """Return ``count`` histories; they depend on ``seed`` alone.

    Args:
        count: Number of histories. The first ones of a longer list are those of a shorter one.
        seed: Seed of the design, of the operations and of the numbers.
        operations: Number of operations of each.
    """
    rows = longer_design(LEVELS, count, seed=seed)
    return tuple(_history(row, f"{seed} {i}", i, operations) for i, row in enumerate(rows))


def _history(row: Row, seed: str, number: int, operations: int) -> History:
    rng = random.Random(seed)
    heads, groups = row["heads"]
    qk_dim, v_dim = row["widths"]
    size = row["compress"] * row["stride"]
    select = max(row["select"], row["compress"]) * row["stride"]
    blocks, init, local = row["blocks"]
    config = dataclasses.replace(
        BASE,
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=qk_dim,
        v_head_dim=v_dim,
        compress_block_size=size,
        compress_stride=row["stride"],
        select_block_size=select,
        num_selected_blocks=blocks,
        init_blocks=init,
        local_blocks=local,
        window_size=row["window"],
        compress=row["phi"],
        rope=row["rope"] != "none",
        rope_before_compress=row["rope"] == "before",
        **row["options"],
    )
    max_len, page = rng.randint(4 * select, 6 * select + 20), row["pages"] * select
    needed = row["batch"] * -(-max_len // page) if page else 0
    sizes = Sizes(
        batch=row["batch"],
        max_len=max_len,
        page_size=page,
        num_pages=max(-(-max_len // page), needed * 2 // 3) if page and row["scarce"] else 0,
        max_rollback=row["max_rollback"],
        max_step=row["max_step"],
        chunk_rows=row["chunk_rows"],
        seed=number,
    )
    history = History(config, sizes, ())
    drawn: list[Operation] = []
    model = Model(history)
    while len(drawn) < operations:
        operation = _step(rng, history, model) if not drawn else _any(rng, history, model)
        if not model.exists(operation):
            continue
        drawn.append(operation)
        if not model.refused(operation) and not model.may_lack_pages(operation):
            model.apply(operation)
    return dataclasses.replace(history, operations=tuple(drawn))


_ACTIONS = ("step",) * 6 + ("crop", "crop", "reorder", "reset", "save", "load", "load", "reserve")


def _any(rng: random.Random, history: History, model: Model) -> Operation:
    """Draw an operation; a few are refused by the cache."""
    sizes, action = history.sizes, rng.choice(_ACTIONS)
    sequence = rng.randrange(sizes.batch)
    if action == "step":
        return _step(rng, history, model)
    if action == "crop":
        furthest = sizes.max_rollback + rng.choice((0, 0, 0, 0, 1))
        floors = [max(0, min(len(s.tokens), s.peak - furthest)) for s in model.sequences]
        lengths = [rng.randint(floor, n) for floor, n in zip(floors, model.lengths)]
        return Operation("crop", tuple(lengths))
    if action == "reorder":
        return Operation("reorder", tuple(rng.randrange(sizes.batch) for _ in range(sizes.batch)))
    if action == "reserve":
        grown = [min(n + rng.randint(0, 9), sizes.max_len) for n in model.lengths]
        return Operation("reserve", tuple(grown))
    if action == "load" and model.snapshots:
        number = rng.randrange(len(model.snapshots))
        if rng.random() < 0.25:
            return Operation("release", (number,))
        return Operation("load", (number, sequence))
    return Operation("reset" if action == "reset" else "save", (sequence,))


def _step(rng: random.Random, history: History, model: Model) -> Operation:
    """Draw a step of one token, of several, up to an edge of a block, or to the end of the cache.

    One in twenty is longer than the cache, which refuses it.
    """
    sizes, config = history.sizes, history.config
    room = [sizes.max_len - n for n in model.lengths]
    longest = rng.choice((1, 1, 1, sizes.max_step, 5, 12, 30))
    edges = [config.compress_block_size, config.select_block_size, config.window_size]
    edges += [sizes.page_size or config.select_block_size, sizes.max_len]
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
