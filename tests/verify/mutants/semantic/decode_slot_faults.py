"""Faults of the decode forms."""

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
from semantic.dense import (
    choose,
    chosen,
    cmp_mask,
    masked_decode,
    sel_mask,
    selected,
    win_mask,
)
from semantic.model import View, mutant


def _decode(slot: str, text: str, fault: Any, when: Any = None) -> Any:
    return mutant(slot, "decode", text, fault, when)


def _starts(c: View) -> list[int]:
    return [int(x) for x in c.call.starts.tolist()]


def _ragged(c: View) -> bool:
    return len(set(c.lengths)) > 1


def _ragged_rows(c: View) -> bool:
    """Whether sequences add different numbers of tokens."""
    return len({b - a for a, b in zip(_starts(c), c.lengths)}) > 1


def _idle(c: View) -> bool:
    return any(a == b for a, b in zip(_starts(c), c.lengths))


def _page(c: View) -> int:
    """Tokens of a page of the cache."""
    rows = c[c.key_name].shape[1]
    return rows * c.stride if c.slot in ("cmp", "select") else rows


def _paged(c: View) -> bool:
    return c.call.block_table.shape[1] > 1 and max(c.lengths) > _page(c)


def _table(change: Any) -> Any:
    """The healthy form with a changed block table."""
    return calls(block_table=lambda c: change(c, c.call.block_table.clone()))


def _one_table(c: View, table: torch.Tensor) -> torch.Tensor:
    """Sequences from the fourth on use the pages of the third."""
    return repeat_from(0, 3)(c, table)


def _last_page_is_the_one_before(c: View, table: torch.Tensor) -> torch.Tensor:
    """A page that the newest token fills exactly is looked up one too early."""
    for b, length in enumerate(c.lengths):
        if length and length % _page(c) == 0 and length > _page(c):
            table[b, length // _page(c) - 1] = table[b, length // _page(c) - 2]
    return table


def _fills_page(c: View) -> bool:
    return any(x and x % _page(c) == 0 and x > _page(c) for x in c.lengths)


def _four_pages(c: View, table: torch.Tensor) -> torch.Tensor:
    """Pages from the fifth on wrap around."""
    return table[:, torch.arange(table.shape[1]) % 4]


def _newest_row_masks(c: View, mask: Any) -> list[torch.Tensor]:
    """All rows of a step see what its last row sees."""

    def seen(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
        return mask(c, token[-1:].expand_as(token), key, index)

    return masked_decode(c, seen)


def _rows_after(count: int) -> Any:
    """Rows of a step from number ``count`` on give zero."""
    return returns(0, zero_from(1, count))


def _new_rows(c: View) -> int:
    return max(b - a for a, b in zip(_starts(c), c.lengths))


def _padding_is(value: int) -> Any:
    """Rows past the new tokens hold ``value``."""

    def fault(c: View) -> list[torch.Tensor]:
        out = c.run()[0].clone()
        for b, (start, length) in enumerate(zip(_starts(c), c.lengths)):
            out[b, length - start :] = value
        return [out, *c.run()[1:]]

    return fault


def _padded(c: View) -> bool:
    return any(b - a < c.tokens for a, b in zip(_starts(c), c.lengths))


def _padding_repeats_last(c: View) -> list[torch.Tensor]:
    results = [x.clone() for x in c.run()]
    for b, (start, length) in enumerate(zip(_starts(c), c.lengths)):
        if start < length:
            results[0][b, length - start :] = results[0][b, length - start - 1]
    return results


def _idle_shifts_batch(c: View) -> list[torch.Tensor]:
    """Results of active sequences are stored without gaps for idle ones."""
    active = [b for b, (x, y) in enumerate(zip(_starts(c), c.lengths)) if x < y]
    results = []
    for x in c.run():
        moved = x.clone()
        moved[: len(active)] = x[active]
        results.append(moved)
    return results


def _idle_before_active(c: View) -> bool:
    state = [a < b for a, b in zip(_starts(c), c.lengths)]
    return False in state and True in state[state.index(False) :]


def _wrap_at(rows: Any) -> Any:
    """The ring of win has ``rows(c)`` rows."""

    def fault(c: View) -> list[torch.Tensor]:
        ring, period = c["k"].shape[1], rows(c)
        changes = {}
        for name in ("k", "v"):
            moved = c[name].clone()
            for b, (start, length) in enumerate(zip(_starts(c), c.lengths)):
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
        for b, (start, length) in enumerate(zip(_starts(c), c.lengths)):
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
    return sel_mask(c, token, key, index) & (key % _page(c) != _page(c) - 1)


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
    page = token[:, None] // _page(c) * (_page(c) // c.block)
    early = (token % _page(c) < c.size - 1)[:, None]
    allowed = (block <= (token // c.block)[:, None]) & ~(early & (block >= page) & (block > 0))
    return choose(c, scores, token, candidates=allowed)


def _last_of_step(c: View, blocks: torch.Tensor) -> torch.Tensor:
    """All rows of a step share the blocks of its first row."""
    out = blocks.clone()
    for b, (start, length) in enumerate(zip(_starts(c), c.lengths)):
        out[b, : length - start] = blocks[b, :1]
    return out


def _first_key_without_any(c: View, o: torch.Tensor, lse: torch.Tensor) -> None:
    """A row that sees no compressed token returns the first value of page 0."""
    for b, (start, length) in enumerate(zip(_starts(c), c.lengths)):
        for row in range(min(length, c.size - 1) - start):
            o[b, row] = c["v_cmp"][0, 0].repeat_interleave(c.per_group, 0)


def _cmp_without_newest(c: View, token: Any, key: Any, index: int) -> torch.Tensor:
    """A compressed token that a row of this step completed is not seen in this step."""
    start = int(c.call.starts[index])
    old = key * c.stride + c.size <= start
    return cmp_mask(c, token, key, index) & old


MUTANTS = (
    # cmp
    _decode("cmp", "a given scale is ignored", calls(scale=lambda c: c.default_scale), scale_given),
    _decode("cmp", "empty rows have lse 0", per_row(empty_rows_lse_zero)),
    _decode(
        "cmp",
        "rows without a key return a stored value",
        per_row(_first_key_without_any),
        lambda c: any(a < min(b, c.size - 1) for a, b in zip(_starts(c), c.lengths)),
    ),
    _decode(
        "cmp",
        "sequences from the fourth on use the pages of the third",
        _table(_one_table),
        lambda c: c.batch >= 4,
    ),
    _decode(
        "cmp",
        "pages from the fifth on wrap around",
        _table(_four_pages),
        lambda c: max(c.lengths) > 4 * _page(c),
    ),
    _decode(
        "cmp",
        "all rows of a step see what the last sees",
        lambda c: _newest_row_masks(c, cmp_mask),
        lambda c: _new_rows(c) > 1,
    ),
    _decode(
        "cmp",
        "a compressed token completed in this step is not seen",
        lambda c: masked_decode(c, _cmp_without_newest),
    ),
    _decode(
        "cmp",
        "kv heads from the fifth on read the fourth",
        reads("k_cmp", repeat_from(-2, 4), "v_cmp"),
        lambda c: c.groups >= 5,
    ),
    _decode("cmp", "fp16 output passes through bf16", returns(0, rounded_to(BF16)), dtype_is(FP16)),
    _decode("cmp", "fp64 is computed in fp32", in_dtype(FP32), dtype_is(FP64)),
    _decode(
        "cmp",
        "scores use the first 64 channels",
        lambda c: c.run(q=zero_from(-1, 64)(c, c["q"])),
        lambda c: c.dk > 64,
    ),
    _decode("cmp", "exp overflows above a score of 88", per_row(overflow_without_max)),
    _decode(
        "cmp",
        "l = d counts as l = 2d",
        lambda c: masked_decode(
            c, lambda c, t, key, i: key * c.stride + 2 * c.stride - 1 <= t[:, None]
        ),
        lambda c: c.size == c.stride,
    ),
    # select
    _decode(
        "select",
        "a given scale is ignored",
        calls(scale=lambda c: c.default_scale),
        every(scale_given, _crowded),
    ),
    _decode("select", "ties go to the higher index", lambda c: selected(c, higher=True), _crowded),
    _decode("select", "padding rows hold block 0", _padding_is(0), _padded),
    _decode(
        "select",
        "local blocks count from the longest sequence",
        _choose_at_longest,
        lambda c: _ragged(c) and c.geometry.local_blocks > 0,
    ),
    _decode(
        "select",
        "blocks of a new page are no candidates at once",
        lambda c: selected(c, _last_block_at_page_end),
        _paged,
    ),
    _decode(
        "select",
        "rows of a step share the blocks of the first",
        returns(0, _last_of_step),
        lambda c: _new_rows(c) > 1,
    ),
    _decode(
        "select",
        "block 0 is forced with init_blocks = 0",
        lambda c: selected(c, init=1),
        lambda c: c.geometry.init_blocks == 0 and _crowded(c),
    ),
    _decode(
        "select",
        "two local blocks are forced with local_blocks >= 3",
        sizes(local_blocks=lambda c: 2),
        lambda c: c.geometry.local_blocks >= 3 and _crowded(c),
    ),
    _decode(
        "select",
        "places from the 17th on stay empty",
        returns(0, lambda c, b: b.masked_fill(torch.arange(c.n) >= 16, -1)),
        lambda c: c.n > 16,
    ),
    _decode(
        "select",
        "heads of a group from the fifth on are not summed",
        lambda c: selected(c, score={"heads": 4}),
        lambda c: c.per_group > 4 and _crowded(c),
    ),
    _decode(
        "select",
        "the lse of fp16 is rounded to fp16",
        reads("lse", rounded_to(FP16)),
        every(dtype_is(FP16), _crowded, lambda c: c.per_group > 1),
    ),
    # sel
    _decode("sel", "a given scale is ignored", calls(scale=lambda c: c.default_scale), scale_given),
    _decode(
        "sel",
        "a page that is just full is looked up one too early",
        _table(_last_page_is_the_one_before),
        _fills_page,
    ),
    _decode(
        "sel",
        "sequences from the fourth on use the pages of the third",
        _table(_one_table),
        lambda c: c.batch >= 4,
    ),
    _decode(
        "sel",
        "pages from the fifth on wrap around",
        _table(_four_pages),
        lambda c: max(c.lengths) > 4 * _page(c),
    ),
    _decode(
        "sel",
        "the last row of a page is not read",
        lambda c: masked_decode(c, _sel_misses_newest_at_page_end),
        lambda c: max(c.lengths) >= _page(c),
    ),
    _decode(
        "sel",
        "rows of a step do not see its earlier rows",
        lambda c: masked_decode(c, _sel_ignores_earlier_new),
        lambda c: _new_rows(c) > 1,
    ),
    _decode(
        "sel",
        "keys are cut at the end of the sequence",
        lambda c: masked_decode(c, _future_cut_at_length),
        lambda c: _new_rows(c) > 1,
    ),
    _decode("sel", "the loop over blocks stops at -1", reads("blocks", _stop_at_hole), _hole),
    _decode(
        "sel",
        "blocks from the 17th on are dropped",
        reads("blocks", lambda c, b: b[..., :16].contiguous()),
        lambda c: c["blocks"].shape[-1] > 16,
    ),
    _decode(
        "sel",
        "rows of a step from the 17th on give zero",
        _rows_after(16),
        lambda c: _new_rows(c) > 16,
    ),
    _decode("sel", "padding rows repeat the last token", _padding_repeats_last, _padded),
    _decode(
        "sel", "results of idle sequences are closed up", _idle_shifts_batch, _idle_before_active
    ),
    _decode(
        "sel",
        "channels of o from Dk on are zero",
        lambda c: returns(0, zero_from(-1, c.dk))(c),
        lambda c: c.dv > c.dk,
    ),
    _decode("sel", "fp32 is computed in bf16", in_dtype(BF16), dtype_is(FP32)),
    _decode(
        "sel",
        "the lse misses a split of a long sequence",
        per_row(_split_without_rescale),
        lambda c: max(c.lengths) > 64,
    ),
    _decode(
        "sel", "a strided q is read as contiguous", reads("q", read_as_contiguous), scattered("q")
    ),
    # win
    _decode(
        "win",
        "a negative scale loses its sign",
        calls(scale=lambda c: -c.scale),
        lambda c: c.scale < 0,
    ),
    _decode(
        "win",
        "the ring wraps at the window",
        _wrap_at(lambda c: c.window),
        lambda c: c["k"].shape[1] != c.window and max(c.lengths) > c.window,
    ),
    _decode(
        "win",
        "the ring is right for one turn only",
        _first_wrap_only,
        lambda c: max(c.lengths) > 2 * c["k"].shape[1],
    ),
    _decode(
        "win",
        "a window across the end of the ring loses its first part",
        lambda c: masked_decode(c, _window_start_in_ring),
        _crosses_ring_end,
    ),
    _decode(
        "win",
        "rows of a step do not see its earlier rows",
        lambda c: masked_decode(c, _ignores_later_rows),
        lambda c: _new_rows(c) > 1,
    ),
    _decode(
        "win",
        "all rows of a step see what the last sees",
        lambda c: _newest_row_masks(c, win_mask),
        lambda c: _new_rows(c) > 1,
    ),
    _decode(
        "win",
        "an odd window is one short",
        sizes(window_size=lambda c: c.window - 1),
        lambda c: c.window % 2 == 1 and c.window > 1,
    ),
    _decode(
        "win",
        "kv heads from the third on read the second",
        reads("k", repeat_from(-2, 2)),
        lambda c: c.groups >= 3,
    ),
    _decode("win", "padding rows repeat the last token", _padding_repeats_last, _padded),
    _decode(
        "win", "results of idle sequences are closed up", _idle_shifts_batch, _idle_before_active
    ),
    _decode("win", "fp16 output passes through bf16", returns(0, rounded_to(BF16)), dtype_is(FP16)),
    _decode("win", "fp64 is computed in fp32", in_dtype(FP32), dtype_is(FP64)),
    _decode(
        "win",
        "rows of a step from the 33rd on give zero",
        _rows_after(32),
        lambda c: _new_rows(c) > 32,
    ),
    _decode(
        "win",
        "the last channel of an odd Dv is zero",
        lambda c: returns(0, zero_from(-1, c.dv - 1))(c),
        lambda c: c.dv % 2 == 1 and c.dv > 1,
    ),
)
