"""Faults of select alone.

Left out as equivalent: a block that is both initial and local takes two places. The two kinds
overlap at a token only if it has fewer than init_blocks + local_blocks candidates. The contract
demands n >= init_blocks + local_blocks, so every candidate is chosen with or without the fault.
"""

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
    every,
    in_dtype,
    misaligned,
    packed,
    padded,
    power_of_two,
    read_as_contiguous,
    read_rounded_down,
    reads,
    repeat_from,
    returns,
    rounded_to,
    scale_given,
    scattered,
    sizes,
    zero_from,
)
from semantic.dense import choose, selected
from semantic.model import View, mutant, mutants

_forward = functools.partial(mutant, "select", "forward")
_decode = functools.partial(mutant, "select", "decode")


def _crowded(c: View) -> bool:
    """Whether a sequence has more candidates than places."""
    return c.geometry.num_select_blocks(max(c.lengths)) > c.n


def _taps_of(size: Any) -> Any:
    """Use the overlap weights of another l."""

    def fault(c: View) -> list[torch.Tensor]:
        step, per = size(c) // c.stride, c.block // c.stride
        taps = []
        for i in range(1 - step, per):
            shared = min(i * c.stride + size(c), c.block) - max(i * c.stride, 0)
            taps.append((i, shared // c.stride))
        return selected(c, score={"taps": taps})

    return fault


def _equal_taps(c: View) -> list[torch.Tensor]:
    return selected(c, score={"taps": [(tap, 1) for tap, _ in c.geometry.overlap_weights()]})


def _without_straddling_taps(c: View) -> list[torch.Tensor]:
    return selected(c, score={"taps": [x for x in c.geometry.overlap_weights() if x[0] >= 0]})


def _current_excluded_at_start(c: View, scores: Any, token: Any) -> torch.Tensor:
    block = torch.arange(scores.shape[-1])
    return choose(c, scores, token, candidates=block * c.block < token.clamp(min=1)[:, None])


def _only_whole_blocks(c: View, scores: Any, token: Any) -> torch.Tensor:
    """The partial block at the end of a sequence is no candidate."""
    block, length = torch.arange(scores.shape[-1]), int(token[-1]) + 1
    allowed = (block <= (token // c.block)[:, None]) & (block < max(1, length // c.block))
    return choose(c, scores, token, candidates=allowed)


def _first_candidates(count: int) -> Any:
    """Only the first ``count`` blocks are scored; local blocks are still forced."""

    def rule(c: View, scores: Any, token: Any) -> torch.Tensor:
        block, current = torch.arange(scores.shape[-1]), (token // c.block)[:, None]
        local = (block <= current) & (block > current - c.geometry.local_blocks)
        return choose(c, scores, token, candidates=((block < count) & (block <= current)) | local)

    return lambda c: selected(c, rule)


def _descending(c: View, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks from the highest index to the lowest, then -1."""
    return blocks.sort(-1, descending=True).values


def _padding_first(c: View, blocks: torch.Tensor) -> torch.Tensor:
    return blocks.sort(-1).values


def _padded_with_zero(c: View, blocks: torch.Tensor) -> torch.Tensor:
    return blocks.clamp(min=0)


def _padded_with_future(c: View, blocks: torch.Tensor) -> torch.Tensor:
    """Places without a candidate hold the next future block."""
    following = torch.arange(blocks.shape[-1], dtype=torch.int32)
    return torch.where(blocks < 0, following, blocks)


def _scores_rounded(dtype: torch.dtype) -> Any:
    return lambda c: selected(c, lambda c, s, t: choose(c, s.to(dtype).to(s.dtype), t))


def _last_places_dropped(c: View, blocks: torch.Tensor) -> torch.Tensor:
    """Only 16 places are filled: a list of more keeps the first 15 and the last."""
    count = (blocks >= 0).sum(-1, keepdim=True)
    last = blocks.gather(-1, (count - 1).clamp(min=0))
    shown = torch.where(count > 16, 15, count)
    place = torch.arange(blocks.shape[-1])
    short = blocks.masked_fill(place >= shown, -1)
    return torch.where((count > 16) & (place == 15), last, short)


def _document_starts_at_block(c: View) -> list[torch.Tensor]:
    """Block numbers count from the multiple of l' below the document's first row."""
    blocks = c.run()[0].clone()
    for piece in c.pieces():
        if piece.length and c.boundaries[piece.index] % c.block:
            token = torch.arange(piece.length) + c.boundaries[piece.index] % c.block
            shift = (token // c.block - torch.arange(piece.length) // c.block).view(-1, 1, 1)
            part = blocks[piece.rows]
            blocks[piece.rows] = torch.where(part > 0, part + shift.int(), part)
    return [blocks]


def _first_document_tail(c: View) -> list[torch.Tensor]:
    """All documents from the third on read the compressed keys from the packed start."""
    index = torch.arange(len(c["k_cmp"]))
    for piece in c.pieces():
        if piece.index >= 2:
            index[piece.keys] = torch.arange(piece.keys.stop - piece.keys.start)
    return c.run(k_cmp=c["k_cmp"][index])


def _ragged(c: View) -> bool:
    return len(set(c.lengths)) > 1


def _paged(c: View) -> bool:
    return c.call.tables.cmp.shape[1] > 1 and max(c.lengths) > c.page_size


def _padding_is(value: int) -> Any:
    """Rows past the new tokens hold ``value``."""

    def fault(c: View) -> list[torch.Tensor]:
        out = c.run()[0].clone()
        for b, (start, length) in enumerate(zip(c.starts, c.lengths)):
            out[b, length - start :] = value
        return [out, *c.run()[1:]]

    return fault


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
    page = token[:, None] // c.page_size * (c.page_size // c.block)
    early = (token % c.page_size < c.size - 1)[:, None]
    allowed = (block <= (token // c.block)[:, None]) & ~(early & (block >= page) & (block > 0))
    return choose(c, scores, token, candidates=allowed)


def _last_of_step(c: View, blocks: torch.Tensor) -> torch.Tensor:
    """All rows of a step share the blocks of its first row."""
    out = blocks.clone()
    for b, (start, length) in enumerate(zip(c.starts, c.lengths)):
        out[b, : length - start] = blocks[b, :1]
    return out


MUTANTS = (
    *mutants(
        {"select": "forward decode"},
        "block 0 is forced with init_blocks = 0",
        lambda c: selected(c, init=1),
        lambda c: c.geometry.init_blocks == 0 and _crowded(c),
    ),
    *mutants(
        {"select": "forward decode"},
        "two local blocks are forced with local_blocks >= 3",
        sizes(local_blocks=lambda c: 2),
        lambda c: c.geometry.local_blocks >= 3 and _crowded(c),
    ),
    *mutants(
        {"select": "forward decode"},
        "heads of a group from the fifth on are not summed",
        lambda c: selected(c, score={"heads": 4}),
        lambda c: c.per_group > 4 and _crowded(c),
    ),
    *mutants(
        {"select": "forward decode"},
        "the lse of fp16 is rounded to fp16",
        reads("lse", rounded_to(FP16)),
        every(dtype_is(FP16), _crowded, lambda c: c.per_group > 1),
    ),
    # forward
    _forward(
        "ties of fp64 go to the higher index",
        lambda c: selected(c, higher=True),
        every(dtype_is(FP64), _crowded),
    ),
    _forward(
        "ties of bf16 go to the higher index",
        lambda c: selected(c, higher=True),
        every(dtype_is(BF16), _crowded),
    ),
    _forward(
        "places from the 17th on stay empty", returns(0, _last_places_dropped), lambda c: c.n > 16
    ),
    _forward(
        "one initial block is forced with init_blocks >= 2",
        sizes(init_blocks=lambda c: 1),
        lambda c: c.geometry.init_blocks >= 2 and _crowded(c),
    ),
    _forward(
        "the current block is forced with local_blocks = 0",
        lambda c: selected(c, local=1),
        lambda c: c.geometry.local_blocks == 0 and _crowded(c),
    ),
    _forward(
        "two local blocks are forced with local_blocks = 1",
        lambda c: selected(c, local=2),
        lambda c: c.geometry.local_blocks == 1 and c.n >= 2 and _crowded(c),
    ),
    _forward(
        "kv heads from the third on use the keys of the second",
        reads("k_cmp", repeat_from(-2, 2)),
        lambda c: c.groups >= 3 and _crowded(c),
    ),
    _forward(
        "sequences from the fourth on use the lse of the third",
        reads("lse", repeat_from(0, 3)),
        every(dense, _crowded, lambda c: c.batch >= 4 and c.per_group > 1),
    ),
    _forward(
        "overlap weights assume l = 2d",
        _taps_of(lambda c: 2 * c.stride),
        lambda c: c.size != 2 * c.stride and c.block >= 2 * c.stride and _crowded(c),
    ),
    _forward(
        "every overlap has weight 1 if l > 2d",
        _equal_taps,
        lambda c: c.size > 2 * c.stride and _crowded(c),
    ),
    _forward(
        "compressed blocks that begin in the previous block do not count",
        _without_straddling_taps,
        lambda c: c.size > c.stride and _crowded(c),
    ),
    _forward(
        "the current block is no candidate at its first token",
        lambda c: selected(c, _current_excluded_at_start),
        lambda c: max(c.lengths) > c.block,
    ),
    _forward(
        "the partial block at the end is no candidate",
        lambda c: selected(c, _only_whole_blocks),
        lambda c: any(x % c.block and x > c.block for x in c.lengths),
    ),
    _forward(
        "blocks from the 33rd on are not scored",
        _first_candidates(32),
        lambda c: c.geometry.num_select_blocks(max(c.lengths)) > 33 and _crowded(c),
    ),
    _forward(
        "blocks from the ninth on are not scored if the length is no multiple of l'",
        _first_candidates(8),
        lambda c: (
            c.geometry.num_select_blocks(max(c.lengths)) > 9
            and _crowded(c)
            and any(x % c.block for x in c.lengths)
        ),
    ),
    _forward("blocks come in descending order", returns(0, _descending), lambda c: c.n > 1),
    _forward("padding comes first", returns(0, _padding_first), lambda c: c.n > 1),
    _forward("padding is block 0", returns(0, _padded_with_zero), lambda c: c.n > 1),
    _forward("padding is the next future block", returns(0, _padded_with_future)),
    _forward(
        "NaN scores rank highest",
        lambda c: selected(c, nan=1e30),
        lambda c: bool(c["q"].isnan().any() or c["k_cmp"].isnan().any() or c["lse"].isnan().any()),
    ),
    _forward(
        "scores of bf16 are rounded to bf16", _scores_rounded(BF16), every(dtype_is(BF16), _crowded)
    ),
    _forward(
        "scores of fp32 are rounded to fp16", _scores_rounded(FP16), every(dtype_is(FP32), _crowded)
    ),
    _forward("fp64 is computed in fp32", in_dtype(FP32), every(dtype_is(FP64), _crowded)),
    _forward(
        "scores are differences of prefix sums",
        lambda c: selected(c, score={"prefix_sums": True}),
        _crowded,
    ),
    _forward(
        "a strided k_cmp is read as contiguous",
        reads("k_cmp", read_as_contiguous),
        every(scattered("k_cmp"), _crowded),
    ),
    _forward(
        "a strided q is read as contiguous",
        reads("q", read_as_contiguous),
        every(scattered("q"), _crowded),
    ),
    _forward(
        "q at an unaligned address is read rounded down",
        reads("q", read_rounded_down(16)),
        every(misaligned("q"), _crowded),
    ),
    _forward(
        "scores use the first 64 channels",
        reads("q", zero_from(-1, 64)),
        lambda c: c.dk > 64 and _crowded(c),
    ),
    _forward(
        "scores use channels up to a multiple of 8",
        reads("q", zero_from(-1, lambda c: c.dk // 8 * 8)),
        lambda c: c.dk % 8 != 0 and c.dk > 8 and _crowded(c),
    ),
    _forward(
        "a document's blocks are numbered from an aligned row", _document_starts_at_block, packed
    ),
    _forward(
        "documents from the third on use the keys of the first",
        _first_document_tail,
        lambda c: packed(c) and len(c.lengths) > 2 and _crowded(c),
    ),
    _forward(
        "a list whose n is no power of two loses its last place",
        returns(0, lambda c, b: torch.nn.functional.pad(b[..., :-1], (0, 1), value=-1)),
        lambda c: not power_of_two(c.n),
    ),
    # decode
    _decode(
        "a given scale is ignored",
        calls(scale=lambda c: c.default_scale),
        every(scale_given, _crowded),
    ),
    _decode("ties go to the higher index", lambda c: selected(c, higher=True), _crowded),
    _decode("padding rows hold block 0", _padding_is(0), padded),
    _decode(
        "local blocks count from the longest sequence",
        _choose_at_longest,
        lambda c: _ragged(c) and c.geometry.local_blocks > 0,
    ),
    _decode(
        "blocks of a new page are no candidates at once",
        lambda c: selected(c, _last_block_at_page_end),
        _paged,
    ),
    _decode(
        "rows of a step share the blocks of the first",
        returns(0, _last_of_step),
        lambda c: c.new_rows > 1,
    ),
    _decode(
        "places from the 17th on stay empty",
        returns(0, lambda c, b: b.masked_fill(torch.arange(c.n) >= 16, -1)),
        lambda c: c.n > 16,
    ),
)
