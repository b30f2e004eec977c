"""The parameters of decode steps, and their designs; lengths lie around every boundary."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_verify.drawn.design import GROUP_SIZES, Design, OneOf, Row
from nsa_verify.drawn.rows import preset_levels
from nsa_verify.drawn.step import INDICES, BlockStep, DecodeStep
from nsa_verify.drawn.verdicts import MIN_ROWS

# For any two parameters and any value of each, at least one step has both values.
_LEVELS: Mapping[str, tuple[Any, ...]] = {
    "kv_heads": (1, 2, 5, 9),
    "group": GROUP_SIZES,  # query heads per kv head
    "widths": ((16, 16), (64, 64), (72, 13), (16, 24)),  # Dk, Dv
    "stride": (2, 4, 8),  # d
    "compress": (1, 2, 3),  # l / d
    "select": (16, 24, 32, 8),  # l', at least l; some kernels take no block below 16
    "blocks": ((4, 1, 2), (1, 0, 0), (5, 3, 1), (19, 1, 2), (6, 1, 3)),  # n, init, local
    "window": (1, 7, 24, 200),
    "batch": (1, 3, 8),  # at least
    "rows": (1, 2, 3, 5, 40),
    "pages": (0, 1, 3),  # blocks per page; 0: no pages
    "spare": (0, 1, 9),
    "scale": (None, 0.02, -0.1, 0.0),
    "gates": ("unit", "wide"),
    "scores": ("normal", "large"),
    "order": ("ascending", "messy"),  # of the blocks that sel receives
    "metadata": ("dense", "strided"),
}
# 48 rows have every allowed pair, with four dtypes; a test checks this.
_COUNTS = {"quick": 48, "full": 192, "interpreter": 0}
# The parameters of block_attention_decode: those of quick, added in full, of the interpreter.
_BLOCK_LEVELS: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "kv_heads": ((1, 2, 3), (), (1, 2)),
    "group": (GROUP_SIZES, (), (OneOf((1, 2)), OneOf((3, 5)))),
    "widths": (((16, 16), (64, 64), (16, 8)), ((128, 128), (96, 64)), ((16, 16), (16, 8))),
    "select": ((16, 32, 48, 128, 512), (64, 192, 256), (16,)),
    "blocks": ((3, 1, 16, 70, 130), (256,), (3, 1)),
    "rows": ((1, 2, 3, 5), (8,), (1, 3)),
    # The pages of a contiguous cache hold two blocks, or the largest part of one that kernels take.
    "pages": (("none", "part", "two"), (), ("none", "part")),
    "starts": (("given", "default"), (), ("given", "default")),
    "index": (INDICES, (), ("int32", "int64")),
    "scale": ((None, -0.2), (0.0,), (None,)),
    "metadata": (("dense", "strided"), (), ("dense", "strided")),
}


def step_design(preset: str, dtypes: Sequence[str]) -> Design:
    """Return the design of the steps of all decode forms, with ``dtypes`` as a parameter."""
    return Design(
        {"dtype": tuple(dtypes), **_LEVELS},
        _step,
        allowed=_allowed,
        needs=("kv_heads", "group"),
        count=_COUNTS[preset],
    )


def block_step_design(preset: str, dtypes: Sequence[str]) -> Design:
    """Return the design of the steps of block_attention_decode, with ``dtypes`` as a parameter."""
    return Design(preset_levels(_BLOCK_LEVELS, preset, dtypes), _block_step)


_MOST_HEADS = 90  # the queries of all tokens are drawn


def _allowed(row: Row) -> bool:
    """Return whether the query heads of ``row`` are few enough, with the mean of a OneOf."""
    sizes = row["group"]
    return bool(row["kv_heads"] * sum(sizes) <= _MOST_HEADS * len(sizes))


def _block_step(row: Row, number: int, seed: int) -> BlockStep:
    """Return the step of ``row``: one sequence is empty, and one is shorter than the step."""
    size, rows = row["select"], row["rows"]
    part = next(part for part in (256, 128, 64, 48, 32, 16) if size % part == 0)
    lengths = (2 * size + 13, size, 0, max(1, rows - 1), size + 1)
    new = tuple(min(length, rows) for length in lengths)
    if row["starts"] == "given":
        new = (new[0], max(0, new[1] - 1), 0, *new[3:])
    return BlockStep(
        **_common(row, seed),
        block=size,
        n=row["blocks"],
        lengths=lengths,
        new=new,
        page_size={"none": 0, "part": part, "two": 2 * size}[row["pages"]],
        starts=row["starts"],
        index=row["index"],
    )


_MAX_LENGTH = 352
_MOST_ROWS = 5  # of a sequence after the first


def _step(row: Row, number: int, seed: int) -> DecodeStep:
    rng = random.Random(f"{seed} {number}")
    stride, (blocks, init, local), window = row["stride"], row["blocks"], row["window"]
    size = row["compress"] * stride
    select = max(row["select"], size)
    page = row["pages"] * select
    edges = (1, size, size + stride, select, window, (blocks + 2) * select, page or select)
    longest = max(edge for edge in edges if edge <= _MAX_LENGTH - 2) + 2
    # One sequence has more blocks than are selected, if that is not too long.
    lengths, new = [longest], [min(longest, row["rows"])]
    while len(lengths) < row["batch"] or sum(new) < MIN_ROWS:
        edge = rng.choice(edges) * rng.choice((1, 1, 2, 3)) + rng.choice((-1, 0, 0, 1))
        length = edge if 1 <= edge <= longest else rng.randint(1, longest)
        lengths.append(length)
        # Only the first sequence has many rows: the oracle takes 0.1 ms for a row and kv head.
        most = min(row["rows"], _MOST_ROWS)
        new.append(min(length, rng.choice((most, most, rng.randint(0, most)))))
    return DecodeStep(
        **_common(row, seed),
        l=size,
        d=stride,
        block=select,
        n=blocks,
        init=init,
        local=local,
        w=window,
        lengths=tuple(lengths),
        new=tuple(new),
        page_size=page,
        **{name: row[name] for name in ("spare", "gates", "scores", "order")},
    )


def _common(row: Row, seed: int) -> dict[str, Any]:
    """Return the fields that the steps of both designs take from ``row``."""
    fields = {name: row[name] for name in ("dtype", "scale", "rows", "metadata")}
    dk, dv = row["widths"]
    return fields | {"h": row["group"], "groups": row["kv_heads"], "dk": dk, "dv": dv, "seed": seed}
