"""Report row 1 on the Triton kernels select and sel, with blocks of 16 tokens.

The cases are those of tests/verify/report_rows/row_01.py.
"""

from __future__ import annotations

import pytest

from row_01 import CASES, Row01, case_id, check

pytestmark = pytest.mark.slow  # the ordinary suite runs these rows on the other backends

# each of the others takes seconds
QUICK = {
    "random-cpu",
    "duplicates-cpu",
    "empty",
    "clamped",
    "shape-1x32x2",
}


def parameters(case: Row01) -> object:
    marks = [] if case_id(case) in QUICK else [pytest.mark.slow]
    return pytest.param(case, id=case_id(case), marks=marks)


# Five cases need a GPU: tests/verify/report_rows/test_report_row_01.py.
@pytest.mark.parametrize("case", [parameters(case) for case in CASES if case.device == "cpu"])
def test_report_row_01_selection(case: Row01) -> None:
    check("triton", "triton", case, block=16)
