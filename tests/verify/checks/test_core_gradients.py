"""A backend's fused backward: when nsa_attention runs it, and what the check of the core finds."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fused_toy
from nsa_core import (
    BackendUnavailable,
    InvalidInput,
    NSAConfig,
    NSAError,
    NSAttention,
    Unsupported,
    nsa_attention,
    resolve,
)
from nsa_core.contract import SLOTS
from nsa_core.dispatch.plan import Plan
from nsa_core.dispatch.registry import Registry, default_registry
from nsa_core.layer.gating import LinearGate, MLPGate
from nsa_core.torch_ops.core_backward import core_backward
from nsa_core.torch_ops.slot_op import record_dispatch
from nsa_verify.cases import Case
from nsa_verify.checks.core import core_gradients
from nsa_verify.combination import Combination

CONFIG = NSAConfig(
    16, 4, 2, head_dim=4, v_head_dim=6, compress_block_size=4, compress_stride=2,
    select_block_size=8, num_selected_blocks=3, window_size=10,
)  # fmt: skip
REGISTRY = Registry().with_backend(fused_toy.spec())
COMBINATION = Combination(dict.fromkeys(SLOTS, "fused-toy"), registry=REGISTRY)
CASES = {
    "dense": Case("dense", CONFIG, (37,), batch=2),
    "packed": Case("packed", CONFIG, (3, 0, 25, 9), packed=True),
    "sampled rows": Case("sampled rows", CONFIG, (30,), rows=(0, 5, 29)),
}
LAST = torch.tensor([-1])
FAULTS = {
    "dq without a third": lambda g: [g[0] * (2 / 3), *g[1:]],
    "dv of cmp without its last row": lambda g: [*g[:2], g[2].index_fill(1, LAST, 0), *g[3:]],
    "dv of win half": lambda g: [*g[:6], g[6] / 2, g[7]],
    "dgates of another order": lambda g: [*g[:7], g[7].flip(-1)],
    "dk of sel off by one row": lambda g: [*g[:3], g[3].roll(1, -3), *g[4:]],
}


def plan(**fields: Any) -> Plan:
    return resolve(CONFIG, registry=REGISTRY, needs_grad=True, **fields)


def leaves(tokens: int = 30) -> list[torch.Tensor]:
    """Return q, k, v and gates."""
    torch.manual_seed(0)
    q, k = torch.randn(1, tokens, 4, 4), torch.randn(1, tokens, 2, 4)
    v, gates = torch.randn(1, tokens, 2, 6), torch.rand(1, tokens, 4, 3)
    return [x.requires_grad_() for x in (q, k, v, gates)]


def backwards(inputs: list[torch.Tensor], **options: Any) -> list[str]:
    """Return the slots whose backward ran, "core" for the fused one."""
    o = nsa_attention(*inputs, config=CONFIG, plan=plan(), **options)
    with record_dispatch() as trace:
        torch.autograd.backward(o, torch.randn_like(o))
    return [call.slot for call in trace if call.direction == "backward"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_gradients_pass(case: str, dtype: torch.dtype) -> None:
    with record_dispatch() as trace:
        findings = list(core_gradients(COMBINATION, CASES[case], dtype))
    assert "core" in {call.slot for call in trace}
    assert len(findings) == 8
    assert all(finding.ok for finding in findings), findings


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_fused_backward_is_found(name: str) -> None:
    with fused_toy.fault(FAULTS[name]):
        findings = list(core_gradients(COMBINATION, CASES["dense"], torch.bfloat16))
    wrong = [finding.quantity for finding in findings if not finding.ok]
    assert len(wrong) == 1, wrong


def test_slots_without_a_fused_backward_are_judged_too() -> None:
    sdpa = Combination(dict.fromkeys(SLOTS, "sdpa"), registry=default_registry())
    findings = list(core_gradients(sdpa, CASES["dense"], torch.bfloat16))
    assert [finding.ok for finding in findings] == [True] * 8


def test_it_runs_only_if_no_gate_is_negative_and_all_inputs_need_a_gradient() -> None:
    slots = ["combine", "win", "sel", "cmp"]
    assert backwards(leaves(), nonnegative_gates=True) == ["core"]
    assert backwards(leaves(), nonnegative_gates=True, recompute=True)[-1] == "core"
    assert backwards(leaves()) == slots
    inputs = leaves()
    inputs[3] = inputs[3].detach()
    assert backwards(inputs, nonnegative_gates=True) == slots
    no_compressed = leaves(3)
    assert backwards(no_compressed, nonnegative_gates=True) == ["combine", "win", "sel"]
    no_blocks = torch.empty(1, 30, 2, 0, dtype=torch.int32)
    assert backwards(leaves(), nonnegative_gates=True, blocks=no_blocks) == [
        "combine",
        "win",
        "cmp",
    ]
    no_sequences = [x[:0].detach().requires_grad_() for x in leaves()]
    assert "core" not in backwards(no_sequences, nonnegative_gates=True)


def altered(how: str, monkeypatch: pytest.MonkeyPatch) -> NSAttention:
    """Return a layer whose gates are negative."""
    layer = NSAttention(dataclasses.replace(CONFIG, gate="mlp" if how == "mlp hook" else "linear"))

    def negative(module: Any, args: Any, output: Any) -> Any:
        return -output if isinstance(module, (LinearGate, MLPGate)) else output

    if "hook" in how:
        layer.gate.register_forward_hook(negative)
    elif how == "global":
        hooks = torch.nn.modules.module
        handle = hooks.register_module_forward_hook(negative)
        monkeypatch.setattr(layer, "remove_hook", handle.remove, raising=False)
    elif how == "instance":
        forward = layer.gate.forward
        monkeypatch.setattr(layer.gate, "forward", lambda x: -forward(x))
    elif how == "subclass":
        layer.gate.__class__ = type("Negative", (LinearGate,), {"forward": negated})
    return layer


def negated(self: LinearGate, x: torch.Tensor) -> torch.Tensor:
    return -LinearGate.forward(self, x)


def slots_of(layer: NSAttention) -> set[str]:
    """Return the slots whose backward a training call of ``layer`` runs."""
    with record_dispatch() as trace:
        layer(torch.randn(1, 30, 16), plan=plan()).sum().backward()
    return {call.slot for call in trace if call.direction == "backward"}


@pytest.mark.parametrize("gate", ["linear", "mlp"])
def test_a_layer_runs_it(gate: str) -> None:
    assert slots_of(NSAttention(dataclasses.replace(CONFIG, gate=gate))) == {"core"}


@pytest.mark.parametrize("how", ["hook", "mlp hook", "global", "instance", "subclass"])
def test_a_layer_with_an_altered_gate_runs_the_slots(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = altered(how, monkeypatch)
    try:
        assert slots_of(layer) == {"combine", "cmp", "sel", "win"}
    finally:
        getattr(layer, "remove_hook", lambda: None)()


def test_gradients_are_those_of_the_slots_and_observers_change_nothing() -> None:
    inputs = leaves()
    do = torch.randn(1, 30, 4, 6)

    def run(watch: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        with watch:
            o = nsa_attention(*inputs, config=CONFIG, plan=plan(), **options)
        with watch:
            return torch.autograd.grad(o, inputs, do)

    nothing = contextlib.nullcontext()
    fused = run(nothing, nonnegative_gates=True)
    watched = run(FlopCounterMode(display=False), nonnegative_gates=True)
    for a, b, c in zip(fused, watched, run(nothing)):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)


def test_wrong_results_and_second_derivatives_are_refused_by_name() -> None:
    inputs = leaves()
    o = nsa_attention(*inputs, config=CONFIG, plan=plan(), nonnegative_gates=True)
    faults = {
        "returned result 0 is": lambda g: [g[0][:, :-1], *g[1:]],
        "returned result 7 is .* torch.float64": lambda g: [*g[:7], g[7].double()],
        "returned 7 tensors, expected 8": lambda g: g[:7],
    }
    for message, plant in faults.items():
        wrong = pytest.raises(NSAError, match=f"'fused-toy', slot 'core', backward {message}")
        with fused_toy.fault(plant), wrong:
            torch.autograd.grad(o, inputs, torch.ones_like(o), retain_graph=True)
    grads = torch.autograd.grad(o, inputs, torch.ones_like(o), create_graph=True)
    with pytest.raises(Unsupported, match="differentiable once, not twice"):
        grads[0].sum().backward()


def test_plans_name_it_only_if_it_can_run() -> None:
    assert "backward: fused-toy (fused)" in plan().explain()
    assert "backward" in plan(varlen=True).fused
    assert not resolve(CONFIG, registry=REGISTRY, needs_grad=False).fused
    assert not plan(partial=True).fused
    mixed = REGISTRY.with_backend(default_registry().get("sdpa").spec)
    assert not resolve(
        CONFIG, registry=mixed, needs_grad=True, backends={"win": "sdpa", "sel": "fused-toy"}
    ).fused


def test_warmup_runs_it() -> None:
    with record_dispatch() as trace:
        plan().warmup()
    assert ("core", "backward") in {(call.slot, call.direction) for call in trace}


def test_the_operator_has_shapes_without_data() -> None:
    inputs = [x.detach() for x in leaves()]
    op = plan().fused["backward"].op
    q, k, v, gates = (x.to("meta") for x in inputs)
    blocks = torch.zeros(1, 30, 2, 3, dtype=torch.int32, device="meta")
    o, lse = q.new_empty(1, 30, 4, 6), q.new_empty(1, 4, 30)
    k_cmp, v_cmp = k[:, :14], v[:, :14]
    tensors = (o, q, k_cmp, v_cmp, k, v, k, v, gates, blocks, lse, lse, lse, o, o, o)
    results = op(*tensors, None, 30, 0.5, list(CONFIG.geometry.as_ints()), False, None)
    assert [x.shape for x in results] == [x.shape for x in tensors[1:9]]


def test_a_negative_gate_is_refused_where_values_can_be_read() -> None:
    inputs = leaves()
    inputs[3] = (inputs[3] - 0.5).detach().requires_grad_()
    with pytest.raises(InvalidInput, match="nonnegative_gates is True, but the smallest of gates"):
        nsa_attention(*inputs, config=CONFIG, nonnegative_gates=True)


def test_threads_define_one_operator() -> None:
    path = "fused_toy:another"
    fused_toy.another = fused_toy.backward
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: core_backward("fused-toy", path), range(16)))
    assert len({id(fused) for fused in found}) == 1


def test_a_function_that_cannot_be_imported_is_refused_with_its_backend() -> None:
    with pytest.raises(BackendUnavailable, match="'fused-toy': its fused backward nowhere:no"):
        core_backward("fused-toy", "nowhere:no")
