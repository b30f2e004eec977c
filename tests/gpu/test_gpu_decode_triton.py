"""Decode forms of the triton backend on a GPU: parity, graphs, determinism, binaries, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from nsa_core import NSAConfig
from nsa_core.contract import SLOTS, DecodeCall
from nsa_verify.checks.decode_compress import fused_compress
from nsa_verify.checks.decode_fused import append_parity, fused_gates, fused_step
from nsa_verify.checks.decode_parity import decode_parity
from nsa_verify.problems.cases import Case
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import bits
from nsa_verify.problems.step_data import StepData, step_data
from nsa_verify.problems.steps import Step

pytest.importorskip("triton")
pytest.importorskip("nsa_backend_triton")
pytestmark = pytest.mark.gpu

TRITON = Combination(dict.fromkeys(SLOTS, "triton"), "cuda")
CONFIG = NSAConfig(dim=1024, n_heads=16, n_kv_heads=2, head_dim=64, rope=False)
LONG = Step(
    Case("16/2/64, pages", CONFIG, ()), (3000, 1, 700, 0, 2048), (1, 1, 1, 0, 1), page_size=128
)
WIDE = NSAConfig(dim=1024, n_heads=16, n_kv_heads=1, head_dim=192, v_head_dim=128, rope=False)
FOUR = dataclasses.replace(LONG, case=Case("four tokens", CONFIG, ()), new=(4, 1, 3, 0, 4), rows=4)
CHUNK = dataclasses.replace(
    LONG, case=Case("a chunk of 90", CONFIG, ()), new=(90, 1, 64, 0, 0), rows=90
)
ODD = Step(Case("16/1 192/128", WIDE, ()), (900, 65), (1, 1))
WIDEST = NSAConfig(dim=1024, n_heads=64, n_kv_heads=1, head_dim=256, rope=False)
MANY_HEADS = Step(Case("64/1 256/256", WIDEST, ()), (1500, 65), (1, 1))  # eight warps
# Each step compiles about ten binaries, of up to 5 s each. `nsa verify` judges more steps.
PROBLEMS = [(step, torch.bfloat16) for step in (LONG, FOUR, CHUNK, ODD, MANY_HEADS)]
PROBLEMS += [(LONG, torch.float16), (LONG, torch.float32), (FOUR, torch.float32)]
STORES = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")


def forms(
    data: StepData, call: DecodeCall | None = None
) -> dict[str, Callable[[], tuple[torch.Tensor, ...]]]:
    """Return a function for each decode form that runs it on ``data``."""
    plan = TRITON.plan(CONFIG, data.q.dtype, needs_grad=False, phase="decode", page_size=128)
    call, store, q = call or data.call, data.stores, data.q
    lse = plan.cmp(q, store["k_cmp"], store["v_cmp"], call=call)[1]
    blocks = plan.select(q, store["k_cmp"], lse, call=call)
    tensors = [store[name] for name in STORES]
    return {
        "cmp": lambda: plan.cmp(q, store["k_cmp"], store["v_cmp"], call=call),
        "select": lambda: (plan.select(q, store["k_cmp"], lse, call=call),),
        "sel": lambda: plan.sel(q, store["k_sel"], store["v_sel"], blocks, call=call),
        "win": lambda: plan.win(q, store["k_win"], store["v_win"], call=call),
        "step": lambda: plan.fused["step"](q, data.gates, *tensors, call=call),
    }


@pytest.mark.parametrize(
    ("step", "dtype"), PROBLEMS, ids=lambda x: x.case.name if isinstance(x, Step) else str(x)
)
def test_every_decode_form_matches_the_oracle(step: Step, dtype: torch.dtype) -> None:
    findings = [*decode_parity(TRITON, step, dtype), *fused_step(TRITON, step, dtype)]
    findings += [*fused_gates(TRITON, step, dtype), *fused_compress(TRITON, step, dtype)]
    for rope, rotate_raw in ((False, False), (True, False), (True, True)):
        findings += append_parity(
            TRITON, step, dtype, rope=rope, rotate_raw=rotate_raw, raw_ring=40
        )
    assert not [f for f in findings if not f.ok]


def test_row_50_a_graph_replays_with_new_values_in_the_same_tensors() -> None:
    data = step_data(LONG, torch.bfloat16, "cuda")
    run = forms(data)["step"]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    lengths = data.call.lengths.clone()
    for fewer in (0, 1, 70, 3):
        data.call.lengths.copy_((lengths - fewer).clamp(min=0))
        data.call.starts.copy_((data.call.lengths - 1).clamp(min=0))
        data.q.normal_()
        for output in captured:
            output.fill_(7)
        graph.replay()
        for actual, expected in zip(captured, run()):
            assert torch.equal(bits(actual), bits(expected)), fewer


def test_no_synchronisation() -> None:
    data = step_data(LONG, torch.bfloat16, "cuda")
    runs = forms(data)
    for run in runs.values():
        run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for run in runs.values():
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("form", ["cmp", "select", "sel", "win", "step"])
def test_row_54_250_repeats_have_equal_bits(form: str) -> None:
    run = forms(step_data(LONG, torch.bfloat16, "cuda"))[form]
    first = run()
    for _ in range(250):
        for actual, expected in zip(run(), first):
            assert torch.equal(bits(actual), bits(expected))


def test_the_last_program_of_a_row_reads_all_splits() -> None:
    """Repeated steps with many splits have equal bits while another stream uses multiprocessors."""
    step = Step(Case("many", CONFIG, ()), (3000,) * 24, (1,) * 24, page_size=128)
    run, other_stream = forms(step_data(step, torch.bfloat16, "cuda"))["step"], torch.cuda.Stream()
    load, first = torch.randn(2048, 2048, device="cuda"), run()
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(other_stream):
            load = (load @ load).tanh()
        for actual, expected in zip(run(), first):
            assert torch.equal(bits(actual), bits(expected))


def test_one_binary_serves_every_length_and_batch() -> None:
    from nsa_backend_triton.decode import choose, sel, span
    from nsa_backend_triton.decode import step as decode_step

    kernels = (span.decode_span, sel.decode_sel, choose.decode_choose, decode_step.decode_step)

    def count_binaries() -> list[int]:
        return [sum(len(entry[0]) for entry in kernel.device_caches.values()) for kernel in kernels]

    for run in forms(step_data(LONG, torch.bfloat16, "cuda")).values():
        run()
    before = count_binaries()
    for lengths in ((1,), (16, 40, 900), (1024,), (2049, 17), (4096,), (3001,) * 7):
        step = dataclasses.replace(LONG, lengths=lengths, new=(1,) * len(lengths))
        for run in forms(step_data(step, torch.bfloat16, "cuda")).values():
            run()
    assert count_binaries() == before


@pytest.mark.parametrize("slot", ["cmp", "select", "sel", "win"])
def test_row_47_peak_memory_equals_the_stated_workspace(slot: str) -> None:
    step = Step(Case("many", CONFIG, ()), (20000,) * 16, (1,) * 16, page_size=128)
    data = step_data(step, torch.bfloat16, "cuda")
    run = forms(data)[slot]
    plan = TRITON.plan(CONFIG, torch.bfloat16, needs_grad=False, phase="decode", page_size=128)
    stated = plan.workspace_bytes(dataclasses.replace(plan.requests[slot], batch=16, seq_len=20000))
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # Requested bytes, because the allocator's blocks may be up to 1 MiB larger.
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    run()
    torch.cuda.synchronize()
    measured = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert abs(stated - measured) <= 0.05 * measured + 4096, f"stated {stated}, measured {measured}"


def test_steps_are_correct_over_a_cache_of_more_than_2_to_the_31_elements() -> None:
    """Row 43: a step reads the last pages of a store with 4.3 GB of keys."""
    pages, page = 17000, 1024
    config = dataclasses.replace(CONFIG, n_heads=2, dim=128)
    step = Step(Case("far", config, ()), (3000,), (1,), page_size=page)
    data = step_data(step, torch.bfloat16, "cuda")
    plan = TRITON.plan(config, torch.bfloat16, needs_grad=False, phase="decode", page_size=page)
    names = ("k_cmp", "v_cmp", "k_sel", "v_sel")

    def run_step(call: DecodeCall) -> tuple[torch.Tensor, ...]:
        stores = [data.stores[name] for name in STORES]
        return plan.fused["step"](data.q, data.gates, *stores, call=call)

    before = run_step(data.call)
    for name in names:
        small = data.stores[name]
        large = torch.empty((pages, *small.shape[1:]), dtype=small.dtype, device="cuda")
        large[-len(small) :] = small
        data.stores[name] = large
    assert data.stores["k_sel"].numel() > 2**31
    tables, first = data.call.tables, pages - len(small)
    tables = tables._replace(cmp=tables.cmp + first, sel=tables.sel + first)
    for actual, expected in zip(run_step(dataclasses.replace(data.call, tables=tables)), before):
        assert torch.equal(bits(actual), bits(expected))
