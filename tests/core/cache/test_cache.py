"""Decoding with a cache: what histories do not show, such as the kernels that run, and pages."""

from __future__ import annotations

import copy
import dataclasses
import gc

import pytest
import torch

from caches import (
    assert_equal,
    layer_of,
    one_by_one,
    poisoned_cache,
    tokens,
    truth,
    whole,
)
from nsa_core import InvalidInput, NSAttention, resolve
from nsa_core.cache import step
from nsa_core.contract import KNOWN_METADATA
from nsa_core.plan.default_plan import partial_plan
from nsa_core.plan.registry import Registry, default_registry
from nsa_core.torch_ops.backend_call import record_dispatch

LENGTH = 53


@pytest.fixture(scope="module")
def problem():
    """A layer, two sequences, and the oracle's output for them."""
    attn = layer_of()
    x = tokens(attn, 2, LENGTH)
    return attn, x, truth(attn, x)


@pytest.mark.parametrize("limit", [7, 8192])
def test_long_chunk_is_split_into_max_chunk_rows(problem, limit, monkeypatch):
    """A chunk over a filled cache runs the decode forms once per MAX_CHUNK_ROWS rows."""
    attn, x, golden = problem
    monkeypatch.setattr(step, "MAX_CHUNK_ROWS", limit)
    cache = poisoned_cache(attn, 2, LENGTH, max_step=2)
    attn(x[:, :40], cache=cache, new=[9, 40])
    with record_dispatch() as trace:
        y = attn(x[:, 9:40], cache=cache, new=[31, 0])
    assert sum(call.slot == "win" for call in trace) == -(-31 // limit)
    assert_equal(y[:1], *(t[:1, 9:40] for t in golden))


def test_a_cache_of_fake_tensors_shares_no_table_with_others(problem):
    attn, x, golden = problem
    with torch._subclasses.FakeTensorMode():
        fake = NSAttention(attn.config).new_cache(2, LENGTH, dtype=attn.reference.dtype)
    cache = attn.new_cache(2, LENGTH)
    assert_equal(attn(x, cache=cache), *golden)
    assert fake.nbytes == cache.nbytes


@pytest.mark.parametrize("page_size", [None, 64])
def test_a_cache_does_not_depend_on_the_default_device(problem, page_size):
    attn, x, (golden, magnitude) = problem
    x = x[:1].expand(2, -1, -1)
    cache = attn.new_cache(2, 128, page_size=page_size, max_rollback=3)
    with torch.device("meta"):
        attn(x[:, :20], cache=cache, new=[20, 0])
        cache.load(cache.snapshot(0), 1)
        cache.reorder([1, 0])
        attn(x[:, 20:25], cache=cache)
        cache.crop(22)
        cache.reset(1)
        y = attn(x[:, 22:], cache=cache, new=[LENGTH - 22, 0])
    assert cache.host_lengths() == [LENGTH, 0]
    assert_equal(y[:1], golden[:1, 22:], magnitude[:1, 22:])


def directions(attn, x, cache, **options):
    with record_dispatch() as trace, torch.no_grad():
        attn(x, cache=cache, **options)
    return {call.direction for call in trace if call.slot != "combine"}


def test_long_chunks_run_the_prefill_kernels(problem, monkeypatch):
    """Short chunks, and those with an explicit plan, run the decode forms."""
    attn, x, _ = problem
    monkeypatch.setattr(step, "MIN_ROWS", {"cpu": 3, "cuda": 3})
    cache = poisoned_cache(attn, 2, LENGTH, max_step=1)
    plan = resolve(attn.config, dtype=torch.float64, phase="decode")
    assert directions(attn, x[:, :9], cache) == {"forward"}
    assert directions(attn, x[:, 9:20], cache, new=[11, 4]) == {"forward"}
    assert directions(attn, x[:, 20:22], cache) == {"decode"}
    assert directions(attn, x[:, 22:31], cache, plan=plan) == {"decode"}


def test_decode_forms_run_without_a_backend_that_takes_partial_queries(problem, monkeypatch):
    sdpa = default_registry().get("sdpa").spec
    slots = {name: dataclasses.replace(slot, partial=False) for name, slot in sdpa.slots.items()}
    registry = Registry(()).with_backend(dataclasses.replace(sdpa, slots=slots))
    monkeypatch.setattr("nsa_core.plan.plan.default_registry", lambda: registry)
    partial_plan.cache_clear()
    attn, x, _ = problem
    cache = poisoned_cache(attn, 2, LENGTH, max_step=1)
    attn(x[:, :20], cache=cache)
    assert directions(attn, x[:, 20:40], cache) == {"decode"}
    partial_plan.cache_clear()


def test_new_accepts_none_lists_tuples_and_tensors(problem):
    attn, x, _ = problem
    both = ([3, 1], (3, 1), torch.tensor([3, 1]), torch.tensor([3, 1], dtype=torch.int32))
    for counts, forms in (([23, 21], both), ([23, 23], (None, [3, 3]))):
        outs = []
        for new in forms:
            cache = attn.new_cache(2, LENGTH)
            attn(x[:, :20], cache=cache)
            outs.append(attn(x[:, 20:23], cache=cache, new=new))
            assert cache.lengths.tolist() == counts
        assert all(torch.equal(y, outs[0]) for y in outs)


@pytest.mark.parametrize("rows", [2, 20])
def test_the_output_of_padding_is_0_beside_a_bias_of_out(problem, rows):
    attn, x = copy.deepcopy(problem[0]), problem[1]
    attn.out.bias = torch.nn.Parameter(torch.ones_like(attn.out.weight[:, 0]))
    cache = attn.new_cache(2, LENGTH, max_step=4)
    for part in x[:, :20], x[:, :rows]:
        y = attn(part, cache=cache, new=[part.shape[1], 1])
        assert y[0].all()
        assert not y[1, 1:].any()


def test_paged_and_contiguous_caches_give_the_same_bits(problem):
    attn, x, _ = problem
    caches = [poisoned_cache(attn, 2, LENGTH, page_size=size) for size in (None, 16, 48)]
    for part in x.split([11, 1, 1, 19, 1, 1, 1, 18], 1):
        y, *other_outputs = [attn(part, cache=cache) for cache in caches]
        assert all(torch.equal(y, other) for other in other_outputs)


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


@pytest.mark.parametrize("page_size", [None, 16])
def test_tensors_of_a_cache_carry_their_metadata(problem, page_size):
    """Backends look launches up by it, so it must be that of the tensors after steps too."""
    attn, x, _ = problem
    cache = poisoned_cache(attn, 2, LENGTH, page_size=page_size)
    attn(x[:, :40], cache=cache)
    tensors = (*cache.kv.tensors(), *cache.kv.pages.tables, *cache.kv.rope)
    assert len(tensors) == 14
    for tensor in tensors:
        assert getattr(tensor, KNOWN_METADATA) == (tensor.shape, tensor.stride(), tensor.dtype)


def test_pages_are_allocated_as_sequences_grow(problem):
    attn, x, _ = problem
    cache = poisoned_cache(attn, 2, LENGTH, page_size=16, num_pages=3)
    attn(x[:, :15], cache=cache)
    assert cache.pages.free == 1
    attn(x[:, 15:16], cache=cache)
    message = "out of pages: sequences 0, 1 need 2 more pages of 16 tokens, 1 of 3 are free"
    with pytest.raises(InvalidInput, match=message):
        attn(x[:, 16:17], cache=cache)
    attn(x[:, 16:17], cache=cache, new=[0, 1])
    assert cache.pages.free == 0
    cache.reset(1)
    assert cache.pages.free == 2


def test_last_sequence_of_a_shared_page_keeps_it(problem):
    attn, x, _ = problem
    cache = poisoned_cache(attn, 2, LENGTH, page_size=16, num_pages=2)
    attn(x[:, :5], cache=cache, new=[5, 0])
    prefix = cache.snapshot(0)
    cache.load(prefix, 1)
    prefix.release()
    assert cache.pages.free == 1
    attn(x[:, 5:6], cache=cache)
    assert cache.pages.free == 0


def test_snapshot_keeps_its_pages_until_it_is_deleted(problem):
    attn, x, _ = problem
    cache = poisoned_cache(attn, 2, LENGTH, page_size=16, num_pages=10)
    attn(x[:, :40], cache=cache)
    prefix = cache.snapshot(1)
    cache.reset()
    assert cache.pages.free == 7
    del prefix
    gc.collect()
    assert cache.pages.free == 10


def test_reserve(problem):
    attn, x, _ = problem
    cache = poisoned_cache(attn, 2, LENGTH, page_size=16, num_pages=6)
    attn(x[:, :5], cache=cache)
    cache.reserve([40, 10])
    assert cache.pages.free == 2
    assert cache.table.device_room.tolist() == [48, 16]
    snapshot = cache.snapshot(0)
    assert cache.table.device_room.tolist()[0] == 5  # its page is shared now
    cache.reserve([40, 10])
    assert cache.table.device_room.tolist() == [48, 16]
    assert cache.pages.free == 1
    snapshot.release()
    assert cache.pages.free == 2


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
