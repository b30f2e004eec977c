"""Group consistency: heads of a group share a set of blocks, independent of other groups."""

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
    """Check that the blocks of a group and batch entry do not depend on others, bit for bit.

    The test permutes the groups, and computes each group and batch entry alone.
    """
    generator = torch.Generator().manual_seed(0)
    groups, heads, width, batch = 3, 2, 16, 2
    q = torch.randn(batch, length, groups, heads, width, generator=generator).to(device)
    k_cmp = torch.randn(
        batch, GEOMETRY.num_compressed(length), groups, width, generator=generator
    ).to(device)
    cmp, select = (slot_kernel(backend, slot, GEOMETRY, 0.25) for slot in ("cmp", "select"))
    select = fault(select)

    def selected(entries: slice, order: list[int]) -> torch.Tensor:
        """Return the blocks [B, S, groups in ``order``, n]."""
        queries, keys = q[entries][:, :, order].flatten(2, 3), k_cmp[entries][:, :, order]
        blocks: torch.Tensor = select(queries, keys, cmp(queries, keys, keys)[1])
        return blocks

    everything = slice(None)
    blocks = selected(everything, [0, 1, 2])
    assert blocks.shape == (batch, length, groups, 4)  # one set per group: its heads cannot differ
    assert torch.equal(selected(everything, [0, 1, 2]), blocks)
    assert torch.equal(selected(everything, [2, 0, 1]), blocks[:, :, [2, 0, 1]])
    for g in range(groups):
        assert torch.equal(selected(everything, [g]), blocks[:, :, [g]])
    for b in range(batch):
        assert torch.equal(selected(slice(b, b + 1), [0, 1, 2]), blocks[b : b + 1])
    assert len({tuple(row) for row in blocks[0, -1].tolist()}) > 1  # groups select different blocks
