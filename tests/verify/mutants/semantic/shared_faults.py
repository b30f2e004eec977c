"""Faults that several slots share."""

from __future__ import annotations

import torch

from semantic.common import (
    BF16,
    FP16,
    FP32,
    FP64,
    calls,
    dtype_is,
    empty_rows_lse_zero,
    gradient_of_first_heads,
    in_dtype,
    overflow_without_max,
    padded,
    per_row,
    read_as_contiguous,
    reads,
    reads_table,
    repeat_from,
    returns,
    rounded_to,
    scale_given,
    scattered,
    zero_from,
)
from semantic.model import View, mutants


def _padding_repeats_last(c: View) -> list[torch.Tensor]:
    results = [x.clone() for x in c.run()]
    for b, (start, length) in enumerate(zip(c.starts, c.lengths)):
        if start < length:
            results[0][b, length - start :] = results[0][b, length - start - 1]
    return results


def _idle_shifts_batch(c: View) -> list[torch.Tensor]:
    """Results of active sequences are stored without gaps for idle ones."""
    active = [b for b, (x, y) in enumerate(zip(c.starts, c.lengths)) if x < y]
    results = []
    for x in c.run():
        moved = x.clone()
        moved[: len(active)] = x[active]
        results.append(moved)
    return results


def _idle_before_active(c: View) -> bool:
    state = [a < b for a, b in zip(c.starts, c.lengths)]
    return False in state and True in state[state.index(False) :]


MUTANTS = (
    *mutants(
        {
            "cmp": "forward backward decode",
            "select": "forward",
            "sel": "forward backward decode",
            "win": "forward",
        },
        "a given scale is ignored",
        calls(scale=lambda c: c.default_scale),
        scale_given,
    ),
    *mutants(
        {"cmp": "forward", "select": "forward", "sel": "forward", "win": "decode"},
        "a negative scale loses its sign",
        calls(scale=lambda c: -c.scale),
        lambda c: c.scale < 0,
    ),
    *mutants(
        {
            "cmp": "forward backward decode",
            "sel": "forward backward",
            "win": "backward decode",
            "combine": "forward backward",
        },
        "fp64 is computed in fp32",
        in_dtype(FP32),
        dtype_is(FP64),
    ),
    *mutants({"sel": "forward decode"}, "fp32 is computed in bf16", in_dtype(BF16), dtype_is(FP32)),
    *mutants(
        {"cmp": "forward decode", "win": "forward decode"},
        "fp16 output passes through bf16",
        returns(0, rounded_to(BF16)),
        dtype_is(FP16),
    ),
    *mutants({"cmp": "forward decode"}, "empty rows have lse 0", per_row(empty_rows_lse_zero)),
    *mutants(
        {"cmp": "forward decode"},
        "exp overflows above a score of 88",
        per_row(overflow_without_max),
    ),
    *mutants(
        {"cmp": "forward decode"},
        "scores use the first 64 channels",
        reads("q", zero_from(-1, 64)),
        lambda c: c.dk > 64,
    ),
    *mutants(
        {"cmp": "forward", "sel": "decode"},
        "channels of o from Dk on are zero",
        returns(0, zero_from(-1, lambda c: c.dk)),
        lambda c: c.dv > c.dk,
    ),
    *mutants(
        {"combine": "forward", "win": "decode"},
        "the last channel of an odd Dv is zero",
        returns(0, zero_from(-1, lambda c: c.dv - 1)),
        lambda c: c.dv % 2 == 1 and c.dv > 1,
    ),
    *mutants(
        {"cmp": "forward decode"},
        "kv heads from the fifth on read the fourth",
        reads("k_cmp", repeat_from(-2, 4), "v_cmp"),
        lambda c: c.groups >= 5,
    ),
    *mutants(
        {"cmp": "forward", "sel": "decode"},
        "a strided q is read as contiguous",
        reads("q", read_as_contiguous),
        scattered("q"),
    ),
    # backward
    *mutants(
        dict.fromkeys(("cmp", "sel", "combine"), "backward"),
        "a strided or expanded dO is read as contiguous",
        reads("do", read_as_contiguous),
        scattered("do"),
    ),
    *mutants(
        {"cmp": "backward", "sel": "backward"},
        "dv sums the first head of a group",
        gradient_of_first_heads(1, 2),
        lambda c: c.per_group > 1,
    ),
    # decode
    *mutants(
        {"cmp": "decode", "sel": "decode"},
        "sequences from the fourth on use the pages of the third",
        reads_table(repeat_from(0, 3)),
        lambda c: c.batch >= 4,
    ),
    *mutants(
        {"cmp": "decode", "sel": "decode"},
        "pages from the fifth on wrap around",
        reads_table(lambda c, table: table[:, torch.arange(table.shape[1]) % 4]),
        lambda c: max(c.lengths) > 4 * c.page_size,
    ),
    *mutants(
        {"sel": "decode", "win": "decode"},
        "padding rows repeat the last token",
        _padding_repeats_last,
        padded,
    ),
    *mutants(
        {"sel": "decode", "win": "decode"},
        "results of idle sequences are closed up",
        _idle_shifts_batch,
        _idle_before_active,
    ),
)
