"""A backend's fused backward: when nsa_attention runs it, and what the check of the core finds."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
from typing import Any

import killers
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import fused_toy
from nsa_core import (
    BackendUnavailable,
    NSAError,
    NSAttention,
    Unsupported,
    nsa_attention,
    resolve,
)
from nsa_core.contract import SLOTS
from nsa_core.layer.gating import LinearGate, MLPGate
from nsa_core.plan.plan import Plan
from nsa_core.plan.registry import Registry, default_registry
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_core.torch_ops.core_backward import core_backward
from nsa_verify.checks.core import (
    core_gradients,
    finite_poison,
    nan_storage,
    run_to_run,
)
from nsa_verify.problems.cases import Case, config_of
from nsa_verify.problems.combination import Combination
from nsa_verify.run.suite import Job

CONFIG = config_of(4, 2, 4, 6, (4, 2, 8, 3, 10))
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


@pytest.mark.few_cases
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
    (wrong,) = [finding for finding in findings if not finding.ok]
    killers.expect("fused backward", name, f"{killers.killer(wrong)}, {wrong.quantity}")


def changed_output(g: Any, _: Any, outputs: Any) -> Any:
    outputs[1].data.mul_(1.5)  # like a kernel, without PyTorch's notice
    return g


def changed_input(g: Any, inputs: Any, _: Any) -> Any:
    inputs[5].data.mul_(1.5)
    return g


def read_beside(g: Any, inputs: Any, _: Any) -> Any:
    """Read memory half a row beside k_sel, which the check fills with NaN."""
    k = inputs[3]
    beside = k.as_strided(k.shape, k.stride(), k.storage_offset() + k.stride(-3) // 2)
    return [*g[:3], g[3] + 0 * beside, *g[4:]]


def without_gates(which: Any) -> Any:
    """Return a fault that drops dgates where ``which`` holds for the gate."""
    return lambda g, inputs, _: [*g[:7], g[7].masked_fill(which(inputs[7]), 0)]


CHECK_FAULTS = {
    "future keys": (finite_poison, lambda g, x, _: [g[0] + 1e-3 * x[3].mean(), *g[1:]], {"dq"}),
    "memory beside keys": (nan_storage, read_beside, {"dk_sel"}),
    "changed outputs": (run_to_run, changed_output, {"dgates"}),
    "gates of 0": (core_gradients, without_gates(lambda gate: gate == 0), {"dgates"}),
    "small gates": (
        core_gradients,
        without_gates(lambda gate: (gate > 0) & (gate < 0.002)),
        {"dgates"},
    ),
    "gates above 1": (core_gradients, without_gates(lambda gate: gate > 1), {"dgates"}),
}


@pytest.mark.parametrize("name", CHECK_FAULTS)
def test_a_fault_is_found_by_its_check(name: str) -> None:
    check, plant, quantities = CHECK_FAULTS[name]
    with fused_toy.fault_on(plant):
        findings = list(check(COMBINATION, CASES["dense"], torch.float32))
    wrong = {f.quantity.split()[0]: killers.killer(f) for f in findings if f.ok is False}
    assert quantities <= wrong.keys(), findings
    for quantity in quantities:
        killers.expect("fused backward", name, f"{wrong[quantity]}, {quantity}")


def test_a_backward_that_changes_its_inputs_is_found_by_the_guard_of_calls() -> None:
    job = Job("core gradients", core_gradients, CASES["dense"], torch.float32)
    with fused_toy.fault_on(changed_input):
        (finding,) = job.run(COMBINATION)
    assert "it changed argument 7 in place" in finding.detail
    killers.expect("fused backward", "changed keys", "guard of calls")


def test_a_backward_that_differs_from_run_to_run_is_found() -> None:
    runs = itertools.count()
    with fused_toy.fault(lambda g: [g[0] * (1 + next(runs) * 2**-20), *g[1:]]):
        findings = list(run_to_run(COMBINATION, CASES["packed"], torch.float32))
    assert {finding.quantity for finding in findings if finding.ok is False} == {"dq"}


def test_a_wrong_gradient_of_a_deterministic_backward_is_found(monkeypatch) -> None:
    right = fused_toy.win.backward

    def wrong(*tensors: Any, call: Any) -> Any:
        dq, dk, dv = right(*tensors, call=call)
        return dq, dk * (1 + 0.05 * call.deterministic), dv

    monkeypatch.setattr(fused_toy.win, "backward", wrong)
    for check, expected in ((core_gradients, set()), (run_to_run, {"dk_win"})):
        findings = check(COMBINATION, CASES["dense"], torch.float32)
        assert {finding.quantity for finding in findings if finding.ok is False} == expected


@pytest.mark.few_cases
@pytest.mark.parametrize("check", [finite_poison, nan_storage, run_to_run])
@pytest.mark.parametrize("case", ["dense", "packed"])
def test_right_backwards_pass_the_other_checks(check: Any, case: str) -> None:
    findings = list(check(COMBINATION, CASES[case], torch.bfloat16))
    assert all(finding.ok is not False for finding in findings), findings
    assert bool(findings) != (check is finite_poison and case == "packed")
    slots = Combination(dict.fromkeys(SLOTS, "sdpa"), registry=default_registry())
    assert not list(check(slots, CASES[case], torch.bfloat16))  # no fused backward


def test_the_outputs_of_the_branches_are_freed_in_the_backward() -> None:
    """Nothing but the list holds them, so that a backward frees them as soon as it can."""
    alive: list[bool] = []

    def free(g: Any, _: Any, outputs: Any) -> Any:
        storages = [StorageWeakRef(o.untyped_storage()) for o in outputs]
        outputs.clear()
        alive.extend(not storage.expired() for storage in storages)
        return g

    for options in ({}, {"recompute": True}):
        with fused_toy.fault_on(free):
            assert backwards(leaves(), nonnegative_gates=True, **options)[-1] == "core"
    assert alive == [False] * 6


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


class Signed(torch.nn.Module):
    """A user's gate, whose gates may be negative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates: torch.Tensor = self.linear(x).tanh().unflatten(-1, (4, 3))
        return gates


def altered(how: str, monkeypatch: pytest.MonkeyPatch) -> NSAttention:
    """Return a layer whose gates may be negative."""
    layer = NSAttention(dataclasses.replace(CONFIG, gate="mlp" if "mlp" in how else "linear"))

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
    elif how == "mlp subclass":
        layer.gate.__class__ = type("Negative", (MLPGate,), {"forward": negated})
    elif how == "user's":
        layer.gate = Signed()
    return layer


def negated(self: LinearGate | MLPGate, x: torch.Tensor) -> torch.Tensor:
    return -type(self).__base__.forward(self, x)


def slots_of(layer: NSAttention, how: str) -> set[str]:
    """Return the slots whose backward a training call of ``layer`` runs, eager or compiled."""
    call: Any = layer
    if how == "compiled":
        torch._dynamo.reset()
        call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with record_dispatch() as trace:
        call(torch.randn(1, 30, 16), plan=plan()).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.gate.parameters())
    return {call.slot for call in trace if call.direction == "backward"}


@pytest.mark.few_cases("linear-eager", "mlp-eager")
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("gate", ["linear", "mlp"])
def test_a_layer_runs_it(gate: str, how: str) -> None:
    layer = NSAttention(dataclasses.replace(CONFIG, gate=gate))
    assert slots_of(layer, how) == {"core"}
    if gate == "mlp":  # its last operation is still the sigmoid
        layer.gate[1] = torch.nn.Tanh()
        assert slots_of(layer, how) == {"core"}


ALTERED = ["hook", "mlp hook", "global", "instance", "subclass", "mlp subclass", "user's"]


@pytest.mark.parametrize(
    ("gate", "how"),
    [(gate, "eager") for gate in ALTERED]
    + [
        pytest.param(gate, "compiled", marks=pytest.mark.slow)
        for gate in ("mlp hook", "subclass", "user's")
    ],
)
def test_a_layer_with_an_altered_gate_runs_the_slots(
    gate: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = altered(gate, monkeypatch)
    try:
        assert slots_of(layer, how) == {"combine", "cmp", "sel", "win"}
    finally:
        getattr(layer, "remove_hook", lambda: None)()


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [(1, 0, 16), (0, 30, 16), (1, 3, 16)])
def test_a_layer_without_tokens_or_compressed_tokens_runs_no_fused_backward(
    shape: tuple[int, int, int], how: str
) -> None:
    torch._dynamo.reset()
    layer = NSAttention(CONFIG)
    call = layer if how == "eager" else torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(shape, requires_grad=True)
    with record_dispatch() as trace:
        call(x, plan=plan()).sum().backward()
    slots = [call.slot for call in trace if call.direction == "backward"]
    assert slots == (["combine", "win", "sel"] if x.numel() else [])
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.gate.parameters())


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
        ": result 0 is": lambda g: [g[0][:, :-1], *g[1:]],
        ": result 7 is .* torch.float64": lambda g: [*g[:7], g[7].double()],
        ": it returned 7 tensors, expected 8": lambda g: g[:7],
    }
    for message, plant in faults.items():
        wrong = pytest.raises(NSAError, match=f"'fused-toy', slot 'core', backward{message}")
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


def with_other_cmp(**slot: Any) -> Plan:
    """Return a plan in which the backend "other" runs cmp; ``slot`` changes its SlotSpec."""
    sdpa = default_registry().get("sdpa").spec
    slots = {"cmp": dataclasses.replace(sdpa.slots["cmp"], **slot)}
    registry = Registry().with_backend(dataclasses.replace(sdpa, name="other", slots=slots))
    sized = dataclasses.replace(fused_toy.spec(), fused_workspace={"backward": "fused_toy:size"})
    registry = registry.with_backend(sized)
    backends = {"cmp": "other", **dict.fromkeys(("select", "sel", "win", "combine"), "fused-toy")}
    return resolve(CONFIG, registry=registry, needs_grad=True, backends=backends)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_another_backend_computes_its_part_of_cmp(how: str) -> None:
    torch._dynamo.reset()
    inputs, do, mixed = leaves(), torch.randn(1, 30, 4, 6), with_other_cmp(reads_lse=True)

    def core(plan: Plan) -> torch.Tensor:
        return nsa_attention(*inputs, config=CONFIG, plan=plan, nonnegative_gates=True)

    if how == "compiled":
        run = torch.compile(lambda: core(mixed), backend="aot_eager", fullgraph=True)
    else:
        run = lambda: core(mixed)  # noqa: E731
    with record_dispatch() as trace:
        gradients = torch.autograd.grad(run(), inputs, do)
    calls = [(call.backend, call.slot) for call in trace if call.direction == "backward"]
    assert calls == [("fused-toy", "core"), ("other", "cmp")]
    for gradient, own in zip(gradients, torch.autograd.grad(core(plan()), inputs, do)):
        torch.testing.assert_close(gradient, own)


def test_a_plan_names_who_computes_cmp_in_a_fused_backward() -> None:
    mixed = with_other_cmp(reads_lse=True)
    assert "backward: fused-toy (fused, cmp by other)" in mixed.explain().splitlines()
    assert mixed.fused["backward"] is not plan().fused["backward"]
    request = dataclasses.replace(mixed.requests["cmp"], batch=1, seq_len=64)
    with pytest.raises(Unsupported, match=r"'fused-toy' does not state .* fused 'back"):
        mixed.workspace_bytes(request, fused="backward")
    assert not with_other_cmp(reads_lse=False).fused


def test_warmup_runs_it() -> None:
    for each in (plan(), with_other_cmp(reads_lse=True)):
        with record_dispatch() as trace:
            each.warmup()
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


def test_threads_define_one_operator() -> None:
    path = "fused_toy:another"
    fused_toy.another = fused_toy.backward
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: core_backward("fused-toy", path), range(16)))
    assert len({id(fused) for fused in found}) == 1


def test_a_function_that_cannot_be_imported_is_refused_with_its_backend() -> None:
    with pytest.raises(BackendUnavailable, match="'fused-toy': its fused backward nowhere:no"):
        core_backward("fused-toy", "nowhere:no")
