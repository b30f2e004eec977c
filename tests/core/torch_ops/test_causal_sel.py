"""In sequences of at most n * l' tokens, sel is causal attention by the kernel of win."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import fused_toy
from nsa_core import nsa_attention, nsa_attention_with_lse, resolve
from nsa_core.contract import SLOTS, BackendSpec, Reason, Request
from nsa_core.errors import NSAError
from nsa_core.plan.finite_checks import checked_plan
from nsa_core.plan.plan import Plan
from nsa_core.plan.registry import Registry, default_registry
from nsa_core.torch_ops import core_node
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_verify.problems.cases import config_of

CONFIG = config_of(6, 2, 8, 4, (4, 2, 8, 3, 5))
LONGEST = 24  # n * l'
CAUSAL = [(s, "forward") for s in ("cmp", "win", "win", "combine")]
SELECTED = [(s, "forward") for s in SLOTS]


def plan(**options: Any) -> Plan:
    """Return a plan in float64 with backward."""
    return resolve(CONFIG, device="cpu", dtype="float64", needs_grad=True, **options)


def leaves(tokens: int, batch: int | None = 2) -> dict[str, torch.Tensor]:
    """Return q, k, v and gates; ``batch`` None: packed."""
    torch.manual_seed(tokens)
    lead = [tokens] if batch is None else [batch, tokens]
    shapes = {"q": (6, 8), "k": (2, 8), "v": (2, 4), "gates": (6, 3)}
    return {
        name: torch.rand(*lead, *shape, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


def run(x: dict[str, torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Return o, the LSEs, the gradients and, last, the blocks."""
    o, lse, blocks = nsa_attention_with_lse(**x, config=CONFIG, **options)
    torch.manual_seed(1)
    return [o, *lse, *torch.autograd.grad(o, list(x.values()), torch.randn_like(o)), blocks]


def slots(x: dict[str, torch.Tensor], **options: Any) -> list[tuple[str, str]]:
    """Return the forwards that a call of nsa_attention runs."""
    with record_dispatch() as trace:
        nsa_attention(**x, config=CONFIG, **options)
    return [(record.slot, record.direction) for record in trace]


@pytest.mark.few_cases
@pytest.mark.parametrize("case", ["dense", "packed", "separate nodes", "no gradient"])
@pytest.mark.parametrize("tokens", [4, 7, LONGEST, LONGEST + 1])
def test_short_sequences_run_causal_attention_and_long_ones_select(
    case: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "separate nodes":
        monkeypatch.setattr(core_node, "_may_be_one_node", lambda *_: False)
    packed, options = case == "packed", {"plan": plan(varlen=case == "packed")}
    x = leaves(tokens + 9 * packed, None if packed else 2)
    if packed:
        bounds = torch.tensor([0, 5, 5, 5 + tokens, 9 + tokens], dtype=torch.int32)
        options |= {"cu_seqlens": bounds, "max_seqlen": max(tokens, 5)}
    with torch.set_grad_enabled(case != "no gradient"):
        assert slots(x, **options) == (CAUSAL if tokens <= LONGEST else SELECTED)
    actual = run(x, **options)
    expected = run(x, **options, blocks=actual[-1])
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    without = nsa_attention(**x, config=CONFIG, **options)
    assert torch.equal(without, actual[0])  # the selection changes no bit


def test_without_max_seqlen_the_number_of_packed_tokens_counts() -> None:
    x, options = leaves(LONGEST + 1, None), {"plan": plan(varlen=True)}
    bounds = torch.tensor([0, 10, LONGEST + 1], dtype=torch.int32)
    assert slots(x, **options, cu_seqlens=bounds) == SELECTED
    assert slots(x, **options, cu_seqlens=bounds, max_seqlen=15) == CAUSAL


def test_given_blocks_are_used_in_short_sequences() -> None:
    x, blocks = leaves(LONGEST), torch.full((2, LONGEST, 2, 1), -1)
    blocks[:, 3] = 0
    o, lse, _ = nsa_attention_with_lse(**x, config=CONFIG, plan=plan(), blocks=blocks)
    assert torch.isfinite(o).all()
    assert torch.isfinite(lse[1]).nonzero()[:, 2].unique().tolist() == [3]


@pytest.mark.parametrize("tokens", [LONGEST, LONGEST + 1])
def test_recompute_gives_the_same_bits(tokens: int) -> None:
    x = leaves(tokens)
    for a, b in zip(run(x, plan=plan()), run(x, plan=plan(), recompute=True), strict=True):
        assert torch.equal(a, b)


def test_gradients_of_some_inputs_alone() -> None:
    x = leaves(LONGEST)
    expected = run(x, plan=plan())[5]  # of k
    o = nsa_attention(**x, config=CONFIG, plan=plan())
    torch.manual_seed(1)
    (actual,) = torch.autograd.grad(o, x["k"], torch.randn_like(o))
    assert torch.equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_a_compiled_call_of_one_length_has_the_bits_of_an_eager_call(recompute: bool) -> None:
    torch._dynamo.reset()
    of_plan, x = plan(), leaves(LONGEST)
    options = {"config": CONFIG, "plan": of_plan, "recompute": recompute}
    call = torch.compile(nsa_attention_with_lse, backend="aot_eager", dynamic=False)
    call(**x, **options)  # compiles
    traces, results = [], []
    for function in (call, nsa_attention_with_lse):
        with record_dispatch() as trace:
            o, lse, blocks = function(**x, **options)
            grads = torch.autograd.grad(o.square().sum(), list(x.values()))
        traces.append([(record.slot, record.direction) for record in trace])
        results.append([o, *lse, blocks, *grads])
    assert traces[0] == traces[1]
    assert traces[0][:4] == CAUSAL
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_an_exported_graph_selects() -> None:
    class Core(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return nsa_attention(*tensors, config=CONFIG, plan=plan_without_grad)

    plan_without_grad = resolve(CONFIG, device="cpu", dtype="float64")
    x = tuple(t.detach() for t in leaves(LONGEST).values())
    graph = torch.export.export(Core(), x).graph
    assert {"nsa_sdpa.select.default", "nsa_sdpa.sel.default"} <= {
        str(node.target) for node in graph.nodes
    }


def test_explain_states_the_length() -> None:
    line = (
        f"  up to n l' = {LONGEST} tokens: causal attention by the backend of win, without select"
    )
    lines = plan().explain().splitlines()
    sel = next(i for i, text in enumerate(lines) if text.startswith("sel:"))
    assert lines[sel + 1] == line
    for phase, partial in (("decode", False), ("prefill", True)):
        other = resolve(CONFIG, device="cpu", dtype="float64", phase=phase, partial=partial)
        assert line not in other.explain()


def test_a_plan_with_one_backward_of_all_slots_selects() -> None:
    """The one backward reads the blocks. Without gradients the same backend is causal."""
    registry = Registry().with_backend(fused_toy.spec())
    of_training, of_inference = (
        resolve(CONFIG, device="cpu", dtype="float64", needs_grad=grad, registry=registry)
        for grad in (True, False)
    )
    assert of_training.fused
    assert of_training.causal_sel is None
    assert of_inference.causal_sel is not None


def refuse_longest_window(request: Request) -> list[Reason]:
    refused = request.slot == "win" and request.geometry.window_size == LONGEST
    return [Reason("window", "does not take this window")] if refused else []


@pytest.mark.parametrize("flaw", ["no slot", "probe", "import"])
def test_a_backend_of_sel_that_cannot_run_the_window_selects(flaw: str) -> None:
    [sdpa] = [entry.spec for entry in default_registry().entries if entry.name == "sdpa"]
    assert isinstance(sdpa, BackendSpec)
    slots_of_sel = dict(sdpa.slots)
    probe = sdpa.probe
    if flaw == "no slot":
        del slots_of_sel["win"]
    elif flaw == "probe":
        probe = f"{__name__}:{refuse_longest_window.__name__}"
    else:
        broken = "no_such_module:forward"
        slots_of_sel["win"] = dataclasses.replace(sdpa.slots["win"], forward=broken)
    registry = Registry(default_registry().entries).with_backend(
        dataclasses.replace(sdpa, name="flawed", slots=slots_of_sel, probe=probe, fused={})
    )
    backends = dict.fromkeys(SLOTS, "sdpa") | {"sel": "flawed"}
    of_plan = plan(backends=backends, registry=registry)
    assert of_plan.causal_sel is None
    assert slots(leaves(LONGEST), plan=of_plan) == SELECTED


def test_warmup_runs_the_causal_kernel() -> None:
    with record_dispatch() as trace:
        plan().warmup()
    assert [record.slot for record in trace if record.direction == "forward"].count("win") == 2
    assert [record.slot for record in trace if record.direction == "backward"].count("win") == 2


def test_a_checked_plan_runs_and_checks_the_causal_kernel() -> None:
    x, checked = leaves(LONGEST), checked_plan(plan(), "third")
    assert slots(x, plan=checked) == CAUSAL
    assert torch.equal(run(x, plan=checked)[0], run(x, plan=plan())[0])
    v = [x["v"].detach(), x["v"].detach().clone(), x["v"].detach()]
    v[1][0, 4] = torch.inf
    k = [x["k"].detach()] * 3
    with pytest.raises(NSAError, match="layer third, branch 'sel'"):
        nsa_attention(x["q"], k, v, x["gates"], config=CONFIG, plan=checked)
