"""FlashAttention-4 as a provider of cmp: its calls, its reasons, its rank and its memory.

The package compiles for GPUs only, so that a fake stands in for it here. test_fa2_gpu.py runs it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from fa2_problems import Problem, run
from fa2_standin import FLASH4, Library, flash4_interface, make
from nsa_backend_fa2 import cmp, flash4, fold_strided, padding, providers, rank, workspace
from nsa_backend_fa2.plugin import nsa_register_backends
from nsa_backend_fa2.providers import Attention, Packed, Source
from nsa_backend_sdpa.probe import CUDNN_LONG_RANK
from nsa_bench.gate import gate_case, long_cases
from nsa_bench.result import read_result
from nsa_bench.shapes import parse_shape
from nsa_core.contract import Rank, Reason, Request, SlotCall
from nsa_core.dryrun import PeakBytes, rounded
from nsa_core.layout import BlockGeometry
from nsa_core.plan.registry import discover
from nsa_verify.conformance.points import Point
from nsa_verify.problems.cases import quick_cases
from slot_requests import make_request

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
SHAPE = {"n_heads": 64, "n_kv_heads": 4, "head_dim": 128, "v_head_dim": 128}
H100 = make_request("cmp", 65536, capability=(9, 0), **SHAPE)
CAUSAL = Attention(0.1)
CU = torch.zeros(3, dtype=torch.int32)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A fake FlashAttention-4, and tensors that pass for those of an H100."""
    library = Library()
    provider = flash4.FlashAttention4(flash4_interface(library), Version(FLASH4))
    source = Source(flash4.NAME, provider, None)
    monkeypatch.setattr(flash4, "source", lambda: source)
    h100 = {"cpu": (9, 0), "meta": None}
    monkeypatch.setattr(flash4, "_capability", lambda x: h100[x.device.type])
    return library


@pytest.mark.parametrize(
    ("shape", "change", "taken"),
    [
        ((16, 256, 2, 128), {}, True),
        ((16, 255, 2, 128), {}, False),
        ((16, 256, 2, 64), {}, True),
        ((16, 256, 2, 32), {}, False),
        ((16, 256, 2, 80), {}, False),
        ((16, 256, 2, 192), {}, False),
        ((16, 256, 2, 128), {"causal": False}, False),
        ((16, 256, 2, 128), {"window": 512}, False),
        ((16, 256, 2, 128), {"deterministic": True}, False),
        ((900, 2, 128), {"packed": Packed(CU, CU, 256, 256)}, True),
        ((900, 2, 128), {"packed": Packed(CU, CU, 255, 900)}, False),
        ((900, 2, 128), {"packed": Packed(torch.zeros(258), CU, 256, 256)}, False),
    ],
)
def test_it_takes_long_causal_calls(
    shape: tuple[int, ...], change: dict[str, object], taken: bool, installed: Library
) -> None:
    attention = dataclasses.replace(CAUSAL, **change)
    assert (flash4.provider_of(torch.empty(shape), attention) is not None) == taken


def test_verify_and_the_gate_of_bench_judge_it(installed: Library) -> None:
    """Their short cases run cmp on FlashAttention-2."""
    quick = next(case for case in quick_cases() if case.name == "long")
    gate = (parse_shape("64/4/128").config(), "cuda", 0)
    (long,) = long_cases(discover(), {"cmp": "fa2"}, *gate, 8192)
    cases = (quick, long, gate_case(*gate))
    requests = [Point(case, "bfloat16").request("cmp", "cuda", (9, 0)) for case in cases]
    assert [flash4.serves(request) for request in requests] == [True, True, False]


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (12, 0)])
def test_it_runs_on_hopper_and_on_blackwell_of_data_centres(
    capability: tuple[int, int] | None, installed: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.empty(16, 256, 2, 128)
    monkeypatch.setattr(flash4, "_capability", lambda x: capability)
    assert flash4.provider_of(q, CAUSAL) is None
    monkeypatch.setattr(flash4, "_capability", lambda x: (10, 0))
    assert flash4.provider_of(q, CAUSAL) is not None


def test_a_sequence_is_read_and_written_in_place(
    installed: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The complete runs of one sequence: o and dq of the calls are views of the results."""
    monkeypatch.setattr(flash4, "MIN_RUNS", 4)
    problem = Problem((200,), batch=1, Dk=64, Dv=64, geometry=BlockGeometry())
    inputs, do, _ = problem.inputs("cmp", torch.bfloat16)
    interface, outputs = flash4.source().provider._interface, []

    def record(name: str, output: str) -> None:
        call = getattr(interface, name)

        def recorded(*tensors, **options):
            outputs.append(options[output].data_ptr())
            return call(*tensors, **options)

        monkeypatch.setattr(interface, name, recorded)

    monkeypatch.setattr(fold_strided, "MAX_FP32_DQ", 5 * 10 * problem.heads * 64 * 4)
    record("_flash_attn_fwd", "out")
    record("_flash_attn_bwd", "dq")
    call = SlotCall(problem.geometry, 0.125)
    monkeypatch.setattr(
        providers, "active_provider", lambda: workspace.AllocationsOnly(False, False)
    )
    o, lse = cmp.forward(*inputs.values(), call=call)
    dq, *_ = cmp.backward(do, *inputs.values(), o, lse, call=call)
    row = problem.heads * 64 * 2  # bytes; row 31 is the first that sees a key
    assert outputs[0] == o.data_ptr() + 31 * row
    assert outputs[1:] == [dq.data_ptr() + n * row for n in (31, 36, 41, 46)]
    assert [c["q"][0] for c in installed.calls] == [16, 5, 5, 5, 1]
    assert {c["q"][1:] for c in installed.calls} == {(10, 4, 64)}


def test_dq_is_not_allocated_twice() -> None:
    interface = types.SimpleNamespace(_flash_attn_bwd=lambda *tensors, **options: None)
    q, k = (torch.empty(2, 64, heads, 64, device="meta") for heads in (8, 2))
    with PeakBytes() as counted:
        provider = flash4.FlashAttention4(interface, Version(FLASH4))
        dq, dk, dv = provider.backward([q, q, k, k, q, q], CAUSAL, q)
    assert dq is q
    assert counted.peak == rounded(dk.nbytes) + rounded(dv.nbytes)


def test_padded_heads_are_copied(installed: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Dk != Dv the call is wider than o: it gets no tensor to write to."""
    monkeypatch.setattr(flash4, "MIN_RUNS", 1)
    q, k, v = torch.randn(2, 9, 4, 96), torch.randn(2, 9, 2, 96), torch.randn(2, 9, 2, 64)
    out = torch.full((2, 9, 4, 64), torch.nan)
    o, _ = padding.attend(q, k, v, CAUSAL, out)
    assert out.isnan().all()
    assert o.shape == out.shape
    same, _ = padding.attend(q, k, torch.randn(2, 9, 2, 96), CAUSAL, full := torch.empty(q.shape))
    assert same is full


def test_nan_in_a_query_reaches_its_lse(
    installed: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package returns -inf for such a row, as for a row without keys."""
    monkeypatch.setattr(flash4, "MIN_RUNS", 4)
    monkeypatch.setattr(padding.flash, "may_split_keys", lambda *x: False)  # as for a long call
    q, k, v = (torch.randn(2, 9, heads, 64) for heads in (4, 2, 2))
    q[1, 5, 2] = torch.nan
    o, lse = padding.attend(q, k, v, CAUSAL)
    nan = torch.zeros(2, 9, 4, dtype=torch.bool)
    nan[1, 5, 2] = True
    assert torch.equal(o.isnan().any(-1), nan)
    assert torch.equal(lse.isnan(), nan.transpose(1, 2))
    assert not lse.isinf().any()


def _install(monkeypatch: pytest.MonkeyPatch, version: str, interface: object) -> Source:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    flash4.source.cache_clear()
    try:
        return flash4.source()
    finally:
        flash4.source.cache_clear()


@pytest.mark.parametrize(
    ("version", "interface", "code", "words"),
    [
        ("4.0.0b3", None, "package_too_old", "flash-attn-4 4.0.0b3 is too old: needs 4.0.0b36"),
        ("beta", None, "package_version", "invalid version: 'beta'"),
        ("4.0.1", None, "package_abi_mismatch", "does not load: ModuleNotFoundError"),
        (
            "4.1",
            types.SimpleNamespace(_flash_attn_fwd=lambda q: q, _flash_attn_bwd=lambda dq, dk: dq),
            "package_too_new",
            "<lambda> takes other arguments",
        ),
    ],
)
def test_a_package_that_cannot_run_has_a_reason(
    version: str, interface: object, code: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _install(monkeypatch, version, interface)
    assert source.provider is None
    assert source.reason is not None
    assert source.reason.code == code
    assert words in source.reason.message
    assert source.reason.hint


def test_a_package_that_does_not_load_may_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = _install(monkeypatch, FLASH4, None).reason
    assert reason is not None
    assert "after flash-attn, which overwrites its files" in reason.hint


def test_a_package_that_runs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = _install(monkeypatch, FLASH4, flash4_interface(Library()))
    assert source.provider is not None
    assert source.provider.title == f"flash-attn-4 {FLASH4}"


RANKED = {"forward": 8e6, "training": None}


def test_the_rank_follows_its_file(installed: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "least_flash4_size", lambda: RANKED)
    inference = dataclasses.replace(H100, needs_grad=False)
    answer = rank.rank(inference)
    assert isinstance(answer, Rank)
    assert answer.value > CUDNN_LONG_RANK
    assert "measured faster on FlashAttention-4" in answer.reason
    for change in (
        {"needs_grad": True},
        {"seq_len": 32768},
        {"seq_len": None},
        {"batch": 2},
        {"varlen": True},
        {"partial": True},
        {"deterministic": True},
        {"capability": (8, 0)},
        {"capability": (10, 0)},
        {"head_dim": 192},
        {"phase": "decode"},
        {"slot": "win"},
    ):
        request: Request = dataclasses.replace(inference, **change)
        assert rank.rank(request) == rank.PRIORITY, change
    absent = Source(flash4.NAME, None, Reason("package_missing", "", ""))
    monkeypatch.setattr(flash4, "source", lambda: absent)
    assert rank.rank(inference) == rank.PRIORITY


def test_the_rank_file_has_sizes_or_null() -> None:
    least = json.loads(Path(rank.__file__).with_name("flash4_rank.json").read_text())
    assert set(least) == {"forward", "training"}
    assert all(size is None or size > 1e6 for size in least.values())
    assert rank.least_flash4_size() == least


def test_ranks_follow_the_measurement(installed: Library) -> None:
    """Where `auto` takes FlashAttention-4, the whole core was not slower with it."""
    chosen = []
    for file in sorted(RESULTS.glob("flash4_*.json")):
        result = read_result(file)
        times = {
            (m.shape, m.length, m.phase, m.subject): m.performance.median_ms
            for m in result.measurements
            if m.performance
        }
        for shape, length, phase, subject in times:
            if subject != "cmp=fa2":
                continue
            heads, groups, width = map(int, shape.split("/"))
            request = dataclasses.replace(
                H100,
                n_heads=heads,
                n_kv_heads=groups,
                head_dim=width,
                v_head_dim=width,
                seq_len=length,
                needs_grad=phase == "both",
            )
            if rank.rank(request) != rank.PRIORITY:
                new, old = (times[shape, length, phase, s] for s in ("cmp=fa2", "auto"))
                chosen.append((shape, length, phase))
                assert new <= old, chosen[-1]
    assert {("64/4/128", 65536, "forward"), ("64/4/128", 65536, "both")} <= {*chosen}


def test_warmup_reaches_its_kernels(installed: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of warm-up compiles what every longer call runs, at strides of up to 64."""
    slot = nsa_register_backends().slots["cmp"]
    for block, stride in ((32, 16), (64, 32), (64, 64)):
        geometry = BlockGeometry(block, stride, 64, 16, 1, 2, 512)
        request = dataclasses.replace(H100, seq_len=slot.warmup_tokens, geometry=geometry)
        assert flash4.serves(request), (block, stride)


def test_workspace_counts_its_buffers(installed: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of o and dq; the buffers of the backward are for a quarter of the residues."""
    monkeypatch.setattr(fold_strided, "MAX_FP32_DQ", 4 * 512 * 64 * 128 * 4)
    monkeypatch.setattr(providers, "first", lambda: providers.FlashAttnPackage(None, Version("2")))
    monkeypatch.setattr(workspace, "_multiprocessors", lambda: 132)
    request, tokens = dataclasses.replace(H100, seq_len=31 + 16 * 512), 31 + 16 * 512
    row, keys = 64 * 128, 512
    forward = dataclasses.replace(request, needs_grad=False)
    own = workspace.cmp(forward)
    lse = tokens * 64 * 4
    assert own == pytest.approx(tokens * row * 2 + 2 * lse, abs=1e6)  # o, and lse two times
    assert workspace._measure(forward, False, False) > own + 0.9 * tokens * row * 2
    grads = tokens * row * 2 + 4 * 2 * keys * 4 * 128 * 2
    buffers = tokens // 4 * 64 * (128 + 2) * 4 + 4 * 2 * keys * 4 * 128 * 4
    assert workspace.cmp(request) == pytest.approx(own + grads + buffers, abs=1e6)
    few = dataclasses.replace(forward, n_heads=1, n_kv_heads=1)  # FlashAttention-2 splits its keys
    assert workspace.cmp(few) == pytest.approx(own / 64, abs=1e5)


def test_results_do_not_depend_on_the_provider(
    installed: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem((300,), batch=1, Dk=64, Dv=64, geometry=BlockGeometry())
    inputs, do, cu = problem.inputs("cmp", torch.float32)
    monkeypatch.setattr(flash4, "MIN_RUNS", 8)
    monkeypatch.setattr(providers, "active_provider", lambda: make("2.8.3", Library()))
    with monkeypatch.context() as patched:
        patched.setattr(fold_strided, "MAX_FP32_DQ", 1)  # a call per residue in the backward
        new = run("cmp", problem, inputs, do, cu)
    assert [call["direction"] for call in installed.calls] == ["forward"] + ["backward"] * 16
    monkeypatch.setattr(flash4, "provider_of", lambda q, attention: None)
    for name, value in run("cmp", problem, inputs, do, cu).items():
        torch.testing.assert_close(new[name], value, msg=name)
