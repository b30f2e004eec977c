"""Decoding in float64: prefill, prefill with steps, chunked prefill and steps alone agree."""

from __future__ import annotations

import itertools

import pytest
import torch

from caches import (
    EDGES,
    OPTIONS,
    assert_equal,
    layer_of,
    one_by_one,
    poisoned_cache,
    tokens,
    truth,
    whole,
)
from nsa_core.cache import step
from nsa_core.torch_ops.backend_call import record_dispatch

LENGTH = 53


@pytest.fixture(scope="module")
def problem():
    """A layer, two sequences, and the oracle's output for them."""
    attn = layer_of()
    x = tokens(attn, 2, LENGTH)
    return attn, x, truth(attn, x)


@pytest.mark.few_cases
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("first", EDGES)
def test_prefill_and_steps(problem, first, page_size):
    attn, x, golden = problem
    cache = poisoned_cache(attn, 2, LENGTH, page_size=page_size)
    y = torch.cat([attn(x[:, :first], cache=cache), one_by_one(attn, x[:, first:], cache)], 1)
    assert_equal(y, *golden)
    assert cache.lengths.tolist() == [LENGTH, LENGTH]


@pytest.mark.few_cases
@pytest.mark.parametrize("chunk", [2, 5, 8, 17, 33])
@pytest.mark.parametrize("max_step", [5, 64])
def test_chunked_prefill(problem, chunk, max_step):
    attn, x, golden = problem
    cache = poisoned_cache(attn, 2, LENGTH, max_step=max_step)
    y = torch.cat([attn(part, cache=cache) for part in x.split(chunk, 1)], 1)
    assert_equal(y, *golden)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_every_layer_option_decodes_like_the_oracle(option):
    attn = layer_of(**option)
    x = tokens(attn, 1, 45)
    cache = poisoned_cache(attn, 1, 45, page_size=32)
    parts = x.split([10, 1, 1, 1, 1, 1, 9, 1, 20], 1)
    assert_equal(torch.cat([attn(part, cache=cache) for part in parts], 1), *truth(attn, x))


@pytest.fixture
def nan_memory():
    """Make torch fill new memory with NaN."""
    previous = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(2).isnan().all()
    yield
    torch.use_deterministic_algorithms(previous)


@pytest.mark.usefixtures("nan_memory")
@pytest.mark.parametrize("max_step", [3, 64])
def test_ragged_steps_with_right_padding(problem, max_step):
    """The first new[b] rows of a sequence are its next tokens; NaN in the padding has no effect."""
    attn, x, (golden, magnitude) = problem
    inputs = torch.cat([x, x], 0)[:3]
    golden, magnitude = (torch.cat([t, t], 0)[:3] for t in (golden, magnitude))
    cache, lengths = poisoned_cache(attn, 3, LENGTH, page_size=16, max_step=max_step), [0, 0, 0]
    for new in ([9, 30, 0], [1, 1, 1], [0, 3, 2], [5, 0, 25], [0, 0, 0], [0, 4, 0], [30, 1, 7]):
        rows = torch.full((3, max(1, *new), x.shape[-1]), torch.nan, dtype=torch.float64)
        for b, n in enumerate(new):
            rows[b, :n] = inputs[b, lengths[b] : lengths[b] + n]
        y = attn(rows, cache=cache, new=new)
        for b, n in enumerate(new):
            assert (y[b, n:] == 0).all()
            if n:
                part = slice(lengths[b], lengths[b] + n)
                assert_equal(y[b : b + 1, :n], golden[b : b + 1, part], magnitude[b : b + 1, part])
            lengths[b] += n
    assert cache.host_lengths() == cache.lengths.tolist() == lengths


@pytest.mark.usefixtures("nan_memory")
def test_long_step_beside_a_full_sequence(problem):
    """Rows of the full sequence would be past the end, where the angle table has no entries."""
    attn, x, golden = problem
    cache = poisoned_cache(attn, 2, LENGTH, page_size=16, max_step=1)
    attn(x[:, :-1], cache=cache, new=[0, LENGTH - 1])
    y = attn(torch.stack([x[0], x[1].roll(1, 0)]), cache=cache, new=[LENGTH, 1])
    assert_equal(y[:1], *(t[:1] for t in golden))
    assert_equal(y[1:, :1], *(t[1:, -1:] for t in golden))
    assert cache.host_lengths() == [LENGTH, LENGTH]


@pytest.mark.parametrize("limit", [7, 8192])
def test_long_chunk_is_split_into_max_chunk_rows(problem, limit, monkeypatch):
    """A chunk over a filled cache runs the decode forms once per MAX_CHUNK_ROWS rows.

    Afterwards, the rings have the newest tokens.
    """
    attn, x, golden = problem
    monkeypatch.setattr(step, "MAX_CHUNK_ROWS", limit)
    cache = poisoned_cache(attn, 2, LENGTH, max_step=2, max_rollback=3)
    attn(x[:, :40], cache=cache, new=[9, 40])
    with record_dispatch() as trace:
        y = attn(x[:, 9:40], cache=cache, new=[31, 0])
    assert sum(call.slot == "win" for call in trace) == -(-31 // limit)
    assert_equal(y[:1], *(t[:1, 9:40] for t in golden))
    cache.crop(37)
    y = torch.cat([attn(x[:, 37:38], cache=cache), attn(x[:, 38:], cache=cache)], 1)
    assert_equal(y, *(t[:, 37:] for t in golden))


def test_new_accepts_lists_tuples_and_tensors(problem):
    attn, x, _ = problem
    outs = []
    for new in ([3, 1], (3, 1), torch.tensor([3, 1]), torch.tensor([3, 1], dtype=torch.int32)):
        cache = attn.new_cache(2, LENGTH)
        attn(x[:, :20], cache=cache)
        outs.append(attn(x[:, 20:23], cache=cache, new=new))
        assert cache.lengths.tolist() == [23, 21]
    assert all(torch.equal(y, outs[0]) for y in outs)


def test_padding_longer_than_the_cache(problem):
    attn, x, golden = problem
    cache = poisoned_cache(attn, 2, LENGTH, max_step=4)
    wide = torch.full((2, 3 * LENGTH, x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[:, :LENGTH] = x
    y = attn(wide, cache=cache, new=[LENGTH, LENGTH])
    assert y.shape == wide.shape
    assert_equal(y[:, :LENGTH], *golden)
    assert (y[:, LENGTH:] == 0).all()


def test_new_of_all_rows_equals_none(problem):
    attn, x, _ = problem
    outs = []
    for new in (None, [4, 4]):
        cache = attn.new_cache(2, LENGTH)
        attn(x[:, :20], cache=cache)
        outs.append(attn(x[:, 20:24], cache=cache, new=new))
    assert torch.equal(*outs)


def test_paged_and_contiguous_caches_give_the_same_bits(problem):
    attn, x, _ = problem
    caches = [poisoned_cache(attn, 2, LENGTH, page_size=size) for size in (None, 16, 48)]
    for part in x.split([11, 1, 1, 19, 1, 1, 1, 18], 1):
        y, *other_outputs = [attn(part, cache=cache) for cache in caches]
        assert all(torch.equal(y, other) for other in other_outputs)


def test_sequences_of_a_batch_are_independent(problem):
    """Outputs are judged, not compared as bits: products over more rows may round differently."""
    attn, x, _ = problem
    batched, alone = poisoned_cache(attn, 2, LENGTH), poisoned_cache(attn, 1, LENGTH)
    attn(tokens(attn, 2, 30, seed=9), cache=batched, new=[30, 0])
    for part in x[1:, :31].split([25, 1, 1, 4], 1):
        both = torch.cat([torch.full_like(part, torch.nan), part])
        y = attn(both, cache=batched, new=[0, part.shape[1]])
        assert_equal(y[1:], attn(part, cache=alone))
        assert (y[0] == 0).all()


def test_steps_of_zero_tokens_and_one_token(problem):
    attn, x, golden = problem
    cache = poisoned_cache(attn, 2, LENGTH)
    assert attn(x[:, :0], cache=cache).shape == (2, 0, x.shape[-1])
    assert_equal(attn(x[:, :1], cache=cache), *(t[:, :1] for t in golden))
    assert attn(x[:, :0], cache=cache).shape == (2, 0, x.shape[-1])
    assert cache.host_lengths() == [1, 1]


def test_cache_is_usable_up_to_its_last_token(problem):
    """Fault row 19: the cache works at its capacity."""
    attn, x, golden = problem
    for page_size, max_step in itertools.product((None, 16), (4, 64)):
        cache = poisoned_cache(attn, 2, LENGTH, page_size=page_size, max_step=max_step)
        y = torch.cat(
            [
                attn(x[:, :-5], cache=cache),
                attn(x[:, -5:-1], cache=cache),
                attn(x[:, -1:], cache=cache),
            ],
            1,
        )
        assert_equal(y, *golden)


def test_steps_run_without_gradient_in_every_grad_mode(problem):
    """Outputs equal those under no_grad, and a cache outlives the grad mode of its creation."""
    attn, x, _ = problem
    with torch.inference_mode():
        cache = attn.new_cache(2, LENGTH)
        first = attn(x[:, :10], cache=cache)
    second = attn(x[:, 10:11], cache=cache)
    assert not second.requires_grad
    with torch.no_grad():
        other = attn.new_cache(2, LENGTH)
        assert torch.equal(first, attn(x[:, :10], cache=other))
        assert torch.equal(second, attn(x[:, 10:11], cache=other))


@pytest.mark.slow
@pytest.mark.parametrize("first", [31, 32, 33, 63, 64, 65, 511, 512, 513])
def test_sizes_of_the_paper(first):
    attn = layer_of(
        compress_block_size=32,
        compress_stride=16,
        select_block_size=64,
        num_selected_blocks=16,
        window_size=512,
    )
    length = first + 20
    x = tokens(attn, 1, length)
    cache = poisoned_cache(attn, 1, length, page_size=64)
    y = torch.cat([attn(x[:, :first], cache=cache), one_by_one(attn, x[:, first:], cache)], 1)
    assert_equal(y, whole(attn, x))
    if first == 513:
        chunked = poisoned_cache(attn, 1, length)
        assert_equal(torch.cat([attn(part, cache=chunked) for part in x.split(100, 1)], 1), y)
        empty = poisoned_cache(attn, 1, length)
        assert_equal(one_by_one(attn, x, empty), y)
