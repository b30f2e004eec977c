"""Group consistency: the heads of a group share one set of blocks, and the set does not depend on
anybody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nsa_core.layout import BlockGeometry
from observed import slot_kernel

GEOMETRY = BlockGeometry(8, 4, 16, 4, 1, 1, 16)


def group_sets_agree(
    backend: str,
    device: str = "cpu",
    length: int = 141,
    fault: Callable[[Any], Any] = lambda select: select,
) -> None:
    """Blocks of a group and batch entry, bit for bit: alone, among others, groups permuted, and
    again.
    """
    generator = torch.Generator().manual_seed(0)
    groups, heads, width, batch = 3, 2, 16, 2
    q = torch.randn(batch, length, groups, heads, width, generator=generator).to(device)
    k_cmp = torch.randn(
        batch, GEOMETRY.num_compressed(length), groups, width, generator=generator
    ).to(device)
    cmp, select = (slot_kernel(backend, slot, GEOMETRY, 0.25) for slot in ("cmp", "select"))
    select = fault(select)

    def chosen(rows: slice, order: list[int]) -> torch.Tensor:
        """Blocks [B, S, groups in ``order``, n]."""
        these, keys = q[rows][:, :, order].flatten(2, 3), k_cmp[rows][:, :, order]
        blocks: torch.Tensor = select(these, keys, cmp(these, keys, keys)[1])
        return blocks

    everyone = slice(None)
    whole = chosen(everyone, [0, 1, 2])
    assert whole.shape == (batch, length, groups, 4)  # one set a group: its heads cannot differ
    assert torch.equal(chosen(everyone, [0, 1, 2]), whole)
    assert torch.equal(chosen(everyone, [2, 0, 1]), whole[:, :, [2, 0, 1]])
    for g in range(groups):
        assert torch.equal(chosen(everyone, [g]), whole[:, :, [g]])
    for b in range(batch):
        assert torch.equal(chosen(slice(b, b + 1), [0, 1, 2]), whole[b : b + 1])
    assert len({tuple(row) for row in whole[0, -1].tolist()}) > 1  # and groups do differ
