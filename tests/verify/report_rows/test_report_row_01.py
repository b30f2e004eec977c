"""Report row 1, '52/52 selection equivalence': the same 52 cases against the truth.

Every backend runs them. Triton kernels run them in the interpreter in
tests/triton/interpreted/interpreted_report_row_01.py.
"""

from __future__ import annotations

from typing import Any

import killers
import pytest
import torch

from row_01 import CASES, Row01, case_id, check


def parameters(case: Row01) -> object:
    marks = [pytest.mark.gpu] if case.device == "cuda" else []
    marks += [pytest.mark.slow] if case_id(case).startswith("large") else []
    return pytest.param(case, id=case_id(case), marks=marks)


def test_report_row_01_has_52_distinct_cases() -> None:
    assert len({case_id(case) for case in CASES}) == len(CASES) == 52


@pytest.mark.few_cases
@pytest.mark.parametrize("case", [parameters(case) for case in CASES])
@pytest.mark.parametrize("backend", ["sdpa", "fa2"])
def test_report_row_01_selection(backend: str, case: Row01, fa2_here: None) -> None:
    on_gpu = torch.cuda.is_available()
    if backend == "fa2" and on_gpu:
        check("sdpa", backend, case, dtype=torch.float16, device="cuda")
    else:
        check("sdpa", backend, case, device=case.device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_report_row_01_selection_of_triton(case: Row01) -> None:
    check("triton", "triton", case, block=16, device="cuda")


def previous_block(kernel: Any) -> Any:
    return lambda q, k, v, blocks: kernel(q, k, v, (blocks - 1).clamp(min=-1))


def one_key_too_many(kernel: Any) -> Any:
    """Return the row of token t + 1 for token t."""
    return lambda *x: (lambda o, lse: (o.roll(-1, 1), lse.roll(-1, 2)))(*kernel(*x))


def duplicates_count_twice(kernel: Any) -> Any:
    """Compute a softmax over the blocks with duplicates; all logits are 0."""

    def listed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor) -> Any:
        block = torch.arange(v.shape[1]) // 4
        counts = (blocks[..., None] == block).sum(-2) * (
            torch.arange(v.shape[1]) <= torch.arange(q.shape[1])[:, None, None]
        )
        counts = counts.repeat_interleave(q.shape[2] // v.shape[2], 2).float()
        return counts / counts.sum(-1, keepdim=True).clamp(min=1), counts.sum(-1).log().transpose(
            1, 2
        )

    return listed


FAULTS = (previous_block, one_key_too_many, duplicates_count_twice)


@pytest.mark.parametrize("fault", FAULTS)
def test_report_row_01_finds_planted_faults(fault: Any) -> None:
    (case,) = [case for case in CASES if case_id(case) == "duplicates-cpu"]
    with pytest.raises(AssertionError):
        check("sdpa", "sdpa", case, fault=fault)
    killers.expect("report rows", f"row 1 {fault.__name__}", case_id(case))
