"""Faults of win alone."""

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
    per_row,
    read_as_contiguous,
    read_rounded_down,
    reads,
    repeat_from,
    returns,
    rounded_to,
    scale_given,
    scattered,
    sizes,
    tail_rows,
    underflow_without_max,
    zero_from,
)
from semantic.dense import (
    key_gradients,
    located,
    masked,
    masked_decode,
    newest_row_masks,
    win_mask,
)
from semantic.model import View, mutant, mutants

_forward = functools.partial(mutant, "win", "forward")
_backward = functools.partial(mutant, "win", "backward")
_decode = functools.partial(mutant, "win", "decode")


def _longest(c: View) -> int:
    return max(c.lengths)


def _first_key_tile_skipped(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """The loop starts at the tile after the one of the window's first key, for unaligned starts."""
    first = (token - c.window + 1).clamp(min=0)
    start = (first + 31) // 32 * 32
    start = torch.where(start > token, first, start)
    return win_mask(c, token, key, index) & (key >= start[:, None])


def _window_of_the_tile(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """Rows of a tile of 16 share the first key of its first row."""
    first = (token // 16 * 16 - c.window + 1)[:, None]
    return (key <= token[:, None]) & (key >= first)


def _exact_window_off_by_one(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """For S = w, the last row loses key 0: its first key is S - w + 1."""
    return win_mask(c, token, key, index) & ((key > 0) | (token < c.window - 1)[:, None])


def _sees_previous_document(c: View) -> list[torch.Tensor]:
    """The first token of a document also attends to the last token of the document before."""
    results = [x.clone() for x in c.run()]
    for piece in c.pieces():
        start = c.boundaries[piece.index]
        if piece.length and start:
            results[0][start] = (
                (
                    results[0][start].float()
                    + c["v"][start - 1].float().repeat_interleave(c.per_group, 0)
                )
                .div(2)
                .to(c.dtype)
            )
    return results


def _follows_single_token(c: View) -> bool:
    return any(a == 1 and b > 0 for a, b in zip(c.lengths, c.lengths[1:]))


def _joins_single_token_document(c: View) -> list[torch.Tensor]:
    """A document of one token is joined with the next one."""
    kept = [0]
    for length, end in zip(c.lengths, c.boundaries[1:]):
        if length == 1 and end != c.boundaries[-1]:
            continue
        kept.append(end)
    cu = torch.tensor(kept, dtype=torch.int32)
    return c.run(cu_seqlens=cu, max_seqlen=int(cu.diff().max()))


def _documents_joined_from(count: int) -> Any:
    def fault(c: View) -> list[torch.Tensor]:
        bounds = c.boundaries
        cu = torch.tensor([*bounds[:count], bounds[-1]], dtype=torch.int32)
        return c.run(cu_seqlens=cu, max_seqlen=int(cu.diff().max()))

    return fault


def _accumulates(dtype: torch.dtype, tile: int) -> Any:
    """o is a sum of the tiles of keys, rounded to ``dtype`` after each."""

    def fault(c: View) -> list[torch.Tensor]:
        o, lse = c.run()
        keys = torch.arange(c.tokens)
        total = torch.zeros(o.shape)
        for first in range(0, c.tokens, tile):
            inside = ((keys >= first) & (keys < first + tile)).view(-1, 1, 1)
            part = c.run(
                v=torch.where(inside, c["v"], torch.zeros_like(c["v"])).float(),
                q=c["q"].float(),
                k=c["k"].float(),
            )[0]
            total = (total + part).to(dtype).float()
        return [total.to(o.dtype), lse]

    return fault


def _nan_queries_are_zero(c: View, o: torch.Tensor, lse: torch.Tensor) -> None:
    o.nan_to_num_(0.0)
    lse.nan_to_num_(0.0, neginf=-torch.inf)


def _later_tiles_missing(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """dk and dv of a key miss the queries in the last partial tile of its window."""
    tile = 32
    last = key // tile * tile + (1 + (c.window - 1) // tile) * tile
    return win_mask(c, token, key, index) & (token[:, None] < last)


def _ring(c: View) -> int:
    """Return the number of tokens of a sequence that the pages of win hold."""
    return c["k"].shape[1] * c.call.tables.win.shape[1]


def _reads_ring(row_of: Any) -> Any:
    """Read the key and value of a token from row ``row_of(c, token)`` of the ring."""

    def change(c: View, store: torch.Tensor) -> torch.Tensor:
        ring, moved = _ring(c), store.clone()
        for b, (start, length) in enumerate(zip(c.starts, c.lengths)):
            token = torch.arange(max(0, start - c.window + 1), length)
            source = located(c, store, b, row_of(c, token) % ring)
            moved[located(c, store, b, token % ring)] = store[source]
        return moved

    return reads("k", change, "v")


def _first_wrap_only(c: View, token: torch.Tensor) -> torch.Tensor:
    """The row of a token is t - R once it passes R: right for one turn of the ring."""
    ring = _ring(c)
    return torch.where(token < ring, token, token - ring).clamp(max=ring - 1)


def _window_start_in_ring(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """A window that crosses the end of the ring loses its part before the end."""
    ring = _ring(c)
    turn = token // ring * ring
    return win_mask(c, token, key, index) & (key >= turn[:, None])


def _crosses_ring_end(c: View) -> bool:
    ring = _ring(c)
    return any((x - 1) // ring != max(0, x - c.window) // ring for x in c.lengths if x)


def _ignores_later_rows(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """A row does not see the tokens that the same step added before it."""
    start = int(c.call.starts[index])
    own = key == token[:, None]
    return win_mask(c, token, key, index) & (own | (key < start))


MUTANTS = (
    *mutants(
        {"win": "forward backward decode"},
        "an odd window is one short",
        sizes(window_size=lambda c: c.window - 1),
        lambda c: c.window % 2 == 1 and c.window > 1,
    ),
    *mutants(
        {"win": "forward backward"},
        "documents from the eighth on are joined",
        _documents_joined_from(8),
        lambda c: packed(c) and len(c.lengths) > 8,
    ),
    # forward
    _forward(
        "a window above 512 is cut to 512",
        sizes(window_size=lambda c: 512),
        lambda c: c.window > 512 and _longest(c) > 512,
    ),
    _forward(
        "a window is rounded up to a multiple of 64",
        sizes(window_size=lambda c: -(-c.window // 64) * 64),
        lambda c: c.window % 64 != 0 and _longest(c) > c.window,
    ),
    _forward(
        "a window above 64 is rounded down to a multiple of 64",
        sizes(window_size=lambda c: c.window // 64 * 64),
        lambda c: c.window > 64 and c.window % 64 != 0,
    ),
    _forward(
        "a window of 1 also sees the previous token",
        sizes(window_size=lambda c: 2),
        lambda c: c.window == 1,
    ),
    _forward(
        "a document longer than the window by less than 16 ignores it",
        sizes(window_size=_longest),
        lambda c: c.window < _longest(c) < c.window + 16,
    ),
    _forward(
        "the last row of S = w misses key 0",
        lambda c: masked(c, _exact_window_off_by_one),
        lambda c: (
            c.window > 1 and all(x <= c.window for x in c.lengths) and _longest(c) == c.window
        ),
    ),
    _forward(
        "the tile of the first key is skipped",
        lambda c: masked(c, _first_key_tile_skipped),
        lambda c: c.window > 32 and _longest(c) > c.window,
    ),
    _forward(
        "rows of a tile share the first key of its first row",
        lambda c: masked(c, _window_of_the_tile),
        lambda c: _longest(c) > c.window,
    ),
    _forward(
        "the first token of a document sees the token before", _sees_previous_document, packed
    ),
    _forward(
        "a document of one token is joined with the next",
        _joins_single_token_document,
        lambda c: packed(c) and _follows_single_token(c),
    ),
    _forward(
        "a small scale is raised to 0.01",
        calls(scale=lambda c: 0.01),
        lambda c: 0 <= c.scale < 0.01,
    ),
    _forward(
        "kv heads from the third on read the second",
        reads("k", repeat_from(-2, 2), "v"),
        lambda c: c.groups >= 3,
    ),
    _forward(
        "heads from the 17th on give zero", returns(0, zero_from(-2, 16)), lambda c: c.heads > 16
    ),
    _forward(
        "sequences from the fifth on read the values of the fourth",
        reads("v", repeat_from(0, 4)),
        every(dense, lambda c: c.batch >= 5),
    ),
    _forward(
        "fp16 accumulates in bf16",
        _accumulates(BF16, 16),
        every(dtype_is(FP16), lambda c: c.tokens > 16),
    ),
    _forward("fp64 scores are computed in fp32", in_dtype(FP32), dtype_is(FP64)),
    _forward("fp32 is computed in fp16", in_dtype(FP16), dtype_is(FP32)),
    _forward("lse of fp64 is rounded to fp32", returns(1, rounded_to(FP32)), dtype_is(FP64)),
    _forward("exp underflows below a score of -104", per_row(underflow_without_max)),
    _forward("NaN in a query gives zero", per_row(_nan_queries_are_zero)),
    _forward("a strided k is read as contiguous", reads("k", read_as_contiguous), scattered("k")),
    _forward(
        "v at an unaligned address is read rounded down",
        reads("v", read_rounded_down(16)),
        misaligned("v"),
    ),
    _forward(
        "scores use channels up to a multiple of 16",
        reads("q", zero_from(-1, lambda c: c.dk // 16 * 16)),
        lambda c: c.dk % 16 != 0 and c.dk > 16,
    ),
    _forward(
        "channels of o from the 129th on are zero",
        returns(0, zero_from(-1, 128)),
        lambda c: c.dv > 128,
    ),
    _forward(
        "the last partial tile of 64 rows is not written",
        returns(0, zero_from(-3, tail_rows(64))),
        lambda c: c.tokens > 64 and c.tokens % 64 != 0,
    ),
    _forward(
        "an all-zero query counts as padding",
        lambda c: [c.run()[0] * (c["q"] != 0).any(-1, keepdim=True), c.run()[1]],
        lambda c: bool((c["q"] == 0).all(-1).any()),
    ),
    # backward
    _backward(
        "dk and dv miss the last partial tile of queries",
        key_gradients(_later_tiles_missing),
        lambda c: c.window % 32 != 1 and _longest(c) > c.window,
    ),
    _backward(
        "dk and dv of the last partial tile of 64 keys are zero",
        returns((1, 2), zero_from(-3, tail_rows(64))),
        lambda c: c.tokens > 64 and c.tokens % 64 != 0,
    ),
    _backward(
        "a given scale is ignored in dq",
        lambda c: [c.run()[0] * (c.default_scale / c.scale if c.scale else 1), *c.run()[1:]],
        scale_given,
    ),
    _backward(
        "delta is left out of heads from the ninth on",
        reads("o", zero_from(-2, 8)),
        lambda c: c.heads > 8,
    ),
    _backward(
        "bf16 gradients of sequences from the third on are those of the second",
        reads("do", repeat_from(0, 2)),
        every(dtype_is(BF16), dense, lambda c: c.batch >= 3),
    ),
    _backward("a strided v is read as contiguous", reads("v", read_as_contiguous), scattered("v")),
    _backward(
        "fp16 gradients above 256 are clamped",
        returns((0, 1, 2), lambda c, grad: grad.clamp(-256, 256)),
        dtype_is(FP16),
    ),
    _backward(
        "NaN in gradients is replaced by zero",
        returns((0, 1, 2), lambda c, grad: grad.nan_to_num(0.0)),
    ),
    # decode
    _decode(
        "the ring wraps at the window",
        _reads_ring(lambda c, token: token % c.window),
        lambda c: _ring(c) != c.window and max(c.lengths) > c.window,
    ),
    _decode(
        "the ring is right for one turn only",
        _reads_ring(_first_wrap_only),
        lambda c: max(c.lengths) > 2 * _ring(c),
    ),
    _decode(
        "a window across the end of the ring loses its first part",
        lambda c: masked_decode(c, _window_start_in_ring),
        _crosses_ring_end,
    ),
    _decode(
        "rows of a step do not see its earlier rows",
        lambda c: masked_decode(c, _ignores_later_rows),
        lambda c: c.new_rows > 1,
    ),
    _decode(
        "all rows of a step see what the last sees",
        lambda c: newest_row_masks(c, win_mask),
        lambda c: c.new_rows > 1,
    ),
    _decode(
        "kv heads from the third on read the second",
        reads("k", repeat_from(-2, 2)),
        lambda c: c.groups >= 3,
    ),
    _decode(
        "rows of a step from the 33rd on give zero",
        returns(0, zero_from(1, 32)),
        lambda c: c.new_rows > 32,
    ),
)
