"""The 7 cases of the reported sliding-window test and similar ones, judged against the oracle."""

from __future__ import annotations

import dataclasses

import torch

from nsa_core.layout import BlockGeometry
from observed import slot_kernel
from slot_results import assert_slot_correct, results_of

SMALL = BlockGeometry(8, 4, 8, 4, window_size=1)
# (dtype, B, S, w). The reported 7: fp32 and fp16 with three windows each, and one batched prefill.
CASES = [(dtype, 1, 8, w) for dtype in ("float32", "float16") for w in (1, 4, 8)] + [
    ("float32", 4, 32, 8)
]
CASES += [("bfloat16", 1, 8, w) for w in (1, 4, 8)]
CASES += [
    (dtype, 2, s, w)
    for dtype in ("float32", "float16", "bfloat16")
    for s, w in ((8, 20), (1, 1), (1, 7))
]


def judge_window(
    backend: str,
    dtype: str,
    batch: int,
    length: int,
    window: int,
    device: str = "cpu",
    fault: int = 0,
) -> None:
    """Check that `win` on random numbers is finite and within the limits, forward and backward.

    ``fault`` is added to the window of the kernel.
    """
    geometry, generator = (
        dataclasses.replace(SMALL, window_size=window),
        torch.Generator().manual_seed(window),
    )
    kernel = slot_kernel(
        backend, "win", dataclasses.replace(geometry, window_size=window + fault), 0.25
    )

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(batch, length, heads, 16, generator=generator).to(
            device, getattr(torch, dtype)
        )

    inputs = {"q": normal(4), "k": normal(2), "v": normal(2)}
    do = normal(4)
    outputs = results_of(kernel, inputs, do)
    for name, tensor in outputs.items():
        assert torch.isfinite(tensor).all(), name
    assert_slot_correct("win", inputs, outputs, geometry, 0.25, do=do)
