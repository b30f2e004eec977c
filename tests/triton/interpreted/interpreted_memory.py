"""plan.workspace_bytes (fault row 47), compared with the peak of a run in the interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_cases import BASE, CASES, SLOTS, point, under_test
from nsa_backend_triton import meta_inputs, workspace
from nsa_backend_triton.sel import bitmask
from nsa_core import resolve
from nsa_core.contract import BRANCHES, SlotCall
from nsa_core.dryrun import PeakBytes
from nsa_core.torch_ops.core_kernels import CoreInputs
from nsa_verify.problems.cases import Case


@pytest.mark.few_cases("select-h=4", "select-packed", "combine-h=4", "combine-packed")
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
@pytest.mark.parametrize("slot", SLOTS)
def test_workspace_peak_equals_the_peak_of_a_run(slot: str, case: Case) -> None:
    subject, case_point = under_test(slot), point(case, "float32")
    data, inputs = subject.data(case_point)
    request = case_point.request(slot, "cpu", None, subject.differentiable)
    if case.packed:
        request = dataclasses.replace(request, batch=len(case.lengths))
    module = meta_inputs.slot_module(slot)
    kernel = subject.kernel(case_point)
    call = SlotCall(case.config.geometry, kernel.scale, data.cu_seqlens, data.max_seqlen)
    tensors = [data.do, *inputs.values(), *([] if data.cu_seqlens is None else [data.cu_seqlens])]
    with PeakBytes(*tensors) as counter:
        out = module.forward(*inputs.values(), call=call)
        if subject.differentiable:
            gradients = module.backward(
                data.do, *inputs.values(), *(out if slot != "combine" else ()), call=call
            )
            assert all(isinstance(x, torch.Tensor) for x in gradients)
            del gradients
    assert workspace.peak(request) == counter.peak


WIDER = dataclasses.replace(BASE, n_kv_heads=1, v_head_dim=24)
DENSE = Case("dense", WIDER, (13,), batch=2)
PACKED = Case("packed", WIDER, (9, 0, 2), packed=True)
TWO_GROUPS = Case("G=2", BASE, (13,))
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "dtype", "deterministic", "bits"),
    [
        pytest.param(PACKED, torch.bfloat16, False, False, id="packed bf16"),
        pytest.param(PACKED, torch.float16, False, False, id="packed fp16", marks=slow),
        pytest.param(DENSE, torch.bfloat16, False, False, id="dense bf16", marks=slow),
        pytest.param(DENSE, torch.float32, True, False, id="dense fp32", marks=slow),
        pytest.param(TWO_GROUPS, torch.bfloat16, True, False, id="G=2, ordered", marks=slow),
        pytest.param(TWO_GROUPS, torch.bfloat16, False, True, id="G=2, bits", marks=slow),
    ],
)
def test_workspace_of_the_fused_backward_equals_the_peak_of_a_run(
    case: Case, dtype: torch.dtype, deterministic: bool, bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is the core's call of the plan's kernel; sel takes its lists or its bit form."""
    monkeypatch.setattr(bitmask, "fits", lambda *problem: bits)
    workspace.core_backward.cache_clear()
    plan = resolve(
        case.config,
        device="cpu",
        dtype=dtype,
        backends="triton",
        needs_grad=True,
        varlen=case.packed,
        deterministic=deterministic,
        batch=len(case.lengths) if case.packed else case.batch,
        seq_len=case.tokens,
    )
    data, config = case.data(dtype), case.config
    *lead, tokens, heads, _ = data.q.shape
    shape = (*lead, tokens, config.n_kv_heads, config.num_selected_blocks)
    blocks = torch.zeros(shape, dtype=torch.int32)
    lse = data.gates.new_zeros(*lead, heads, tokens)
    saved = [getattr(data, name) for name in CoreInputs._fields]
    inputs = [data.do, *saved, blocks, lse, lse, lse]
    existing = inputs if data.cu_seqlens is None else [*inputs, data.cu_seqlens]
    with PeakBytes(*existing) as counter:
        tensors = [*inputs, *(torch.zeros_like(data.do) for _ in BRANCHES)]
        tail = (data.cu_seqlens, *plan.cmp.tail(data.max_seqlen))
        gradients = plan.fused["backward"].gradients(True, tensors, tail)
        del gradients
    assert plan.workspace_bytes(plan.requests["cmp"], fused="backward") == counter.peak
