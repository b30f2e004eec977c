"""Row 47: peak memory on a GPU is what plan.workspace_bytes says, for every backend that is ready there."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import pytest
import torch

from nsa_core import NSAConfig, Unsupported, resolve
from nsa_core.contract import SLOTS
from nsa_core.plan import Plan
from nsa_core.registry import default_registry
from nsa_core.verify.cases import Case, CaseData

pytestmark = pytest.mark.gpu

REPORTS = NSAConfig(dim=768, n_heads=12, n_kv_heads=2, head_dim=64)
FEW = dataclasses.replace(REPORTS, n_heads=2)  # so few rows that FlashAttention-2 splits the keys
PAPER = NSAConfig(dim=256, n_heads=64, n_kv_heads=4, head_dim=192, v_head_dim=128)
ODD = NSAConfig(
    dim=256, n_heads=4, n_kv_heads=2, head_dim=65, v_head_dim=80, rope=False, compress_block_size=16, compress_stride=8,
    select_block_size=32, num_selected_blocks=4, window_size=48,
)  # fmt: skip
CASES = {
    "2k": Case("2k", REPORTS, (2048,)),
    "16k": Case("16k", REPORTS, (16384,)),
    "batch": Case("batch", REPORTS, (2048,), batch=4),
    "packed": Case("packed", REPORTS, (3000, 1000, 4192), packed=True),
    "192/128": Case("192/128", PAPER, (4096,)),
    "few heads": Case("few heads", FEW, (2048,)),
    "65/80": Case("65/80", ODD, (2048,), batch=2),
}
FORWARD_ONLY = ("16k", "packed", "few heads")
BACKENDS = [
    (entry.name, slot)
    for entry in default_registry().entries
    if entry.status == "ready" and entry.spec
    for slot in SLOTS
    if slot in entry.spec.slots
]
INPUTS = {
    "cmp": ("q", "k_cmp", "v_cmp"),
    "select": ("q", "k_cmp"),
    "sel": ("q", "k_sel", "v_sel"),
    "win": ("q", "k_win", "v_win"),
}


def inputs_of(slot: str, case: Case, data: CaseData) -> list[torch.Tensor]:
    """The slot's tensors; what another slot would return is made here, so that one backend's memory is looked at."""
    generator = torch.Generator("cuda").manual_seed(0)
    if slot == "combine":
        return [
            data.gates,
            *(torch.randn(data.do.shape, generator=generator, device="cuda").to(data.do) for _ in "123"),
        ]
    tensors = [getattr(data, name) for name in INPUTS[slot]]
    *lead, tokens, heads, _ = data.q.shape
    if slot == "select":
        tensors.append(torch.full((*lead, heads, tokens), 3.0, device="cuda"))
    if slot == "sel":
        geometry = case.config.geometry
        most = geometry.num_select_blocks(min(case.lengths))
        shape = (*lead, tokens, case.config.n_kv_heads, geometry.num_selected_blocks)
        tensors.append(torch.randint(most, shape, generator=generator, device="cuda", dtype=torch.int32))
    return tensors


def asked() -> int:
    """Bytes asked of the allocator and alive; its blocks may be up to 1 MiB larger, at 2k tokens more than 5 %."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def peak_of(once: Callable[[], None]) -> int:
    """Peak bytes of ``once`` beyond what was alive before; run in this thread alone.

    A thread of autograd's own may hold the last gradients a little longer than the call that made them, which would
    then be freed under the next call and taken for memory that it did not need.
    """
    with torch.autograd.set_multithreading_enabled(False):
        once()  # libraries allocate for good in their first call
        before = asked()
        torch.cuda.reset_peak_memory_stats()
        once()
        peak = int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    after = asked()
    assert after == before, f"{after - before} bytes changed owner while the peak was taken"
    return peak - before


def plan_of(backend: str, slot: str, case: Case, **options: bool) -> Plan:
    sizes = {"batch": len(case.lengths) if case.packed else case.batch, "seq_len": case.tokens}
    try:
        return resolve(
            case.config, device="cuda", dtype=torch.bfloat16, backends={slot: backend}, varlen=case.packed,
            **sizes, **options,
        )  # fmt: skip
    except Unsupported as refusal:
        pytest.skip(str(refusal))


def assert_stated(backend: str, slot: str, case: Case, **options: bool) -> None:
    plan = plan_of(backend, slot, case, **options)
    data = case.data(torch.bfloat16, "cuda")
    inputs = inputs_of(slot, case, data)
    wanted = [x.requires_grad_() for x in inputs if x.is_floating_point()] if options["needs_grad"] else []
    kernel, backward = getattr(plan, slot), options["needs_grad"] and slot != "select"

    def once() -> None:
        result = kernel(*inputs, cu_seqlens=data.cu_seqlens, max_seqlen=data.max_seqlen)
        if backward:
            torch.autograd.grad(result if slot == "combine" else result[0], wanted, data.do)

    peak, stated = peak_of(once), plan.workspace_bytes(plan.requests[slot])
    print(f"peak {peak / 2**20:.1f} MiB, stated {stated / 2**20:.1f} MiB, {stated / peak:.3f}")
    assert abs(peak - stated) <= 0.05 * peak, f"peak {peak}, stated {stated}, ratio {stated / peak:.3f}"


EACH = pytest.mark.parametrize(("backend", "slot"), BACKENDS)


@EACH
@pytest.mark.parametrize("name", CASES)
def test_row_47_forward_and_backward(name: str, backend: str, slot: str) -> None:
    assert_stated(backend, slot, CASES[name], needs_grad=True)


@EACH
@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_row_47_forward(name: str, backend: str, slot: str) -> None:
    assert_stated(backend, slot, CASES[name], needs_grad=False)


@EACH
@pytest.mark.parametrize("name", ["2k", "packed"])
def test_row_47_deterministic(name: str, backend: str, slot: str) -> None:
    assert_stated(backend, slot, CASES[name], needs_grad=True, deterministic=True)


def test_a_peak_taken_while_memory_changes_owner_is_refused() -> None:
    held = [torch.empty(1 << 20, device="cuda")]
    calls = []

    def once() -> None:
        calls.append(torch.empty(1 << 10, device="cuda").numel())
        if len(calls) == 2:
            held.clear()

    with pytest.raises(AssertionError, match="changed owner"):
        peak_of(once)
