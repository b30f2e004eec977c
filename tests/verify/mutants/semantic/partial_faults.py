"""Faults of partial calls, whose queries begin inside a sequence; whole calls stay healthy."""

from __future__ import annotations

from typing import Any

import torch

from semantic.common import dense, every
from semantic.model import Condition, Fault, View, partial_mutant
from semantic.padded import key_axis


def _first(c: View) -> int:
    return int(c.call.first_query)


def _extra(c: View) -> int:
    """Return the number of tokens behind the last query."""
    return key_axis(c.slot, c.tensors, c.call) - _first(c) - c.tokens


def _inside(c: View) -> bool:
    return _first(c) > 0


def _residue(name: str) -> Condition:
    """Whether the first query is no multiple of the size ``name`` of the geometry."""
    return lambda c: _first(c) % getattr(c, name) != 0


def _begins_at(first: Any) -> Fault:
    """The healthy function with a wrong position of row 0."""
    return lambda c: c.run(first_query=first(c))


def _rounded_down(name: str) -> Fault:
    return _begins_at(lambda c: _first(c) // getattr(c, name) * getattr(c, name))


def _second_sequence_at_zero(c: View) -> list[torch.Tensor]:
    right, wrong = c.run(), c.run(first_query=0)
    for x, y in zip(right, wrong):
        x[1:] = y[1:]
    return right


def _previous_rows_lse(c: View) -> list[torch.Tensor]:
    o, lse = c.run()
    return [o, lse.roll(1, -1)]


def _last_query_sees_an_extra_key(c: View) -> list[torch.Tensor]:
    o, lse = c.run()
    later_o, later_lse = c.run(first_query=_first(c) + 1)
    o[..., -1, :, :] = later_o[..., -1, :, :]
    lse[..., -1] = later_lse[..., -1]
    return [o, lse]


def _without_earlier_keys(c: View) -> list[torch.Tensor]:
    first = _first(c)
    return c.run(k=c["k"][:, first:], v=c["v"][:, first:], first_query=0)


def _cut_document_begins_at_the_cut(c: View) -> list[torch.Tensor]:
    bounds = sorted({*c.boundaries, _first(c)})
    return c.run(cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


def _cuts_a_document(c: View) -> bool:
    return c.packed and 0 < _first(c) not in c.boundaries


def _local_block_of_the_row(c: View) -> list[torch.Tensor]:
    """The current block, which is always chosen, is that of the row of q."""
    (blocks,) = c.run()
    for row in range(c.tokens):
        mine = blocks[:, row].unbind(1)
        for entries in (x for group in mine for x in group):
            right, wrong = (_first(c) + row) // c.block, row // c.block
            if right in entries.tolist() and wrong not in entries.tolist():
                entries[entries == right] = wrong
                used = entries[entries >= 0].sort().values
                entries[: len(used)] = used
    return [blocks]


def _blocks_from_the_first_query(c: View) -> list[torch.Tensor]:
    (blocks,) = c.run()
    moved = blocks - _first(c) // c.block
    return [torch.where((blocks >= 0) & (moved >= 0), moved, -1)]


def _lists_of_later_rows(c: View) -> list[torch.Tensor]:
    rows = (torch.arange(c.tokens) + _first(c)).clamp(max=c.tokens - 1)
    return c.run(blocks=c["blocks"].index_select(-3, rows))


def _earlier_keys_lost(c: View) -> list[torch.Tensor]:
    dq, dk, dv = c.run()
    for grad in (dk, dv):
        grad[..., : _first(c), :, :] = 0
    return [dq, dk, dv]


def _extra_keys_not_written(c: View) -> list[torch.Tensor]:
    dq, dk, dv = c.run()
    end = _first(c) + c.tokens
    dv[..., end:, :, :] = dv[..., end - 1 : end, :, :]
    return [dq, dk, dv]


def _first_rows_add_nothing(name: str) -> Fault:
    """The queries before the first multiple of a size add nothing to dk and dv."""

    def fault(c: View) -> list[torch.Tensor]:
        size, do = getattr(c, name), c["do"].clone()
        do[..., : -_first(c) % size, :, :] = 0
        return [c.run()[0], *c.run(do=do)[1:]]

    return fault


def _no_key_gradient(c: View) -> list[torch.Tensor]:
    return [c.run()[0], *(torch.zeros_like(x) for x in c.run()[1:])]


def _forward(slot: str, text: str, fault: Fault, when: Condition) -> Any:
    return partial_mutant(slot, "forward", text, fault, when)


def _backward(slot: str, text: str, fault: Fault, when: Condition) -> Any:
    return partial_mutant(slot, "backward", text, fault, when)


MUTANTS = (
    *(
        _forward(slot, "the offset is one too small", _begins_at(lambda c: _first(c) - 1), _inside)
        for slot in ("cmp", "select", "win")
    ),
    _forward("sel", "the offset is ignored", _begins_at(lambda c: 0), _inside),
    _forward("cmp", "the offset is rounded to d", _rounded_down("stride"), _residue("stride")),
    _forward("select", "the offset is rounded to l'", _rounded_down("block"), _residue("block")),
    _forward(
        "cmp",
        "sequences from the second on ignore the offset",
        _second_sequence_at_zero,
        every(dense, _inside, lambda c: c.batch > 1),
    ),
    _forward("cmp", "lse is that of the previous row", _previous_rows_lse, lambda c: c.tokens > 1),
    _forward(
        "win",
        "the last query sees the first extra key",
        _last_query_sees_an_extra_key,
        every(dense, lambda c: _extra(c) > 0),
    ),
    _forward(
        "win", "no key before the queries is seen", _without_earlier_keys, every(dense, _inside)
    ),
    _forward(
        "win",
        "a cut document begins at the first query",
        _cut_document_begins_at_the_cut,
        _cuts_a_document,
    ),
    _forward(
        "select",
        "the current block is that of the row",
        _local_block_of_the_row,
        every(dense, _inside),
    ),
    _forward(
        "select",
        "blocks count from the first query's",
        _blocks_from_the_first_query,
        every(dense, _inside),
    ),
    _forward("sel", "lists are read at the token's position", _lists_of_later_rows, _inside),
    *(
        _backward(slot, "the offset is one too small", _begins_at(lambda c: _first(c) - 1), _inside)
        for slot in ("cmp", "win")
    ),
    _backward("sel", "the offset is ignored", _begins_at(lambda c: 0), _inside),
    *(
        _backward(
            slot, "dk and dv of keys before the queries are zero", _earlier_keys_lost, _inside
        )
        for slot in ("sel", "win")
    ),
    *(
        _backward(
            slot,
            "dv of extra keys is not written",
            _extra_keys_not_written,
            lambda c: _extra(c) > 0,
        )
        for slot in ("sel", "win")
    ),
    _backward(
        "cmp",
        "dk and dv miss the first queries up to a multiple of d",
        _first_rows_add_nothing("stride"),
        _residue("stride"),
    ),
    _backward(
        "sel",
        "dk and dv miss the first queries up to a multiple of l'",
        _first_rows_add_nothing("block"),
        _residue("block"),
    ),
    _backward(
        "sel", "a single query gives no dk and dv", _no_key_gradient, lambda c: c.tokens == 1
    ),
)
# Partial calls through the same wrappers, without a fault.
CONTROLS = tuple(
    partial_mutant(slot, phase, "the right call", lambda c: c.run(), lambda c: True)
    for slot in ("cmp", "select", "sel", "win")
    for phase in ("forward", "backward")
    if (slot, phase) != ("select", "backward")
)
