"""Faults of the decode forms of sel and win."""

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
    in_dtype,
    per_row,
    read_as_contiguous,
    reads,
    repeat_from,
    returns,
    rounded_to,
    scale_given,
    scattered,
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
    chosen,
    masked_decode,
    sel_mask,
    win_mask,
)
from semantic.model import View


def _last_page_is_the_one_before(c: View, table: torch.Tensor) -> torch.Tensor:
    """A page that the newest token fills exactly is looked up one too early."""
    for b, length in enumerate(c.lengths):
        if length and length % page_size(c) == 0 and length > page_size(c):
            table[b, length // page_size(c) - 1] = table[b, length // page_size(c) - 2]
    return table


def _fills_page(c: View) -> bool:
    return any(x and x % page_size(c) == 0 and x > page_size(c) for x in c.lengths)


def _rows_after(count: int) -> Any:
    """Rows of a step from number ``count`` on give zero."""
    return returns(0, zero_from(1, count))


def _padding_repeats_last(c: View) -> list[torch.Tensor]:
    results = [x.clone() for x in c.run()]
    for b, (start, length) in enumerate(zip(starts(c), c.lengths)):
        if start < length:
            results[0][b, length - start :] = results[0][b, length - start - 1]
    return results


def _idle_shifts_batch(c: View) -> list[torch.Tensor]:
    """Results of active sequences are stored without gaps for idle ones."""
    active = [b for b, (x, y) in enumerate(zip(starts(c), c.lengths)) if x < y]
    results = []
    for x in c.run():
        moved = x.clone()
        moved[: len(active)] = x[active]
        results.append(moved)
    return results


def _idle_before_active(c: View) -> bool:
    state = [a < b for a, b in zip(starts(c), c.lengths)]
    return False in state and True in state[state.index(False) :]


def _wrap_at(rows: Any) -> Any:
    """The ring of win has ``rows(c)`` rows."""

    def fault(c: View) -> list[torch.Tensor]:
        ring, period = c["k"].shape[1], rows(c)
        changes = {}
        for name in ("k", "v"):
            moved = c[name].clone()
            for b, (start, length) in enumerate(zip(starts(c), c.lengths)):
                token = torch.arange(max(0, start - c.window + 1), length)
                moved[b, token % ring] = c[name][b, token % period % ring]
            changes[name] = moved
        return c.run(**changes)

    return fault


def _first_wrap_only(c: View) -> list[torch.Tensor]:
    """The row of a token is t - R once it passes R: right for one turn of the ring."""
    ring, changes = c["k"].shape[1], {}
    for name in ("k", "v"):
        moved = c[name].clone()
        for b, (start, length) in enumerate(zip(starts(c), c.lengths)):
            token = torch.arange(max(0, start - c.window + 1), length)
            place = torch.where(token < ring, token, token - ring).clamp(max=ring - 1)
            moved[b, token % ring] = c[name][b, place]
        changes[name] = moved
    return c.run(**changes)


def _window_start_in_ring(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """A window that crosses the end of the ring loses its part before the end."""
    ring = c["k"].shape[1]
    turn = token // ring * ring
    return win_mask(c, token, key, index) & (key >= turn[:, None])


def _crosses_ring_end(c: View) -> bool:
    ring = c["k"].shape[1]
    return any((x - 1) // ring != max(0, x - c.window) // ring for x in c.lengths if x)


def _ignores_later_rows(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """A row does not see the tokens that the same step added before it."""
    start = int(c.call.starts[index])
    own = key == token[:, None]
    return win_mask(c, token, key, index) & (own | (key < start))


def _sel_ignores_earlier_new(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    start = int(c.call.starts[index])
    own = (key == token[:, None]) | (key < start)
    return sel_mask(c, token, key, index) & own[:, None]


def _sel_misses_newest_at_page_end(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """The last row of a page is not read."""
    return sel_mask(c, token, key, index) & (key % page_size(c) != page_size(c) - 1)


def _stop_at_hole(c: View, blocks: torch.Tensor) -> torch.Tensor:
    return blocks.masked_fill((blocks < 0).cumsum(-1) > 0, -1)


def _hole(c: View) -> bool:
    blocks = c["blocks"]
    return bool(((blocks[..., :-1] < 0) & (blocks[..., 1:] >= 0)).any())


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
    decode("sel", "a given scale is ignored", calls(scale=lambda c: c.default_scale), scale_given),
    decode(
        "sel",
        "a page that is just full is looked up one too early",
        table(_last_page_is_the_one_before),
        _fills_page,
    ),
    decode(
        "sel",
        "sequences from the fourth on use the pages of the third",
        table(one_table),
        lambda c: c.batch >= 4,
    ),
    decode(
        "sel",
        "pages from the fifth on wrap around",
        table(four_pages),
        lambda c: max(c.lengths) > 4 * page_size(c),
    ),
    decode(
        "sel",
        "the last row of a page is not read",
        lambda c: masked_decode(c, _sel_misses_newest_at_page_end),
        lambda c: max(c.lengths) >= page_size(c),
    ),
    decode(
        "sel",
        "rows of a step do not see its earlier rows",
        lambda c: masked_decode(c, _sel_ignores_earlier_new),
        lambda c: new_rows(c) > 1,
    ),
    decode(
        "sel",
        "keys are cut at the end of the sequence",
        lambda c: masked_decode(c, _future_cut_at_length),
        lambda c: new_rows(c) > 1,
    ),
    decode("sel", "the loop over blocks stops at -1", reads("blocks", _stop_at_hole), _hole),
    decode(
        "sel",
        "blocks from the 17th on are dropped",
        reads("blocks", lambda c, b: b[..., :16].contiguous()),
        lambda c: c["blocks"].shape[-1] > 16,
    ),
    decode(
        "sel",
        "rows of a step from the 17th on give zero",
        _rows_after(16),
        lambda c: new_rows(c) > 16,
    ),
    decode("sel", "padding rows repeat the last token", _padding_repeats_last, padded),
    decode(
        "sel", "results of idle sequences are closed up", _idle_shifts_batch, _idle_before_active
    ),
    decode(
        "sel",
        "channels of o from Dk on are zero",
        lambda c: returns(0, zero_from(-1, c.dk))(c),
        lambda c: c.dv > c.dk,
    ),
    decode("sel", "fp32 is computed in bf16", in_dtype(BF16), dtype_is(FP32)),
    decode(
        "sel",
        "the lse misses a split of a long sequence",
        per_row(_split_without_rescale),
        lambda c: max(c.lengths) > 64,
    ),
    decode(
        "sel", "a strided q is read as contiguous", reads("q", read_as_contiguous), scattered("q")
    ),
    decode(
        "win",
        "a negative scale loses its sign",
        calls(scale=lambda c: -c.scale),
        lambda c: c.scale < 0,
    ),
    decode(
        "win",
        "the ring wraps at the window",
        _wrap_at(lambda c: c.window),
        lambda c: c["k"].shape[1] != c.window and max(c.lengths) > c.window,
    ),
    decode(
        "win",
        "the ring is right for one turn only",
        _first_wrap_only,
        lambda c: max(c.lengths) > 2 * c["k"].shape[1],
    ),
    decode(
        "win",
        "a window across the end of the ring loses its first part",
        lambda c: masked_decode(c, _window_start_in_ring),
        _crosses_ring_end,
    ),
    decode(
        "win",
        "rows of a step do not see its earlier rows",
        lambda c: masked_decode(c, _ignores_later_rows),
        lambda c: new_rows(c) > 1,
    ),
    decode(
        "win",
        "all rows of a step see what the last sees",
        lambda c: newest_row_masks(c, win_mask),
        lambda c: new_rows(c) > 1,
    ),
    decode(
        "win",
        "an odd window is one short",
        sizes(window_size=lambda c: c.window - 1),
        lambda c: c.window % 2 == 1 and c.window > 1,
    ),
    decode(
        "win",
        "kv heads from the third on read the second",
        reads("k", repeat_from(-2, 2)),
        lambda c: c.groups >= 3,
    ),
    decode("win", "padding rows repeat the last token", _padding_repeats_last, padded),
    decode(
        "win", "results of idle sequences are closed up", _idle_shifts_batch, _idle_before_active
    ),
    decode("win", "fp16 output passes through bf16", returns(0, rounded_to(BF16)), dtype_is(FP16)),
    decode("win", "fp64 is computed in fp32", in_dtype(FP32), dtype_is(FP64)),
    decode(
        "win",
        "rows of a step from the 33rd on give zero",
        _rows_after(32),
        lambda c: new_rows(c) > 32,
    ),
    decode(
        "win",
        "the last channel of an odd Dv is zero",
        lambda c: returns(0, zero_from(-1, c.dv - 1))(c),
        lambda c: c.dv % 2 == 1 and c.dv > 1,
    ),
)
