"""The first compressed token of each packed document, compared with nsa_core."""

from __future__ import annotations

import pytest
import torch

from nsa_backend_triton.host import document_starts
from nsa_core.layout import BlockGeometry
from nsa_core.packing import compressed_cu_seqlens

MANY = (
    torch.randint(0, 10**6, (2500,), generator=torch.Generator().manual_seed(3))
    .sort()
    .values.tolist()
)


@pytest.mark.parametrize(
    "bounds",
    [[0, 0], [0, 31], [0, 32, 63, 111, 111, 1000], [0, *MANY], [0, 40, 10, 20], [5, 9, 20]],
    ids=["empty", "too short", "several", "more than a block", "falling", "not from 0"],
)
@pytest.mark.parametrize(
    "geometry", [BlockGeometry(), BlockGeometry(8, 8, 16), BlockGeometry(12, 4, 12)], ids=str
)
def test_compressed_starts_match_nsa_core(bounds: list[int], geometry: BlockGeometry) -> None:
    cu = torch.tensor(bounds, dtype=torch.int32)
    starts = document_starts.compressed_starts(cu, geometry, max(bounds))
    assert torch.equal(starts, compressed_cu_seqlens(cu, geometry))


@pytest.mark.parametrize("num_tokens", [0, 31, 32, 62, 63, 94, 95, 110, 999])
def test_tokens_past_the_last_query_do_not_count(num_tokens: int) -> None:
    cu, geometry = torch.tensor([0, 32, 63, 111, 111, 1000], dtype=torch.int32), BlockGeometry()
    starts = document_starts.compressed_starts(cu, geometry, num_tokens)
    assert torch.equal(starts, compressed_cu_seqlens(cu.clamp(max=num_tokens), geometry))
