"""The core as one autograd node computes what the nodes of its slots compute, bit for bit."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import io
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

import cases
from nsa_core import (
    NSAttention,
    Unsupported,
    nsa_attention,
    nsa_attention_with_lse,
    resolve,
)
from nsa_core.contract import BRANCHES
from nsa_core.torch_ops import core_node
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_core.torch_ops.call_wrapper import wrapped_calls
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify.problems.cases import config_of

CONFIG = config_of(4, 2, 16, 16, (8, 4, 16, 4, 24))
TOKENS = 150


def leaves(packed: bool, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return q, k, v (three of each) and gates that require gradients."""
    torch.manual_seed(0)
    lead = (TOKENS,) if packed else (2, TOKENS)
    return cases.inputs(CONFIG, *lead, dtype=dtype, requires_grad=True)._asdict()


def flat(inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of ``inputs`` in a list."""
    return [inputs["q"], *inputs["k"], *inputs["v"], inputs["gates"]]


def run(inputs: dict[str, Any], **options: Any) -> list[torch.Tensor]:
    """Return o, the LSEs, the blocks and all gradients."""
    o, lse, blocks = nsa_attention_with_lse(**inputs, config=CONFIG, **options)
    assert not any(x.requires_grad for x in (*lse, blocks))
    torch.manual_seed(1)
    return [o, *lse, blocks, *torch.autograd.grad(o, flat(inputs), torch.randn_like(o))]


@pytest.fixture
def separate_nodes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that computes as ``run`` with a node for each slot."""

    def run_separately(*args: Any, **options: Any) -> list[torch.Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(core_node, "_may_be_one_node", lambda *_: False)
            return run(*args, **options)

    return run_separately


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["dense", "packed", "blocks", "shared"])
def test_results_and_gradients_have_the_same_bits(
    case: str, dtype: torch.dtype, separate_nodes: Any
) -> None:
    inputs, options = leaves(case == "packed", dtype), {}
    if case == "packed":
        options["cu_seqlens"] = torch.tensor([0, 40, 40, TOKENS], dtype=torch.int32)
    if case == "blocks":
        options["blocks"] = torch.randint(-1, 12, (2, TOKENS, 2, 4))
    if case == "shared":
        inputs["k"], inputs["v"] = inputs["k"][:1] * 3, inputs["v"][:1] * 3
    actual, expected = run(inputs, **options), separate_nodes(inputs, **options)
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


def test_a_training_call_records_one_node() -> None:
    o = nsa_attention(**leaves(False), config=CONFIG)
    assert type(o.grad_fn).__name__ == "_CoreNodeBackward"


@pytest.mark.parametrize(
    ("wanted", "directions"),
    [
        ("gates", ["combine"]),
        ("k_win", ["combine", "win"]),
        ("v_cmp", ["combine", "cmp"]),
        ("q", ["combine", "win", "sel", "cmp"]),
    ],
)
def test_a_branch_without_wanted_gradients_does_not_run(wanted: str, directions: Any) -> None:
    inputs = leaves(False)
    tensors = dict(
        zip(("q", "k_cmp", "k_sel", "k_win", "v_cmp", "v_sel", "v_win", "gates"), flat(inputs))
    )
    for name, x in tensors.items():
        x.requires_grad_(name == wanted)
    if wanted == "v_cmp":  # the compressed values come from v[cmp], outside of the core
        assert tensors["v_cmp"] is inputs["v"][0]
    o = nsa_attention(**inputs, config=CONFIG)
    with record_dispatch() as trace:
        o.sum().backward()
    assert [record.slot for record in trace] == directions
    assert tensors[wanted].grad is not None


def test_the_backward_can_be_repeated_but_not_differentiated() -> None:
    inputs = leaves(False)
    o = nsa_attention(**inputs, config=CONFIG)
    first, second = (torch.autograd.grad(o.sum(), inputs["q"], retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])
    (dq,) = torch.autograd.grad(o.square().sum(), inputs["q"], create_graph=True)
    with pytest.raises(Unsupported, match="differentiable once"):
        dq.sum().backward()


def test_saved_tensors_can_be_offloaded_and_recomputed(separate_nodes: Any) -> None:
    expected = separate_nodes(leaves(False))[-8]
    inputs = leaves(False)
    with torch.autograd.graph.save_on_cpu():
        o = nsa_attention(**inputs, config=CONFIG)
    torch.manual_seed(1)
    do = torch.randn_like(o)
    assert torch.equal(torch.autograd.grad(o, inputs["q"], do)[0], expected)

    def core(q: torch.Tensor) -> torch.Tensor:
        return nsa_attention(**{**inputs, "q": q}, config=CONFIG)

    o = torch.utils.checkpoint.checkpoint(core, inputs["q"], use_reentrant=False)
    assert torch.equal(torch.autograd.grad(o, inputs["q"], do)[0], expected)


@pytest.mark.parametrize("how", ["one node", "separate nodes", "recompute"])
def test_tensors_are_freed_as_soon_as_with_a_node_for_each_slot(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch keeps the arguments of a backward, but do lives no longer than `combine` runs."""
    storages: dict[str, StorageWeakRef] = {}
    alive: dict[str, list[str]] = {}

    def watch(where: Any, function: Any, arguments: Any, options: Any) -> Any:
        _, slot, direction = where
        if direction == "backward":
            if slot == "combine":
                storages["do"] = StorageWeakRef(arguments[0].untyped_storage())
            alive[slot] = [name for name, storage in storages.items() if not storage.expired()]
        result = function(*arguments, **options)
        if direction == "forward" and slot in BRANCHES:
            storages[f"o_{slot}"] = StorageWeakRef(result[0].untyped_storage())
        elif slot == "combine" and direction == "backward":
            for branch, do in zip(BRANCHES, result[1:], strict=True):
                storages[f"do_{branch}"] = StorageWeakRef(do.untyped_storage())
        return result

    if how == "separate nodes":
        monkeypatch.setattr(core_node, "_may_be_one_node", lambda *_: False)
    with wrapped_calls(watch):
        core = partial(nsa_attention, **leaves(False), config=CONFIG)
        core(recompute=how == "recompute").square().sum().backward()
    assert alive == {
        "combine": ["o_cmp", "o_sel", "o_win", "do"],
        "win": ["o_cmp", "o_sel", "o_win", "do_cmp", "do_sel", "do_win"],
        "sel": ["o_cmp", "o_sel", "do_cmp", "do_sel"],
        "cmp": ["o_cmp", "do_cmp"],
    }


def profiled() -> Any:
    """Return a profiler of the CPU."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


WATCHERS = {
    "nobody": contextlib.nullcontext,
    "profiler": profiled,
    "flop counter": lambda: FlopCounterMode(display=False),
    "device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_an_observed_call_records_the_same_node(watcher: str) -> None:
    kept: list[tuple[int, ...]] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(x.shape))
        return x

    records = []
    for context in (WATCHERS[watcher], contextlib.nullcontext):
        with context(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            o = nsa_attention(**leaves(False), config=CONFIG)
        records.append((type(o.grad_fn).__name__, tuple(kept)))
        kept.clear()
    assert records[0] == records[1]
    assert records[0][0] == "_CoreNodeBackward"


@pytest.mark.few_cases
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    ("forward", "backward"),
    [(w, "nobody") for w in WATCHERS] + [("nobody", w) for w in WATCHERS if w != "nobody"],
)
def test_checkpoint_repeats_a_forward_that_somebody_else_observed(
    forward: str, backward: str, early_stop: bool, recompute: bool
) -> None:
    inputs = leaves(False)
    torch.manual_seed(1)
    do = torch.randn(2, TOKENS, 4, 16)
    core = partial(nsa_attention, **inputs, config=CONFIG)
    expected = torch.autograd.grad(core(), flat(inputs), do)
    with WATCHERS[forward](), torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
        o = torch.utils.checkpoint.checkpoint(core, use_reentrant=False, recompute=recompute)
    with WATCHERS[backward]():
        gradients = torch.autograd.grad(o, flat(inputs), do)
    for x, y in zip(gradients, expected, strict=True):
        assert torch.equal(x, y)


def test_a_profiler_sees_the_operators_of_the_slots() -> None:
    with profiled() as profile:
        nsa_attention(**leaves(False), config=CONFIG).sum().backward()
    names = {event.key for event in profile.key_averages() if event.key.startswith("nsa_sdpa::")}
    slots = {"cmp", "select", "sel", "win", "combine"}
    backwards = {f"{slot}_backward" for slot in slots - {"select"}}
    assert names == {f"nsa_sdpa::{name}" for name in slots | backwards}


def test_threads_may_run_the_backward_of_one_graph_at_a_time() -> None:
    """Each of two threads has its gradient of o before either runs its backward."""
    inputs = leaves(False)
    o = nsa_attention(**inputs, config=CONFIG)
    dos = torch.randn(2, *o.shape)
    expected = [torch.autograd.grad(o, inputs["q"], do, retain_graph=True)[0] for do in dos]
    both_hold = threading.Barrier(2, timeout=30)
    release = core_node._HeldGradient.release

    def wait(self: Any) -> torch.Tensor | None:
        both_hold.wait()
        return release(self)

    def train(do: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(o, inputs["q"], do, retain_graph=True)[0]

    with pytest.MonkeyPatch.context() as patch, concurrent.futures.ThreadPoolExecutor(2) as threads:
        patch.setattr(core_node._HeldGradient, "release", wait)
        actual = list(threads.map(train, dos))
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


def test_hooks_of_the_node_receive_and_replace_the_gradient() -> None:
    inputs = leaves(False)
    o = nsa_attention(**inputs, config=CONFIG)
    do = torch.randn_like(o)
    expected = torch.autograd.grad(o, inputs["q"], 2 * do, retain_graph=True)[0]
    seen: list[torch.Tensor] = []

    def double(grads: Any) -> Any:
        seen.append(grads[0])
        return (2 * grads[0], *grads[1:])

    assert o.grad_fn is not None
    handle = o.grad_fn.register_prehook(double)
    assert torch.equal(torch.autograd.grad(o, inputs["q"], do, retain_graph=True)[0], expected)
    assert torch.equal(seen[0], do)
    handle.remove()
    assert torch.equal(torch.autograd.grad(o, inputs["q"], 2 * do)[0], expected)
    assert len(seen) == 1


@pytest.mark.parametrize("case", ["dense", "packed", "blocks"])
def test_recomputed_branches_give_the_same_bits(case: str) -> None:
    inputs, options = leaves(case == "packed"), {}
    if case == "packed":
        options["cu_seqlens"] = torch.tensor([0, 40, 40, TOKENS], dtype=torch.int32)
    if case == "blocks":
        options["blocks"] = torch.randint(-1, 12, (2, TOKENS, 2, 4))
    expected = run(inputs, **options)
    with record_dispatch() as trace:
        actual = run(inputs, recompute=True, **options)
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)
    calls = [(record.slot, record.direction) for record in trace]
    again = calls[calls.index(("combine", "forward")) + 1 : calls.index(("combine", "backward"))]
    assert again == [(slot, "forward") for slot in ("cmp", "sel", "win")]


def test_recompute_keeps_the_inputs_and_the_blocks() -> None:
    inputs, kept = leaves(False), {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.data_ptr()] = x.nbytes
        return x

    compressed = {"k_cmp": inputs["k"][0][:, :36], "v_cmp": inputs["v"][0][:, :36]}
    core = partial(nsa_attention_with_lse, **inputs, **compressed, config=CONFIG)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        blocks = core(recompute=True).blocks
    own = [inputs["q"], *compressed.values(), *inputs["k"][1:], *inputs["v"][1:], inputs["gates"]]
    assert kept == {x.data_ptr(): x.nbytes for x in [*own, blocks]}
    with_recompute = sum(kept.values())
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        core()
    outputs, statistics = inputs["q"].nbytes, 4 * 2 * TOKENS * 4
    assert sum(kept.values()) == with_recompute + 3 * (outputs + statistics)


FORWARDS = [(slot, "forward") for slot in ("cmp", "select", "sel", "win", "combine")]
AGAIN = [(slot, "forward") for slot in ("cmp", "sel", "win")]
BACKWARDS = [(slot, "backward") for slot in ("combine", "win", "sel", "cmp")]


@pytest.mark.few_cases("plain", "profiler", "profiler forward", "profiler backward", "flop counter")
@pytest.mark.parametrize(
    "how",
    ["plain", "profiler", "profiler forward", "profiler backward", "flop counter", "compile"],
)
def test_recompute_runs_the_branches_again_and_nothing_else(how: str) -> None:
    inputs = leaves(False)
    torch.manual_seed(1)
    do = torch.randn(2, TOKENS, 4, 16)

    def core(q: torch.Tensor, recompute: bool = True) -> torch.Tensor:
        return nsa_attention(**{**inputs, "q": q}, config=CONFIG, recompute=recompute)

    expected = torch.autograd.grad(core(inputs["q"], False), flat(inputs), do)
    watcher = {"profiler": profiled, "flop counter": WATCHERS["flop counter"]}
    during = dict.fromkeys(("forward", "backward"), watcher.get(how, contextlib.nullcontext))
    if how.startswith("profiler "):
        during[how.split()[1]] = profiled
    call: Any = core
    if how == "compile":
        call = torch.compile(core, backend="aot_eager", fullgraph=True)
    with record_dispatch() as trace:
        with during["forward"]():
            o = call(inputs["q"])
        with during["backward"]():
            gradients = torch.autograd.grad(o, flat(inputs), do)
    for x, y in zip(gradients, expected, strict=True):
        assert torch.equal(x, y)
    assert [(record.slot, record.direction) for record in trace] == FORWARDS + AGAIN + BACKWARDS


def test_recompute_has_no_effect_under_torch_func() -> None:
    inputs = leaves(False)

    def call(q: torch.Tensor) -> torch.Tensor:
        return nsa_attention(**{**inputs, "q": q}, config=CONFIG, recompute=True)

    with record_dispatch() as trace:
        o, vjp = torch.func.vjp(call, inputs["q"].detach())
        (dq,) = vjp(torch.ones_like(o))
    assert sum(record.direction == "forward" for record in trace) == len(FORWARDS)
    assert torch.equal(dq, torch.autograd.grad(call(inputs["q"]).sum(), inputs["q"])[0])


class Core(torch.nn.Module):
    """The core as a module, for torch.export."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Return o."""
        return nsa_attention(q, k, k, gates, config=CONFIG, recompute=True)


@pytest.mark.few_cases("False")
@pytest.mark.parametrize("strict", [False, True])
def test_a_call_with_recompute_can_be_exported(strict: bool) -> None:
    inputs = leaves(False)
    tensors = tuple(x.detach() for x in (inputs["q"], inputs["k"][0], inputs["gates"]))
    exported = torch.export.export(Core(), tensors, strict=strict)
    assert not any("checkpoint" in str(node.target) for node in exported.graph.nodes)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(*tensors), Core()(*tensors))


@pytest.mark.parametrize("check", [False, True])
def test_a_layer_recomputes_if_its_attribute_says_so(check: bool) -> None:
    torch.manual_seed(0)
    layer = NSAttention(CONFIG, recompute=True, check=check)
    x = torch.randn(1, TOKENS, 64)

    def train() -> tuple[list[tuple[str, str]], tuple[torch.Tensor, ...]]:
        with record_dispatch() as trace:
            gradients = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
        return [(record.slot, record.direction) for record in trace], gradients

    calls, gradients = train()
    assert calls == FORWARDS + AGAIN + BACKWARDS
    layer.recompute = False
    calls, expected = train()
    assert calls == FORWARDS + BACKWARDS
    for a, b in zip(gradients, expected, strict=True):
        assert torch.equal(a, b)


def test_a_recomputed_graph_can_be_used_twice_and_offloaded() -> None:
    inputs = leaves(False)
    core = partial(nsa_attention, **inputs, config=CONFIG)
    expected = torch.autograd.grad(core().sum(), flat(inputs))
    with torch.autograd.graph.save_on_cpu():
        o = core(recompute=True).sum()
    for retain in (True, False):
        gradients = torch.autograd.grad(o, flat(inputs), retain_graph=retain)
        assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))


def test_a_slot_without_backward_is_refused_as_before() -> None:
    plan = resolve(CONFIG, device="cpu", dtype="float32", needs_grad=True, backends="sdpa")
    forward_only = dataclasses.replace(plan._slots["win"], backward=None)
    kernel = dataclasses.replace(plan.win, op=slot_op("sdpa", "win", forward_only).op)
    with pytest.raises(Unsupported, match="no backward for 'win'"):
        nsa_attention(**leaves(False), config=CONFIG, plan=dataclasses.replace(plan, win=kernel))
