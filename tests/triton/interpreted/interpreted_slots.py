"""Every slot in the strict interpreter, forward and backward, judged by the oracle.

fp64 tests the logic, fp32 and bf16 also the precision.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_cases import CASES, EVERY_DTYPE, SLOTS, SLOW, SMALLEST, point, under_test
from nsa_backend_triton.strict.interpreter import strict
from nsa_core.torch_ops.schema import DIFFERENTIABLE
from nsa_verify.conformance.slot_under_test import faults
from nsa_verify.problems.cases import Case
from nsa_verify.problems.findings import bits

EACH_SLOT = pytest.mark.parametrize("slot", SLOTS)
DTYPES = ("float64", "float32", "bfloat16")
_QUICK = [(case, "float64") for case in CASES] + [(case, "bfloat16") for case in EVERY_DTYPE]
_REST = [
    (case, dtype) for case in (*CASES, *SLOW) for dtype in DTYPES if (case, dtype) not in _QUICK
]
PROBLEMS = [pytest.param(case, dtype, id=f"{case.name}-{dtype}") for case, dtype in _QUICK]
PROBLEMS += [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}", marks=pytest.mark.slow)
    for case, dtype in _REST
]
# Three blocks per row, of up to five: sums of three terms differ by order, sums of two do not.
THREE_TERM_CASES = [
    dataclasses.replace(
        case, config=dataclasses.replace(case.config, select_block_size=8, num_selected_blocks=3)
    )
    for case in CASES[:2]
]
DETERMINISTIC_CASES = [
    pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.packed else [])
    for case in THREE_TERM_CASES
]


@pytest.mark.few_cases(
    "cmp-S < l-float64",
    "select-h=3, Dk 24 Dv 8, w > S-float64",
    "select-h=1, D 12 in 16-float64",
    "select-h=7, l=l', l'=d-float64",
    "select-widths of three bands-float64",
    "select-h=4-bfloat16",
    "sel-S=1-float64",
    "win-S < l-float64",
    "combine-packed-float64",
)
@pytest.mark.parametrize(("case", "dtype"), PROBLEMS)
@EACH_SLOT
def test_slot_matches_oracle(slot: str, case: Case, dtype: str) -> None:
    subject, case_point = under_test(slot), point(case, dtype)
    answer = subject.probe(case_point, subject.differentiable)
    assert answer.accepted, answer
    data, inputs = subject.data(case_point)
    with strict() as counts:
        run = subject.run(case_point, inputs, data.do if subject.differentiable else None, data)
    assert counts.programs or not inputs.get("k_cmp", data.q).numel()
    assert not faults(slot, case, run, data)


@pytest.mark.slow
@pytest.mark.parametrize("case", DETERMINISTIC_CASES)
@pytest.mark.parametrize("slot", SLOTS)
def test_deterministic_bits_do_not_depend_on_program_order(slot: str, case: Case) -> None:
    subject, case_point = under_test(slot), point(case, "float32", deterministic=True)
    data, inputs = subject.data(case_point)
    runs = []
    for seed in (1, 2):
        with strict(seed):
            runs.append(
                subject.run(
                    case_point, inputs, data.do if subject.differentiable else None, data
                ).outputs
            )
    for name, x in runs[0].items():
        assert torch.equal(bits(x), bits(runs[1][name])), name


@pytest.mark.few_cases("win-dense", "combine-dense", "combine-packed")
@pytest.mark.parametrize("case", SMALLEST, ids=lambda case: case.name)
@pytest.mark.parametrize("slot", [slot for slot in SLOTS if slot != "select"])
def test_gradients_pass_gradcheck(slot: str, case: Case) -> None:
    subject, case_point = under_test(slot), point(case, "float64")
    data, inputs = subject.data(case_point)
    kernel = subject.kernel(case_point)
    leaves = {name: inputs[name].clone().requires_grad_() for name in DIFFERENTIABLE[slot]}
    assert sum(leaf.numel() for leaf in leaves.values()) <= 200

    def output(*values: torch.Tensor) -> torch.Tensor:
        results = kernel(
            *{**inputs, **dict(zip(leaves, values))}.values(),
            cu_seqlens=data.cu_seqlens,
            max_seqlen=data.max_seqlen,
        )
        return results if isinstance(results, torch.Tensor) else results[0]

    assert torch.autograd.gradcheck(output, tuple(leaves.values()), fast_mode=True)
