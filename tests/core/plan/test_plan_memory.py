"""Cached plans: their number is bounded, what was dropped is made again, graphs keep theirs."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa_core import NSAConfig, nsa_attention
from nsa_core.block import plans as block_plans
from nsa_core.layer import short_config
from nsa_core.plan import default_plan as plans

LIMIT = 4
Q, KV = torch.randn(1, 12, 4, 8), torch.randn(1, 12, 2, 8)
GATES = torch.rand(1, 12, 4, 3)
SIZES = {"compress_block_size": 4, "compress_stride": 4, "select_block_size": 4}


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use caches of four objects, which start empty."""
    monkeypatch.setattr(plans, "CACHED", LIMIT)
    for module, make in (
        (plans, plans._resolve_default),
        (block_plans, block_plans._resolve_default),
    ):
        monkeypatch.setattr(module, "_plans", plans.ObjectCache(make))
    configs = plans.ObjectCache(short_config.build_config, typed=True)
    monkeypatch.setattr(short_config, "_configs", configs)


def _layer_plan(number: int) -> object:
    config = NSAConfig(32, 4, 2, window_size=1 + number)
    return plans.default_plan(config, Q.device, Q.dtype, False, True)


def _block_plan(number: int) -> object:
    sizes = block_plans.BlockSizes(4, 2, 8, 8, 16, 1 + number, None)
    options = (Q.device, Q.dtype, False, False, True, None, None)
    return block_plans.default_block_plan(sizes, *options)


def _config(number: int) -> object:
    numbers = (None,) * 6 + (1 + number, None)
    return short_config.short_config(numbers, Q, KV, KV)


MAKERS = [_layer_plan, _block_plan, _config]


@pytest.mark.parametrize("make", MAKERS)
def test_the_latest_objects_are_kept_and_no_others(make: Callable[[int], object]) -> None:
    living = [weakref.ref(make(number)) for number in range(3 * LIMIT)]
    gc.collect()
    kept = [number for number, reference in enumerate(living) if reference() is not None]
    assert kept == list(range(2 * LIMIT, 3 * LIMIT))
    first_kept = living[2 * LIMIT]()
    assert make(2 * LIMIT) is first_kept  # used again, so it now outlives the others
    for number in range(LIMIT - 1):
        make(number)
    assert make(2 * LIMIT) is first_kept


@pytest.mark.parametrize("wants_grad", [True, False])
def test_a_dropped_plan_is_resolved_again_with_the_same_results(wants_grad: bool) -> None:
    def run(window: int) -> torch.Tensor:
        q = Q.clone().requires_grad_(wants_grad)
        o = nsa_attention(q, KV, KV, GATES, window_size=window, **SIZES)  # type: ignore[call-overload]
        if wants_grad:
            o.sum().backward()
        return torch.cat([o.detach(), q.grad]) if wants_grad else o

    first = run(3)
    for window in range(10, 10 + 2 * LIMIT):
        run(window)
    assert torch.equal(run(3), first)


def test_a_compiled_graph_keeps_its_plan() -> None:
    """Its guards read the plan: a dropped one would compile the graph again at every call."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda q: nsa_attention(q, KV, KV, GATES, window_size=3, **SIZES),  # type: ignore[call-overload]
        backend=backend,
        fullgraph=True,
    )
    first = compiled(Q)
    for window in range(10, 10 + 2 * LIMIT):
        nsa_attention(Q, KV, KV, GATES, window_size=window, **SIZES)  # type: ignore[call-overload]
    gc.collect()
    assert torch.equal(compiled(Q), first)
    assert len(graphs) == 1
    torch.compiler.reset()
