"""Generated cases of queries that begin inside a sequence, by a covering design of their own.

The cut is described by where the queries begin, and how many there are. The parameter ``residue``
is the position of the first query modulo 8: with each of its values the queries begin at every
residue modulo d, and modulo blocks of 8 tokens. See :func:`_position` for larger blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_verify.drawn.case import SlotCase
from nsa_verify.drawn.design import GROUP_SIZES, Design, OneOf, Row
from nsa_verify.drawn.rows import batch_of, case_of, frozen_levels, preset_levels

PARTIAL_SLOTS = ("cmp", "select", "sel", "win")  # combine reads no keys
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
_NEEDS = ("begin", "blocks", "groups", "widths", "documents", "residue")
_MOST_KEYS = 1 << 21


def partial_design(slot: str, preset: str, dtypes: Sequence[str]) -> Design:
    """Return the design of ``slot`` for a preset, with each of ``dtypes`` as a parameter."""
    return Design(
        preset_levels({**_SHARED, **_OWN[slot]}, preset, dtypes),
        functools.partial(_build, slot),
        triples=_TRIPLES if preset == "full" else (),
        allowed=_allowed,
        needs=_NEEDS,
    )


def _allowed(row: Row) -> bool:
    """Return whether the keys of ``row`` are few enough: many blocks only with small sizes.

    Queries that begin with a later document begin with its first token.
    """
    if row["begin"] == "document" and row["residue"] and "batch" not in row["documents"]:
        return bool(row["documents"] in ("dense", "one document"))
    _, _, block = row.get("blocks", _DEFAULT_BLOCKS)
    numbers = row["begin"] if isinstance(row["begin"], OneOf) else (row["begin"],)
    number = max((n for n in numbers if isinstance(n, int)), default=2)
    elements = number * block * batch_of(row["documents"]) * int(row["groups"])
    elements *= max(row["widths"])
    return bool(elements <= _MOST_KEYS)


def _build(slot: str, row: Row, number: int, seed: int) -> SlotCase:
    """Return the case that ``row`` describes."""
    size, _, block = row.get("blocks", _DEFAULT_BLOCKS)
    far = row["begin"] if isinstance(row["begin"], int) else 0  # the block of the queries
    length = (max(far, 2) + 1) * block + size + 3  # of the longest document
    short = 3 * block + size + 3
    documents = {
        "packed": (0, 0, block, 0, 0, length, 0, 0, 0, 1, (short + 1) // 3, 0, 0),
        "tiny documents": (block, 1, 0, 2, 1, 3, length, 0, 1, 5, 0),
        "one document": (length,),
    }.get(row["documents"], ())
    start = sum(documents[: documents.index(length)]) if documents else 0
    axis = sum(documents) or length
    base = 0 if row["begin"] == "axis" else start + far * block
    first = base + _position(row["residue"], block, far > 0)
    rest = axis - first
    named = {"to its end": start + length - first, "all": rest, "all but 3": max(1, rest - 3)}
    queries = named[row["queries"]] if row["queries"] in named else min(int(row["queries"]), rest)
    tokens = {"tokens": length, "batch": batch_of(row["documents"])}
    return case_of(
        slot,
        row,
        number,
        seed,
        blocks=_DEFAULT_BLOCKS,
        first_query=first,
        queries=queries,
        **({"documents": documents} if documents else tokens),
    )


def _position(residue: int, block: int, later: bool) -> int:
    """Return the position of the first query in its selection block of ``block`` tokens.

    Eight residues are half of the positions in a block of 16: every second one of each half block.
    Later blocks have the others.
    """
    if block >= 2 * _RESIDUES:
        return (residue + _RESIDUES * ((residue + later) % 2)) * block // (2 * _RESIDUES)
    return residue * block // _RESIDUES
