"""Training under torch.compile runs the core as one operator, with the results of eager calls."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fused_toy
from nsa_core import InvalidInput, Unsupported, nsa_attention_with_lse, resolve
from nsa_core.contract import BRANCHES, SLOTS
from nsa_core.errors import NSAError
from nsa_core.plan.finite_checks import CheckedKernel, checked_plan
from nsa_core.plan.plan import Plan
from nsa_core.plan.registry import Registry, default_registry
from nsa_core.torch_ops import core_op
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_core.torch_ops.core_kernels import CoreInputs
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify.problems.cases import config_of

CONFIG = config_of(4, 2, 4, 6, (4, 2, 8, 3, 10))
REGISTRIES = {
    "slots": default_registry(),
    "fused": Registry().with_backend(fused_toy.spec()),
}
FORWARDS = [(slot, "forward") for slot in SLOTS]
AGAIN = [(slot, "forward") for slot in BRANCHES]
BACKWARDS = {
    "slots": [(slot, "backward") for slot in ("combine", "win", "sel", "cmp")],
    "fused": [("core", "backward")],
}
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


def plan(kind: str, dtype: torch.dtype = torch.float64, packed: bool = False) -> Plan:
    """Return a plan with the backwards of the slots, or with a fused one."""
    backend = {"slots": "sdpa", "fused": "fused-toy"}[kind]
    options = {"dtype": dtype, "varlen": packed, "backends": backend}
    return resolve(CONFIG, registry=REGISTRIES[kind], needs_grad=True, **options)


def leaves(
    tokens: int = 30, packed: bool = False, dtype: torch.dtype = torch.float64, wanted: Any = NAMES
) -> dict[str, torch.Tensor]:
    """Return the tensors of the core; those of ``wanted`` require a gradient."""
    torch.manual_seed(0)
    lead = [] if packed else [2]
    geometry, gate_dtype = CONFIG.geometry, dtype if dtype == torch.float64 else torch.float32
    rows = (geometry.max_compressed if packed else geometry.num_compressed)(tokens)
    shapes = {"q": (tokens, 4, 4), "gates": (tokens, 4, 3)}
    for branch in BRANCHES:
        length = rows if branch == "cmp" else tokens
        shapes |= {f"k_{branch}": (length, 2, 4), f"v_{branch}": (length, 2, 6)}
    tensors = {name: torch.rand(*lead, *shapes[name], dtype=dtype) for name in NAMES}
    tensors["gates"] = tensors["gates"].to(gate_dtype)
    return {name: x.requires_grad_(name in wanted) for name, x in tensors.items()}


def attend(x: dict[str, torch.Tensor], plan: Plan, **options: Any) -> Any:
    """Return o, the LSEs and the blocks."""
    k, v = (None, x["k_sel"], x["k_win"]), (None, x["v_sel"], x["v_win"])
    return nsa_attention_with_lse(
        x["q"],
        k,
        v,
        x["gates"],
        k_cmp=x["k_cmp"],
        v_cmp=x["v_cmp"],
        config=CONFIG,
        plan=plan,
        **options,
    )


def results(
    call: Callable[..., Any], x: dict[str, torch.Tensor], *args: Any, **options: Any
) -> list[Any]:
    """Return the results of ``call`` and the gradients, None where none is needed."""
    o, lse, blocks = call(x, *args, **options)
    assert not any(y.requires_grad for y in (*lse, blocks))
    wanted = [t for t in x.values() if t.requires_grad]
    torch.manual_seed(1)
    return [o, *lse, blocks, *torch.autograd.grad(o, wanted, torch.randn_like(o))]


class Graphs:
    """A backend of torch.compile that keeps the names of the operators of each graph."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []
        self.backend = aot_autograd(fw_compiler=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        targets = [str(node.target).removesuffix(".default") for node in graph.graph.nodes]
        self.names.append([name for name in targets if name.startswith("nsa_")])
        return make_boxed_func(graph.forward)


def compiled(**options: Any) -> tuple[Any, Graphs]:
    """Return ``attend`` compiled without graph breaks, and its graphs."""
    torch._dynamo.reset()
    graphs = Graphs()
    return torch.compile(attend, backend=graphs.backend, fullgraph=True, **options), graphs


ONE_BACKWARD = ["nsa_core.core_backward"]
SLOT_BACKWARDS = [f"nsa_sdpa.{slot}_backward" for slot in ("combine", "win", "sel", "cmp")]


def few(fast: Sequence[tuple[Any, ...]], *axes: Sequence[Any]) -> list[Any]:
    """Return the product of ``axes`` as parameters; all but those of ``fast`` are slow."""
    points = itertools.product(*axes)
    return [p if p in fast else pytest.param(*p, marks=pytest.mark.slow) for p in points]


@pytest.mark.few_cases("fused-blocks-False")
@pytest.mark.parametrize(
    ("kind", "case", "recompute"),
    few(
        [("slots", "dense", False), ("fused", "packed", True), ("fused", "blocks", False)],
        ("slots", "fused"),
        ("dense", "packed", "blocks"),
        (False, True),
    ),
)
def test_results_gradients_and_kernels_are_those_of_eager_calls(
    kind: str, case: str, recompute: bool
) -> None:
    packed = case == "packed"
    x, options = leaves(packed=packed), {"recompute": recompute, "nonnegative_gates": True}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, 11, 11, 30], dtype=torch.int32)
    if case == "blocks":
        options["blocks"] = torch.randint(-1, 4, (2, 30, 2, 3))
    call, graphs = compiled()
    of_plan = plan(kind, packed=packed)
    traces = []
    with record_dispatch() as trace:
        expected = results(attend, x, of_plan, **options)
        traces.append([(record.slot, record.direction) for record in trace])
    call(x, of_plan, **options)  # compiles
    with record_dispatch() as trace:
        actual = results(call, x, of_plan, **options)
        traces.append([(record.slot, record.direction) for record in trace])
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    forwards = [call for call in FORWARDS if case != "blocks" or call[0] != "select"]
    assert traces == [forwards + AGAIN * recompute + BACKWARDS[kind]] * 2
    backward = ONE_BACKWARD if recompute or kind == "fused" else SLOT_BACKWARDS
    assert graphs.names == [["nsa_core.core"], backward]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fused", "slots"])
def test_lengths_share_two_compilations_at_most(kind: str) -> None:
    call, graphs = compiled()
    for tokens in (30, 41, 25, 64):
        x = leaves(tokens, dtype=torch.float32)
        of_plan, options = plan(kind, torch.float32), {"nonnegative_gates": True}
        actual = results(call, x, of_plan, **options)
        for a, b in zip(actual, results(attend, x, of_plan, **options), strict=True):
            assert torch.equal(a, b)
    assert len(graphs.names) <= 4  # a forward and a backward each


@pytest.mark.few_cases("wanted2-False")
@pytest.mark.parametrize(
    ("wanted", "recompute"),
    few(
        [(("k_win",), False), (("v_cmp", "k_sel"), True)],
        [("gates",), ("k_win",), ("v_cmp", "k_sel"), ("q",)],
        (False, True),
    ),
)
def test_a_branch_without_wanted_gradients_does_not_run(
    wanted: tuple[str, ...], recompute: bool
) -> None:
    of_branch = {"k_win": ["win"], "k_sel": ["sel"], "v_cmp": ["cmp"], "q": ["win", "sel", "cmp"]}
    needed = [slot for name in wanted for slot in of_branch.get(name, ())]
    slots = ["combine", *[slot for slot in ("win", "sel", "cmp") if slot in needed]]
    x, options = leaves(wanted=wanted), {"nonnegative_gates": True, "recompute": recompute}
    call, _ = compiled()
    expected = results(attend, x, plan("fused"), **options)
    with record_dispatch() as trace:
        actual = results(call, x, plan("fused"), **options)
    assert [record.slot for record in trace if record.direction == "backward"] == slots
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *few(
            [("fused", "blocks")],
            ("slots", "fused"),
            ("dense", "packed", "blocks", "no keys"),
        ),
        ("slots", "causal"),  # a plan with one backward of all slots has no causal kernel
    ],
)
def test_the_operators_pass_opcheck(kind: str, case: str) -> None:
    packed, tokens = case == "packed", {"no keys": 3, "causal": 24}.get(case, 30)
    x, of_plan = leaves(tokens, packed), plan(kind, packed=packed)
    cu_seqlens = torch.tensor([0, 11, 11, 30], dtype=torch.int32) if packed else None
    blocks = torch.randint(-1, 4, (2, 30, 2, 3)) if case == "blocks" else None
    assert of_plan.core is not None
    constants = (tokens, of_plan.core.kernels, 0.3, CONFIG.geometry.as_ints(), False)
    options = (case == "packed", True, case == "causal")
    arguments = (*x.values(), cu_seqlens, blocks, *constants, *options)
    torch.library.opcheck(torch.ops.nsa_core.core.default, arguments)
    o, selected, *rest = torch.ops.nsa_core.core.default(*arguments)
    inputs = [t.detach() for t in x.values()]
    if case == "causal":
        assert selected.shape == (0,)
        selected = None
    saved = [selected if blocks is None else blocks, *rest]
    some = [False, True, False, True, True, False, False, True]
    for needs, kept in (([True] * 8, saved), (some, [saved[0], *[None] * 6])):
        arguments = (torch.randn_like(o), *inputs, cu_seqlens, *kept, *constants, True, needs)
        torch.library.opcheck(torch.ops.nsa_core.core_backward.default, arguments)


def test_a_result_is_no_given_tensor_and_the_backward_is_not_differentiable() -> None:
    x, blocks = leaves(), torch.zeros(2, 30, 2, 1, dtype=torch.int32)
    core, inputs = plan("fused").core, CoreInputs(*x.values())
    assert core is not None
    tail = (30, core.kernels, 0.3, CONFIG.geometry.as_ints(), False, False, True, False)
    assert torch.ops.nsa_core.core.default(*inputs, None, blocks, *tail)[1].shape == (0,)
    o, branches = core_op.core(core, inputs, blocks, None, 30, False, True, False)
    assert branches.blocks is blocks
    (dq,) = torch.autograd.grad(o.square().sum(), inputs.q, create_graph=True)
    with pytest.raises(Unsupported, match="differentiable once, not twice"):
        dq.sum().backward()


def run_without_grad(x: dict[str, torch.Tensor], of_plan: Plan) -> torch.Tensor:
    with torch.no_grad():
        return attend(x, of_plan)[0]


def run_transformed(x: dict[str, torch.Tensor], of_plan: Plan) -> torch.Tensor:
    return torch.func.grad(lambda q: attend({**x, "q": q}, of_plan)[0].sum())(x["q"])


def run_mapped(x: dict[str, torch.Tensor], of_plan: Plan) -> torch.Tensor:
    def one(q: torch.Tensor) -> torch.Tensor:
        return attend({name: t[:1] for name, t in x.items()} | {"q": q[None]}, of_plan)[0]

    return torch.func.vmap(one)(x["q"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "wanted"),
    [(run_without_grad, NAMES), (run_transformed, ()), (run_mapped, NAMES)],
)
def test_inference_and_transforms_keep_the_slots(
    call: Callable[..., torch.Tensor], wanted: tuple[str, ...]
) -> None:
    torch._dynamo.reset()
    graphs, of_plan, x = Graphs(), plan("fused"), leaves(wanted=wanted)
    run = torch.compile(call, backend=graphs.backend, fullgraph=True)
    assert torch.equal(run(x, of_plan), call(x, of_plan))
    names = [name for graph in graphs.names for name in graph]
    assert "nsa_fused_toy.select" in names
    assert not any(name.startswith("nsa_core.core") for name in names)


def test_inference_with_tensors_that_need_no_gradient_keeps_the_slots() -> None:
    x, (call, graphs) = leaves(wanted=()), compiled()
    assert torch.equal(call(x, plan("fused"))[0], attend(x, plan("fused"))[0])
    assert graphs.names == [[f"nsa_fused_toy.{slot}" for slot in SLOTS]]


@pytest.mark.few_cases("eager-None")
@pytest.mark.parametrize(
    ("backend", "kept"),
    few(
        [(backend, kept) for backend in ("aot", "eager") for kept in (None, ("select",))],
        ("aot", "eager"),
        (None, (), ("select",), SLOTS[:4]),
    ),
)
def test_a_compiled_checkpoint_runs_again_the_slots_that_its_policy_does_not_keep(
    backend: str, kept: Any
) -> None:
    """Without a policy, AOT autograd runs the whole operator again.

    With backend="eager", the checkpoint itself runs the forward again in the backward. It refuses
    an operator that the first run did not call. Before torch 2.12, this backend runs a checkpoint
    without a policy only once.
    """
    x, of_plan, graphs = leaves(), plan("slots"), Graphs()
    options: dict[str, Any] = {"use_reentrant": False}
    if kept is not None:
        saved = [getattr(of_plan, slot).op for slot in kept]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, saved)

    def call(x: dict[str, torch.Tensor], of_plan: Plan) -> torch.Tensor:
        o: torch.Tensor = checkpoint(lambda *args: attend(*args)[0], x, of_plan, **options)
        return o

    torch._dynamo.reset()
    compiler = graphs.backend if backend == "aot" else "eager"
    with record_dispatch() as trace:
        o = torch.compile(call, backend=compiler, fullgraph=True)(x, of_plan)
        gradients = torch.autograd.grad(o.sum(), list(x.values()))
    for expected in (call(x, of_plan), attend(x, of_plan)[0]):
        assert all(
            map(torch.equal, gradients, torch.autograd.grad(expected.sum(), list(x.values())))
        )
    again = [slot for slot in SLOTS if slot not in (kept or ())]
    if backend == "eager":
        calls = [(record.slot, record.direction) for record in trace]
        is_repeated = kept is not None or torch.__version__ >= "2.12"
        repeated = [(slot, "forward") for slot in again if is_repeated]
        assert calls == [*FORWARDS, *repeated, *BACKWARDS["slots"]]
    elif kept is None:
        assert graphs.names == [["nsa_core.core"], ["nsa_core.core", *SLOT_BACKWARDS]]
    else:
        names = [name for name in graphs.names[1] if name not in SLOT_BACKWARDS]
        assert names == [f"nsa_sdpa.{slot}" for slot in again if slot != "combine"]


@pytest.mark.parametrize("has_policy", [True, False])
def test_the_policy_of_a_repetition_counts_where_it_has_one(has_policy: bool) -> None:
    """Before torch 2.13, its storage names no operator that the policy does not keep."""
    policy: Any = lambda *_, **options: False  # noqa: E731
    if not has_policy:
        policy.__module__ = "torch._higher_order_ops.wrap"  # that of a checkpoint without one
    mode = _CachedTorchDispatchMode(policy, {}, False)
    mode.policy_fn = policy
    with mode:
        assert core_op._has_policy(plan("slots").cmp.op) == has_policy


def test_a_negative_gate_is_refused_where_values_can_be_read() -> None:
    x, (call, _) = leaves(), compiled()
    call(x, plan("fused"), nonnegative_gates=True)
    x["gates"].data[0, 3, 1, 2] = -0.25
    with pytest.raises(InvalidInput, match=r"the smallest of gates is -0\.25; leave it out"):
        call(x, plan("fused"), nonnegative_gates=True)


@pytest.mark.slow
def test_plans_of_equal_constants_share_a_graph_and_others_do_not() -> None:
    x, (call, graphs) = leaves(), compiled()
    first, second = plan("fused"), plan("fused")
    assert first.core == second.core
    for of_plan in (first, second):
        call(x, of_plan)
    assert graphs.names == [["nsa_core.core"]]
    kernels = {slot: dataclasses.replace(getattr(first, slot), scale=0.1) for slot in SLOTS}
    other = dataclasses.replace(first, **kernels)
    for of_plan in (other, plan("slots"), first):
        assert torch.equal(call(x, of_plan)[0], attend(x, of_plan)[0])


@pytest.mark.slow
def test_a_plan_that_is_no_operator_runs_its_slots() -> None:
    whole = plan("slots")
    assert whole.core is not None
    scaled = dataclasses.replace(whole, win=dataclasses.replace(whole.win, scale=0.1))
    spec = dataclasses.replace(whole._slots["win"], backward=None)
    forward_only = dataclasses.replace(whole.win, op=slot_op("sdpa", "win", spec).op)
    assert dataclasses.replace(whole, win=forward_only).core is None
    assert checked_plan(whole, None).core is None
    assert scaled.core is None
    assert resolve(CONFIG, phase="decode", dtype="float32").core is None
    x, (call, graphs) = leaves(), compiled()
    for a, b in zip(results(call, x, scaled), results(attend, x, scaled), strict=True):
        assert torch.equal(a, b)
    assert graphs.names[0] == [f"nsa_sdpa.{slot}" for slot in SLOTS]


@pytest.mark.few_cases("lead0")
@pytest.mark.parametrize("lead", [(2, 0), (0, 5)])
def test_calls_without_tokens_or_sequences(lead: tuple[int, int]) -> None:
    x = {name: t.detach()[: lead[0]] for name, t in leaves(lead[1]).items()}
    x = {name: t.requires_grad_() for name, t in x.items()}
    call, _ = compiled(dynamic=False)
    with record_dispatch() as trace:
        actual = results(call, x, plan("fused"), nonnegative_gates=True)
    assert trace == []
    for a, b in zip(actual, results(attend, x, plan("fused"), nonnegative_gates=True), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize(("dtype", "code"), [(torch.float8_e4m3fn, torch.nan), (torch.int8, 1)])
def test_the_error_of_a_checked_kernel_reads_quantised_inputs(dtype, code):
    q, k, v = torch.full((1, 1, 2, 4), torch.nan), torch.ones(3, 8, 2, 4), torch.ones(3, 8, 2, 4)
    v[1, 5] = code

    def kernel(q, k, v):
        return q

    kernel.slot, kernel.backend = "win", "x"
    places = "q from index [0, 0, 0, 0]" + ", v from index [1, 5, 0, 0]" * (code != code)
    with pytest.raises(NSAError, match=re.escape(f"these are not finite: {places}") + "$"):
        CheckedKernel(kernel, None)(q, k.to(dtype), v.to(dtype))
