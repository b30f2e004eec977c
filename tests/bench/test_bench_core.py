"""What `nsa bench` calls the total: compress, three branches, selection and gates; q, k, v and
gates in, o out.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_bench.baselines import Dense
from nsa_bench.cells import TOTAL, works_of
from nsa_bench.inputs import make_inputs
from nsa_bench.shapes import PAPER_BLOCKS, parse_shape
from nsa_core import resolve
from nsa_core.contract import SLOTS
from nsa_core.layer.phi.kinds import mean_compress
from nsa_core.torch_ops.slot_op import record_dispatch
from nsa_verify import oracle

CONFIG = parse_shape("4/2/8").config((8, 4, 16, 3, 24))
INPUTS = ("q", "k", "v", "gates")


def total(phase: str):  # type: ignore[no-untyped-def]
    """(the inputs, the call that is timed as the total, the plan it runs)."""
    x = make_inputs("random", CONFIG, batch=2, length=90, dtype=torch.float64, device="cpu", seed=0)
    plan = resolve(CONFIG, dtype=torch.float64, needs_grad=True)
    (work,) = [w for w in works_of(x, CONFIG, phase, {"sdpa": plan}, []) if w.key == TOTAL + "sdpa"]
    return x, work.make(), plan


def by_hand(x, plan):  # type: ignore[no-untyped-def]
    """The definition, slot by slot."""
    k_cmp, v_cmp = mean_compress(x.k, CONFIG.geometry), mean_compress(x.v, CONFIG.geometry)
    o_cmp, lse = plan.cmp(x.q, k_cmp, v_cmp)
    blocks = plan.select(x.q.detach(), k_cmp.detach(), lse)
    return plan.combine(
        x.gates, o_cmp, plan.sel(x.q, x.k, x.v, blocks)[0], plan.win(x.q, x.k, x.v)[0]
    )


def test_forward_is_the_definition_and_nothing_else() -> None:
    x, call, plan = total("forward")
    with record_dispatch() as trace:
        o = call()
    assert [(r.slot, r.direction) for r in trace] == [(slot, "forward") for slot in SLOTS]
    assert o.shape == x.do.shape
    assert torch.equal(o, by_hand(x, plan))
    exact = oracle.attention(x.q, x.k, x.v, x.gates, CONFIG)  # which compresses by the mean
    torch.testing.assert_close(o, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("phase", ["backward", "both"])
def test_backward_gives_the_gradients_of_what_came_in(phase: str) -> None:
    x, call, plan = total(phase)
    with record_dispatch() as trace:
        gradients = call()
    backwards = [r.slot for r in trace if r.direction == "backward"]
    assert sorted(backwards) == sorted(set(SLOTS) - {"select"})
    assert [r.slot for r in trace if r.direction == "forward"] == (
        [] if phase == "backward" else list(SLOTS)
    )
    wanted = torch.autograd.grad(by_hand(x, plan), [getattr(x, name) for name in INPUTS], x.do)
    assert all(torch.equal(got, want) for got, want in zip(gradients, wanted, strict=True))


@pytest.mark.parametrize("kind", ["dense", "rival"])
@pytest.mark.parametrize("phase", ["backward", "both"])
def test_each_setup_has_leaves_of_its_own_over_the_same_memory(phase: str, kind: str) -> None:
    """A leaf first used on one stream ends its backwards there: captured on another, they would be
    no CUDA graph.
    """
    x, seen = (
        make_inputs("random", CONFIG, batch=1, length=8, dtype=torch.float64, device="cpu", seed=0),
        [],
    )

    def forward(given):  # type: ignore[no-untyped-def]
        seen.append(given)
        return given.q * 2 + (given.gates.sum() + given.k.sum() + given.v.sum())

    (work,) = works_of(x, CONFIG, phase, {}, [Dense("other", forward, kind=kind)])
    for call in (work.make(), work.make()):
        assert torch.equal(call()[0], 2 * x.do)
    first, second = seen
    assert all(given.do is x.do and (given.gates is x.gates) == (kind == "dense") for given in seen)
    for name in ("q", "k", "v", "gates")[: 3 if kind == "dense" else 4]:
        leaves = [getattr(inputs, name) for inputs in (x, first, second)]
        assert len({id(leaf) for leaf in leaves}) == 3
        assert len({leaf.data_ptr() for leaf in leaves}) == 1
        assert all(leaf.is_leaf and leaf.requires_grad for leaf in leaves)


def test_the_layer_that_is_timed_is_that_of_the_published_figures() -> None:
    """l=32, d=16, l'=64, n=16, w=512, mean compression, one key/value pair, block 0 and the last
    two always.
    """
    assert PAPER_BLOCKS == (32, 16, 64, 16, 512)
    for name in ("64/4/128", "32/8/128", "12/2/64"):
        config = parse_shape(name).config()
        assert (config.compress, config.shared_kv) == ("mean", True)
        assert dataclasses.astuple(config.geometry) == (32, 16, 64, 16, 1, 2, 512)
        assert "/".join(map(str, (config.n_heads, config.n_kv_heads, config.qk_dim))) == name
