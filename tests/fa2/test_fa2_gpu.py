"""Every provider on a GPU, compared with the oracle. The other tests of fa2 need no GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from fa2_problems import (
    PACKED,
    PROBLEMS,
    SLOTS,
    TINY,
    Piece,
    Problem,
    assert_compiled_correct,
    assert_correct,
    assert_judged,
    kernel,
    run,
)
from nsa_backend_fa2 import flash4, providers
from nsa_backend_fa2.plugin import nsa_register_backends
from nsa_core.contract import SLOTS as CORE
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_verify.checks.core import core_gradients
from nsa_verify.problems.cases import Case, config_of
from nsa_verify.problems.combination import Combination

pytestmark = pytest.mark.gpu

SOURCES = {source.name: source for source in providers.sources()}
PAPER = BlockGeometry()
SHORT = BlockGeometry(16, 8, 32, 4, 1, 2, 48)
DOCUMENTS = (0, 33, 16, 15, 0, 210, 64, 1)

# Problems larger than a tile of the kernels; only sampled rows are judged.
LARGE = {
    "12/2/64": Problem((700,), batch=1, heads=12, groups=2, Dk=64, Dv=64, geometry=PAPER),
    "12/2/64-batch": Problem((350,), batch=2, heads=12, groups=2, Dk=64, Dv=64, geometry=SHORT),
    "h1": Problem((350,), batch=2, heads=2, groups=2, Dk=64, Dv=64, geometry=SHORT),
    "h16-128": Problem((700,), batch=1, heads=16, groups=1, Dk=128, Dv=128, geometry=PAPER),
    "h16-192/128": Problem((300,), batch=1, heads=16, groups=1, Dk=192, Dv=128, geometry=PAPER),
    "256": Problem((300,), batch=1, heads=2, groups=1, Dk=256, Dv=256, geometry=SHORT),
    "65/80": Problem((300,), batch=1, heads=4, groups=2, Dk=65, Dv=80, geometry=SHORT),
    "packed-12/2/64": Problem(
        DOCUMENTS, batch=None, heads=12, groups=2, Dk=64, Dv=64, geometry=SHORT
    ),
    "packed-192/128": Problem(
        DOCUMENTS, batch=None, heads=8, groups=2, Dk=192, Dv=128, geometry=SHORT
    ),
    "packed-h1": Problem(DOCUMENTS, batch=None, heads=2, groups=2, Dk=32, Dv=32, geometry=SHORT),
}
HISTORIC = Problem(
    (64,), heads=4, groups=2, Dk=64, Dv=64, geometry=BlockGeometry(16, 8, 16, 4, 1, 2, 32)
)


@pytest.fixture(autouse=True)
def few_threads() -> Iterator[None]:
    """Limit the oracle to two threads: its products are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["flash-attn", "PyTorch", "flash-attn-4"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> providers.Provider:
    """Each provider in turn; the test is skipped with the reason if it is not installed.

    flash-attn-4 runs calls of any length here, not only long ones.
    """
    is_flash4 = request.param == flash4.NAME
    if is_flash4 and request.node.callspec.params.get("slot", "cmp") != "cmp":
        pytest.skip("it runs cmp only")
    source = flash4.source() if is_flash4 else SOURCES[request.param]
    if source.provider is None:
        pytest.skip(str(source.reason))
    if is_flash4:
        monkeypatch.setattr(flash4, "MIN_RUNS", 1)
    else:
        monkeypatch.setattr(flash4, "provider_of", lambda q, attention: None)
        monkeypatch.setattr(providers, "sources", lambda: (source,))
    return source.provider


def sampled(problem: Problem) -> list[int]:
    """Return tokens at the edges of blocks, documents and tiles, and some in between."""
    total, g = sum(problem.lengths), problem.geometry
    edges = [
        0,
        1,
        g.compress_block_size - 1,
        g.compress_block_size,
        g.select_block_size,
        g.window_size,
        127,
        128,
        total - 1,
    ]
    edges += [
        sum(problem.lengths[:i]) + step for i in range(len(problem.lengths)) for step in (-1, 0, 1)
    ]
    return sorted({t for t in [*edges, *range(5, total, max(1, total // 12))] if 0 <= t < total})


def judge_sampled(
    slot: str, problem: Problem, dtype: torch.dtype, deterministic: bool = False
) -> None:
    """Run on the GPU with do = 0 outside the sampled rows, and judge those rows."""
    inputs, do, cu = problem.inputs(slot, dtype, "cuda")
    rows = sampled(problem)
    masked_do = torch.zeros_like(do)
    masked_do[..., rows, :, :] = do[..., rows, :, :]
    outputs = run(slot, problem, inputs, masked_do, cu, deterministic)
    assert_correct(slot, problem, inputs, outputs, masked_do, cu, rows=rows)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_problems_match_the_oracle(
    dtype: torch.dtype, name: str, slot: str, provider: providers.Provider
) -> None:
    judge_sampled(slot, LARGE[name], dtype)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_small_problems_match_the_oracle(
    name: str, slot: str, provider: providers.Provider
) -> None:
    assert_judged(slot, PROBLEMS[name], torch.bfloat16, "cuda")


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", LARGE)
def test_pieces_of_large_problems_match_the_oracle(
    name: str, slot: str, provider: providers.Provider
) -> None:
    """Queries that begin inside a sequence, some of one row, with keys behind them."""
    problem = LARGE[name]
    inputs, do, cu = problem.inputs(slot, torch.bfloat16, "cuda")
    total = sum(problem.lengths)
    for first, stop in ((1, total - 37), (137, total), (63, 64), (200, 203)):
        piece = Piece(problem, first, stop)
        rows = sorted({t for t in (*sampled(problem), first, stop - 1) if first <= t < stop})
        sampled_do = torch.zeros_like(do)
        sampled_do[..., rows, :, :] = do[..., rows, :, :]
        outputs = piece.in_whole(piece.run(slot, inputs, sampled_do, cu), inputs)
        assert_correct(slot, problem, inputs, outputs, sampled_do, cu, rows=rows)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", ["one", "batch", "packed"])
def test_pieces_of_small_problems_match_the_oracle(
    name: str, slot: str, provider: providers.Provider
) -> None:
    """Every residue of d and l', and documents without a query row, which get zero gradients."""
    problem = {**TINY, "one": Problem((29,), batch=1, Dk=64, Dv=64)}[name]
    inputs, do, cu = problem.inputs(slot, torch.bfloat16, "cuda")
    total = sum(problem.lengths)
    for first in range(total):
        piece = Piece(problem, first, total if first % 2 else min(total, first + 1 + first % 9))
        outputs = piece.in_whole(piece.run(slot, inputs, do, cu), inputs)
        rows = range(piece.first, piece.stop)
        assert_correct(slot, problem, inputs, outputs, piece.outside(do), cu, rows=rows)


LONG = {
    "16/1/128": Problem((8300,), batch=1, heads=16, groups=1, Dk=128, Dv=128, geometry=PAPER),
    "12/2/64": Problem((4500,), batch=1, heads=12, groups=2, Dk=64, Dv=64, geometry=PAPER),
    "h1": Problem((4200,), batch=2, heads=2, groups=2, Dk=96, Dv=88, geometry=PAPER),
    "packed": Problem((33, 4500, 700), batch=None, heads=8, groups=2, Dk=96, Dv=96, geometry=PAPER),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_cmp_runs_on_flash_attention_4_and_matches_the_oracle(
    dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = flash4.source().provider
    if provider is None:
        pytest.skip(str(flash4.source().reason))
    calls = []
    for pass_name in ("forward", "backward"):
        method = getattr(provider, pass_name)

        def record(*args: object, method=method, pass_name=pass_name) -> object:
            calls.append(pass_name)
            return method(*args)

        monkeypatch.setattr(provider, pass_name, record)
    judge_sampled("cmp", LONG[name], dtype)
    assert calls == ["forward", "backward"]


CASES = {
    "batch": Case("batch", config_of(12, 2, 64, 64, (32, 16, 64, 4, 512)), (705,), batch=2),
    "one": Case(
        "one",
        config_of(16, 1, 128, 128, (32, 16, 64, 4, 512)),
        (1100,),
        rows=tuple(range(0, 1100, 9)),
    ),
    "packed": Case("packed", config_of(12, 2, 64, 64, (16, 8, 32, 4, 48)), DOCUMENTS, packed=True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cmp_joins_the_fused_backward_of_triton(
    dtype: torch.dtype, name: str, provider: providers.Provider
) -> None:
    """Some gates are 0, 1e-6 or 2.5; fa2 gets do of the gated sum, and the gates by the LSE."""
    backends = {**dict.fromkeys(CORE, "triton"), "cmp": "fa2"}
    with record_dispatch() as trace:
        findings = list(core_gradients(Combination(backends, device="cuda"), CASES[name], dtype))
    assert all(finding.ok for finding in findings), findings
    calls = [(call.backend, call.slot) for call in trace if call.direction == "backward"]
    assert calls == [("triton", "core"), ("fa2", "cmp")]


def test_historic_0_766_sliding_window_of_flash_attention_2(provider: providers.Provider) -> None:
    """A report found an error of 0.766 in fp16, because its reference returned V[0]."""
    assert_judged("win", HISTORIC, torch.float16, "cuda")


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", ["12/2/64", "12/2/64-batch", "packed-12/2/64"])
def test_deterministic_runs_are_bitwise_equal(
    name: str, slot: str, provider: providers.Provider
) -> None:
    problem = LARGE[name]
    inputs, do, cu = problem.inputs(slot, torch.bfloat16, "cuda")
    torch.use_deterministic_algorithms(isinstance(providers.first(), providers.TorchFlash))
    try:
        first = run(slot, problem, inputs, do, cu, deterministic=True)
        for _ in range(20):
            for key, value in run(slot, problem, inputs, do, cu, deterministic=True).items():
                assert torch.equal(value, first[key]), key
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", ["12/2/64", "12/2/64-batch", "packed-12/2/64", "h16-192/128"])
def test_no_call_synchronises(name: str, slot: str, provider: providers.Provider) -> None:
    problem = LARGE[name]
    inputs, do, cu = problem.inputs(slot, torch.bfloat16, "cuda")
    run(slot, problem, inputs, do, cu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(slot, problem, inputs, do, cu)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", TINY)
def test_row_50_cuda_graph_of_forward_and_backward_replays_on_new_inputs(
    name: str, slot: str, provider: providers.Provider
) -> None:
    problem = TINY[name]
    static, do, cu = problem.inputs(slot, torch.bfloat16, "cuda")
    leaves = {n: x.detach().clone().requires_grad_(n != "blocks") for n, x in static.items()}
    differentiated = [x for n, x in leaves.items() if n != "blocks"]
    call, longest = kernel(slot, problem), max(problem.lengths) if cu is not None else None

    def forward_backward() -> list[torch.Tensor]:
        o, lse = call(*leaves.values(), cu_seqlens=cu, max_seqlen=longest)
        return [o, lse, *torch.autograd.grad(o, differentiated, do)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward_backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = forward_backward()
    inputs, new_do, _ = dataclasses.replace(problem, seed=7).inputs(slot, torch.bfloat16, "cuda")
    with torch.no_grad():
        for n, x in inputs.items():
            leaves[n].copy_(x)
        do.copy_(new_do)
    graph.replay()
    torch.cuda.synchronize()
    names = ["o", "lse", *(f"d{n}" for n in inputs if n != "blocks")]
    outputs = {n: x.detach() for n, x in zip(names, results)}
    assert_correct(slot, problem, inputs, outputs, new_do, cu)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", ["batch", "packed"])
def test_fullgraph_compilation_matches_the_oracle(
    name: str, slot: str, provider: providers.Provider
) -> None:
    assert_compiled_correct(slot, TINY[name], torch.bfloat16, "cuda", "inductor")


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", ["12/2/64", "packed-12/2/64"])
def test_profile_contains_the_evidence_of_the_slot(
    name: str, slot: str, provider: providers.Provider
) -> None:
    problem = LARGE[name]
    inputs, do, cu = problem.inputs(slot, torch.bfloat16, "cuda")
    with torch.profiler.profile() as profile:
        run(slot, problem, inputs, do, cu)
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    for evidence in nsa_register_backends().slots[slot].evidence:
        assert any(evidence in name for name in names), (evidence, sorted(names))


@pytest.mark.parametrize("slot", SLOTS)
def test_row_34_nan_in_one_query_stays_in_its_row(slot: str, provider: providers.Provider) -> None:
    problem = Problem((150,), batch=1, heads=4, groups=2, Dk=64, Dv=64, geometry=SHORT)
    inputs, do, cu = problem.inputs(slot, torch.bfloat16, "cuda")
    clean = run(slot, problem, inputs, do, cu)
    inputs["q"][0, 100, 1] = torch.nan
    outputs = run(slot, problem, inputs, do, cu)
    assert outputs["o"][0, 100, 1].isnan().all()
    assert outputs["lse"][0, 1, 100].isnan()
    for name, index in (("o", (0, 100, 1)), ("lse", (0, 1, 100))):
        outputs[name][index] = clean[name][index]
        assert torch.equal(outputs[name], clean[name]), name


@pytest.mark.parametrize("slot", SLOTS)
def test_row_44_batch_above_the_limit_of_a_call_is_split(
    slot: str, provider: providers.Provider
) -> None:
    problem = Problem(
        (8,),
        batch=70_000,
        heads=2,
        groups=1,
        Dk=16,
        Dv=16,
        geometry=BlockGeometry(2, 2, 2, 3, 1, 2, 3),
    )
    inputs, do, cu = problem.inputs(slot, torch.bfloat16, "cuda")
    outputs = run(slot, problem, inputs, do, cu)
    judged = [0, 65_534, 65_535, 69_999]
    judged_inputs = {n: x[judged] for n, x in inputs.items()}
    judged_outputs = {n: x[judged] for n, x in outputs.items()}
    assert_correct(slot, problem, judged_inputs, judged_outputs, do[judged], None)


def test_row_17_malformed_boundaries_on_the_device_do_not_crash(
    provider: providers.Provider,
) -> None:
    """Malformed boundaries give undefined results, but never an access outside the tensors."""
    problem = Problem(PACKED, batch=None, heads=4, groups=2, Dk=64, Dv=64)
    total = sum(PACKED)
    for slot in SLOTS:
        inputs, do, _ = problem.inputs(slot, torch.bfloat16, "cuda")
        for bounds in ([0, total + 50, 20, total], [0, -5, total], [7, 3, 2**31 - 1], [0, 0, 0]):
            run(slot, problem, inputs, do, torch.tensor(bounds, dtype=torch.int32, device="cuda"))
            torch.cuda.synchronize()
