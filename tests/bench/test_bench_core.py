"""The total of `nsa bench` is the whole core: compression, selection, branches and gated sum."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_bench.baselines import Baseline
from nsa_bench.cells import TOTAL, cell_workloads
from nsa_bench.inputs import make_inputs
from nsa_bench.shapes import PAPER_BLOCKS, parse_shape
from nsa_core import resolve
from nsa_core.contract import SLOTS
from nsa_core.layer.phi.kinds import mean_compress
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_verify import oracle

CONFIG = parse_shape("4/2/8").config((8, 4, 16, 3, 24))
INPUTS = ("q", "k", "v", "gates")


def total(phase: str):  # type: ignore[no-untyped-def]
    """Return the inputs, the call that is timed as the total, and its plan."""
    x = make_inputs("random", CONFIG, batch=2, length=90, dtype=torch.float64, device="cpu", seed=0)
    plan = resolve(CONFIG, dtype=torch.float64, needs_grad=True)
    (work,) = [
        w
        for w in cell_workloads(lambda: x, CONFIG, phase, 90, {"sdpa": plan}, [])
        if w.key == TOTAL + "sdpa"
    ]
    return x, work.make(), plan


def slot_by_slot(x, plan):  # type: ignore[no-untyped-def]
    """Compute the core slot by slot, as defined."""
    k_cmp, v_cmp = mean_compress(x.k, CONFIG.geometry), mean_compress(x.v, CONFIG.geometry)
    o_cmp, lse = plan.cmp(x.q, k_cmp, v_cmp)
    blocks = plan.select(x.q.detach(), k_cmp.detach(), lse)
    return plan.combine(
        x.gates, o_cmp, plan.sel(x.q, x.k, x.v, blocks)[0], plan.win(x.q, x.k, x.v)[0]
    )


def test_forward_runs_each_slot_once_and_matches_the_oracle() -> None:
    x, call, plan = total("forward")
    with record_dispatch() as trace:
        o = call()
    assert [(r.slot, r.direction) for r in trace] == [(slot, "forward") for slot in SLOTS]
    assert o.shape == x.do.shape
    assert torch.equal(o, slot_by_slot(x, plan))
    truth = oracle.attention(x.q, x.k, x.v, x.gates, CONFIG)  # mean compression, as in CONFIG
    torch.testing.assert_close(o, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("phase", ["forward", "backward", "both"])
@pytest.mark.parametrize(
    ("length", "names"),
    [(48, ["cmp", "causal", "win", "combine"]), (49, list(SLOTS))],  # n * l' = 48
)
def test_the_kernels_timed_alone_are_those_that_the_whole_core_runs(
    length: int, names: list[str], phase: str
) -> None:
    options = {"batch": 1, "dtype": torch.float32, "device": "cpu", "seed": 0}
    x = make_inputs("random", CONFIG, length=length, **options)
    plan = resolve(CONFIG, dtype=torch.float32, needs_grad=True)
    workloads = cell_workloads(lambda: x, CONFIG, phase, length, {"auto": plan}, [])
    calls = {}
    for work in workloads:
        call = work.make()
        with record_dispatch() as trace:
            call()
        calls[work.key] = [(r.slot, r.direction) for r in trace]
    alone = [key for key in calls if key not in (TOTAL + "auto", "compress")]
    expected = [name for name in names if (name, phase) != ("select", "backward")]
    assert alone == [f"{name} sdpa" for name in expected]
    assert sorted(calls[TOTAL + "auto"]) == sorted(call for key in alone for call in calls[key])


@pytest.mark.parametrize("phase", ["backward", "both"])
def test_backward_returns_the_gradients_of_all_inputs(phase: str) -> None:
    x, call, plan = total(phase)
    with record_dispatch() as trace:
        gradients = call()
    backwards = [r.slot for r in trace if r.direction == "backward"]
    assert sorted(backwards) == sorted(set(SLOTS) - {"select"})
    assert [r.slot for r in trace if r.direction == "forward"] == (
        [] if phase == "backward" else list(SLOTS)
    )
    leaves = [getattr(x, name) for name in INPUTS]
    expected = torch.autograd.grad(slot_by_slot(x, plan), leaves, x.do)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("kind", ["dense", "rival"])
@pytest.mark.parametrize("phase", ["backward", "both"])
def test_each_setup_creates_new_leaves_over_the_same_memory(phase: str, kind: str) -> None:
    """Autograd ends a backward on the stream of a leaf's first use, which must be the capture's."""
    x, seen = (
        make_inputs("random", CONFIG, batch=1, length=8, dtype=torch.float64, device="cpu", seed=0),
        [],
    )

    def forward(inputs):  # type: ignore[no-untyped-def]
        seen.append(inputs)
        return inputs.q * 2 + (inputs.gates.sum() + inputs.k.sum() + inputs.v.sum())

    baseline = Baseline("other", forward, kind=kind)
    (work,) = cell_workloads(lambda: x, CONFIG, phase, 8, {}, [baseline])
    for call in (work.make(), work.make()):
        assert torch.equal(call()[0], 2 * x.do)
    first, second = seen
    assert all(
        inputs.do is x.do and (inputs.gates is x.gates) == (kind == "dense") for inputs in seen
    )
    for name in ("q", "k", "v", "gates")[: 3 if kind == "dense" else 4]:
        leaves = [getattr(inputs, name) for inputs in (x, first, second)]
        assert len({id(leaf) for leaf in leaves}) == 3
        assert len({leaf.data_ptr() for leaf in leaves}) == 1
        assert all(leaf.is_leaf and leaf.requires_grad for leaf in leaves)


def test_the_timed_layer_has_the_papers_block_sizes() -> None:
    """It also has mean compression and one key/value pair; block 0 and the last two are forced."""
    assert PAPER_BLOCKS == (32, 16, 64, 16, 512)
    for name in ("64/4/128", "32/8/128", "12/2/64"):
        config = parse_shape(name).config()
        assert (config.compress, config.shared_kv) == ("mean", True)
        assert dataclasses.astuple(config.geometry) == (32, 16, 64, 16, 1, 2, 512)
        assert "/".join(map(str, (config.n_heads, config.n_kv_heads, config.qk_dim))) == name
