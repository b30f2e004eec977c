"""Faults of sel, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import torch

from semantic.common import (
    BF16,
    FP16,
    FP32,
    FP64,
    calls,
    dense,
    dtype_is,
    empty_rows_lse_zero,
    every,
    heads_of_group_zero_from,
    in_dtype,
    misaligned,
    packed,
    per_row,
    power_of_two,
    read_as_contiguous,
    read_rounded_down,
    reads,
    repeat_from,
    returns,
    rounded_to,
    scale_given,
    scattered,
    zero_from,
)
from semantic.dense import chosen, counts, key_gradients, masked, sel_mask
from semantic.model import View, mutant

_forward = functools.partial(mutant, "sel", "forward")
_backward = functools.partial(mutant, "sel", "backward")


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


def _only_head(c: View, head: int) -> torch.Tensor:
    do = c["do"].unflatten(-2, (c.groups, c.per_group))
    keep = torch.arange(c.per_group).view(-1, 1) == head
    return (do * keep).flatten(-3, -2)


def _dv_of_first_head(c: View) -> list[torch.Tensor]:
    return [*c.run()[:2], c.run(do=_only_head(c, 0))[2]]


def _last_document_has_no(*indices: int) -> Any:
    def fault(c: View) -> list[torch.Tensor]:
        results = [x.clone() for x in c.run()]
        for i in indices:
            results[i][c.boundaries[-2] :] = 0
        return results

    return fault


def _int64_read_as_int32(c: View, blocks: torch.Tensor) -> torch.Tensor:
    return blocks.contiguous().view(torch.int32)[..., : blocks.shape[-1]].contiguous()


def _reads_int64(c: View) -> bool:
    return c["blocks"].dtype == torch.int64


MUTANTS = (
    _forward(
        "blocks from the 17th on are dropped",
        reads("blocks", lambda c, b: b[..., :16].contiguous()),
        lambda c: _listed(c) > 16,
    ),
    _forward(
        "a number of blocks that is no power of two loses the last",
        reads("blocks", lambda c, b: b[..., : _listed(c) - 1].contiguous()),
        lambda c: not power_of_two(_listed(c)),
    ),
    _forward(
        "a block named twice apart counts twice",
        lambda c: masked(c, sel_mask, weight=_multiplicity),
        _repeated_apart,
    ),
    _forward("the loop over blocks stops at -1", reads("blocks", _stop_at_hole), _hole),
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
    _forward("int64 blocks are read as int32", reads("blocks", _int64_read_as_int32), _reads_int64),
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
    _forward("a given scale is ignored", calls(scale=lambda c: c.default_scale), scale_given),
    _forward(
        "a negative scale loses its sign", calls(scale=lambda c: -c.scale), lambda c: c.scale < 0
    ),
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
    _forward("fp32 is computed in bf16", in_dtype(BF16), dtype_is(FP32)),
    _forward("fp64 is computed in fp32", in_dtype(FP32), dtype_is(FP64)),
    _forward("bf16 lse is rounded to bf16", returns(1, rounded_to(BF16)), dtype_is(BF16)),
    _forward(
        "values use the first Dk channels",
        lambda c: c.run(v=zero_from(-1, c.dk)(c, c["v"])),
        lambda c: c.dv > c.dk,
    ),
    _forward(
        "channels of v from the 65th on are zero",
        lambda c: c.run(v=zero_from(-1, 64)(c, c["v"])),
        lambda c: c.dv > 64,
    ),
    _forward(
        "Inf in an output is replaced by the largest number",
        lambda c: [x.nan_to_num(nan=torch.nan) if i == 0 else x for i, x in enumerate(c.run())],
    ),
    # backward
    _backward(
        "blocks from the 17th on are dropped",
        reads("blocks", lambda c, b: b[..., :16].contiguous()),
        lambda c: _listed(c) > 16,
    ),
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
    _backward("dv sums the first head of a group", _dv_of_first_head, lambda c: c.per_group > 1),
    _backward(
        "a block named twice apart counts twice in dk and dv",
        key_gradients(sel_mask, weight=_multiplicity),
        _repeated_apart,
    ),
    _backward("the loop over blocks stops at -1", reads("blocks", _stop_at_hole), _hole),
    _backward(
        "dk and dv of the last document are zero",
        _last_document_has_no(1, 2),
        lambda c: packed(c) and len(c.lengths) > 2,
    ),
    _backward(
        "dk of the last partial block is zero",
        lambda c: [
            zero_from(-3, c.tokens // c.block * c.block)(c, x) if i == 1 else x
            for i, x in enumerate(c.run())
        ],
        lambda c: c.tokens % c.block != 0,
    ),
    _backward("a given scale is ignored", calls(scale=lambda c: c.default_scale), scale_given),
    _backward(
        "a strided or expanded dO is read as contiguous",
        reads("do", read_as_contiguous),
        scattered("do"),
    ),
    _backward(
        "int64 blocks are read as int32", reads("blocks", _int64_read_as_int32), _reads_int64
    ),
    _backward("fp16 dv passes through bf16", returns(2, rounded_to(BF16)), dtype_is(FP16)),
    _backward("fp64 is computed in fp32", in_dtype(FP32), dtype_is(FP64)),
    _backward(
        "the last channel of an odd Dk has no gradient",
        lambda c: [zero_from(-1, c.dk - 1)(c, x) if i < 2 else x for i, x in enumerate(c.run())],
        lambda c: c.dk % 2 == 1,
    ),
    _backward(
        "sequences from the third on read the lse of the second",
        reads("lse", repeat_from(0, 2)),
        every(dense, lambda c: c.batch >= 3),
    ),
)
