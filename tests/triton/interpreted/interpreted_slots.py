"""Every slot in the strict interpreter: fp64 for the logic, fp32, and bf16 for the precision;
forward and backward.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_cases import CASES, EVERY_DTYPE, SLOTS, SLOW, SMALLEST, point, under_test
from nsa_backend_triton.strict.interpreter import strict
from nsa_core.torch_ops.slot_op import DIFFERENTIABLE
from nsa_verify.cases import Case
from nsa_verify.conformance.slot_under_test import faults
from nsa_verify.findings import bits

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
# Rows of three blocks, chosen of up to five: a sum of two has the same bits in any order.
THREE_SUMMANDS = [
    dataclasses.replace(
        case, config=dataclasses.replace(case.config, select_block_size=8, num_selected_blocks=3)
    )
    for case in CASES[:2]
]
IN_ORDER = [
    pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.packed else [])
    for case in THREE_SUMMANDS
]


@pytest.mark.parametrize(("case", "dtype"), PROBLEMS)
@EACH_SLOT
def test_slot_is_right(slot: str, case: Case, dtype: str) -> None:
    subject, asked = under_test(slot), point(case, dtype)
    answer = subject.ask(asked, subject.differentiable)
    assert answer.accepted, answer
    data, inputs = subject.data(asked)
    with strict() as seen:
        run = subject.run(asked, inputs, data.do if subject.differentiable else None, data)
    assert seen.programs or not inputs.get("k_cmp", data.q).numel()
    assert not faults(slot, case, run, data)


@pytest.mark.parametrize("case", IN_ORDER)
@pytest.mark.parametrize(
    "slot", [s if s == "sel" else pytest.param(s, marks=pytest.mark.slow) for s in SLOTS]
)
def test_same_bits_in_any_order_of_programs_when_demanded(slot: str, case: Case) -> None:
    subject, asked = under_test(slot), point(case, "float32", deterministic=True)
    data, inputs = subject.data(asked)
    runs = []
    for seed in (1, 2):
        with strict(seed):
            runs.append(
                subject.run(
                    asked, inputs, data.do if subject.differentiable else None, data
                ).outputs
            )
    for name, one in runs[0].items():
        assert torch.equal(bits(one), bits(runs[1][name])), name


@pytest.mark.parametrize("case", SMALLEST, ids=lambda case: case.name)
@pytest.mark.parametrize("slot", [slot for slot in SLOTS if slot != "select"])
def test_gradients_are_those_of_the_forward(slot: str, case: Case) -> None:
    subject, asked = under_test(slot), point(case, "float64")
    data, inputs = subject.data(asked)
    kernel = subject.kernel(asked)
    leaves = {name: inputs[name].clone().requires_grad_() for name in DIFFERENTIABLE[slot]}
    assert sum(leaf.numel() for leaf in leaves.values()) <= 200

    def output(*given: torch.Tensor) -> torch.Tensor:
        results = kernel(
            *{**inputs, **dict(zip(leaves, given))}.values(),
            cu_seqlens=data.cu_seqlens,
            max_seqlen=data.max_seqlen,
        )
        return results if isinstance(results, torch.Tensor) else results[0]

    with strict():
        assert torch.autograd.gradcheck(output, tuple(leaves.values()), fast_mode=True)
