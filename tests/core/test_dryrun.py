"""PeakBytes, which computes every stated workspace, against sums computed by hand."""

from __future__ import annotations

import pytest
import torch

from nsa_core.dryrun import GRANULE, PeakBytes, rounded


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_peak_counts_live_storages(device: str) -> None:
    def allocate(granules: int) -> torch.Tensor:
        return torch.empty(granules * GRANULE, dtype=torch.uint8, device=device)

    before = allocate(1000)
    with PeakBytes() as count:
        a = allocate(100)
        b = a.view(100, -1)  # no storage of its own
        c = allocate(30)
        before.add_(1)  # not created inside
        del c
        assert count.live == 100 * GRANULE
        d = allocate(20)
        del a, b, d
        assert count.live == 0
        allocate(60)
    assert count.peak == 130 * GRANULE


def test_sizes_are_rounded_like_the_allocator() -> None:
    assert [rounded(size) for size in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    with PeakBytes() as count:
        tensors = [torch.empty(1, device="meta") for _ in range(3)]
    assert count.peak == 3 * GRANULE
    del tensors


def test_existing_storages_are_not_counted() -> None:
    existing = torch.empty(4096, dtype=torch.uint8, device="meta")
    with PeakBytes(existing) as count:
        assert existing.detach()[:10] is not existing
    assert count.peak == 0


def test_temporary_buffers_of_operators_are_counted() -> None:
    values, indices = (
        torch.empty(8192, device="meta"),
        torch.empty(2048, dtype=torch.int64, device="meta"),
    )
    for sort in (values.sort, lambda: values.sort(stable=True), lambda: values.view(1, -1).sort(1)):
        with PeakBytes() as count:
            sort()
        assert count.peak == 8192 * (4 + 8) + 8192 * (4 + 16)
    with PeakBytes() as count:
        values.view(2, -1).sort(dim=-1)  # short rows need no buffer
    assert count.peak == 8192 * (4 + 8)
    target = torch.empty(100, device="meta")
    with PeakBytes() as count:
        target.index_put_((indices,), values[:2048], accumulate=True)
    assert count.peak == 6 * 8 * 2048
