"""The triton backend on a GPU: binaries, synchronisation, graphs, memory, warm-up, and the
conformance suite.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil

import pytest
import torch

from nsa_core import NSAConfig, nsa_attention, resolve
from nsa_core.contract import SLOTS
from nsa_core.dispatch.plan import Plan
from nsa_verify.cases import Case, CaseData
from nsa_verify.conformance import BackendConformance
from nsa_verify.findings import bits
from nsa_verify.slot_runs import run_slot, run_slots, slot_inputs

nsa_backend_triton = pytest.importorskip("nsa_backend_triton")
pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

CONFIG = NSAConfig(dim=768, n_heads=12, n_kv_heads=2, head_dim=64, rope=False)
LENGTHS = (1, 63, 64, 200, 1000, 1024, 2049, 4096, 8191, 20000)
EACH = pytest.mark.parametrize("slot", SLOTS)


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


def case(length: int, packed: bool = False) -> tuple[Case, CaseData]:
    lengths = (0, length // 3, length - length // 3, 0) if packed else (length,)
    asked = Case(f"{length} tokens", CONFIG, lengths, packed=packed)
    return asked, asked.data(torch.bfloat16, "cuda")


def binaries() -> dict[str, int]:
    """Compiled kernels of the package in this process, by name."""
    from triton.runtime.jit import JITFunction

    found = {}
    for info in pkgutil.walk_packages(nsa_backend_triton.__path__, "nsa_backend_triton."):
        module = importlib.import_module(info.name)
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                count = sum(len(entry[0]) for entry in kernel.device_caches.values())
                if count:
                    found[kernel.__name__] = count
    return found


class TestTriton(BackendConformance):
    """What every backend owes: graphs, compile, threads, layouts, long offsets, dtypes,
    determinism.
    """

    backend = "triton"


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_row_29_warmup_leaves_nothing_to_compile_at_any_length(packed: bool) -> None:
    made = plan(varlen=packed)
    made.warmup()
    before = binaries()
    assert before
    for length in LENGTHS:
        asked, data = case(length, packed)
        run_slots(made, asked, data)
    assert binaries() == before


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@EACH
def test_no_synchronisation(slot: str, packed: bool) -> None:
    asked, data = case(6000, packed)
    for deterministic in (False, True):
        made = plan(packed, deterministic)
        runs = run_slots(made, asked, data)  # compiles
        inputs = slot_inputs(slot, data, runs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_slot(made, slot, inputs, None if slot == "select" else data.do, data)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_row_50_forward_and_backward_in_one_graph(packed: bool) -> None:
    asked, data = case(6000, packed)
    made = plan(packed, deterministic=True)
    fresh = asked.data(torch.bfloat16, "cuda", seed=3)
    names = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
    static = {name: getattr(data, name).detach().clone().requires_grad_() for name in names}

    def step(x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        o = nsa_attention(
            x["q"],
            (None, x["k_sel"], x["k_win"]),
            (None, x["v_sel"], x["v_win"]),
            x["gates"],
            config=CONFIG,
            plan=made,
            k_cmp=x["k_cmp"],
            v_cmp=x["v_cmp"],
            cu_seqlens=data.cu_seqlens,
            max_seqlen=data.max_seqlen if packed else None,
        )
        return (o, *torch.autograd.grad(o, list(x.values()), data.do))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static)
    with torch.no_grad():
        for name, tensor in static.items():
            tensor.copy_(getattr(fresh, name))
    graph.replay()
    eager = step({name: getattr(fresh, name).detach().clone().requires_grad_() for name in names})
    for got, want in zip(captured, eager):
        assert torch.equal(bits(got), bits(want))


def test_row_29_two_compilations_for_every_length() -> None:
    from torch._dynamo.testing import CompileCounter

    made, counter = plan(), CompileCounter()
    torch._dynamo.reset()

    def whole(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        return nsa_attention(q, k, v, gates, config=CONFIG, plan=made)

    compiled = torch.compile(whole, backend=counter, fullgraph=True)
    for length in LENGTHS[3:]:
        _, data = case(length)
        compiled(data.q, data.k_sel, data.v_sel, data.gates)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@EACH
def test_row_47_peak_memory_is_what_the_plan_tells(
    slot: str, packed: bool, deterministic: bool
) -> None:
    asked, data = case(30000, packed)
    made = plan(packed, deterministic)
    inputs = slot_inputs(slot, data, run_slots(made, asked, data))
    do = None if slot == "select" else data.do
    request = dataclasses.replace(
        made.requests[slot], batch=len(asked.lengths) if packed else 1, seq_len=30000
    )
    told = made.workspace_bytes(request)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_slot(made, slot, inputs, do, data)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert abs(told - taken) <= 0.05 * taken, (
        f"told {told}, taken {taken}, ratio {told / taken:.3f}"
    )


@EACH
def test_row_54_the_same_bits_250_times(slot: str) -> None:
    asked, data = case(3000)
    made = plan(deterministic=True)
    inputs = slot_inputs(slot, data, run_slots(made, asked, data))
    do = None if slot == "select" else data.do
    first = run_slot(made, slot, inputs, do, data).outputs
    for _ in range(250):
        for name, got in run_slot(made, slot, inputs, do, data).outputs.items():
            assert torch.equal(bits(got), bits(first[name])), name


@EACH
def test_row_55_a_row_does_not_depend_on_its_neighbours_in_the_batch(slot: str) -> None:
    asked = Case("batch", CONFIG, (700,), batch=3)
    data = asked.data(torch.bfloat16, "cuda")
    made = plan(deterministic=True)
    inputs = slot_inputs(slot, data, run_slots(made, asked, data))
    do = None if slot == "select" else data.do
    together = run_slot(made, slot, inputs, do, data).outputs
    for entry in range(3):
        alone = {name: tensor[entry : entry + 1] for name, tensor in inputs.items()}
        run = run_slot(
            made, slot, alone, None if do is None else do[entry : entry + 1], data
        ).outputs
        for name, got in run.items():
            assert torch.equal(bits(got), bits(together[name][entry : entry + 1])), (entry, name)
