"""Faults of combine alone.

Left out as equivalent: with bf16 tensors, gates or dgates that are rounded to bf16. A correct
kernel rounds o to bf16, and this error is as large: it lies within the noise of the verdict.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from semantic.common import (
    BF16,
    FP16,
    FP32,
    dense,
    dtype_is,
    every,
    misaligned,
    packed,
    read_as_contiguous,
    read_rounded_down,
    reads,
    repeat_from,
    returns,
    rounded_to,
    scattered,
    tail_rows,
    without_subnormals,
    zero_from,
)
from semantic.model import View, mutant

_forward = functools.partial(mutant, "combine", "forward")
_backward = functools.partial(mutant, "combine", "backward")


def _gates_outside(c: View) -> bool:
    return bool(((c["gates"] < 0) | (c["gates"] > 1)).any())


def _without_nonfinite(c: View, x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def _nonfinite(c: View) -> bool:
    return any(not bool(c[name].isfinite().all()) for name in ("o_cmp", "o_sel", "o_win"))


def _zero_gates_skip(c: View) -> list[torch.Tensor]:
    """A branch whose gate is 0 is not read."""
    outputs = {
        name: c[name].masked_fill(c["gates"][..., i, None] == 0, 0)
        for i, name in enumerate(("o_cmp", "o_sel", "o_win"))
    }
    return c.run(**outputs)


def _sums_in(dtype: torch.dtype) -> Any:
    """Every product and partial sum is rounded to ``dtype``."""

    def fault(c: View) -> list[torch.Tensor]:
        total = torch.zeros(c["o_cmp"].shape, dtype=dtype)
        for i, name in enumerate(("o_cmp", "o_sel", "o_win")):
            total = total + (c["gates"][..., i, None].to(dtype) * c[name].to(dtype))
        return [total.to(c.dtype)]

    return fault


def _softmax_gates(c: View) -> list[torch.Tensor]:
    """Gates that sum to more than 1 are normalised."""
    total = c["gates"].sum(-1, keepdim=True)
    return c.run(gates=torch.where(total > 1, c["gates"] / total, c["gates"]))


MUTANTS = (
    _forward(
        "gates are clamped to [0, 1]", reads("gates", lambda c, g: g.clamp(0, 1)), _gates_outside
    ),
    _forward(
        "negative gates lose their sign",
        reads("gates", lambda c, g: g.abs()),
        lambda c: bool((c["gates"] < 0).any()),
    ),
    _forward("gates that sum to more than 1 are normalised", _softmax_gates),
    _forward("fp16 sums in bf16", _sums_in(BF16), dtype_is(FP16)),
    _forward("fp32 gates are rounded to fp16", reads("gates", rounded_to(FP16)), dtype_is(FP32)),
    _forward(
        "fp16 sums in fp16 and overflows",
        lambda c: [_sums_in(FP16)(c)[0].clamp(-1024, 1024)],
        dtype_is(FP16),
    ),
    _forward(
        "bf16 truncates instead of rounding",
        lambda c: [
            (
                c.run(**{n: c[n].float() for n in ("o_cmp", "o_sel", "o_win")})[0].view(torch.int32)
                & -65536
            )
            .view(torch.float32)
            .to(BF16)
        ],
        dtype_is(BF16),
    ),
    _forward(
        "a branch whose gate is 0 is not read",
        _zero_gates_skip,
        lambda c: bool((c["gates"] == 0).any()) and _nonfinite(c),
    ),
    _forward("NaN and Inf of o_win count as 0", reads("o_win", _without_nonfinite), _nonfinite),
    _forward(
        "channels of o_win from the 65th on are not added",
        reads("o_win", zero_from(-1, 64)),
        lambda c: c.dv > 64,
    ),
    _forward(
        "heads from the ninth on use the gates of the eighth",
        reads("gates", repeat_from(-2, 8)),
        lambda c: c.heads > 8,
    ),
    _forward(
        "the last partial tile of 32 rows misses sel",
        reads("o_sel", zero_from(-3, tail_rows(32))),
        lambda c: c.tokens > 32 and c.tokens % 32 != 0,
    ),
    _forward(
        "packed rows from the 65th on use the gates of the 64th",
        reads("gates", repeat_from(0, 64)),
        lambda c: packed(c) and c.tokens > 64,
    ),
    _forward(
        "sequences from the third on use the gates of the second",
        reads("gates", repeat_from(0, 2)),
        every(dense, lambda c: c.batch >= 3),
    ),
    _forward(
        "strided gates are read as contiguous",
        reads("gates", read_as_contiguous),
        scattered("gates"),
    ),
    _forward(
        "a strided o_sel is read as contiguous",
        reads("o_sel", read_as_contiguous),
        scattered("o_sel"),
    ),
    _forward(
        "o_cmp at an unaligned address is read rounded down",
        reads("o_cmp", read_rounded_down(16)),
        misaligned("o_cmp"),
    ),
    # backward
    _backward(
        "dgates of sel and win are exchanged",
        returns(0, lambda c, g: g[..., [0, 2, 1]].contiguous()),
    ),
    _backward(
        "dgates sum the first 64 channels",
        lambda c: [c.run(do=zero_from(-1, 64)(c, c["do"]))[0], *c.run()[1:]],
        lambda c: c.dv > 64,
    ),
    _backward(
        "dgates miss the last channel of an odd Dv",
        lambda c: [c.run(do=zero_from(-1, c.dv - 1)(c, c["do"]))[0], *c.run()[1:]],
        lambda c: c.dv % 2 == 1 and c.dv > 1,
    ),
    _backward(
        "dgates are 0 outside [0, 1]",
        lambda c: [c.run()[0].masked_fill((c["gates"] < 0) | (c["gates"] > 1), 0), *c.run()[1:]],
        _gates_outside,
    ),
    _backward("dgates of fp16 overflow", returns(0, lambda c, g: g.clamp(-8, 8)), dtype_is(FP16)),
    _backward(
        "do_win uses negative gates without their sign",
        lambda c: [*c.run()[:3], c.run(gates=c["gates"].abs())[3]],
        lambda c: bool((c["gates"] < 0).any()),
    ),
    _backward(
        "fp16 gradients below 2^-14 are flushed",
        returns((1, 2, 3), without_subnormals(2.0**-14)),
        dtype_is(FP16),
    ),
    _backward(
        "a strided o_cmp is read as contiguous",
        reads("o_cmp", read_as_contiguous),
        scattered("o_cmp"),
    ),
    _backward(
        "do_cmp of the last partial tile of 32 rows is zero",
        returns(1, zero_from(-3, tail_rows(32))),
        lambda c: c.tokens > 32 and c.tokens % 32 != 0,
    ),
    _backward(
        "sequences from the fourth on use the gates of the third",
        reads("gates", repeat_from(0, 3)),
        every(dense, lambda c: c.batch >= 4),
    ),
)
