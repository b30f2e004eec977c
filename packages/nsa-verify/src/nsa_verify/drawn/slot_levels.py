"""The parameters of each slot and their values, and its covering design."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_verify.drawn.case import SlotCase
from nsa_verify.drawn.design import GROUP_SIZES, Design, Row
from nsa_verify.drawn.rows import batch_of, case_of, frozen_levels, preset_levels, tokens_of

# Each first group of values is that of quick (at most five), the second is added in full.
_BLOCKS = (  # l, d, l'
    ((8, 4, 16), (4, 2, 4), (4, 4, 4), (12, 4, 12), (32, 16, 64)),
    ((1, 1, 4), (6, 3, 9), (16, 4, 16), (12, 4, 16)),
)
# Kernels that read whole selection blocks may refuse those below 16 tokens.
_SELECTED = (
    ((8, 4, 16), (4, 2, 16), (4, 4, 4), (12, 4, 20), (32, 16, 64)),
    ((1, 1, 4), (6, 3, 9), (16, 4, 16), (12, 4, 12)),
)
_FORCED = (((1, 2), (0, 0), (2, 1), (0, 3), (3, 0)), ((1, 1), (0, 1)))  # init, local
_FREE = ((1, 0, 2, 5, 17), (3, 13))  # selected blocks that are not forced
_WINDOW = ((5, 1, 16, 33, 520), (2, 64, 600, 2000))
_HEADS = (GROUP_SIZES, ())
_GROUPS = ((2, 1, 3, 5, 9), (4, 8))
_WIDTHS = (
    ((16, 16), (72, 24), (24, 136), (8, 65), (13, 13)),
    ((24, 7), (1, 1), (64, 64), (128, 64)),
)
_SCALE = ((None, 1.0, -0.3, 0.0, 0.05), (-1.0, 2.5))
# Sequences of a dense batch, or documents around one of the length of the case.
_DOCUMENTS = (("dense", "batch 5", "batch 8", "packed", "tiny documents"), ("batch 2", "batch 3"))
_LAYOUT = (("plain", "transposed", "gaps", "offset", "expanded"), ("strided",))
_DO_LAYOUT = (("plain", "transposed", "gaps", "expanded", "strided"), ("offset",))
_SCORES = (("normal", "tiny", "zero", "large"), ())
_VALUES = (("normal", "small", "outlier", "steep"), ())
_COMBINE_POISON = (("none", "nan_v", "inf_v"), ())
_BLOCK_KINDS = (("sorted", "sorted64", "messy", "messy64", "none"), ())
_GATES = (("sigmoid", "negative", "above1", "zero"), ())
_POISON = (("none", "nan_q", "nan_k", "nan_v", "inf_v"), ("nan_do",))
_METADATA = (("dense", "strided"), ())
_HEADS_ALONE = {"h": _HEADS, "groups": _GROUPS}
_LAYOUTS = {"layout": _LAYOUT, "do_layout": _DO_LAYOUT, "metadata": _METADATA}
# Lengths by name, because they depend on the block sizes; see _length.
_LEVELS: Mapping[str, Mapping[str, Any]] = {
    "cmp": {
        "length": (("130 keys", "l", "l-1", "l+d-1", "l+d"), ("1", "several", "many")),
        "blocks": _BLOCKS,
        **_HEADS_ALONE,
        "widths": _WIDTHS,
        "scale": _SCALE,
        "documents": _DOCUMENTS,
        **_LAYOUTS,
        "scores": _SCORES,
        "values": _VALUES,
        "poison": _POISON,
        "frozen": (frozen_levels("cmp"), ()),
    },
    "select": {
        "length": (
            ("n blocks+", "n blocks", "block+1", "40 blocks", "1"),
            ("block", "l-1", "l+d", "140 blocks"),
        ),
        "blocks": _SELECTED,
        "forced": _FORCED,
        "free": _FREE,
        **_HEADS_ALONE,
        "widths": _WIDTHS,
        "scale": _SCALE,
        "documents": _DOCUMENTS,
        "layout": _LAYOUT,
        "metadata": _METADATA,
        "scores": _SCORES,
        "poison": (("none", "nan_q", "nan_k"), ()),
    },
    "sel": {
        "length": (
            ("n blocks+", "n blocks", "block+1", "66 blocks", "1"),
            ("block", "block-1", "many"),
        ),
        "blocks": _SELECTED,
        "free": _FREE,
        "block_kind": _BLOCK_KINDS,
        **_HEADS_ALONE,
        "widths": _WIDTHS,
        "scale": _SCALE,
        "documents": _DOCUMENTS,
        **_LAYOUTS,
        "scores": _SCORES,
        "values": _VALUES,
        "poison": _POISON,
        "frozen": (frozen_levels("sel"), ()),
    },
    "win": {
        "length": (("w+1", "w", "2w+3", "129", "1"), ("w-1", "130", "17")),
        "w": _WINDOW,
        **_HEADS_ALONE,
        "widths": _WIDTHS,
        "scale": _SCALE,
        "documents": _DOCUMENTS,
        **_LAYOUTS,
        "scores": _SCORES,
        "values": _VALUES,
        "poison": _POISON,
        "frozen": (frozen_levels("win"), ()),
    },
    "combine": {
        "length": (("17", "1", "2", "40", "129"), ()),
        **_HEADS_ALONE,
        "widths": _WIDTHS,
        "documents": _DOCUMENTS,
        "layout": _LAYOUT,
        "do_layout": _DO_LAYOUT,
        "gates": _GATES,
        "values": _VALUES,
        "poison": _COMBINE_POISON,
        "frozen": (frozen_levels("combine"), ()),
    },
}
# Parameters that interact by three in full.
_TRIPLES = {
    "cmp": ("length", "blocks", "documents", "h", "scale", "dtype"),
    "select": ("length", "blocks", "forced", "free"),
    "sel": ("length", "blocks", "free", "block_kind", "documents"),
    "win": ("length", "w", "documents", "h", "scale", "dtype"),
    "combine": ("length", "documents", "gates", "layout", "do_layout"),
}
# The parameters of _rows. A length does not depend on the forced blocks: with them, the library
# needs minutes for the design of select.
_NEEDS = ("length", "blocks", "free", "w", "groups", "documents", "h")
# With this length the entries of a large batch have results that no other value makes equal, so
# that every design finds a kernel that reads another entry.
_LENGTH_OF_BATCH = {"cmp": "l+d", "select": "n blocks+", "sel": "n blocks+", "win": "w+1"}
_LARGE_BATCH = 5
_HIDING = ("layout", "scale", "scores", "block_kind")  # their first values hide no entry
_MOST_FORCED = 3  # of _FORCED
# A length of n blocks is at most this long, so that few values exclude each other: only with small
# blocks are more than 16 of them selected from more. Else a design has hundreds of rows.
_BLOCK_TOKENS = 96
_MOST_BLOCK_TOKENS = 168
# Query rows times kv heads, each of which takes about 0.1 ms in the oracle, and times query heads.
_MOST_ROWS = {"quick": 700, "full": 1500, "interpreter": 48}
_MOST_HEADS = {"quick": 4500, "full": 12000, "interpreter": 400}


def slot_design(slot: str, preset: str, dtypes: Sequence[str]) -> Design:
    """Return the design of ``slot`` for a preset, with each of ``dtypes`` as a parameter."""
    return Design(
        preset_levels(_LEVELS[slot], preset, dtypes),
        functools.partial(_build, slot),
        triples=_TRIPLES[slot] if preset == "full" else (),
        allowed=functools.partial(_allowed, slot, preset),
        needs=_NEEDS,
        firsts=_HIDING if slot != "combine" else (),
    )


def _allowed(slot: str, preset: str, row: Row) -> bool:
    """Return whether the case of ``row`` is small enough for the oracle, and hides no entry."""
    lengths, sizes = tokens_of(row["documents"], _length(row)), row["h"]
    tokens = sum(lengths.get("documents", ())) or lengths["tokens"] * lengths["batch"]
    rows = tokens * int(row["groups"])
    if rows > _MOST_ROWS[preset] or rows * sum(sizes) > _MOST_HEADS[preset] * len(sizes):
        return False
    plain = row["length"] == _LENGTH_OF_BATCH.get(slot)
    return not (plain and batch_of(row["documents"]) >= _LARGE_BATCH and _hides_batch(row))


def _build(slot: str, row: Row, number: int, seed: int) -> SlotCase:
    """Return the case that ``row`` describes."""
    equal = row.get("scale") == 0 or row.get("scores") == "zero"
    if equal and row.get("do_layout") == "expanded":
        # The terms of the sum over the heads would be equal, and so would their rounding errors.
        row = {**row, "do_layout": "transposed"}
    return case_of(slot, row, number, seed, **tokens_of(row["documents"], _length(row)))


def _length(row: Row) -> int:
    """Return the number of tokens that the length of ``row`` stands for."""
    name, w = row["length"], row.get("w", 4)
    size, stride, block = row.get("blocks", (4, 4, 4))
    n = max(1, row.get("free", 1) + (_MOST_FORCED if "forced" in row else 0))
    n = min(n, _BLOCK_TOKENS // block)
    lengths = {
        "several": size + 4 * stride + 1,
        "many": max(size + 4 * stride, 3 * block) + 61,
        "130 keys": size + 130 * stride + 1,  # more than the bits of an integer of 128
        "40 blocks": min(40 * block, _MOST_BLOCK_TOKENS) + 1,
        "66 blocks": 66 * block + 1,
        "140 blocks": 140 * block + 1,
        "l": size,
        "l-1": size - 1,
        "l+d-1": size + stride - 1,
        "l+d": size + stride,
        "n blocks": n * block,
        "n blocks+": (n + 2) * block + 1,  # its last token has n + 3 candidates
        "block": block,
        "block+1": block + 1,
        "block-1": block - 1,
        "w": w,
        "w-1": w - 1,
        "w+1": w + 1,
        "2w+3": 2 * w + 3,
    }
    return lengths[name] if name in lengths else int(name)


def _hides_batch(row: Row) -> bool:
    """Return whether the values of ``row`` make the results of all batch entries equal.

    The keys are equal or have no influence, or select has no choice.
    """
    size, free = row.get("blocks", (4, 4, 4))[2], row.get("free", 1)
    few = "forced" in row and (not free or (free + _MOST_FORCED) * size >= _length(row))
    equal = row["scale"] == 0 or row["scores"] == "zero" or row["layout"] == "expanded"
    return bool(few or equal or row.get("block_kind") == "none")
