"""Report row 14 on the Triton kernels: tests/verify/report_rows/row_14.py."""

from __future__ import annotations

import pytest

from row_14 import group_sets_agree

pytestmark = pytest.mark.slow  # the ordinary suite runs these rows on the other backends


def test_report_row_14_group_sets_are_bit_identical() -> None:
    group_sets_agree("triton", length=77)
