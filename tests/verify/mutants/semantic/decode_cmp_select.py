"""Faults of the decode forms of cmp and select."""

from __future__ import annotations

from typing import Any

import torch

from semantic.common import (
    BF16,
    FP16,
    FP32,
    FP64,
    calls,
    dtype_is,
    empty_rows_lse_zero,
    every,
    in_dtype,
    overflow_without_max,
    per_row,
    reads,
    repeat_from,
    returns,
    rounded_to,
    scale_given,
    sizes,
    zero_from,
)
from semantic.decode_common import (
    decode,
    four_pages,
    new_rows,
    newest_row_masks,
    one_table,
    padded,
    page_size,
    starts,
    table,
)
from semantic.dense import (
    choose,
    cmp_mask,
    masked_decode,
    selected,
)
from semantic.model import View


def _ragged(c: View) -> bool:
    return len(set(c.lengths)) > 1


def _paged(c: View) -> bool:
    return c.call.block_table.shape[1] > 1 and max(c.lengths) > page_size(c)


def _padding_is(value: int) -> Any:
    """Rows past the new tokens hold ``value``."""

    def fault(c: View) -> list[torch.Tensor]:
        out = c.run()[0].clone()
        for b, (start, length) in enumerate(zip(starts(c), c.lengths)):
            out[b, length - start :] = value
        return [out, *c.run()[1:]]

    return fault


def _crowded(c: View) -> bool:
    return c.geometry.num_select_blocks(max(c.lengths)) > c.n


def _choose_at_longest(c: View) -> list[torch.Tensor]:
    """Local blocks of every sequence count from the longest sequence's end."""
    longest = max(c.lengths)

    def rule(c: View, scores: Any, token: Any) -> torch.Tensor:
        moved = (token + longest - int(token[-1]) - 1).clamp(max=int(token[-1]))
        return choose(c, scores, moved)

    return selected(c, rule)


def _last_block_at_page_end(c: View, scores: Any, token: Any) -> torch.Tensor:
    """Blocks of the last page are no candidates until its first compressed token is there."""
    block = torch.arange(scores.shape[-1])
    page = token[:, None] // page_size(c) * (page_size(c) // c.block)
    early = (token % page_size(c) < c.size - 1)[:, None]
    allowed = (block <= (token // c.block)[:, None]) & ~(early & (block >= page) & (block > 0))
    return choose(c, scores, token, candidates=allowed)


def _last_of_step(c: View, blocks: torch.Tensor) -> torch.Tensor:
    """All rows of a step share the blocks of its first row."""
    out = blocks.clone()
    for b, (start, length) in enumerate(zip(starts(c), c.lengths)):
        out[b, : length - start] = blocks[b, :1]
    return out


def _first_key_without_any(c: View, o: torch.Tensor, lse: torch.Tensor) -> None:
    """A row that sees no compressed token returns the first value of page 0."""
    for b, (start, length) in enumerate(zip(starts(c), c.lengths)):
        for row in range(min(length, c.size - 1) - start):
            o[b, row] = c["v_cmp"][0, 0].repeat_interleave(c.per_group, 0)


def _cmp_without_newest(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """A compressed token that a row of this step completed is not seen in this step."""
    start = int(c.call.starts[index])
    old = key * c.stride + c.size <= start
    return cmp_mask(c, token, key, index) & old


MUTANTS = (
    decode("cmp", "a given scale is ignored", calls(scale=lambda c: c.default_scale), scale_given),
    decode("cmp", "empty rows have lse 0", per_row(empty_rows_lse_zero)),
    decode(
        "cmp",
        "rows without a key return a stored value",
        per_row(_first_key_without_any),
        lambda c: any(a < min(b, c.size - 1) for a, b in zip(starts(c), c.lengths)),
    ),
    decode(
        "cmp",
        "sequences from the fourth on use the pages of the third",
        table(one_table),
        lambda c: c.batch >= 4,
    ),
    decode(
        "cmp",
        "pages from the fifth on wrap around",
        table(four_pages),
        lambda c: max(c.lengths) > 4 * page_size(c),
    ),
    decode(
        "cmp",
        "all rows of a step see what the last sees",
        lambda c: newest_row_masks(c, cmp_mask),
        lambda c: new_rows(c) > 1,
    ),
    decode(
        "cmp",
        "a compressed token completed in this step is not seen",
        lambda c: masked_decode(c, _cmp_without_newest),
    ),
    decode(
        "cmp",
        "kv heads from the fifth on read the fourth",
        reads("k_cmp", repeat_from(-2, 4), "v_cmp"),
        lambda c: c.groups >= 5,
    ),
    decode("cmp", "fp16 output passes through bf16", returns(0, rounded_to(BF16)), dtype_is(FP16)),
    decode("cmp", "fp64 is computed in fp32", in_dtype(FP32), dtype_is(FP64)),
    decode(
        "cmp",
        "scores use the first 64 channels",
        lambda c: c.run(q=zero_from(-1, 64)(c, c["q"])),
        lambda c: c.dk > 64,
    ),
    decode("cmp", "exp overflows above a score of 88", per_row(overflow_without_max)),
    decode(
        "cmp",
        "l = d counts as l = 2d",
        lambda c: masked_decode(
            c, lambda c, t, key, i: key * c.stride + 2 * c.stride - 1 <= t[:, None]
        ),
        lambda c: c.size == c.stride,
    ),
    decode(
        "select",
        "a given scale is ignored",
        calls(scale=lambda c: c.default_scale),
        every(scale_given, _crowded),
    ),
    decode("select", "ties go to the higher index", lambda c: selected(c, higher=True), _crowded),
    decode("select", "padding rows hold block 0", _padding_is(0), padded),
    decode(
        "select",
        "local blocks count from the longest sequence",
        _choose_at_longest,
        lambda c: _ragged(c) and c.geometry.local_blocks > 0,
    ),
    decode(
        "select",
        "blocks of a new page are no candidates at once",
        lambda c: selected(c, _last_block_at_page_end),
        _paged,
    ),
    decode(
        "select",
        "rows of a step share the blocks of the first",
        returns(0, _last_of_step),
        lambda c: new_rows(c) > 1,
    ),
    decode(
        "select",
        "block 0 is forced with init_blocks = 0",
        lambda c: selected(c, init=1),
        lambda c: c.geometry.init_blocks == 0 and _crowded(c),
    ),
    decode(
        "select",
        "two local blocks are forced with local_blocks >= 3",
        sizes(local_blocks=lambda c: 2),
        lambda c: c.geometry.local_blocks >= 3 and _crowded(c),
    ),
    decode(
        "select",
        "places from the 17th on stay empty",
        returns(0, lambda c, b: b.masked_fill(torch.arange(c.n) >= 16, -1)),
        lambda c: c.n > 16,
    ),
    decode(
        "select",
        "heads of a group from the fifth on are not summed",
        lambda c: selected(c, score={"heads": 4}),
        lambda c: c.per_group > 4 and _crowded(c),
    ),
    decode(
        "select",
        "the lse of fp16 is rounded to fp16",
        reads("lse", rounded_to(FP16)),
        every(dtype_is(FP16), _crowded, lambda c: c.per_group > 1),
    ),
)
