"""What plan.workspace_bytes tells (fault row 47), held against what a run in the interpreter
makes.
"""

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
def test_the_dry_run_counts_what_a_run_makes(slot: str, case: Case) -> None:
    subject, asked = under_test(slot), point(case, "float32")
    data, inputs = subject.data(asked)
    request = asked.request(slot, "cpu", None, subject.differentiable)
    if case.packed:
        request = dataclasses.replace(request, batch=len(case.lengths))
    module = meta_inputs.slot_module(slot)
    kernel = subject.kernel(asked)
    call = SlotCall(case.config.geometry, kernel.scale, data.cu_seqlens, data.max_seqlen)
    given = [data.do, *inputs.values(), *([] if data.cu_seqlens is None else [data.cu_seqlens])]
    with strict(), PeakBytes(*given) as counted:
        out = module.forward(*inputs.values(), call=call)
        if subject.differentiable:
            kept = module.backward(
                data.do, *inputs.values(), *(out if slot != "combine" else ()), call=call
            )
            assert all(isinstance(x, torch.Tensor) for x in kept)
            del kept
    # The interpreter lets go of a launch's arguments a little later than a GPU's launcher does.
    assert 0.9 * counted.peak <= workspace.peak(request) <= counted.peak
