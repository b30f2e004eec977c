"""Faults of sel alone."""

from __future__ import annotations

import functools
from typing import Any

import torch

from semantic.common import (
    BF16,
    FP16,
    dense,
    dtype_is,
    empty_rows_lse_zero,
    every,
    heads_of_group_zero_from,
    misaligned,
    packed,
    per_row,
    power_of_two,
    read_as_contiguous,
    read_rounded_down,
    reads,
    reads_table,
    repeat_from,
    returns,
    rounded_to,
    scattered,
    zero_from,
)
from semantic.dense import chosen, counts, key_gradients, masked, masked_decode, sel_mask
from semantic.model import View, mutant, mutants

_forward = functools.partial(mutant, "sel", "forward")
_backward = functools.partial(mutant, "sel", "backward")
_decode = functools.partial(mutant, "sel", "decode")


def _listed(c: View) -> int:
    return c["blocks"].shape[-1]


def _sorted(c: View) -> torch.Tensor:
    return c["blocks"].long().sort(-1).values


def _repeated(c: View) -> bool:
    blocks = _sorted(c)
    return bool(((blocks[..., 1:] == blocks[..., :-1]) & (blocks[..., 1:] >= 0)).any())


def _repeated_apart(c: View) -> bool:
    """Whether a row names a block twice with another one between."""
    return _repeated(c) and not torch.equal(_sorted(c), c["blocks"].long())


def _multiplicity(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    times = counts(chosen(c, index)[: len(token)], len(key) // c.block + 1)
    return times[..., key // c.block].double()


def _hole(c: View) -> bool:
    """Whether -1 comes before a block."""
    blocks = c["blocks"]
    return bool(((blocks[..., :-1] < 0) & (blocks[..., 1:] >= 0)).any())


def _stop_at_hole(c: View, blocks: torch.Tensor) -> torch.Tensor:
    return blocks.masked_fill((blocks < 0).cumsum(-1) > 0, -1)


def _with_blocks(change: Any) -> Any:
    """The mask of blocks that ``change(c, blocks [S, G, n], token, index)`` returns."""

    def mask(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
        blocks = chosen(c, index)[: len(token)]
        return sel_mask(c, token, key, index, change(c, blocks, token, index))

    return lambda c: masked(c, mask)


def _minus_one_is_block_zero(c: View, blocks: Any, token: Any, index: int) -> torch.Tensor:
    return blocks.clamp(min=0)


def _minus_one_is_current(c: View, blocks: Any, token: Any, index: int) -> torch.Tensor:
    return torch.where(blocks < 0, (token // c.block)[:, None, None], blocks)


def _out_of_range_is_current(c: View, blocks: Any, token: Any, index: int) -> torch.Tensor:
    return torch.minimum(blocks, (token // c.block)[:, None, None])


def _own_block_without_any(c: View, blocks: Any, token: Any, index: int) -> torch.Tensor:
    empty = (blocks < 0).all(-1, keepdim=True)
    return torch.where(empty, (token // c.block)[:, None, None], blocks)


def _low_bits(bits: int) -> Any:
    def change(c: View, blocks: Any, token: Any, index: int) -> torch.Tensor:
        return torch.where(blocks >= 0, blocks % (1 << bits), blocks)

    return change


def _padded_block(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """Blocks reach to the next power of two of l'."""
    reach = 1 << (c.block - 1).bit_length()
    member = counts(chosen(c, index)[: len(token)], len(key) // c.block + 1) > 0
    seen = member[..., key // c.block]
    spill = member[..., (key // c.block - 1).clamp(min=0)] & (key >= c.block)
    spill &= (key % c.block + c.block) < reach
    return (seen | spill) & (key <= token[:, None])[:, None]


def _only_last_block_is_causal(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """Only the last listed block gets a causal mask, as if the list were sorted."""
    blocks = chosen(c, index)[: len(token)]
    total = len(key) // c.block + 1
    inside = (blocks >= 0) & (blocks < total)
    place = torch.arange(blocks.shape[-1]).expand_as(blocks).masked_fill(~inside, -1).argmax(-1)
    last = blocks.gather(-1, place[..., None])
    free = counts(blocks.masked_fill(blocks == last, -1), total) > 0
    causal = sel_mask(c, token, key, index)
    current = (token // c.block)[:, None, None] == (key // c.block)
    return causal | (free[..., key // c.block] & current)


def _last_partial_block_missing(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    whole = len(key) // c.block * c.block
    return sel_mask(c, token, key, index) & ((key < whole) | (key == token[:, None]))[:, None]


def _token_at_block_start_missing(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """A query at the first token of a block treats its own block as future."""
    start = (token % c.block == 0)[:, None] & (key == token[:, None]) & (token > 0)[:, None]
    return sel_mask(c, token, key, index) & ~start[:, None]


def _global_blocks(c: View) -> list[torch.Tensor]:
    """Documents start at the multiple of l' below their first row."""
    results = [x.clone() for x in c.run()]
    for piece in c.pieces():
        start = c.boundaries[piece.index]
        shift = start % c.block
        if not shift or not piece.length:
            continue
        k, v = (torch.roll(c[x], shift, 0) for x in ("k", "v"))
        moved = c.run(k=k, v=v)
        results[0][piece.rows] = moved[0][piece.rows]
    return results


def _capped_rows(cap: int) -> Any:
    """A mask that keeps the first ``cap`` queries of every block, for dk and dv."""

    def mask(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
        seen = sel_mask(c, token, key, index)
        starts = torch.arange(0, len(key), c.block)
        rank = seen[..., starts].long().cumsum(0)
        return seen & (rank[..., key // c.block] <= cap)

    return mask


def _int64_read_as_int32(c: View, blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.int32)[..., : blocks.shape[-1]].contiguous()


def _last_page_is_the_one_before(c: View, table: torch.Tensor) -> torch.Tensor:
    """A page that the newest token fills exactly is looked up one too early."""
    for b, length in enumerate(c.lengths):
        if length and length % c.page_size == 0 and length > c.page_size:
            table[b, length // c.page_size - 1] = table[b, length // c.page_size - 2]
    return table


def _fills_page(c: View) -> bool:
    return any(x and x % c.page_size == 0 and x > c.page_size for x in c.lengths)


def _sel_ignores_earlier_new(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    start = int(c.call.starts[index])
    own = (key == token[:, None]) | (key < start)
    return sel_mask(c, token, key, index) & own[:, None]


def _sel_misses_newest_at_page_end(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """The last row of a page is not read."""
    return sel_mask(c, token, key, index) & (key % c.page_size != c.page_size - 1)


def _future_cut_at_length(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """Keys are cut at the sequence's end, not at the row's own token."""
    last = token[-1:].expand_as(token)
    return sel_mask(c, last, key, index, chosen(c, index)[: len(token)])


def _split_without_rescale(c: View, o: torch.Tensor, lse: torch.Tensor) -> None:
    """The lse of the last of two splits of long sequences is returned."""
    for b, length in enumerate(c.lengths):
        if length > 64:
            lse[b] -= 0.01


MUTANTS = (
    *mutants(
        {"sel": "forward backward decode"},
        "blocks from the 17th on are dropped",
        reads("blocks", lambda c, b: b[..., :16].contiguous()),
        lambda c: _listed(c) > 16,
    ),
    *mutants(
        {"sel": "forward backward decode"},
        "the loop over blocks stops at -1",
        reads("blocks", _stop_at_hole),
        _hole,
    ),
    *mutants(
        {"sel": "forward backward"},
        "int64 blocks are read as int32",
        reads("blocks", _int64_read_as_int32),
        lambda c: c["blocks"].dtype == torch.int64,
    ),
    # forward
    _forward(
        "a number of blocks that is no power of two loses the last",
        reads("blocks", lambda c, b: b[..., :-1].contiguous()),
        lambda c: not power_of_two(_listed(c)),
    ),
    _forward(
        "a block named twice apart counts twice",
        lambda c: masked(c, sel_mask, weight=_multiplicity),
        _repeated_apart,
    ),
    _forward(
        "-1 is read as block 0",
        _with_blocks(_minus_one_is_block_zero),
        lambda c: bool((c["blocks"] < 0).any()),
    ),
    _forward(
        "-1 is read as the current block",
        _with_blocks(_minus_one_is_current),
        lambda c: bool((c["blocks"] < 0).any()),
    ),
    _forward(
        "a block out of range is clamped to the current one",
        _with_blocks(_out_of_range_is_current),
        lambda c: bool((c["blocks"] * c.block >= max(c.lengths)).any()),
    ),
    _forward(
        "a row without blocks attends to its own block",
        _with_blocks(_own_block_without_any),
        lambda c: bool((c["blocks"] < 0).all(-1).any()),
    ),
    _forward("a row without blocks has lse 0", per_row(empty_rows_lse_zero)),
    _forward(
        "block indices are stored in 4 bits",
        _with_blocks(_low_bits(4)),
        lambda c: max(c.lengths) > 16 * c.block,
    ),
    _forward(
        "a block reaches to the next power of two",
        lambda c: masked(c, _padded_block),
        lambda c: not power_of_two(c.block),
    ),
    _forward(
        "only the last listed block is cut at the query",
        lambda c: masked(c, _only_last_block_is_causal),
        lambda c: not torch.equal(_sorted(c), c["blocks"].long()),
    ),
    _forward(
        "the last partial block of a sequence is skipped",
        lambda c: masked(c, _last_partial_block_missing),
        lambda c: any(x % c.block for x in c.lengths),
    ),
    _forward(
        "the first token of a block does not see itself",
        lambda c: masked(c, _token_at_block_start_missing),
        lambda c: max(c.lengths) > c.block,
    ),
    _forward("blocks of a document are aligned to the packed axis", _global_blocks, packed),
    _forward(
        "kv heads from the fifth on read the blocks of the fourth",
        reads("blocks", repeat_from(-2, 4)),
        lambda c: c.groups >= 5,
    ),
    _forward(
        "heads of a group from the 17th on give zero",
        heads_of_group_zero_from(lambda c: 16),
        lambda c: c.per_group > 16,
    ),
    _forward(
        "a group of 3, 5, 6 or 7 heads loses the last",
        heads_of_group_zero_from(lambda c: c.per_group - 1),
        lambda c: c.per_group in (3, 5, 6, 7),
    ),
    _forward(
        "sequences from the fourth on read the blocks of the third",
        reads("blocks", repeat_from(0, 3)),
        every(dense, lambda c: c.batch >= 4),
    ),
    _forward("an expanded k is read as contiguous", reads("k", read_as_contiguous), scattered("k")),
    _forward(
        "q at an unaligned address is read rounded down",
        reads("q", read_rounded_down(16)),
        misaligned("q"),
    ),
    _forward("fp16 probabilities pass through bf16", returns(0, rounded_to(BF16)), dtype_is(FP16)),
    _forward("bf16 lse is rounded to bf16", returns(1, rounded_to(BF16)), dtype_is(BF16)),
    _forward(
        "values use the first Dk channels",
        reads("v", zero_from(-1, lambda c: c.dk)),
        lambda c: c.dv > c.dk,
    ),
    _forward(
        "channels of v from the 65th on are zero",
        reads("v", zero_from(-1, 64)),
        lambda c: c.dv > 64,
    ),
    _forward(
        "Inf in an output is replaced by the largest number",
        returns(0, lambda c, o: o.nan_to_num(nan=torch.nan)),
    ),
    # backward
    _backward(
        "dk and dv miss the queries of a block from the 65th on",
        key_gradients(_capped_rows(64)),
        lambda c: max(c.lengths) > 64,
    ),
    _backward(
        "dk and dv miss the queries of a block from the 1025th on",
        key_gradients(_capped_rows(1024)),
        lambda c: max(c.lengths) > 1024,
    ),
    _backward(
        "a block named twice apart counts twice in dk and dv",
        key_gradients(sel_mask, weight=_multiplicity),
        _repeated_apart,
    ),
    _backward(
        "dk and dv of the last document are zero",
        returns((1, 2), zero_from(0, lambda c: c.boundaries[-2])),
        lambda c: packed(c) and len(c.lengths) > 2,
    ),
    _backward(
        "dk of the last partial block is zero",
        returns(1, zero_from(-3, lambda c: c.tokens // c.block * c.block)),
        lambda c: c.tokens % c.block != 0,
    ),
    _backward("fp16 dv passes through bf16", returns(2, rounded_to(BF16)), dtype_is(FP16)),
    _backward(
        "the last channel of an odd Dk has no gradient",
        returns((0, 1), zero_from(-1, lambda c: c.dk - 1)),
        lambda c: c.dk % 2 == 1,
    ),
    _backward(
        "sequences from the third on read the lse of the second",
        reads("lse", repeat_from(0, 2)),
        every(dense, lambda c: c.batch >= 3),
    ),
    # decode
    _decode(
        "a page that is just full is looked up one too early",
        reads_table(_last_page_is_the_one_before),
        _fills_page,
    ),
    _decode(
        "the last row of a page is not read",
        lambda c: masked_decode(c, _sel_misses_newest_at_page_end),
        lambda c: max(c.lengths) >= c.page_size,
    ),
    _decode(
        "rows of a step do not see its earlier rows",
        lambda c: masked_decode(c, _sel_ignores_earlier_new),
        lambda c: c.new_rows > 1,
    ),
    _decode(
        "keys are cut at the end of the sequence",
        lambda c: masked_decode(c, _future_cut_at_length),
        lambda c: c.new_rows > 1,
    ),
    _decode(
        "rows of a step from the 17th on give zero",
        returns(0, zero_from(1, 16)),
        lambda c: c.new_rows > 16,
    ),
    _decode(
        "the lse misses a split of a long sequence",
        per_row(_split_without_rescale),
        lambda c: max(c.lengths) > 64,
    ),
)
