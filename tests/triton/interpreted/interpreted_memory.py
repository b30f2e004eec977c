"""plan.workspace_bytes (fault row 47), compared with the peak of a run in the interpreter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_cases import CASES, SLOTS, point, under_test
from nsa_backend_triton.strict.interpreter import strict
from nsa_backend_triton.tools import meta_inputs, workspace
from nsa_core.contract import SlotCall
from nsa_core.dryrun import PeakBytes
from nsa_verify.cases import Case


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
    with strict(), PeakBytes(*tensors) as counter:
        out = module.forward(*inputs.values(), call=call)
        if subject.differentiable:
            gradients = module.backward(
                data.do, *inputs.values(), *(out if slot != "combine" else ()), call=call
            )
            assert all(isinstance(x, torch.Tensor) for x in gradients)
            del gradients
    # The interpreter frees a launch's arguments a little later than a GPU's launcher does.
    assert 0.9 * counter.peak <= workspace.peak(request) <= counter.peak
