"""Long chunks of a prompt: prefill kernels on queries that begin inside their sequences."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from caches import assert_equal, layer_of, poisoned_cache, tokens, truth
from nsa_core import resolve
from nsa_core.cache import step
from nsa_core.plan.default_plan import partial_plan
from nsa_core.plan.registry import Registry, default_registry
from nsa_core.torch_ops.backend_call import record_dispatch

LENGTH = 70


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """Let chunks of three rows or more use the prefill kernels."""
    monkeypatch.setattr(step, "MIN_ROWS", {"cpu": 3, "cuda": 3})


def directions(trace):
    return {call.direction for call in trace if call.slot != "combine"}


@pytest.mark.few_cases("16-None")
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("chunk", [3, 5, 16, 33])
def test_chunks_equal_the_whole_layer(chunk, page_size):
    attn = layer_of()
    x = tokens(attn, 2, LENGTH)
    cache = poisoned_cache(attn, 2, LENGTH, page_size=page_size, max_step=1)
    with record_dispatch() as trace, torch.no_grad():
        y = torch.cat([attn(part, cache=cache) for part in x.split(chunk, 1)], 1)
    assert_equal(y, *truth(attn, x))
    last_is_short = LENGTH % chunk in (1, 2)
    assert directions(trace) == ({"forward", "decode"} if last_is_short else {"forward"})


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [None, 16])
def test_ragged_chunks_equal_the_whole_layer(page_size):
    """Sequences begin the chunk at different tokens, and one has none."""
    attn = layer_of()
    x = tokens(attn, 4, LENGTH)
    cache = poisoned_cache(attn, 4, LENGTH, page_size=page_size, max_step=1)
    golden, magnitude = truth(attn, x)
    lengths = [0] * 4
    with torch.no_grad():
        for new in ([9, 30, 9, 0], [20, 4, 20, 0], [0, 17, 3, 0], [31, 1, 31, 12]):
            rows = torch.full((4, max(new), attn.config.dim), torch.nan, dtype=x.dtype)
            for b, count in enumerate(new):
                rows[b, :count] = x[b, lengths[b] : lengths[b] + count]
            with record_dispatch() as trace:
                y = attn(rows, cache=cache, new=new)
            assert directions(trace) == {"forward"}, new
            for b, count in enumerate(new):
                span = slice(lengths[b], lengths[b] + count)
                if count:
                    assert_equal(
                        y[b : b + 1, :count], golden[b : b + 1, span], magnitude[b : b + 1, span]
                    )
                assert not y[b, count:].any()
                lengths[b] += count


def test_sequences_of_equal_starts_and_different_counts_run_one_by_one():
    attn = layer_of()
    x, cache = tokens(attn, 2, 40), poisoned_cache(attn, 2, 40, max_step=1)
    golden, magnitude = truth(attn, x)
    with torch.no_grad():
        attn(x[:, :20], cache=cache)
        y = attn(x[:, 20:32], cache=cache, new=[12, 5])
    assert_equal(y[:1], golden[:1, 20:32], magnitude[:1, 20:32])
    assert_equal(y[1:, :5], golden[1:, 20:25], magnitude[1:, 20:25])
    assert not y[1, 5:].any()


def test_short_chunk_and_explicit_plan_run_the_decode_forms():
    attn = layer_of()
    x, cache = tokens(attn, 1, 40), poisoned_cache(attn, 1, 40, max_step=1)
    plan = resolve(attn.config, dtype=torch.float64, phase="decode")
    with torch.no_grad():
        attn(x[:, :20], cache=cache)
        for rows, options in ((2, {}), (9, {"plan": plan})):
            with record_dispatch() as trace:
                attn(x[:, 20 : 20 + rows], cache=cache, **options)
            assert directions(trace) == {"decode"}


def test_decode_forms_run_without_a_backend_that_takes_partial_queries(monkeypatch):
    sdpa = default_registry().get("sdpa").spec
    slots = {name: dataclasses.replace(slot, partial=False) for name, slot in sdpa.slots.items()}
    registry = Registry(()).with_backend(dataclasses.replace(sdpa, slots=slots))
    monkeypatch.setattr("nsa_core.plan.plan.default_registry", lambda: registry)
    partial_plan.cache_clear()
    attn = layer_of()
    x, cache = tokens(attn, 1, 40), poisoned_cache(attn, 1, 40, max_step=1)
    with record_dispatch() as trace, torch.no_grad():
        y = torch.cat([attn(part, cache=cache) for part in x.split(20, 1)], 1)
    partial_plan.cache_clear()
    assert_equal(y, *truth(attn, x))
    assert "decode" in directions(trace)
