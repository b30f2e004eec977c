"""The parameters of each slot, their values, and the cases that a row of values describes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_core.contract import SLOTS
from nsa_core.errors import InvalidInput
from nsa_verify.generated.case import GRADIENTS, GeneratedCase
from nsa_verify.generated.design import (
    GROUP_SIZES,
    OneOf,
    Row,
    covering_design,
    longer_design,
    take_turns,
)


def frozen_levels(slot: str) -> tuple[Any, ...]:
    """Return the levels of ``frozen``: no input of ``slot``, each one alone, and all but one."""
    names = GRADIENTS[slot]
    alone = OneOf((name,) for name in names)
    return (), alone, OneOf(tuple(x for x in names if x != name) for name in names)


# Each first group of values is that of quick (at most five), the second is added in full.
_BLOCKS = (  # l, d, l'
    ((8, 4, 16), (4, 2, 4), (4, 4, 4), (12, 4, 12), (32, 16, 64)),
    ((1, 1, 4), (6, 3, 9), (16, 4, 16), (12, 4, 16)),
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
        "blocks": _BLOCKS,
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
        "blocks": _BLOCKS,
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


@dataclasses.dataclass(frozen=True)
class SlotDesign:
    """The covering design of one slot.

    Attributes:
        slot: The slot.
        levels: The values of each parameter.
        triples: Parameters of which every allowed triple occurs.
        most_rows: Largest number of query rows times kv heads in a case.
        most_heads: Largest number of query rows times query heads, with the mean of a OneOf.
    """

    slot: str
    levels: Mapping[str, Sequence[Any]]
    triples: tuple[str, ...]
    most_rows: int
    most_heads: int

    @property
    def needs(self) -> list[str]:
        """The parameters that :meth:`allowed` reads."""
        return [name for name in _NEEDS if name in self.levels]

    @property
    def firsts(self) -> list[str]:
        """The parameters that it reads too, and of which it allows the first value."""
        return [name for name in _HIDING if name in self.levels and self.slot != "combine"]

    def allowed(self, row: Row) -> bool:
        """Return whether the case of ``row`` is small enough for the oracle, and hides no entry."""
        rows, sizes = _rows(row), row["h"]
        if rows > self.most_rows or rows * sum(sizes) > self.most_heads * len(sizes):
            return False
        plain = row["length"] == _LENGTH_OF_BATCH.get(self.slot)
        return not (plain and _batch(row["documents"]) >= _LARGE_BATCH and _hides_batch(row))

    def rows(self, seed: int, count: int | None = None) -> list[Row]:
        """Return the rows of the design, or ``count`` rows that begin with them."""
        options: dict[str, Any] = {"triples": self.triples}
        options |= {"allowed": self.allowed, "needs": self.needs, "firsts": self.firsts}
        if count is not None:
            return longer_design(self.levels, count, seed=seed, **options)
        return covering_design(self.levels, seed=seed, **options)


def slot_design(slot: str, preset: str, dtypes: Sequence[str]) -> SlotDesign:
    """Return the design of ``slot`` for a preset, with each of ``dtypes`` as a parameter.

    Raises:
        InvalidInput: The slot or the preset is unknown, or there is no dtype.
    """
    if slot not in _LEVELS or preset not in _MOST_ROWS or not dtypes:
        raise InvalidInput(
            f"slot must be one of {', '.join(SLOTS)}, preset one of {', '.join(_MOST_ROWS)}, and"
            f" dtypes not empty; got {slot!r}, {preset!r} and {list(dtypes)}"
        )
    levels = {
        name: (*quick, *(added if preset == "full" else ()))
        for name, (quick, added) in _LEVELS[slot].items()
    }
    triples = _TRIPLES[slot] if preset == "full" else ()
    levels = {"dtype": tuple(dtypes), **levels}
    return SlotDesign(slot, levels, triples, _MOST_ROWS[preset], _MOST_HEADS[preset])


def generated_cases(
    preset: str,
    dtypes: Sequence[str],
    *,
    seed: int = 0,
    slots: Sequence[str] = SLOTS,
    count: int | None = None,
) -> list[GeneratedCase]:
    """Return the generated cases of a preset, slot by slot.

    Args:
        preset: "quick" (every pair of values) or "full" (more values, and triples of those that
            interact).
        dtypes: Names of the dtypes.
        seed: Seed of the design and of the random numbers.
        slots: Slots to draw cases for.
        count: Cases of each slot; None takes the whole design.
    """
    return [case for slot in slots for case in _cases(slot, preset, tuple(dtypes), seed, count)]


@functools.lru_cache(maxsize=32)  # a design takes a second, and tests ask for it often
def _cases(
    slot: str, preset: str, dtypes: tuple[str, ...], seed: int, count: int | None
) -> tuple[GeneratedCase, ...]:
    rows = take_turns(slot_design(slot, preset, dtypes).rows(seed, count), seed)
    # The random numbers differ from case to case, and from seed to seed.
    return tuple(case_of(slot, row, seed * 10_007 + index) for index, row in enumerate(rows))


def case_of(slot: str, row: Row, seed: int) -> GeneratedCase:
    """Return the case that ``row`` describes."""
    sizes = _sizes(row)
    name = row["documents"]
    length = _length(row)
    lengths: dict[str, Any] = {"documents": documents_of_length(name, length)}
    if not lengths["documents"]:
        lengths = {"tokens": length, "batch": _batch(name)}
    fields: dict[str, Any] = {**sizes, **lengths, "slot": slot, "seed": seed, "dtype": row["dtype"]}
    fields["dk"], fields["dv"] = row["widths"]
    same = ["h", "groups", "scale", "layout", "do_layout", "scores", "values", "gates", "poison"]
    same += ["metadata", "frozen"]
    fields |= {name: row[name] for name in same if name in row}
    if "block_kind" in row:
        fields["blocks"] = row["block_kind"]
    equal = row.get("scale") == 0 or row.get("scores") == "zero"
    if equal and row.get("do_layout") == "expanded":
        # The terms of the sum over the heads would be equal, and so would their rounding errors.
        fields["do_layout"] = "transposed"
    return GeneratedCase(**fields)


def _sizes(row: Row) -> dict[str, int]:
    """Return the block sizes of ``row``."""
    size, stride, block = row.get("blocks", (4, 4, 4))
    init, local = row.get("forced", (0, 0))
    n = max(1, init + local + row.get("free", 1))
    w = row.get("w", 4)
    return {"l": size, "d": stride, "block": block, "n": n, "init": init, "local": local, "w": w}


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


def _batch(name: str) -> int:
    return int(name.removeprefix("batch ")) if name.startswith("batch ") else 1


def documents_of_length(name: str, length: int) -> tuple[int, ...]:
    """Return the lengths of packed documents, with empty ones and runs of them; () if dense."""
    return {
        "packed": (0, 0, length, 1, 0, 0, 0, (length + 1) // 2, 0, 0),
        "tiny documents": (1, 0, 2, 1, 3, length, 0, 1, 5, length // 2 + 1, 0),
    }.get(name, ())


def _rows(row: Row) -> int:
    length = _length(row)
    documents = documents_of_length(row["documents"], length)
    tokens = sum(documents) if documents else length * _batch(row["documents"])
    return tokens * int(row["groups"])
