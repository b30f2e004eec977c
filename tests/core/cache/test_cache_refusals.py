"""A cache refuses invalid arguments before anything is written."""

from __future__ import annotations

import copy
import dataclasses
import pickle

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
from nsa_core import InvalidInput, NSAError, NSAttention, Unsupported, resolve

ROOM = 40
PAGES = pytest.mark.parametrize("page_size", [None, 16])


@pytest.fixture(scope="module")
def attn():
    return layer_of()


@PAGES
def test_step_past_the_end_is_refused_without_a_change(attn, page_size):
    """Fault row 19: one token past the capacity."""
    x = tokens(attn, 2, ROOM + 5)
    cache = poisoned_cache(attn, 2, ROOM, page_size=page_size)
    attn(x[:, :30], cache=cache, new=[30, 20])
    before = content(cache)
    for rows, new, message in (
        (11, None, "sequence 0 has 30 tokens, 11 more do not fit: max_len is 40"),
        (21, [10, 21], "sequence 1 has 20 tokens, 21 more do not fit: max_len is 40"),
        (
            45,
            None,
            (
                "sequence 0 has 30 tokens, 45 more do not fit; sequence 1 has 20 tokens, 45 more do"
                " not fit"
            ),
        ),
    ):
        with pytest.raises(InvalidInput, match=message):
            attn(x[:, :rows], cache=cache, new=new)
        assert_unchanged(cache, before)
    y = attn(torch.stack([x[0, 30:40], x[1, 20:30]]), cache=cache)
    assert_equal(y, torch.cat([whole(attn, x[:1, :40])[:, 30:], whole(attn, x[1:, :30])[:, 20:]]))
    empty = poisoned_cache(attn, 2, ROOM, page_size=page_size)
    with pytest.raises(InvalidInput, match="sequence 0 has 0 tokens, 41 more do not fit"):
        attn(x[:, :41], cache=empty)
    assert_equal(attn(x[:, :40], cache=empty), whole(attn, x[:, :40]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"new": [1]}, "new must be 2 integers"),
        ({"new": [1, 4]}, "new must be from 0 to the 3 rows of x"),
        ({"new": [1, -1]}, "new must be from 0 to the 3 rows of x"),
        ({"new": [1, True]}, "new must be 2 integers"),
        ({"new": torch.tensor([0.5, 1])}, "new must be 2 integers"),
        ({"new": 3}, "new must be 2 integers"),
    ],
)
def test_invalid_new_is_refused(attn, arguments, message):
    cache = poisoned_cache(attn, 2, ROOM)
    before = content(cache)
    with pytest.raises(InvalidInput, match=message):
        attn(tokens(attn, 2, 3), cache=cache, **arguments)
    assert_unchanged(cache, before)


def test_inputs_that_do_not_fit_the_cache_are_refused(attn):
    cache, x = poisoned_cache(attn, 2, ROOM), tokens(attn, 2, 3)
    before, other = content(cache), layer_of(seed=1)
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    for call, message in (
        (lambda: attn(x[:1], cache=cache), "x has 1 sequences, but the cache has 2"),
        (
            lambda: attn(x.float(), cache=cache),
            "x is torch.float32, the layer's parameters are torch.float64",
        ),
        (
            lambda: attn(x[0], cu_seqlens=bounds, cache=cache),
            "cu_seqlens is not supported with a cache: pass x .B, m, dim. and new=",
        ),
        (lambda: attn(x, attention_mask=bounds, cache=cache), "attention_mask is not supported"),
        (lambda: attn(x, new=[1, 1]), "new needs cache="),
        (lambda: other(x, cache=cache), "the cache is another layer's"),
        (
            lambda: attn(x, cache=[cache]),
            "cache must be a result of new_cache.. of this layer, got list",
        ),
        (
            lambda: attn(x.clone().requires_grad_(), cache=cache),
            "no gradient flows through a cache",
        ),
        (
            lambda: attn(x, cache=attn.new_cache(2, 9, dtype=torch.float32)),
            "the cache is torch.float32 on cpu",
        ),
    ):
        with pytest.raises(InvalidInput, match=message):
            call()
    assert_unchanged(cache, before)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"batch": 0, "max_len": 1.5},
            "batch must be an integer >= 1, got 0; max_len must be an integer >= 1, got 1.5",
        ),
        ({"page_size": 24}, "page_size must be a multiple of select_block_size 16, got 24"),
        ({"num_pages": 3}, "num_pages 3 needs page_size, which is None"),
        ({"page_size": 16, "num_pages": 0}, "num_pages must be an integer >= 1 or None, got 0"),
        (
            {"max_rollback": -1, "max_step": True},
            "max_rollback must be an integer >= 0, got -1; max_step must be an",
        ),
        ({"dtype": torch.int8}, "dtype must be one of"),
        ({"device": "gpu"}, "device 'gpu' is not one that torch knows"),
    ],
)
def test_invalid_sizes_are_refused(attn, sizes, message):
    with pytest.raises(InvalidInput, match=message):
        attn.new_cache(**{"batch": 2, "max_len": ROOM, **sizes})


def test_invalid_indices_are_refused(attn):
    cache = attn.new_cache(2, ROOM)
    for call in (
        lambda: cache.reset(2),
        lambda: cache.snapshot(-1),
        lambda: cache.reorder([0, True]),
    ):
        with pytest.raises(InvalidInput, match="sequences are numbered 0 to 1"):
            call()
    for call in (
        lambda: cache.reset(1.5),
        lambda: cache.reorder(None),
        lambda: cache.load(cache.snapshot(0), "a"),
    ):
        with pytest.raises(InvalidInput, match="sequences are numbered 0 to 1"):
            call()
    with pytest.raises(InvalidInput, match="2 indices are needed, one per sequence, got 1"):
        cache.reorder([1])
    with pytest.raises(InvalidInput, match=r"expected one sequence index, got \[0, 1\]"):
        cache.snapshot([0, 1])
    with pytest.raises(InvalidInput, match="load: snapshot must be a result of snapshot"):
        cache.load(0, 1)
    for lengths in (0.0, None, [0, 0.0], "ab"):
        with pytest.raises(InvalidInput, match="lengths must be an integer >= 0, or 2 of them"):
            cache.crop(lengths)
    cache.crop(torch.zeros(2, dtype=torch.int64).numpy())  # integers of any kind
    assert cache.host_lengths() == [0, 0]


def test_explicit_plans(attn):
    """A cache or a single step accepts an explicit plan of the right phase.

    The phase is decode; for the first step it is prefill.
    """
    x = tokens(attn, 2, ROOM)
    decode, prefill = (
        resolve(attn.config, dtype=torch.float64, phase=phase) for phase in ("decode", "prefill")
    )
    cache = attn.new_cache(2, ROOM, plan=decode)
    assert cache.plan is decode
    y = torch.cat(
        [attn(x[:, :9], cache=cache, plan=prefill), attn(x[:, 9:12], cache=cache, plan=decode)], 1
    )
    assert_equal(y, whole(attn, x)[:, :12])
    decode.warmup()  # does not change the cache
    assert cache.host_lengths() == [12, 12]
    with pytest.raises(InvalidInput, match="phase is 'prefill', not 'decode'"):
        attn(x[:, 12:13], cache=cache, plan=prefill)
    with pytest.raises(InvalidInput, match="dtype is 'float32', not 'float64'"):
        attn.new_cache(2, ROOM, plan=resolve(attn.config, phase="decode"))
    with pytest.raises(InvalidInput, match="page_size is None, not 16"):
        attn.new_cache(2, ROOM, page_size=16, plan=decode)
    with pytest.raises(InvalidInput, match="it is for NSAConfig"):
        layer_of(window_size=7).new_cache(2, ROOM, plan=decode)
    with pytest.raises(Unsupported, match="has no decode form"):
        NSAttention(attn.config, backends={"win": "fa2"}).new_cache(2, ROOM)


def test_cache_refuses_copy_and_pickle(attn):
    cache = attn.new_cache(2, ROOM)
    for copy_function in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidInput, match="not copied or pickled"):
            copy_function(cache)


def test_compile_breaks_the_graph_with_a_reason(attn):
    x = tokens(attn, 2, ROOM)
    caches = [poisoned_cache(attn, 2, ROOM) for _ in range(2)]
    compiled = torch.compile(lambda x, cache: 2 * attn(x, cache=cache), backend="eager")
    for part in x[:, :12].split([9, 1, 2], 1):
        assert torch.equal(compiled(part, caches[0]), 2 * attn(part, cache=caches[1]))
    whole_graph = torch.compile(
        lambda x, cache: attn(x, cache=cache), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="capture it in a CUDA graph"):
        whole_graph(x[:, 12:13], caches[0])
    assert caches[0].host_lengths() == [12, 12]


def test_failing_kernel_does_not_change_the_lengths(attn, monkeypatch):
    x = tokens(attn, 2, ROOM)
    cache = poisoned_cache(attn, 2, ROOM, page_size=16)
    attn(x[:, :20], cache=cache)

    def fail(*tensors, call):
        raise RuntimeError("out of luck")

    broken = dataclasses.replace(cache.plan, win=dataclasses.replace(cache.plan.win, function=fail))
    for part, new in ((x[:, 20:21], None), (x[:, 20:24], [0, 4])):
        with pytest.raises(NSAError, match="slot 'win', decode: RuntimeError: out of luck"):
            attn(part, cache=cache, plan=broken, new=new)
        assert cache.host_lengths() == cache.lengths.tolist() == [20, 20]
    assert_equal(one_by_one(attn, x[:, 20:30], cache), whole(attn, x)[:, 20:30])


def test_check_names_layer_branch_and_backend(attn):
    checked = layer_of()
    checked.check, checked.layer = True, 7
    cache = checked.new_cache(1, ROOM)
    checked(tokens(attn, 1, 5), cache=cache)
    x = torch.full((1, 1, attn.config.dim), torch.nan, dtype=torch.float64)
    with pytest.raises(NSAError, match="layer 7, branch 'sel', backend 'sdpa'"):
        checked(x, cache=cache)
