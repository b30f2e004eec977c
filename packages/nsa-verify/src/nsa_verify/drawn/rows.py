"""Parts that all designs of cases share: values of a preset, and the case of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nsa_verify.drawn.case import GRADIENTS, SlotCase
from nsa_verify.drawn.design import OneOf, Row


def preset_levels(
    table: Mapping[str, Sequence[Any]], preset: str, dtypes: Sequence[str]
) -> dict[str, tuple[Any, ...]]:
    """Return the values of each parameter in a preset, the dtypes first.

    Args:
        table: By parameter, the values of quick, those that full adds, and those of the
            interpreter, whose kernels take milliseconds for an operation; by default those of
            quick.
        preset: "quick", "full" or "interpreter".
        dtypes: Names of the dtypes.
    """
    levels: dict[str, tuple[Any, ...]] = {"dtype": tuple(dtypes)}
    for name, (quick, added, *tiny) in table.items():
        levels[name] = (*quick, *added) if preset == "full" else quick
        if tiny and preset == "interpreter":
            levels[name] = tiny[0]
    return levels


def frozen_levels(slot: str) -> tuple[Any, ...]:
    """Return the levels of ``frozen``: no input of ``slot``, each one alone, and all but one."""
    names = GRADIENTS[slot]
    alone = OneOf((name,) for name in names)
    return (), alone, OneOf(tuple(x for x in names if x != name) for name in names)


def batch_of(documents: str) -> int:
    """Return the batch size of a value of the parameter ``documents``."""
    return int(documents.removeprefix("batch ")) if documents.startswith("batch ") else 1


def tokens_of(documents: str, length: int) -> dict[str, Any]:
    """Return the fields of a case about its tokens.

    They are packed documents, with empty ones and runs of them, around one of ``length`` tokens, or
    sequences of this length.
    """
    packed = {
        "packed": (0, 0, length, 1, 0, 0, 0, (length + 1) // 2, 0, 0),
        "tiny documents": (1, 0, 2, 1, 3, length, 0, 1, 5, length // 2 + 1, 0),
    }.get(documents)
    return {"documents": packed} if packed else {"tokens": length, "batch": batch_of(documents)}


def case_of(
    kind: str,
    row: Row,
    number: int,
    seed: int,
    *,
    blocks: tuple[int, int, int] = (4, 4, 4),
    **fields: Any,
) -> SlotCase:
    """Return the case of a row.

    Args:
        kind: The slot or function.
        row: Values of parameters, most of which are fields of the case.
        number: Number of the row. The random numbers differ from case to case.
        seed: Seed of the design. They differ from seed to seed too.
        blocks: l, d and l' of a row without blocks.
        **fields: Other fields of the case.
    """
    same = ["dtype", "h", "groups", "scale", "layout", "do_layout", "scores", "values", "gates"]
    same += ["poison", "metadata", "frozen", "w", "recompute", "block", "n"]
    fields["l"], fields["d"], fields["block"] = row.get("blocks", blocks)
    fields["init"], fields["local"] = init, local = row.get("forced", (0, 0))
    fields["n"] = max(1, init + local + row.get("free", 1))
    fields["dk"], fields["dv"] = row["widths"]
    fields |= {name: row[name] for name in same if name in row}
    if "block_kind" in row:
        fields["blocks"] = row["block_kind"]
    return SlotCase(kind, seed=seed * 10_007 + number, **fields)
