"""The triton backend on a GPU: conformance, binaries, synchronisation, graphs, memory, warm-up."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest
import torch

from nsa_core import NSAConfig, nsa_attention, resolve
from nsa_core.contract import SLOTS
from nsa_core.plan.plan import Plan
from nsa_verify.conformance import BackendConformance
from nsa_verify.problems.cases import Case, CaseData
from nsa_verify.problems.findings import bits
from nsa_verify.problems.slot_runs import run_kernel, run_slots, slot_inputs

nsa_backend_triton = pytest.importorskip("nsa_backend_triton")
pytest.importorskip("triton")
launch_cache = importlib.import_module("nsa_backend_triton.host.launch_cache")
runs = importlib.import_module("nsa_backend_triton.sel.runs")
pytestmark = pytest.mark.gpu

CONFIG = NSAConfig(dim=768, n_heads=12, n_kv_heads=2, head_dim=64, rope=False)
LENGTHS = (1, 63, 64, 200, 1000, 1024, 2049, 4096, 8191, 20000)
EACH_SLOT = pytest.mark.parametrize("slot", SLOTS)


def plan(varlen: bool = False, deterministic: bool = False, config: NSAConfig = CONFIG) -> Plan:
    return resolve(
        config,
        device="cuda",
        dtype=torch.bfloat16,
        backends="triton",
        needs_grad=True,
        varlen=varlen,
        deterministic=deterministic,
    )


def case_and_data(length: int, packed: bool = False) -> tuple[Case, CaseData]:
    lengths = (0, length // 3, length - length // 3, 0) if packed else (length,)
    case = Case(f"{length} tokens", CONFIG, lengths, packed=packed)
    return case, case.data(torch.bfloat16, "cuda")


def count_binaries() -> dict[str, int]:
    """Return the number of compiled binaries in this process, by kernel."""
    from triton.runtime.jit import JITFunction

    binaries = {}
    for info in pkgutil.walk_packages(nsa_backend_triton.__path__, "nsa_backend_triton."):
        module = importlib.import_module(info.name)
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                count = sum(len(entry[0]) for entry in kernel.device_caches.values())
                if count:
                    binaries[kernel.__name__] = count
    return binaries


class TestTriton(BackendConformance):
    """The conformance suite: graphs, compile, threads, layouts, offsets, dtypes, determinism."""

    backend = "triton"


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_row_29_warmup_compiles_the_kernels_for_all_lengths(packed: bool) -> None:
    warm_plan = plan(varlen=packed)
    warm_plan.warmup()
    before = count_binaries()
    assert before
    for length in LENGTHS:
        case, data = case_and_data(length, packed)
        run_slots(warm_plan, case, data)
    assert count_binaries() == before


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@EACH_SLOT
def test_no_synchronisation(slot: str, packed: bool) -> None:
    case, data = case_and_data(6000, packed)
    for deterministic in (False, True):
        slot_plan = plan(packed, deterministic)
        runs = run_slots(slot_plan, case, data)  # compiles the kernels
        inputs = slot_inputs(slot, data, runs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_kernel(
                getattr(slot_plan, slot), inputs, None if slot == "select" else data.do, data
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("length", [1500, 6000])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_row_50_forward_and_backward_in_one_graph(packed: bool, fused: bool, length: int) -> None:
    """The fused backward runs kernels beside each other; 1500 tokens take the bits of sel.

    The captured boundaries are a column of a table, whose values change before the replay.
    """
    case, data = case_and_data(length, packed)
    graph_plan = plan(packed, deterministic=True)
    new_data = case.data(torch.bfloat16, "cuda", seed=3)
    names = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
    for each in (data, new_data):
        each.gates.abs_()
    static = {name: getattr(data, name).detach().clone().requires_grad_() for name in names}
    bounds = new_bounds = None
    if data.cu_seqlens is not None:
        bounds = torch.stack([data.cu_seqlens, torch.full_like(data.cu_seqlens, 7)], -1)[:, 0]
        new_bounds = torch.tensor(
            [0, length // 2, length // 2, length, length], device="cuda"
        ).int()

    def step(
        x: dict[str, torch.Tensor], cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        o = nsa_attention(
            x["q"],
            (None, x["k_sel"], x["k_win"]),
            (None, x["v_sel"], x["v_win"]),
            x["gates"],
            config=CONFIG,
            plan=graph_plan,
            k_cmp=x["k_cmp"],
            v_cmp=x["v_cmp"],
            cu_seqlens=cu_seqlens,
            max_seqlen=data.max_seqlen if packed else None,
            nonnegative_gates=fused,
        )
        return (o, *torch.autograd.grad(o, list(x.values()), data.do))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(static, bounds)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, bounds)
    with torch.no_grad():
        for name, tensor in static.items():
            tensor.copy_(getattr(new_data, name))
        if bounds is not None:
            bounds.copy_(new_bounds)
    for tensor in captured:
        tensor.detach().fill_(torch.nan)
    graph.replay()
    leaves = {name: getattr(new_data, name).detach().clone().requires_grad_() for name in names}
    eager = step(leaves, new_bounds)
    for actual, expected in zip(captured, eager):
        assert torch.equal(bits(actual), bits(expected))


def test_row_29_torch_compile_compiles_at_most_twice_for_all_lengths() -> None:
    from torch._dynamo.testing import CompileCounter

    compiled_plan, counter = plan(), CompileCounter()
    torch._dynamo.reset()

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        return nsa_attention(q, k, v, gates, config=CONFIG, plan=compiled_plan)

    compiled = torch.compile(attention, backend=counter, fullgraph=True)
    for length in LENGTHS[3:]:
        _, data = case_and_data(length)
        compiled(data.q, data.k_sel, data.v_sel, data.gates)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@EACH_SLOT
def test_row_47_peak_memory_equals_the_stated_workspace(
    slot: str, packed: bool, deterministic: bool
) -> None:
    case, data = case_and_data(30000, packed)
    slot_plan = plan(packed, deterministic)
    inputs = slot_inputs(slot, data, run_slots(slot_plan, case, data))
    do = None if slot == "select" else data.do
    request = dataclasses.replace(
        slot_plan.requests[slot], batch=len(case.lengths) if packed else 1, seq_len=30000
    )
    stated = slot_plan.workspace_bytes(request)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_kernel(getattr(slot_plan, slot), inputs, do, data)
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    assert abs(stated - measured) <= 0.05 * measured, (
        f"stated {stated}, measured {measured}, ratio {stated / measured:.3f}"
    )


@EACH_SLOT
def test_row_54_250_repeats_have_equal_bits(slot: str) -> None:
    case, data = case_and_data(3000)
    slot_plan = plan(deterministic=True)
    inputs = slot_inputs(slot, data, run_slots(slot_plan, case, data))
    do = None if slot == "select" else data.do
    first = run_kernel(getattr(slot_plan, slot), inputs, do, data).outputs
    for _ in range(250):
        for name, tensor in run_kernel(getattr(slot_plan, slot), inputs, do, data).outputs.items():
            assert torch.equal(bits(tensor), bits(first[name])), name


@pytest.mark.parametrize("length", [700, 20000])
@EACH_SLOT
def test_row_55_a_sequence_does_not_depend_on_the_rest_of_the_batch(
    slot: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # sel divides the rows of 20000 tokens into runs
    monkeypatch.setattr(runs, "PARTIAL_BYTES", 2**26)
    launch_cache.clear()
    case = Case("batch", CONFIG, (length,), batch=3)
    data = case.data(torch.bfloat16, "cuda")
    slot_plan = plan(deterministic=True)
    inputs = slot_inputs(slot, data, run_slots(slot_plan, case, data))
    do = None if slot == "select" else data.do
    batched = run_kernel(getattr(slot_plan, slot), inputs, do, data).outputs
    for entry in range(3):
        row = slice(entry, entry + 1)
        single_inputs = {name: tensor[row] for name, tensor in inputs.items()}
        single_do = None if do is None else do[row]
        single = run_kernel(getattr(slot_plan, slot), single_inputs, single_do, data).outputs
        for name, tensor in single.items():
            assert torch.equal(bits(tensor), bits(batched[name][row])), (entry, name)
    launch_cache.clear()
