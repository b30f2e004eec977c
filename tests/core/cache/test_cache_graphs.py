"""Steps as a CUDA graph replays them, simulated on the CPU: the host reads nothing."""

from __future__ import annotations

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
from nsa_core.cache import step

ROOM = 40
PAGES = pytest.mark.parametrize("page_size", [None, 16])


@pytest.fixture(scope="module")
def attn():
    return layer_of()


@pytest.fixture
def captured(monkeypatch):
    """Run steps as during the capture of a CUDA graph: the host reads nothing."""
    monkeypatch.setattr(step, "is_capturing", lambda device: True)


@PAGES
def test_captured_steps_equal_eager_steps(attn, page_size, captured):
    x = tokens(attn, 2, ROOM)
    cache = poisoned_cache(attn, 2, ROOM, page_size=page_size)
    cache.reserve(ROOM)
    golden, device_new = whole(attn, x), torch.tensor([3, 0], dtype=torch.int32)
    assert_equal(one_by_one(attn, x[:, :18], cache), golden[:, :18])
    y = attn(x[:, 18:22], cache=cache, new=device_new)
    assert_equal(y[:1, :3], golden[:1, 18:21])
    assert (y[0, 3:] == 0).all()
    assert (y[1] == 0).all()
    device_new.copy_(torch.tensor([-5, 99]))  # clamped to the rows of x
    assert_equal(attn(x[:, 18:22], cache=cache, new=device_new)[1:], golden[1:, 18:22])
    assert cache.host_lengths() == [21, 22]
    cache.check()


@PAGES
def test_captured_step_past_the_end_writes_nothing(attn, page_size, captured):
    x = tokens(attn, 2, ROOM + 9)
    cache = poisoned_cache(attn, 2, ROOM, page_size=page_size)
    cache.reserve(ROOM)
    one_by_one(attn, x[:, :38], cache)
    y = attn(x[:, 38:42], cache=cache, new=torch.tensor([4, 1], dtype=torch.int32))
    golden = whole(attn, x[:, :ROOM])
    assert_equal(y[:1, :2], golden[:1, 38:])
    assert_equal(y[1:, :1], golden[1:, 38:39])
    assert (y[0, 2:] == 0).all()
    before = content(cache)
    attn(x[:, 42:43], cache=cache, new=torch.tensor([1, 0], dtype=torch.int32))
    assert_unchanged(cache, before)
    with pytest.raises(InvalidInput, match="sequence 0 has 40 tokens and room for 40, max_len 40"):
        cache.check()
    cache.check()  # reported once
    assert cache.lengths.tolist() == [40, 39]
    attn(x[:, 42:43], cache=cache, new=torch.tensor([1, 0], dtype=torch.int32))
    cache.reset(0)
    cache.check()  # reset clears the overflow


def test_captured_step_at_the_end_of_the_last_page(captured):
    """With l = d, the next block of a full sequence would start in a page outside the table."""
    attn = layer_of(compress_block_size=4)
    x, cache = tokens(attn, 1, 32), poisoned_cache(attn, 1, 32, page_size=16)
    cache.reserve(32)
    one_by_one(attn, x, cache)
    before = content(cache)
    attn(x[:, :1], cache=cache)
    assert_unchanged(cache, before)


def test_captured_step_without_own_pages_writes_nothing(attn, captured):
    """Pages may be not reserved, or shared with a snapshot."""
    x = tokens(attn, 2, ROOM)
    cache = poisoned_cache(attn, 2, ROOM, page_size=16)
    cache.reserve([32, 16])
    one_by_one(attn, x[:, :17], cache)
    with pytest.raises(
        InvalidInput,
        match=r"sequence 1 has 16 tokens and room for 16, max_len 40; call reserve\(\) before",
    ):
        cache.check()
    snapshot = cache.snapshot(0)
    attn(x[:, 17:18], cache=cache, new=torch.tensor([1, 0], dtype=torch.int32))
    with pytest.raises(InvalidInput, match="sequence 0 has 17 tokens and room for 17"):
        cache.check()
    cache.reserve([32, 16])
    y = attn(x[:, 17:18], cache=cache, new=torch.tensor([1, 0], dtype=torch.int32))
    assert_equal(y[:1], whole(attn, x[:1])[:, 17:18])
    cache.load(snapshot, 1)
    assert cache.host_lengths() == [18, 17]


def test_host_reads_the_lengths_after_replays(attn, monkeypatch):
    """Eager steps, crops and overflow checks between replays use the lengths on the device."""
    x = tokens(attn, 1, ROOM + 1)
    golden, cache = whole(attn, x[:, :ROOM]), poisoned_cache(attn, 1, ROOM, max_rollback=4)
    attn(x[:, :9], cache=cache)
    with monkeypatch.context() as patched:
        patched.setattr(step, "is_capturing", lambda device: True)
        one_by_one(attn, x[:, 9:20], cache)
    assert_equal(attn(x[:, 20:24], cache=cache), golden[:, 20:24])
    with monkeypatch.context() as patched:
        patched.setattr(step, "is_capturing", lambda device: True)
        one_by_one(attn, x[:, 24:38], cache)
    with pytest.raises(InvalidInput, match="sequence 0 has had 38 tokens and 33 would be 5 fewer"):
        cache.crop(33)
    cache.crop(34)
    assert_equal(one_by_one(attn, x[:, 34:40], cache), golden[:, 34:])
    with pytest.raises(InvalidInput, match="sequence 0 has 40 tokens, 1 more do not fit"):
        attn(x[:, 40:], cache=cache)


def test_captured_step_refuses_long_steps_and_host_counts(attn, captured):
    cache, x = poisoned_cache(attn, 2, ROOM, max_step=4), tokens(attn, 2, ROOM)
    for call, message in (
        (
            lambda: attn(x[:, :5], cache=cache),
            "a captured step takes at most max_step = 4 rows, got 5",
        ),
        (lambda: attn(x[:, :2], cache=cache, new=[1, 1]), "a list would become a constant"),
        (lambda: attn(x[:, :2], cache=cache, new=torch.zeros(2)), "new must be int32 .2. on cpu"),
    ):
        with pytest.raises(InvalidInput, match=message):
            call()


def test_counts_on_the_device_only(attn, monkeypatch):
    """With `new` on a GPU the host uses bounds, and reads the lengths if the bounds do not fit."""
    x = tokens(attn, 2, ROOM)
    cache = poisoned_cache(attn, 2, ROOM, page_size=16, max_rollback=3)
    golden = whole(attn, x)

    def ragged_new_tokens(cache, rows, new, capturing):
        return step.NewTokens(rows, [rows] * 2, new, exact=False)

    with monkeypatch.context() as patched:
        patched.setattr(step, "new_tokens", ragged_new_tokens)
        assert_equal(attn(x[:, :12], cache=cache, new=torch.tensor([12, 4]))[:1], golden[:1, :12])
        for t in range(12, 30):
            rows = torch.stack([x[0, t : t + 2], x[1, t - 8 : t - 6]])
            y = attn(rows, cache=cache, new=torch.tensor([1, 1]))
            assert_equal(y[:, :1], torch.stack([golden[0, t : t + 1], golden[1, t - 8 : t - 7]]))
    assert not cache.exact
    assert cache.bounds != [30, 22]
    with pytest.raises(InvalidInput, match="sequence 0 has had 30 tokens and 26 would be 4 fewer"):
        cache.crop([26, 22])
    cache.crop([27, 22])
    assert_equal(attn(x[:, 27:40], cache=cache, new=[13, 0])[:1], golden[:1, 27:])


@PAGES
def test_reserve_workspace_changes_no_bit(attn, page_size):
    x = tokens(attn, 2, ROOM)
    caches = [poisoned_cache(attn, 2, ROOM, page_size=page_size) for _ in range(2)]
    caches[0].reserve_workspace()
    for part in x.split([9, 1, 1, 5, 1, 23], 1):
        before = content(caches[0])
        caches[0].reserve_workspace(rows=3)
        caches[0].reserve_workspace(rows=caches[0].max_step)
        assert_unchanged(caches[0], before)
        assert torch.equal(attn(part, cache=caches[0]), attn(part, cache=caches[1]))
    caches[0].check()
