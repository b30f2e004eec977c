"""Report row 2, '7/7 sliding window: no NaN on CUDA': the same 7 cases and more, judged.

The report required only finite values. Triton kernels run the cases on the CPU in
tests/triton/interpreted/interpreted_report_row_02.py.
"""

from __future__ import annotations

import dataclasses

import pytest

from nsa_core.errors import InvalidInput
from row_02 import CASES, SMALL, judge_window

WHERE = [("sdpa", "cpu"), ("fa2", "cpu")]
WHERE += [
    pytest.param(backend, "cuda", marks=pytest.mark.gpu) for backend in ("sdpa", "fa2", "triton")
]


@pytest.mark.few_cases
@pytest.mark.parametrize(("dtype", "batch", "length", "window"), CASES)
@pytest.mark.parametrize(("backend", "device"), WHERE)
def test_report_row_02_sliding_window(
    backend: str, device: str, dtype: str, batch: int, length: int, window: int, fa2_here: None
) -> None:
    if (backend, device, dtype) == ("fa2", "cuda", "float32"):
        pytest.skip("FlashAttention-2 does not support float32")
    judge_window(backend, dtype, batch, length, window, device)


@pytest.mark.parametrize("window", [0, -1])
def test_report_row_02_window_below_1_is_refused(window: int) -> None:
    with pytest.raises(InvalidInput, match=f"window_size must be an integer >= 1, got {window}"):
        dataclasses.replace(SMALL, window_size=window)


def test_report_row_02_finds_a_window_one_key_short() -> None:
    """The output of such a window is finite, but the verdict refuses it."""
    with pytest.raises(AssertionError, match="'o'"):
        judge_window("sdpa", "float32", 1, 8, 4, fault=-1)
