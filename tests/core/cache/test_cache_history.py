"""Crop, reset, reorder, snapshot and load: later outputs equal those of the resulting sequences."""

from __future__ import annotations

import gc

import pytest
import torch

from caches import (
    assert_equal,
    assert_unchanged,
    content,
    layer_of,
    one_by_one,
    poisoned_cache,
    tokens,
    whole,
)
from nsa_core import InvalidInput
from nsa_verify.drawn.draw import draw
from nsa_verify.drawn.judge import judge
from nsa_verify.problems.combination import Combination

ROOM = 70
PAGES = pytest.mark.parametrize("page_size", [None, 16])


@pytest.fixture(scope="module")
def attn():
    return layer_of()


def new_cache(attn, page_size, batch=2, **options):
    return poisoned_cache(
        attn, batch, ROOM, page_size=page_size, max_rollback=9, max_step=6, **options
    )


@pytest.mark.few_cases
@PAGES
@pytest.mark.parametrize("start", [0, 3, 8, 12, 15, 16, 22, 32, 47])
def test_continuing_after_crop_equals_never_appending(attn, start, page_size):
    x = tokens(attn, 2, ROOM)
    cropped, other = new_cache(attn, page_size), new_cache(attn, page_size)
    for cache in (cropped, other):
        attn(x[:, :start], cache=cache)
    attn(tokens(attn, 2, 6, seed=5), cache=cropped)
    attn(tokens(attn, 2, 3, seed=6), cache=cropped)
    cropped.crop(start)
    assert cropped.host_lengths() == cropped.lengths.tolist() == [start, start]
    following = x[:, start : start + 20]
    assert torch.equal(one_by_one(attn, following, cropped), one_by_one(attn, following, other))


@PAGES
def test_crop_of_one_sequence(attn, page_size):
    x = tokens(attn, 2, ROOM)
    cache = new_cache(attn, page_size)
    attn(x[:, :40], cache=cache)
    cache.crop([40, 33])
    assert cache.lengths.tolist() == [40, 33]
    y = attn(x[:, 40:44], cache=cache, new=[4, 0])
    assert_equal(y[:1], whole(attn, x[:1])[:, 40:44])
    y = attn(torch.stack([x[0, 44:48], x[1, 33:37]]), cache=cache)
    assert_equal(y[1:], whole(attn, x[1:])[:, 33:37])


def test_crop_refuses_more_than_max_rollback(attn):
    cache = new_cache(attn, None)
    x = tokens(attn, 2, ROOM)
    attn(x[:, :40], cache=cache)
    cache.crop([40, 34])
    for lengths, message in (
        ([30, 34], "sequence 0 has had 40 tokens and 30 would be 10 fewer, max_rollback is 9"),
        ([40, 30], "sequence 1 has had 40 tokens and 30 would be 10 fewer"),
        ([41, 34], "sequence 0 has 40 tokens, cannot crop to 41"),
        ([40], "lengths must be an integer >= 0, or 2 of them"),
        ([40, -1], "lengths must be an integer >= 0"),
    ):
        with pytest.raises(InvalidInput, match=message):
            cache.crop(lengths)
        assert cache.host_lengths() == cache.lengths.tolist() == [40, 34]
    other = attn.new_cache(1, 10)
    attn(x[:1, :5], cache=other)
    with pytest.raises(InvalidInput, match="max_rollback is 0"):
        other.crop(4)


@PAGES
def test_reset_of_one_sequence_and_of_all(attn, page_size):
    x, new_x = tokens(attn, 2, ROOM), tokens(attn, 2, ROOM, seed=3)
    cache = new_cache(attn, page_size)
    attn(x[:, :50], cache=cache)
    cache.reset(1)
    y = attn(
        torch.cat([torch.zeros_like(new_x[1:, :30]), new_x[1:, :30]]), cache=cache, new=[0, 30]
    )
    assert_equal(y[1:], whole(attn, new_x[1:, :30]))
    y = attn(torch.stack([x[0, 50:55], new_x[1, 30:35]]), cache=cache)
    assert_equal(y[:1], whole(attn, x[:1])[:, 50:55])
    cache.reset()
    assert cache.host_lengths() == cache.lengths.tolist() == [0, 0]
    assert cache.pages is None or cache.pages.free == cache.pages.total
    assert_equal(attn(new_x, cache=cache), whole(attn, new_x))


@pytest.mark.few_cases("16")
@PAGES
def test_reorder(attn, page_size):
    """Beams from one sequence stay independent, also across a page boundary."""
    x = tokens(attn, 3, ROOM)
    for length in (11, 16, 29, 31):
        cache = new_cache(attn, page_size, batch=3)
        attn(x[:, :length], cache=cache)
        cache.reorder(torch.tensor([2, 0, 2]))
        past = torch.stack([x[2], x[0], x[2]])[:, :length]
        more = tokens(attn, 3, 20, seed=4)
        golden = whole(attn, torch.cat([past, more], 1))
        assert_equal(one_by_one(attn, more, cache), golden[:, length:])


def test_reorder_moves_the_rollback_limit(attn):
    cache = new_cache(attn, None)
    attn(tokens(attn, 2, 40), cache=cache, new=[40, 20])
    cache.crop([33, 20])
    cache.reorder([1, 0])
    assert cache.host_lengths() == [20, 33]
    with pytest.raises(InvalidInput, match="sequence 1 has had 40 tokens and 30 would be 10 fewer"):
        cache.crop([20, 30])
    cache.crop([11, 31])


@pytest.mark.few_cases
@PAGES
@pytest.mark.parametrize("length", [5, 16, 20, 32, 36])
def test_prefix_shared_by_all_sequences(attn, length, page_size):
    """Also at a page boundary, where compressed tokens of the shared page are still missing."""
    x = tokens(attn, 1, ROOM)
    cache = new_cache(attn, page_size, batch=3)
    attn(x[:, :length].expand(3, -1, -1), cache=cache, new=[length, 0, 0])
    prefix = cache.snapshot(0)
    cache.load(prefix, 1)
    cache.load(prefix, 2)
    assert cache.lengths.tolist() == [length] * 3
    if cache.pages is not None:
        assert cache.pages.free == cache.pages.total - -(-length // 16)
    more = tokens(attn, 3, 30, seed=4)
    golden = whole(attn, torch.cat([x[:, :length].expand(3, -1, -1), more], 1))
    assert_equal(one_by_one(attn, more, cache), golden[:, length:])
    cache.load(prefix, 1)
    y = attn(more[:, :3], cache=cache, new=[0, 3, 0])
    assert_equal(y[1:2], golden[1:2, length : length + 3])


def test_snapshot_keeps_its_pages_until_released(attn):
    cache = new_cache(attn, 16, num_pages=10)
    attn(tokens(attn, 2, 40), cache=cache)
    prefix = cache.snapshot(0)
    cache.reset()
    assert cache.pages.free == 7
    prefix.release()
    assert cache.pages.free == 10
    with pytest.raises(InvalidInput, match="was released"):
        cache.load(prefix, 0)
    attn(tokens(attn, 2, 40), cache=cache)
    prefix = cache.snapshot(1)
    cache.reset()
    del prefix
    gc.collect()
    assert cache.pages.free == 10


def test_last_sequence_of_a_shared_page_keeps_it(attn):
    cache = new_cache(attn, 16, num_pages=2)
    x = tokens(attn, 2, 12)
    attn(x[:, :5], cache=cache, new=[5, 0])
    prefix = cache.snapshot(0)
    cache.load(prefix, 1)
    prefix.release()
    assert cache.pages.free == 1
    y = one_by_one(attn, x[:, 5:], cache)
    assert cache.pages.free == 0
    assert_equal(y, whole(attn, torch.cat([x[:1, :5].expand(2, -1, -1), x[:, 5:]], 1))[:, 5:])


def test_snapshot_of_another_cache_is_refused(attn):
    first, second = new_cache(attn, 16), new_cache(attn, 16)
    attn(tokens(attn, 2, 4), cache=first)
    with pytest.raises(InvalidInput, match="is of another cache"):
        second.load(first.snapshot(0), 0)


def test_pages_are_allocated_as_sequences_grow(attn):
    cache = new_cache(attn, 16, num_pages=3)
    x = tokens(attn, 2, ROOM)
    attn(x[:, :15], cache=cache)
    assert cache.pages.free == 1
    attn(x[:, 15:16], cache=cache)
    before = content(cache)
    message = "out of pages: sequences 0, 1 need 2 more pages of 16 tokens, 1 of 3 are free"
    with pytest.raises(InvalidInput, match=message):
        attn(x[:, 16:17], cache=cache)
    assert_unchanged(cache, before)
    y = attn(x[:, 16:17], cache=cache, new=[0, 1])
    assert_equal(y[1:], whole(attn, x[1:])[:, 16:17])
    cache.reset(1)
    assert cache.pages.free == 2
    assert_equal(attn(x[:, 16:20], cache=cache, new=[4, 0])[:1], whole(attn, x[:1])[:, 16:20])


def test_reserve(attn):
    cache = new_cache(attn, 16, num_pages=6)
    attn(tokens(attn, 2, 5), cache=cache)
    cache.reserve([40, 10])
    assert cache.pages.free == 2
    assert cache.table.device_room.tolist() == [48, 16]
    with pytest.raises(InvalidInput, match="out of pages"):
        cache.reserve(64)
    assert cache.pages.free == 2
    with pytest.raises(InvalidInput, match="71 tokens are more than max_len 70"):
        cache.reserve(71)
    snapshot = cache.snapshot(0)
    assert cache.table.device_room.tolist()[0] == 5  # its page is shared now
    cache.reserve([40, 10])
    assert cache.table.device_room.tolist() == [48, 16]
    assert cache.pages.free == 1
    snapshot.release()
    assert cache.pages.free == 2


@pytest.mark.few_cases("1", "2")
@pytest.mark.parametrize("number", range(6))
def test_any_history(number):
    """Random operations on caches of many sizes, judged by the check of `nsa verify`."""
    history = draw("cache", "quick", ["float64"], seed=11, count=6)[number]
    failed = [f for f in judge(Combination({}, name="auto"), history) if not f.ok]
    assert not failed, failed[0].detail
