"""Report row 2 on the Triton kernels: the windows of tests/verify/report_rows/row_02.py."""

from __future__ import annotations

import pytest

from row_02 import CASES, judge_window

pytestmark = pytest.mark.slow  # the ordinary suite runs these rows on the other backends


@pytest.mark.parametrize(("dtype", "batch", "length", "window"), CASES)
def test_report_row_02_sliding_window(dtype: str, batch: int, length: int, window: int) -> None:
    judge_window("triton", dtype, batch, length, window)
