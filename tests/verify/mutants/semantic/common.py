"""Faults and conditions that the tables of several slots share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nsa_core.contract import BlockTables
from semantic.model import Condition, Fault, View

Change = Callable[[View, torch.Tensor], torch.Tensor]

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# Conditions
def dtype_is(*dtypes: torch.dtype) -> Condition:
    return lambda c: c.dtype in dtypes


def every(*conditions: Condition) -> Condition:
    return lambda c: all(condition(c) for condition in conditions)


def packed(c: View) -> bool:
    return c.packed


def dense(c: View) -> bool:
    return not c.packed


def scale_given(c: View) -> bool:
    return abs(c.scale - c.default_scale) > 1e-9


def padded(c: View) -> bool:
    """Whether a sequence of a decode step has fewer new tokens than another."""
    return any(b - a < c.tokens for a, b in zip(c.starts, c.lengths))


def scattered(name: str) -> Condition:
    """Whether tensor ``name`` is not contiguous."""
    return lambda c: not c[name].is_contiguous()


def misaligned(name: str, alignment: int = 16) -> Condition:
    """Whether the first byte of tensor ``name`` is not at a multiple of ``alignment``."""
    return lambda c: c[name].data_ptr() % alignment != 0


def power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


# Changes of a tensor
def storage_of(x: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of ``x`` as a flat tensor."""
    length = x.untyped_storage().nbytes() // x.element_size()
    return torch.as_strided(x, (length,), (1,), 0)


def read_as_contiguous(c: View, x: torch.Tensor) -> torch.Tensor:
    """Read the memory of ``x`` as if its strides were those of a contiguous tensor."""
    flat = storage_of(x)
    return flat[(x.storage_offset() + torch.arange(x.numel())) % len(flat)].view(x.shape)


def read_rounded_down(alignment: int) -> Change:
    """Read the memory of ``x`` from its address rounded down to a multiple of ``alignment``."""

    def change(c: View, x: torch.Tensor) -> torch.Tensor:
        shift = min(x.data_ptr() % alignment // x.element_size(), x.storage_offset())
        return torch.as_strided(x, x.shape, x.stride(), x.storage_offset() - shift).clone()

    return change


def zero_from(axis: int, first: int | Callable[[View], int]) -> Change:
    """Set the entries from index ``first`` of ``axis`` on to zero."""

    def change(c: View, x: torch.Tensor) -> torch.Tensor:
        start = first if isinstance(first, int) else first(c)
        x = x.clone()
        x.narrow(axis, start, x.shape[axis] - start).zero_()
        return x

    return change


def repeat_from(axis: int, first: int) -> Change:
    """Replace the entries from index ``first`` of ``axis`` on by entry ``first - 1``."""

    def change(c: View, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(x.shape[axis]).clamp(max=first - 1)
        return x.index_select(axis, index)

    return change


def rounded_to(dtype: torch.dtype) -> Change:
    """Round to ``dtype`` and back."""
    return lambda c, x: x.to(dtype).to(x.dtype)


def without_subnormals(smallest: float) -> Change:
    """Flush numbers below ``smallest`` to zero."""
    return lambda c, x: torch.where(x.abs() < smallest, torch.zeros_like(x), x)


# Faults
def reads(name: str, change: Change, *others: str) -> Fault:
    """The healthy function on a changed tensor ``name``, and changed ``others``."""
    return lambda c: c.run(**{key: change(c, c[key]) for key in (name, *others)})


def calls(**fields: Callable[[View], Any]) -> Fault:
    """The healthy function with changed fields of the call."""
    return lambda c: c.run(**{name: value(c) for name, value in fields.items()})


def reads_table(change: Change) -> Fault:
    """The healthy decode form with a changed block table of the branch that it reads."""

    def tables(c: View) -> BlockTables:
        tables = {branch: c.call.table(branch) for branch in BlockTables._fields}
        return BlockTables(**tables | {c.branch: change(c, tables[c.branch].clone())})

    return calls(tables=tables, sequences=lambda c: None)


def sizes(**fields: Callable[[View], int]) -> Fault:
    """The healthy function with changed fields of the geometry."""
    return lambda c: c.run(geometry={name: value(c) for name, value in fields.items()})


def returns(indices: int | tuple[int, ...], change: Change) -> Fault:
    """The healthy function with changed results."""
    changed = (indices,) if isinstance(indices, int) else indices
    return lambda c: [
        change(c, x.clone()) if i in changed else x.clone() for i, x in enumerate(c.run())
    ]


def heads_of_group_zero_from(count: Callable[[View], int]) -> Fault:
    """The healthy function, whose heads of each group from number ``count(c)`` on give zero."""

    def change(c: View, o: torch.Tensor) -> torch.Tensor:
        heads = o.unflatten(-2, (c.groups, -1))
        return zero_from(-2, count(c))(c, heads).flatten(-3, -2)

    return returns(0, change)


def in_dtype(dtype: torch.dtype) -> Fault:
    """The healthy function on inputs rounded to ``dtype`` and computed in it."""

    def fault(c: View) -> list[torch.Tensor]:
        changes = {
            name: x.to(dtype)
            for name, x in c.tensors.items()
            if x.is_floating_point() and not (name == "lse" and dtype != FP64)
        }
        if dtype in (FP32, FP64):
            changes |= {n: c[n].to(dtype) for n in ("lse", "gates") if n in c.tensors}
        return [
            wrong.to(right.dtype) if right.is_floating_point() else wrong
            for wrong, right in zip(c.run(**changes), c.run())
        ]

    return fault


def per_row(change: Callable[[View, torch.Tensor, torch.Tensor], None]) -> Fault:
    """Change o [..., Hq, Dv] and lse [..., Hq] in place by ``change(c, o, lse)``."""

    def fault(c: View) -> list[torch.Tensor]:
        o, lse = (x.clone() for x in c.run())
        change(c, o, lse.transpose(-1, -2))
        return [o, lse]

    return fault


def empty_rows_lse_zero(c: View, o: torch.Tensor, lse: torch.Tensor) -> None:
    lse.masked_fill_(lse == -torch.inf, 0)


def overflow_without_max(c: View, o: torch.Tensor, lse: torch.Tensor) -> None:
    """The softmax does not subtract the maximum: exp overflows above a score of 88.7."""
    high = lse > 88.7
    o[high] = torch.nan
    lse[high] = torch.inf


def underflow_without_max(c: View, o: torch.Tensor, lse: torch.Tensor) -> None:
    """The softmax does not subtract the maximum: every exp is 0 below a score of -104."""
    low = (lse < -104) & (lse > -torch.inf)
    o[low] = 0
    lse[low] = -torch.inf


def tail_rows(tile: int) -> Callable[[View], int]:
    """Return the number of tokens in whole tiles of ``tile``."""
    return lambda c: c.tokens // tile * tile


def _first_heads_only(c: View, count: int) -> torch.Tensor:
    """dO without the heads of each group from number ``count`` on."""
    do = c["do"].unflatten(-2, (c.groups, c.per_group)).clone()
    do[..., count:, :] = 0
    return do.flatten(-3, -2)


def gradient_of_first_heads(count: int, *grads: int) -> Fault:
    """The results ``grads`` miss the heads of each group from number ``count`` on."""

    def fault(c: View) -> list[torch.Tensor]:
        results, fewer = c.run(), c.run(do=_first_heads_only(c, count))
        return [fewer[i] if i in grads else result for i, result in enumerate(results)]

    return fault
