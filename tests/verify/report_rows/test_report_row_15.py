"""Report row 15, 'sliding FA-2 fails, MAE 0.766': the reported windows against the oracle.

tests/verify/report_rows/test_historic_numbers.py explains the number. On the CPU, a stand-in
replaces the library at lengths that it supports. On a GPU the library runs, and 8192 tokens are
judged at sampled rows. Forward and backward are judged.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops.backend_call import DispatchRecord, record_dispatch
from nsa_verify import oracle
from observed import slot_kernel
from slot_results import assert_slot_correct, results_of

WINDOWS = (1, 31, 32, 64, 512)
WHERE = [("cpu", 64), ("cpu", 600)]
WHERE += [pytest.param("cuda", length, marks=pytest.mark.gpu) for length in (64, 600, 8192)]


@pytest.mark.few_cases
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("device", "length"), WHERE)
def test_report_row_15_sliding_window_of_fa2(
    device: str, length: int, window: int, fa2_here: Any, figure: Any
) -> None:
    geometry = dataclasses.replace(BlockGeometry(), window_size=window)
    batch, heads, groups = (2, 4, 2) if length == 64 else (1, 2, 1)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (batch, length, heads, 64),
        "k": (batch, length, groups, 64),
        "v": (batch, length, groups, 64),
    }
    inputs = {
        n: torch.randn(s, generator=generator).to(device, torch.float16) for n, s in shapes.items()
    }
    rows = sorted({0, 1, window - 1, window, length // 2, length - 1} & set(range(length)))
    rows = list(range(length)) if length == 64 else rows
    do = torch.zeros_like(inputs["q"])
    do[:, rows] = torch.randn(batch, len(rows), heads, 64, generator=generator).to(
        device, torch.float16
    )
    with record_dispatch() as trace:
        outputs = results_of(slot_kernel("fa2", "win", geometry, 0.125), inputs, do)
    assert trace == [
        DispatchRecord("fa2", "win", direction) for direction in ("forward", "backward")
    ]
    assert_slot_correct("win", inputs, outputs, geometry, 0.125, do=do, rows=rows)
    exact = oracle.win(*inputs.values(), geometry, 0.125, rows=rows).o
    error = float((outputs["o"].double().cpu() - exact)[:, rows].abs().mean())
    figure(f"MAE {error:.1e} (2e-4 allowed, fp16; reported 0.766), gradients within budget")
    assert error < 2e-4
