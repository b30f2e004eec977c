"""A cache operation that raises leaves the cache as it was: at every point, and in odd calls."""

from __future__ import annotations

import pytest
import torch

from caches import assert_unchanged, content, layer_of, poisoned_cache, tokens
from injection import (
    AUTO,
    ERRORS,
    HookError,
    RaiseAt,
    RaiseAtOpcode,
    RaiseInHook,
    raise_hook_error,
    state,
    undone,
)
from nsa_core.cache import step
from nsa_verify.drawn.caches.judge import plans_of
from nsa_verify.drawn.caches.outputs import judge_output
from nsa_verify.drawn.caches.replay import Replay
from nsa_verify.drawn.parser import parse

CACHE = (
    "cache dtype=float64 l=8 d=4 block=16 n=3 w=21 h=2 groups=2 compress=linear batch=3 max_len=90"
    " max_rollback=5 max_step=4"
)
# The last operation fails.
FEW_HISTORIES = (
    "step=61,44,9 crop=57,44,4",
    "step=61,44,9 reset=0",
    "step=61,44,9 reorder=2,0,2",
    "step=61,44,9 save=0 step=1,4,2 load=0,1",
    "step=30,44,9 reserve=80,80,80",
    "chunk_rows=6 step=40,17,1 step=13,13,13",
)
HISTORIES = (
    *FEW_HISTORIES,
    "step=33,33,33",
    "step=9,0,0 step=0,30,12",
    "step=4,4,4 crop=0,0,0 step=9,9,9",
    "step=60,44,2 step=1,1,1",
    "step=59,43,7 step=1,1,1",
    "step=61,44,2 step=4,4,4",
    "step=61,46,0 step=4,0,2",
    "step=40,17,1 step=25,25,25",
    "step=40,17,1 step=0,25,7",
    "chunk_rows=1 step=40,17,1 step=9,9,9",
    "step=61,44,9 crop=57,44,4 step=4,4,4",
    "step=61,44,9 reorder=0,0,1 step=1,1,1",
    "step=47,44,9 save=0 step=4,4,4",
)


def check_errors(line, injector, interval):
    """Inject errors at intervals of operators or opcodes, until the last operation is complete."""
    history = parse(f"{CACHE} {line}")
    *earlier, last = history.operations
    replay, number = Replay(history, plans_of(AUTO, history)), 0
    with replay.short_chunks():
        for operation in earlier:
            assert not list(replay.faults_of(operation, judge_output))
        replay.cache.overflowed.fill_(True)  # as after a replay; only a reset clears them
        before = state(replay.cache)
        while state(replay.cache) == before:
            error = injector(number, *([ERRORS[number % 3]] if injector is RaiseAt else []))
            assert not list(replay.faults_of(last, judge_output, undone(replay, error))), number
            number += interval
            if not error.raised:
                break
    assert number > 3 * interval
    assert not list(replay.page_faults())


@pytest.mark.parametrize("operations", FEW_HISTORIES)
def test_error_at_many_operators(operations):
    check_errors(f"page_size=16 {operations}", RaiseAt, 97 if "chunk_rows" in operations else 1)


@pytest.mark.slow
@pytest.mark.parametrize("pages", ["", "page_size=16"])
@pytest.mark.parametrize(("injector", "interval"), [(RaiseAt, 1), (RaiseAtOpcode, 29)])
@pytest.mark.parametrize("operations", HISTORIES)
def test_error_at_every_point(operations, injector, interval, pages):
    if "reserve" in operations and not pages:
        pytest.skip("a cache without pages has nothing to reserve")
    check_errors(f"{pages} {operations}", injector, interval)


@pytest.fixture(scope="module")
def attn():
    return layer_of(compress="linear")


@pytest.fixture
def cache(attn):
    cache = poisoned_cache(attn, 3, 90, page_size=16, max_rollback=5, max_step=4)
    attn(tokens(attn, 3, 60), cache=cache, new=[60, 44, 2])
    return cache


def test_error_in_out_without_the_hooks_of_the_layer(attn, cache, monkeypatch):
    """A call of forward, which some wrappers make."""
    before = content(cache)
    monkeypatch.setattr(type(attn), "__call__", type(attn).forward)
    with pytest.raises(HookError), RaiseInHook(attn.out):
        attn(tokens(attn, 3, 20, seed=3), cache=cache)
    assert cache.host_lengths() == before[-1].tolist() == cache.lengths.tolist()


def test_error_of_a_captured_step_changes_nothing_on_the_device(attn, cache, monkeypatch):
    """While a graph is captured, no operator runs, so nothing on the device needs an undo."""
    cache.reserve(80)
    bounds, counts = cache.bounds, []
    monkeypatch.setattr(step, "is_capturing", lambda device: True)
    hook = attn.out.register_forward_hook(lambda *args: counts.append(counter.count))
    try:
        with pytest.raises(HookError), RaiseAt(None, HookError) as counter, RaiseInHook(attn.out):
            attn(tokens(attn, 3, 1), cache=cache)
    finally:
        hook.remove()
    assert counts == [counter.count]
    assert cache.bounds is bounds
    assert not cache.captured


def test_operation_in_a_hook_of_a_step(attn, cache):
    """It belongs to the step: an error after it undoes both, and a second step saves the rings."""
    before, snapshots = state(cache), []
    x = tokens(attn, 3, 4, seed=3)

    def operate(*args):
        snapshots.append(cache.snapshot(0))
        for _ in range(7):  # more tokens than the rings can spare
            attn.forward(x, cache=cache)

    golden = poisoned_cache(attn, 3, 90, max_rollback=5, max_step=4)
    attn(tokens(attn, 3, 60), cache=golden, new=[60, 44, 2])
    hooks = [attn.register_forward_hook(hook) for hook in (operate, raise_hook_error)]
    try:
        with pytest.raises(HookError):
            attn(x[:, :1], cache=cache, new=[0, 1, 1])
    finally:
        for hook in hooks:
            hook.remove()
    snapshots.pop().release()
    assert state(cache) == before
    assert torch.equal(attn(x, cache=cache), attn(x, cache=golden))


def test_refused_step_and_full_pool_change_nothing(attn, cache):
    small = poisoned_cache(attn, 3, 90, page_size=16, num_pages=14)
    attn(tokens(attn, 3, 61), cache=small, new=[61, 44, 9])
    small.reorder([0, 0, 1])
    small.reserve([90, 90, 44])
    before, tensors = state(small), content(small)
    for rows, message in ((80, "max_len is 90"), (40, "need 3 more pages of 16 tokens, 2 of 14")):
        with pytest.raises(ValueError, match=message):
            attn(tokens(attn, 3, rows), cache=small, new=[0, 0, rows])
        assert state(small) == before
        assert_unchanged(small, tensors)
