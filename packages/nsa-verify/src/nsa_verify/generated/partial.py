"""Generated cases of queries that begin inside a sequence, by a covering design of their own.

The cut is described by where the queries begin, and how many there are. The parameter ``residue``
is the position of the first query modulo 8: with each of its values the queries begin at every
residue modulo d, and modulo blocks of 8 tokens. See :func:`_position` for larger blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_verify.generated.case import GeneratedCase
from nsa_verify.generated.design import (
    GROUP_SIZES,
    OneOf,
    Row,
    covering_design,
    longer_design,
    take_turns,
)
from nsa_verify.generated.levels import frozen_levels

SLOTS = ("cmp", "select", "sel", "win")  # combine reads no keys
_RESIDUES = 8
# Each first group of values is that of quick, the second is added in full.
_SHARED: Mapping[str, Any] = {
    "residue": (tuple(range(_RESIDUES)), ()),
    # Positions from which the residue counts: the start of the axis, which is that of the first
    # document, the start of the longest document, and one of its blocks.
    "begin": (("axis", "document", 2), ()),
    # To the end of the document leaves nothing of it; to the end of the axis leaves no extra key.
    "queries": (("1", "5", "to its end", "all", "all but 3"), ("0", "40")),
    "documents": (("dense", "batch 5", "packed", "tiny documents"), ("batch 8", "one document")),
    "h": (GROUP_SIZES, ()),
    "groups": ((2, 1), (3,)),
    "widths": (((16, 16), (24, 8), (13, 13)), ((72, 24), (64, 64))),
    "layout": (("plain", "gaps", "transposed"), ("offset", "expanded")),
    "metadata": (("dense", "strided"), ()),
}
# Many blocks are an axis of the selection alone: in cmp, a few queries would see thousands of keys,
# whose probabilities share the rounding of the LSE.
_FAR = ("axis", "document", 2, 140), (OneOf((300, 1024, 4095)),)
_MORE_BLOCKS = ((6, 3, 9), (32, 16, 64))
_BLOCKS = ((4, 2, 8), (8, 4, 8), (2, 1, 8), (8, 8, 8)), ((8, 4, 16), *_MORE_BLOCKS)
# Kernels that read whole selection blocks may refuse those below 16 tokens.
_SELECTED = ((4, 2, 16), (8, 4, 16), (2, 1, 8), (8, 8, 16)), ((2, 1, 16), *_MORE_BLOCKS)
_OWN: Mapping[str, Mapping[str, Any]] = {
    "cmp": {
        "blocks": _BLOCKS,
        "poison": (("none",), ("nan_q", "nan_k")),
        "frozen": (frozen_levels("cmp"), ()),
    },
    "select": {
        "begin": _FAR,
        "blocks": _SELECTED,
        "forced": (((1, 1), (1, 2), (0, 0), (0, 3), (2, 0)), ()),  # init, local
        "free": ((1, 2), (0, 5)),
        "poison": (("none",), ("nan_q", "nan_k")),
    },
    "sel": {
        "begin": _FAR,
        "blocks": _SELECTED,
        "free": ((2, 1, 5), (17,)),
        "block_kind": (("sorted", "messy", "sorted64"), ("messy64", "none")),
        "poison": (("none",), ("nan_q", "nan_k", "nan_v")),
        "frozen": (frozen_levels("sel"), ()),
    },
    "win": {
        "w": ((5, 1, 8, 33), (2, 64)),
        "poison": (("none",), ("nan_q", "nan_k", "inf_v")),
        "frozen": (frozen_levels("win"), ()),
    },
}
_TRIPLES = ("residue", "begin", "queries", "documents")
_DEFAULT_BLOCKS = (4, 4, 8)
# The parameters that `allowed` reads, and the most elements of k or v.
NEEDS = ("begin", "blocks", "groups", "widths", "documents", "residue")
_MOST_KEYS = 1 << 21


def partial_cases(
    preset: str,
    dtypes: Sequence[str],
    *,
    seed: int = 0,
    slots: Sequence[str] = SLOTS,
    count: int | None = None,
) -> list[GeneratedCase]:
    """Return the cases of a preset whose queries begin inside a sequence, slot by slot.

    Args:
        preset: "quick" (every pair of values) or "full" (more values, and triples of those that
            describe the cut).
        dtypes: Names of the dtypes.
        seed: Seed of the design and of the random numbers.
        slots: Slots to draw cases for.
        count: Cases of each slot; None takes the whole design.
    """
    return [case for slot in slots for case in _cases(slot, preset, tuple(dtypes), seed, count)]


@functools.lru_cache(maxsize=32)
def _cases(
    slot: str, preset: str, dtypes: tuple[str, ...], seed: int, count: int | None
) -> tuple[GeneratedCase, ...]:
    levels = partial_levels(slot, preset, dtypes)
    options: dict[str, Any] = {"seed": seed, "triples": _TRIPLES if preset == "full" else ()}
    options |= {"allowed": allowed, "needs": [name for name in NEEDS if name in levels]}
    if count is None:
        rows = covering_design(levels, **options)
    else:
        rows = longer_design(levels, count, **options)
    rows = take_turns(rows, seed)
    return tuple(_case_of(slot, row, seed * 10_007 + index) for index, row in enumerate(rows))


def allowed(row: Row) -> bool:
    """Return whether the keys of ``row`` are few enough: many blocks only with small sizes.

    Queries that begin with a later document begin with its first token.
    """
    if row["begin"] == "document" and row["residue"] and "batch" not in row["documents"]:
        return bool(row["documents"] in ("dense", "one document"))
    _, _, block = row.get("blocks", _DEFAULT_BLOCKS)
    numbers = row["begin"] if isinstance(row["begin"], OneOf) else (row["begin"],)
    number = max((n for n in numbers if isinstance(n, int)), default=2)
    batch = int(row["documents"].removeprefix("batch ")) if "batch" in row["documents"] else 1
    elements = number * block * batch * int(row["groups"]) * max(row["widths"])
    return bool(elements <= _MOST_KEYS)


def partial_levels(slot: str, preset: str, dtypes: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return the values of each parameter of ``slot`` in a preset."""
    levels = {
        name: (*quick, *(added if preset == "full" else ()))
        for name, (quick, added) in {**_SHARED, **_OWN[slot]}.items()
    }
    return {"dtype": tuple(dtypes), **levels}


def _case_of(slot: str, row: Row, seed: int) -> GeneratedCase:
    """Return the case that ``row`` describes."""
    size, stride, block = row.get("blocks", _DEFAULT_BLOCKS)
    init, local = row.get("forced", (0, 0))
    number = row["begin"] if isinstance(row["begin"], int) else 0  # of the block of the queries
    length = (max(number, 2) + 1) * block + size + 3  # of the longest document
    short = 3 * block + size + 3
    documents = {
        "packed": (0, 0, block, 0, 0, length, 0, 0, 0, 1, (short + 1) // 3, 0, 0),
        "tiny documents": (block, 1, 0, 2, 1, 3, length, 0, 1, 5, 0),
        "one document": (length,),
    }.get(row["documents"], ())
    longest = documents.index(length) if documents else 0
    start = sum(documents[:longest])
    axis = sum(documents) if documents else length
    base = 0 if row["begin"] == "axis" else start + number * block
    first = base + _position(row["residue"], block, number > 0)
    rest = axis - first
    to_end = start + length - first
    queries = {"to its end": to_end, "all": rest, "all but 3": max(1, rest - 3)}.get(row["queries"])
    if queries is None:
        queries = min(int(row["queries"]), rest)
    fields: dict[str, Any] = {"documents": documents} if documents else {"tokens": length}
    if row["documents"].startswith("batch "):
        fields["batch"] = int(row["documents"].removeprefix("batch "))
    same = ("dtype", "h", "groups", "layout", "metadata", "poison", "frozen", "w")
    fields |= {name: row[name] for name in same if name in row}
    if "block_kind" in row:
        fields["blocks"] = row["block_kind"]
    return GeneratedCase(
        slot=slot,
        l=size,
        d=stride,
        block=block,
        n=max(1, init + local + row.get("free", 1)),
        init=init,
        local=local,
        dk=row["widths"][0],
        dv=row["widths"][1],
        first_query=first,
        queries=queries,
        seed=seed,
        **fields,
    )


def _position(residue: int, block: int, later: bool) -> int:
    """Return the position of the first query in its selection block of ``block`` tokens.

    Eight residues are half of the positions in a block of 16: every second one of each half block.
    Later blocks have the others.
    """
    if block >= 2 * _RESIDUES:
        return (residue + _RESIDUES * ((residue + later) % 2)) * block // (2 * _RESIDUES)
    return residue * block // _RESIDUES
