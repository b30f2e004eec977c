"""The parameters of nsa_attention ("core") and of block_attention, and their covering designs."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_verify.drawn.case import SlotCase
from nsa_verify.drawn.design import GROUP_SIZES, Design, OneOf, Row
from nsa_verify.drawn.rows import batch_of, case_of, frozen_levels, preset_levels, tokens_of

FUNCTIONS = ("core", "block_attention")
_NO_INPUT, _ALONE, _ALL_BUT_ONE = frozen_levels("core")
_BRANCHES = OneOf((f"k_{branch}", f"v_{branch}") for branch in ("cmp", "sel", "win"))
_DOCUMENTS = ("dense", "batch 5", "packed", "tiny documents")
# Each first group of values is that of quick, the second is added in full, and the third is that
# of the interpreter, whose kernels take milliseconds for an operation.
_LEVELS: Mapping[str, Mapping[str, Any]] = {
    "core": {
        # At most n blocks: sel is causal attention.
        "length": (("n blocks+", "n blocks", "l+d", "1"), ("40",), ("l+d", "n blocks")),
        "blocks": (  # l, d, l'
            ((8, 4, 16), (4, 2, 16), (2, 1, 32), (12, 4, 20)),
            ((4, 2, 4), (12, 4, 12), (32, 16, 64)),  # some kernels take no block below 16
            ((8, 4, 16), (4, 2, 16)),
        ),
        "forced": (((1, 2), (0, 0), (1, 1)), (), ((0, 0),)),  # init, local
        "free": ((1, 0, 2), (5,), (1,)),
        "w": ((5, 1, 33), (64,), (5, 20)),
        "h": (GROUP_SIZES, (), (OneOf((1, 2)), OneOf((3, 5)))),
        "groups": ((2, 1, 3), (), (2, 1)),
        "widths": (((16, 16), (24, 8), (13, 13)), ((64, 64), (128, 64)), ((16, 16), (16, 8))),
        "documents": (_DOCUMENTS, ("batch 8",), ("dense",)),
        "layout": (("plain", "transposed", "gaps"), ("offset", "strided"), ("plain", "gaps")),
        "do_layout": (("plain", "transposed", "expanded"), ("gaps",), ("plain",)),
        "metadata": (("dense", "strided"), (), ("dense", "strided")),
        "block_kind": (("selected", "messy", "sorted64"), (), ("selected", "messy")),
        "gates": (("sigmoid", "negative", "above1", "zero"), (), ("sigmoid", "negative")),
        "recompute": ((False, True), (), (False, True)),
        "frozen": (
            (_NO_INPUT, OneOf(_ALONE[:3]), OneOf(_ALONE[3:]), _BRANCHES, _ALL_BUT_ONE),
            (),
            (_NO_INPUT, OneOf((("k_cmp", "v_cmp"), ("q",), ("v_sel", "gates")))),
        ),
    },
    "block_attention": {
        # Whole tokens, or queries inside the sequence.
        "rows": (("all", "last", "middle"), ("one",), ("all", "middle")),
        "length": (("1 block+", "2 blocks+"), ("5 blocks",), ("33",)),
        # Blocks of more than 256 keys are split, and so are some that a kernel does not take.
        "block": ((16, 48, 128, 256, 512), (32, 64, 192, 200, 384, 1024), (16, 48, 272)),
        "n": ((3, 1, 16, 70, 130), (2, 256), (2, 1)),
        "h": (GROUP_SIZES, (), (OneOf((1, 2)), OneOf((3, 5)))),
        "groups": ((2, 1, 3), (), (2, 1)),
        "widths": (((16, 16), (16, 24), (24, 16)), ((64, 64), (128, 128)), ((16, 16), (16, 8))),
        "scale": ((None, -0.2), (0.0,), (None,)),
        "documents": (_DOCUMENTS, ("batch 8",), ("dense", "packed")),
        "layout": (("plain", "transposed", "gaps"), ("offset",), ("plain",)),
        "do_layout": (("plain", "expanded"), ("gaps",), ("plain",)),
        "metadata": (("dense", "strided"), (), ("dense", "strided")),
        "block_kind": (
            ("messy", "messy64", "messy16", "messy8", "sorted"),
            ("none",),
            ("messy", "messy64", "messy8"),
        ),
        "frozen": (frozen_levels("block_attention"), (), ((),)),
    },
}
# The parameters that `allowed` reads.
_NEEDS = ("length", "block", "n", "blocks", "forced", "free", "groups", "documents", "rows")
# The interpreter runs the first cases of a design, which cover the most pairs, because it is slow.
_COUNTS = {"quick": None, "full": None, "interpreter": 5}
# Query rows times kv heads, and keys; the oracle takes 0.1 ms for such a row of a branch.
_MOST_ROWS = {"quick": 180, "full": 1000, "interpreter": 80}
_MOST_KEYS = {"quick": 3000, "full": 9000, "interpreter": 80}
# Keys of the blocks of a query: kernels read each of them, repeated ones too.
_MOST_READ = {"quick": 4200, "full": 40_000, "interpreter": 1000}
_MIDDLE = 60  # queries inside a sequence


def function_design(name: str, preset: str, dtypes: Sequence[str]) -> Design:
    """Return the design of a function for a preset, with each of ``dtypes`` as a parameter."""
    return Design(
        preset_levels(_LEVELS[name], preset, dtypes),
        functools.partial(_build, name),
        allowed=functools.partial(_allowed, preset),
        needs=_NEEDS,
        count=_COUNTS[preset],
    )


def _allowed(preset: str, row: Row) -> bool:
    """Return whether the case of ``row`` is small enough for the oracle."""
    keys = _axis(row)
    first, queries = _cut(row)
    batch = batch_of(row["documents"])
    rows = (keys - first if queries is None else queries) * batch * int(row["groups"])
    read = row.get("n", 0) * row.get("block", 0)
    limits = (_MOST_ROWS[preset], _MOST_KEYS[preset], _MOST_READ[preset])
    return all(x <= limit for x, limit in zip((rows, keys * batch, read), limits))


def _build(name: str, row: Row, number: int, seed: int) -> SlotCase:
    """Return the case that ``row`` describes."""
    fields = tokens_of(row["documents"], _length(row))
    if row.get("rows", "all") != "all":
        fields["first_query"], fields["queries"] = _cut(row)
    return case_of(name, row, number, seed, **fields)


def _length(row: Row) -> int:
    """Return the length of the longest document or sequence of ``row``."""
    if "block" in row:  # block_attention
        block = int(row["block"])
        sizes = {"1 block+": block + 21, "2 blocks+": 2 * block + 13, "5 blocks": 5 * block}
        return sizes.get(row["length"], 0) or int(row["length"])
    size, stride, block = row["blocks"]
    n = max(1, sum(row["forced"]) + row["free"])
    sizes = {"n blocks+": (n + 2) * block + 1, "n blocks": n * block, "l+d": size + stride}
    return sizes[row["length"]] if row["length"] in sizes else int(row["length"])


def _axis(row: Row) -> int:
    """Return the number of tokens of the axis of the keys."""
    length = _length(row)
    return sum(tokens_of(row["documents"], length).get("documents", (length,)))


def _cut(row: Row) -> tuple[int, int | None]:
    """Return the position of the first query and the number of queries; None: all from there."""
    axis = _axis(row)
    rows = row.get("rows", "all")
    if rows == "all":
        return 0, None
    queries = 1 if rows == "one" else min(_MIDDLE, axis)
    return (axis - queries, queries) if rows == "last" else ((axis - queries) // 2, queries)
