"""Report row 1, '52/52 selection equivalence': the same 52 ids, against the truth, on every backend's selector.

Triton's kernels run the same cases in their interpreter: tests/triton/interpreted_report_row_01.py.
"""

from __future__ import annotations

import pytest
import torch

from row_01 import CASES, Row01, case_id, check


def parameters(case: Row01) -> object:
    return pytest.param(case, id=case_id(case), marks=[pytest.mark.gpu] if case.device == "cuda" else [])


def test_there_are_52() -> None:
    assert len({case_id(case) for case in CASES}) == len(CASES) == 52


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


@pytest.mark.parametrize("fault", ["the block before", "one key too many", "duplicates count twice"])
def test_report_row_01_can_fail(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_backend_sdpa import sel

    whole, distinct = sel.forward, sel._distinct
    if fault == "the block before":
        monkeypatch.setattr(sel, "_distinct", lambda *x: ((y := distinct(*x))[0] - (y[0] > 0).long(), y[1]))
    elif fault == "one key too many":
        monkeypatch.setattr(sel, "_places", _later(sel._places))
    else:
        monkeypatch.setattr(sel, "_distinct", lambda blocks, last: (blocks.long().clamp(min=0), blocks >= 0))
    assert sel.forward is whole
    duplicates = next(case for case in CASES if case.name == "duplicates")
    with pytest.raises(AssertionError):
        check("sdpa", "sdpa", duplicates)


def _later(places):  # type: ignore[no-untyped-def]
    def moved(*given):  # type: ignore[no-untyped-def]
        position, offset = places(*given)
        return position + 1, offset

    return moved
