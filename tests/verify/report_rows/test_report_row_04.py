"""Report row 4, '3/3 FA-2 varlen parity': compressed varlen, dense against varlen, run to run.

In the report, S_cmp = 7 was below the length from which FlashAttention-2 was used, so it never ran,
and V[0] was compared with V[0]. Here the dispatch record must name fa2, and the truth is the
float64 oracle. On the CPU, a stand-in replaces the library.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops.backend_call import DispatchRecord, record_dispatch
from nsa_verify import oracle
from nsa_verify.problems.findings import bits
from observed import slot_kernel

REPORTED = BlockGeometry(16, 8, 32, 4, window_size=32)  # l, d as reported
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = (64, 300)  # 7 compressed tokens, as reported, and 36
RAN = DispatchRecord("fa2", "cmp", "forward")


def inputs(
    device: str, *lengths: int, packed: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Return (q, k_cmp, v_cmp) in float16 and cu_seqlens, for two sequences or packed documents."""
    generator, total = torch.Generator().manual_seed(0), sum(lengths)
    lead, rows = (
        ((total,), (total // 8,)) if packed else ((2, total), (2, REPORTED.num_compressed(total)))
    )
    shapes = ((*lead, 4, 32), (*rows, 2, 32), (*rows, 2, 32))
    tensors = [
        torch.randn(shape, generator=generator).to(device, torch.float16) for shape in shapes
    ]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32) if packed else None
    return tensors, cu


def cmp_of_fa2(
    tensors: list[torch.Tensor], cu: torch.Tensor | None, library: Any, longest: int | None = None
) -> Any:
    """Run cmp of fa2, check that fa2 ran, and return o and lse."""
    before = len(library.calls) if library else 0
    with record_dispatch() as trace:
        o, lse = slot_kernel("fa2", "cmp", REPORTED, 32**-0.5)(
            *tensors, cu_seqlens=cu, max_seqlen=longest
        )
    assert trace == [RAN], trace
    assert library is None or len(library.calls) > before, "the library was never called"
    return o, lse


def mae(o: torch.Tensor, tensors: list[torch.Tensor], cu: torch.Tensor | None = None) -> float:
    """Return the mean absolute error to the oracle."""
    exact = oracle.cmp(*tensors, REPORTED, 32**-0.5, cu_seqlens=cu).o
    return float((o.double().cpu() - exact).abs().mean())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("device", DEVICES)
def test_report_row_04_compressed_varlen(
    device: str, length: int, fa2_here: Any, figure: Any
) -> None:
    tensors, cu = inputs(device, length, length // 3, 5, packed=True)
    o, _ = cmp_of_fa2(tensors, cu, fa2_here, length)
    error = mae(o, tensors, cu)
    figure(f"MAE {error:.1e} (2e-4 allowed, fp16), fa2 ran")
    assert error < 2e-4


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("device", DEVICES)
def test_report_row_04_dense_against_varlen(
    device: str, length: int, fa2_here: Any, figure: Any
) -> None:
    tensors, _ = inputs(device, length)
    dense, _ = cmp_of_fa2(tensors, None, fa2_here)
    # Packed tensors have T // d rows; the last ones are not read.
    tail = length // 8 - REPORTED.num_compressed(length)
    kv = [torch.nn.functional.pad(x[0], (0, 0, 0, 0, 0, tail)) for x in tensors[1:]]
    cu = torch.tensor([0, length], dtype=torch.int32, device=device)
    packed, _ = cmp_of_fa2([tensors[0][0], *kv], cu, fa2_here, length)
    difference = float((dense[0].float() - packed.float()).abs().mean())
    figure(f"dense to varlen {difference:.1e}, MAE {mae(dense, tensors):.1e} (2e-4 allowed)")
    assert max(difference, mae(dense, tensors)) < 2e-4


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("device", DEVICES)
def test_report_row_04_run_to_run(device: str, length: int, fa2_here: Any, figure: Any) -> None:
    tensors, cu = inputs(device, length, length // 2, packed=True)
    first, *others = [cmp_of_fa2(tensors, cu, fa2_here, length) for _ in range(3)]
    for other in others:
        for x, y in zip(first, other):
            assert torch.equal(bits(x), bits(y))
    figure("the same bits three times (1e-5 allowed)")


def test_report_row_04_finds_a_library_that_is_not_called(fa2_here: Any) -> None:
    """A sequence shorter than l has no compressed token, so the library is not called."""
    tensors, _ = inputs("cpu", 15)
    with pytest.raises(AssertionError):
        cmp_of_fa2(tensors, None, fa2_here)
