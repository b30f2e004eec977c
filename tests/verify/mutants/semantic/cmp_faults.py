"""Faults of cmp alone."""

from __future__ import annotations

import functools
from typing import Any

import torch

from semantic.common import (
    BF16,
    FP16,
    FP32,
    calls,
    dense,
    dtype_is,
    every,
    gradient_of_first_heads,
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
    scale_given,
    scattered,
    without_subnormals,
    zero_from,
)
from semantic.dense import cmp_mask, masked, masked_decode, newest_row_masks
from semantic.model import View, mutant

_forward = functools.partial(mutant, "cmp", "forward")
_backward = functools.partial(mutant, "cmp", "backward")
_decode = functools.partial(mutant, "cmp", "decode")


def _hard_coded_overlap(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    return key * c.stride + 2 * c.stride - 1 <= token[:, None]


def _last_key_never_seen(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    exact = (len(token) - c.size) % c.stride == 0
    return cmp_mask(c, token, key, index) & (key < len(key) - exact)


def _partial_tile_dropped(tile: int) -> Any:
    def mask(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
        return cmp_mask(c, token, key, index) & (key < max(tile, len(key) // tile * tile))

    return mask


def _keys_of(c: View, count: Any) -> list[torch.Tensor]:
    """Every document reads from the row that is the sum of count(length) before it."""
    starts, total = {}, 0
    for piece in c.pieces():
        starts[piece.index] = total
        total += count(piece.length)
    rows = len(c["k_cmp"])
    index = torch.arange(rows)
    for piece in c.pieces():
        length = piece.keys.stop - piece.keys.start
        moved = starts[piece.index] + torch.arange(length)
        index[piece.keys] = moved % rows
    return c.run(k_cmp=c["k_cmp"][index], v_cmp=c["v_cmp"][index])


def _short_document(c: View) -> bool:
    """Whether a document with compressed tokens follows one shorter than l."""
    short = [i for i, length in enumerate(c.lengths) if 0 < length < c.size]
    return bool(short) and any(length >= c.size for length in c.lengths[short[0] :])


def _empty_document(c: View) -> bool:
    empty = [i for i, length in enumerate(c.lengths) if length == 0]
    return bool(empty) and any(length >= c.size for length in c.lengths[empty[0] :])


def _documents_from(first: int, names: tuple[str, ...]) -> Any:
    """Documents from number ``first`` on give zero in the results ``names``."""

    def fault(c: View) -> list[torch.Tensor]:
        order = {"o": 0, "dq": 0, "dk": 1, "dv": 2}
        results = [x.clone() for x in c.run()]
        for piece in c.pieces():
            if piece.index >= first:
                for name in names:
                    results[order[name]][piece.keys if name in ("dk", "dv") else piece.rows] = 0
        return results

    return fault


def _values_in_empty_rows(c: View, o: torch.Tensor, lse: torch.Tensor) -> None:
    for piece in c.pieces():
        values = c["v_cmp"][piece.keys]
        if len(values):
            blank = o[piece.rows][: c.size - 1]
            blank.copy_(values[:1].repeat_interleave(c.per_group, 1).expand_as(blank))


def _unused_rows(c: View) -> int:
    used = max((piece.keys.stop for piece in c.pieces()), default=0)
    return len(c["k_cmp"]) - used


def _garbage_in_unused_rows(c: View) -> list[torch.Tensor]:
    results = [x.clone() for x in c.run()]
    for grad in results[1:]:
        grad[len(grad) - _unused_rows(c) :] = 1
    return results


def _empty_rows_get_gradient(c: View) -> list[torch.Tensor]:
    results = [x.clone() for x in c.run()]
    width = min(c.dk, c.dv)
    for piece in c.pieces():
        blank = results[0][piece.rows][: c.size - 1]
        blank[..., :width] = c["do"][piece.rows][: c.size - 1][..., :width]
    return results


def _nan_spreads_in_tile(c: View, o: torch.Tensor, lse: torch.Tensor) -> None:
    tile = 16
    bad = o.isnan().any(-1).any(-1)
    for first in range(0, o.shape[-3], tile):
        rows = slice(first, first + tile)
        hit = bad[..., rows].any(-1)
        o[..., rows, :, :] = torch.where(
            hit[..., None, None, None], torch.full((), torch.nan, dtype=o.dtype), o[..., rows, :, :]
        )


def _first_key_without_any(c: View, o: torch.Tensor, lse: torch.Tensor) -> None:
    """A row that sees no compressed token returns the first value of page 0."""
    for b, (start, length) in enumerate(zip(c.starts, c.lengths)):
        for row in range(min(length, c.size - 1) - start):
            o[b, row] = c["v_cmp"][0, 0].repeat_interleave(c.per_group, 0)


def _cmp_without_newest(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """A compressed token that a row of this step completed is not seen in this step."""
    start = int(c.call.starts[index])
    old = key * c.stride + c.size <= start
    return cmp_mask(c, token, key, index) & old


MUTANTS = (
    _forward(
        "scale 0 counts as not given",
        calls(scale=lambda c: c.default_scale),
        lambda c: c.scale == 0,
    ),
    _forward(
        "the scale comes from Dk padded to a power of two",
        calls(scale=lambda c: (1 << (c.dk - 1).bit_length()) ** -0.5),
        lambda c: not scale_given(c) and not power_of_two(c.dk),
    ),
    _forward(
        "heads of a group from the ninth on give zero",
        heads_of_group_zero_from(lambda c: 8),
        lambda c: c.per_group > 8,
    ),
    _forward(
        "sequences from the fourth on read the keys of the third",
        reads("k_cmp", repeat_from(0, 3)),
        lambda c: dense(c) and c.batch >= 4,
    ),
    _forward(
        "fp32 products are rounded to bf16",
        in_dtype(BF16),
        dtype_is(FP32),
    ),
    _forward(
        "the lse of bf16 has base 2",
        returns(1, lambda c, lse: lse / 0.6931471805599453),
        dtype_is(BF16),
    ),
    _forward("rows without a key return the first value", per_row(_values_in_empty_rows)),
    _forward(
        "visibility assumes l = 2d",
        lambda c: masked(c, _hard_coded_overlap),
        lambda c: c.size != 2 * c.stride,
    ),
    _forward(
        "a compressed token that ends with the last token is not seen",
        lambda c: masked(c, _last_key_never_seen),
        lambda c: any(s >= c.size and (s - c.size) % c.stride == 0 for s in c.lengths),
    ),
    _forward(
        "the last partial tile of 16 keys is dropped",
        lambda c: masked(c, _partial_tile_dropped(16)),
        lambda c: any(x > 16 and x % 16 for x in map(c.geometry.num_compressed, c.lengths)),
    ),
    _forward(
        "a document shorter than l counts negative compressed tokens",
        lambda c: _keys_of(c, lambda s: (s - c.size) // c.stride + 1 if s else 0),
        lambda c: packed(c) and _short_document(c),
    ),
    _forward(
        "division truncates: a document shorter than l has a compressed token",
        lambda c: _keys_of(c, lambda s: max(0, int((s - c.size) / c.stride) + 1)),
        lambda c: packed(c) and (_short_document(c) or _empty_document(c)),
    ),
    _forward(
        "an empty document owns one compressed row",
        lambda c: _keys_of(c, lambda s: c.geometry.num_compressed(s) if s else 1),
        lambda c: packed(c) and _empty_document(c),
    ),
    _forward(
        "documents from the fifth on give zero",
        _documents_from(4, ("o",)),
        lambda c: packed(c) and len(c.lengths) > 4,
    ),
    _forward(
        "k_cmp at an unaligned address is read rounded down",
        reads("k_cmp", read_rounded_down(16)),
        misaligned("k_cmp"),
    ),
    _forward(
        "a strided or expanded v_cmp is read as contiguous",
        reads("v_cmp", read_as_contiguous),
        scattered("v_cmp"),
    ),
    _forward(
        "fp16 subnormals in v_cmp are flushed",
        reads("v_cmp", without_subnormals(6.1e-5)),
        dtype_is(FP16),
    ),
    _forward(
        "the last channel of an odd Dk is not read",
        reads("q", zero_from(-1, lambda c: c.dk - 1)),
        lambda c: c.dk % 2 == 1,
    ),
    _forward("NaN in a query spreads over its tile of 16 rows", per_row(_nan_spreads_in_tile)),
    _forward(
        "masked scores are -10000",
        lambda c: masked(c, cmp_mask, hidden=-1e4),
        lambda c: float(c["q"].abs().max()) * float(c["k_cmp"].abs().max()) * abs(c.scale) > 30,
    ),
    # backward
    _backward("dq has the scale twice", returns(0, lambda c, dq: dq * c.scale)),
    _backward(
        "a negative scale loses its sign",
        returns((0, 1), lambda c, grad: -grad),
        lambda c: c.scale < 0,
    ),
    _backward(
        "dk and dv miss heads of a group from the ninth on",
        gradient_of_first_heads(8, 1, 2),
        lambda c: c.per_group > 8,
    ),
    _backward(
        "dk and dv of kv heads from the fifth on are zero",
        returns((1, 2), zero_from(-2, 4)),
        lambda c: c.groups >= 5,
    ),
    _backward(
        "unused rows of a packed dk_cmp are not written",
        _garbage_in_unused_rows,
        lambda c: packed(c) and _unused_rows(c) > 0,
    ),
    _backward(
        "documents from the fifth on have no dk and dv",
        _documents_from(4, ("dk", "dv")),
        lambda c: packed(c) and len(c.lengths) > 4,
    ),
    _backward("rows without a key get a gradient", _empty_rows_get_gradient),
    _backward(
        "fp16 gradients below 2^-14 are flushed",
        returns((0, 1, 2), without_subnormals(2.0**-14)),
        dtype_is(FP16),
    ),
    _backward(
        "delta sums the first Dk channels",
        reads("o", zero_from(-1, lambda c: c.dk)),
        lambda c: c.dv > c.dk,
    ),
    _backward(
        "dq of the last query of a partial tile of 16 is zero",
        returns(0, zero_from(-3, lambda c: c.tokens - 1)),
        every(dense, lambda c: c.tokens % 16 == 1 and c.tokens > 16),
    ),
    # decode
    _decode(
        "rows without a key return a stored value",
        per_row(_first_key_without_any),
        lambda c: any(a < min(b, c.size - 1) for a, b in zip(c.starts, c.lengths)),
    ),
    _decode(
        "all rows of a step see what the last sees",
        lambda c: newest_row_masks(c, cmp_mask),
        lambda c: c.new_rows > 1,
    ),
    _decode(
        "a compressed token completed in this step is not seen",
        lambda c: masked_decode(c, _cmp_without_newest),
    ),
    _decode(
        "l = d counts as l = 2d",
        lambda c: masked_decode(
            c, lambda c, t, key, i: key * c.stride + 2 * c.stride - 1 <= t[:, None]
        ),
        lambda c: c.size == c.stride,
    ),
)
