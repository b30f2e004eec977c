"""The rows of the fault table that need a GPU, for every backend that is ready on it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_core import NSAConfig, nsa_attention, resolve
from nsa_core.contract import SLOTS
from nsa_core.plan.plan import Plan
from nsa_core.plan.registry import default_registry
from nsa_verify.conformance import BackendConformance
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.cases import Case, CaseData, config_of
from nsa_verify.problems.findings import bits
from nsa_verify.problems.slot_runs import run_kernel, run_slots, slot_inputs

pytestmark = pytest.mark.gpu

CONFIG = config_of(8, 2, 32, 32, (16, 8, 32, 4, 48))
CASE = Case("gpu rows", CONFIG, (300,), batch=2)
BRANCHES = ("cmp", "sel", "win")


def backends() -> list[tuple[str, str]]:
    """Return (backend, slot) for each slot of the ready backends."""
    entries = [e for e in default_registry().entries if e.status == "ready" and e.spec]
    return [(e.name, slot) for e in entries for slot in SLOTS if slot in e.spec.slots]


def plan_for(
    backend: str, slot: str, config: NSAConfig = CONFIG, device: str = "cuda", **options: object
) -> Plan:
    """Return the plan with ``backend`` in ``slot``; skip the test if the backend refuses it."""
    from nsa_core import Unsupported

    try:
        return resolve(
            config,
            device=device,
            dtype=options.pop("dtype", torch.bfloat16),
            backends={slot: backend},
            **options,
        )
    except Unsupported as refusal:
        pytest.skip(str(refusal))


EACH = pytest.mark.parametrize(("backend", "slot"), backends())
EACH_BRANCH = pytest.mark.parametrize(
    ("backend", "slot"), [b for b in backends() if b[1] in BRANCHES]
)


def inputs_of(
    backend: str, slot: str, case: Case = CASE
) -> tuple[Plan, CaseData, dict[str, torch.Tensor]]:
    data = case.data(torch.bfloat16, "cuda")
    plan = plan_for(backend, slot, case.config, needs_grad=True, varlen=case.packed)
    return plan, data, slot_inputs(slot, data, run_slots(plan, case, data))


def assert_judged(slot: str, run, config: NSAConfig = CONFIG, **kw: object) -> None:
    verdicts = judge_slot(
        slot, run.inputs, run.outputs, config.geometry, config.softmax_scale, do=run.do, **kw
    )
    for name, verdict in verdicts.items():
        assert verdict.ok, (slot, name, verdict.why)


@EACH_BRANCH
def test_row_24_pointers_need_no_16_byte_alignment(backend: str, slot: str) -> None:
    plan, data, inputs = inputs_of(backend, slot)

    def misaligned(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.new_empty(tensor.numel() + 1)
        view = storage[1:].view(tensor.shape)
        assert view.data_ptr() % 16
        return view.copy_(tensor)

    inputs = {
        name: tensor if name == "blocks" else misaligned(tensor) for name, tensor in inputs.items()
    }
    assert_judged(slot, run_kernel(getattr(plan, slot), inputs, data.do, data))


@EACH_BRANCH
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_row_27_tensors_may_be_on_a_device_that_is_not_current(backend: str, slot: str) -> None:
    torch.cuda.set_device(0)
    data = CASE.data(torch.bfloat16, "cuda:1")
    plan = plan_for(backend, slot, device="cuda:1", needs_grad=True)
    runs = run_slots(plan, CASE, data)
    assert runs[slot].outputs["o"].device == torch.device("cuda:1")
    assert_judged(slot, runs[slot])


CONFORMANCE_CHECKS = {
    "row_43_offset_above_2_to_the_31": "long_offsets",
    "row_50_graph_replay_equals_eager_on_new_inputs": "cuda_graph",
    "row_52_two_threads_call_first_together": "two_threads",
}


@EACH
@pytest.mark.parametrize("row", CONFORMANCE_CHECKS)
def test_rows_of_the_conformance_suite(backend: str, slot: str, row: str) -> None:
    suite = BackendConformance()
    suite.backend, suite._device = backend, "cuda"
    suite.test_kernel(slot, CONFORMANCE_CHECKS[row])


@EACH_BRANCH
def test_row_44_more_than_65535_sequences_times_groups_are_correct(backend: str, slot: str) -> None:
    config = dataclasses.replace(
        CONFIG,
        dim=32,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        v_head_dim=16,
        compress_block_size=2,
        compress_stride=2,
        select_block_size=2,
        num_selected_blocks=3,
        window_size=3,
    )
    case = Case("many sequences", config, (8,), batch=70_000)
    plan, data, inputs = inputs_of(backend, slot, case)
    run = run_kernel(getattr(plan, slot), inputs, data.do, data)
    checked = [0, 65_535, 65_536, 69_999]
    verdicts = judge_slot(
        slot,
        {name: tensor[checked] for name, tensor in run.inputs.items()},
        {name: tensor[checked] for name, tensor in run.outputs.items()},
        config.geometry,
        config.softmax_scale,
        do=data.do[checked],
    )
    assert all(verdict.ok for verdict in verdicts.values()), verdicts


@EACH_BRANCH
def test_row_47_out_of_memory_errors_are_raised_unchanged(backend: str, slot: str) -> None:
    plan, data, inputs = inputs_of(backend, slot, Case("oom", CONFIG, (8192,), batch=4))
    run_kernel(getattr(plan, slot), inputs, data.do, data)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    held, size = [], 1 << 30
    while size >= 1 << 20:  # tensors of other tests may hold segments with free blocks
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        with pytest.raises(torch.OutOfMemoryError):
            run_kernel(getattr(plan, slot), inputs, data.do, data)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@EACH_BRANCH
def test_row_51_runs_on_the_current_stream(backend: str, slot: str) -> None:
    plan, data, inputs = inputs_of(backend, slot)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run = run_kernel(getattr(plan, slot), inputs, data.do, data)
    stream.synchronize()
    assert_judged(slot, run)


@EACH
def test_row_54_250_repeats_have_equal_bits(backend: str, slot: str) -> None:
    entry = default_registry().get(backend)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plan, data, inputs = inputs_of(backend, slot)
        do = None if slot == "select" else data.do
        first = run_kernel(getattr(plan, slot), inputs, do, data)
        for _ in range(249):
            repeat = run_kernel(getattr(plan, slot), inputs, do, data)
            for name, tensor in first.outputs.items():
                assert torch.equal(bits(tensor), bits(repeat.outputs[name])), (entry.name, name)
    finally:
        torch.use_deterministic_algorithms(False)


def test_inductor_compiles_a_full_graph() -> None:
    data = CASE.data(torch.bfloat16, "cuda")
    k, v = (data.k_win, data.k_sel, data.k_win), (data.v_win, data.v_sel, data.v_win)
    leaves = [data.q.requires_grad_(), *(tensor.requires_grad_() for tensor in (*k, *v))]

    def attention(q: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return nsa_attention(q, k, v, gates, config=CONFIG)

    eager = attention(data.q, data.gates)
    compiled = torch.compile(attention, fullgraph=True)(data.q, data.gates)
    torch.testing.assert_close(compiled, eager)
    for actual, expected in zip(
        torch.autograd.grad(compiled.sum(), leaves[:1]),
        torch.autograd.grad(eager.sum(), leaves[:1]),
    ):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_peak_memory_grows_almost_linearly_from_2k_to_64k() -> None:
    """Peak memory of forward and backward (12/2/64, bf16) grows at most as S^1.1 (log-log fit)."""
    import math

    config = NSAConfig(dim=768, n_heads=12, n_kv_heads=2, head_dim=64)
    points = []
    for s in (2048, 4096, 8192, 16384, 32768, 65536):
        q, k, v = (
            torch.randn(1, s, h, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for h in (12, 2, 2)
        )
        gates = torch.rand(1, s, 12, 3, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        plan = resolve(
            config, device="cuda", dtype=torch.bfloat16, needs_grad=True, backends="sdpa"
        )
        nsa_attention(q, k, v, gates, config=config, plan=plan).float().sum().backward()
        points.append((math.log(s), math.log(torch.cuda.max_memory_allocated())))
        print(s, torch.cuda.max_memory_allocated() / 2**20, "MiB")
    mean_x, mean_y = (sum(p[i] for p in points) / len(points) for i in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    print("slope", slope)
    assert slope <= 1.1
