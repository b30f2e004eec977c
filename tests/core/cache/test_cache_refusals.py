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
SEQUENCES = "sequences are numbered 0 to 1"
LENGTHS = "lengths must be an integer >= 0, or 2 of them"
ROWS = "rows must be an integer from 1 to max_step = 4, got"


@pytest.fixture(scope="module")
def attn():
    return layer_of()


@pytest.fixture(scope="module")
def cache(attn):
    """Two sequences of 30 and 20 tokens; the first one has had 33."""
    cache = poisoned_cache(attn, 2, ROOM, max_rollback=9, max_step=4)
    attn(tokens(attn, 2, 33), cache=cache, new=[33, 20])
    cache.crop([30, 20])
    return cache


def call(rows=3, **options):
    """A step of ``rows`` rows, or with the x of ``options``."""

    def run(attn, cache):
        x = options.pop("x", lambda x: x)(tokens(attn, 2, rows))
        return attn(x, **{"cache": cache, **options})

    return run


def method(name, *arguments):
    return lambda attn, cache: getattr(cache, name)(*arguments)


def creation(**sizes):
    return lambda attn, cache: attn.new_cache(**{"batch": 2, "max_len": ROOM, **sizes})


def load_from_another_cache(attn, cache):
    cache.load(attn.new_cache(2, ROOM).snapshot(0), 0)


def load_a_released_snapshot(attn, cache):
    snapshot = cache.snapshot(0)
    snapshot.release()
    cache.load(snapshot, 0)


REFUSED = (
    (call(11), "sequence 0 has 30 tokens, 11 more do not fit: max_len is 40"),
    (call(21, new=[10, 21]), "sequence 1 has 20 tokens, 21 more do not fit: max_len is 40"),
    (call(45), "0 has 30 tokens, 45 more do not fit; sequence 1 has 20 tokens, 45 more do not fit"),
    (call(new=[1]), "new must be 2 integers"),
    (call(new=[1, 4]), "new must be from 0 to the 3 rows of x"),
    (call(new=[1, -1]), "new must be from 0 to the 3 rows of x"),
    (call(new=[1, True]), "new must be 2 integers"),
    (call(new=torch.tensor([0.5, 1])), "new must be 2 integers"),
    (call(new=3), "new must be 2 integers"),
    (call(x=lambda x: x[:1]), "x has 1 sequences, but the cache has 2"),
    (call(x=torch.Tensor.float), "x is torch.float32, the layer's parameters are torch.float64"),
    (
        call(x=lambda x: x[0], cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)),
        "cu_seqlens is not supported with a cache: pass x .B, m, dim. and new=",
    ),
    (call(attention_mask=torch.ones(2, 3)), "attention_mask is not supported"),
    (call(cache=None, new=[1, 1]), "new needs cache="),
    (lambda _, cache: call()(layer_of(seed=1), cache), "the cache is another layer's"),
    (call(cache=[0]), "cache must be a result of new_cache.. of this layer, got list"),
    (call(x=lambda x: x.requires_grad_()), "no gradient flows through a cache"),
    (
        lambda attn, _: call()(attn, attn.new_cache(2, 9, dtype=torch.float32)),
        "the cache is torch.float32 on cpu",
    ),
    (creation(batch=0, max_len=1.5), ">= 1, got 0; max_len must be an integer >= 1, got 1.5"),
    (creation(page_size=24), "page_size must be a multiple of select_block_size 16, got 24"),
    (creation(num_pages=3), "num_pages 3 needs page_size, which is None"),
    (creation(page_size=16, num_pages=0), "num_pages must be an integer >= 1 or None, got 0"),
    (creation(max_rollback=-1, max_step=True), ">= 0, got -1; max_step must be an"),
    (creation(dtype=torch.int8), "dtype must be one of"),
    (creation(device="gpu"), "device 'gpu' is not one that torch knows"),
    (method("reset", 2), SEQUENCES),
    (method("reset", 1.5), SEQUENCES),
    (method("snapshot", -1), SEQUENCES),
    (method("snapshot", [0, 1]), r"expected one sequence index, got \[0, 1\]"),
    (method("reorder", [0, True]), SEQUENCES),
    (method("reorder", None), SEQUENCES),
    (method("reorder", [1]), "2 indices are needed, one per sequence, got 1"),
    (lambda _, cache: cache.load(cache.snapshot(0), "a"), SEQUENCES),
    (method("load", 0, 1), "load: snapshot must be a result of snapshot"),
    (load_from_another_cache, "the snapshot is of another cache"),
    (load_a_released_snapshot, "the snapshot was released"),
    (method("crop", [23, 20]), "0 has had 33 tokens and 23 would be 10 fewer, max_rollback is 9"),
    (method("crop", [31, 20]), "sequence 0 has 30 tokens, cannot crop to 31"),
    (method("crop", [30]), LENGTHS),
    (method("crop", [30, -1]), LENGTHS),
    (method("crop", 0.0), LENGTHS),
    (method("crop", None), LENGTHS),
    (method("crop", [0, 0.0]), LENGTHS),
    (method("crop", "ab"), LENGTHS),
    (method("reserve", 41), "41 tokens are more than max_len 40"),
    (method("reserve_workspace", 0), f"{ROWS} 0; a longer step .* allocates more memory"),
    (method("reserve_workspace", True), f"{ROWS} True"),
    (method("reserve_workspace", 1.0), f"{ROWS} 1.0"),
    (method("reserve_workspace", 5), f"{ROWS} 5"),
    (lambda _, cache: copy.copy(cache), "not copied or pickled"),
    (lambda _, cache: copy.deepcopy(cache), "not copied or pickled"),
    (lambda _, cache: pickle.dumps(cache), "another process must run the tokens again"),
)


@pytest.mark.parametrize(("refused", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_invalid_call_is_refused_without_a_change(attn, cache, refused, message):
    before = content(cache)
    with pytest.raises(InvalidInput, match=message):
        refused(attn, cache)
    assert_unchanged(cache, before)


def test_lengths_may_be_integers_of_any_kind(attn):
    cache = attn.new_cache(2, ROOM)
    cache.crop(torch.zeros(2, dtype=torch.int64).numpy())
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
    with pytest.raises(InvalidInput, match="plan is for prefill, but this call is a decode step"):
        attn(x[:, 12:13], cache=cache, plan=prefill)
    with pytest.raises(InvalidInput, match="plan is for float32 on cpu, but the tensors"):
        attn.new_cache(2, ROOM, plan=resolve(attn.config, phase="decode"))
    with pytest.raises(InvalidInput, match="page_size None, but that of the pages is 16"):
        attn.new_cache(2, ROOM, page_size=16, plan=decode)
    with pytest.raises(InvalidInput, match="plan is for NSAConfig"):
        layer_of(window_size=7).new_cache(2, ROOM, plan=decode)
    with pytest.raises(Unsupported, match="has no decode form"):
        NSAttention(attn.config, backends={"win": "fa2"}).new_cache(2, ROOM)


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
