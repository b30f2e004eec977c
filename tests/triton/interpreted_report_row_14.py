"""Report row 14 on our kernels: tests/regressions/row_14.py."""

from __future__ import annotations

import pathlib
import sys

import pytest

from nsa_backend_triton.strict.interpreter import strict

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "regressions"))
from row_14 import group_sets_agree

pytestmark = pytest.mark.slow  # the same rows run on the other backends in the ordinary tests


def test_report_row_14_group_sets_are_bit_identical() -> None:
    with strict():
        group_sets_agree("triton", length=77)
