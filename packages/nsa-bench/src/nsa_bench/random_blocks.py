"""Random selected blocks, for kernels that must not depend on what attention learned."""

from __future__ import annotations

import torch

from nsa_core.layout import BlockGeometry


def random_causal_blocks(
    seq_len: int, groups: int, geometry: BlockGeometry, device: str, batch: int = 1, seed: int = 0
) -> torch.Tensor:
    """Return random blocks int32 [batch, seq_len, groups, n] that follow the selection rules.

    They include the always-selected blocks, are sorted in ascending order, and end with -1 if fewer
    than n blocks are candidates.
    """
    generator = torch.Generator(device).manual_seed(seed)
    size, n = geometry.select_block_size, geometry.num_selected_blocks
    count = geometry.num_select_blocks(seq_len)
    block = torch.arange(count, device=device)
    out = torch.full((batch, seq_len, groups, n), -1, dtype=torch.int32, device=device)
    for first in range(0, seq_len, 4096):
        t = torch.arange(first, min(first + 4096, seq_len), device=device)
        current = (t // size)[:, None, None]
        rank = torch.rand(batch, len(t), groups, count, generator=generator, device=device)
        rank.masked_fill_(
            (block < geometry.init_blocks) | (block > current - geometry.local_blocks), 2.0
        )
        rank.masked_fill_(block > current, -1.0)
        chosen = rank.topk(min(n, count)).indices
        chosen = chosen.masked_fill_(rank.gather(-1, chosen) < 0, count).sort(-1).values
        out[:, t, :, : chosen.shape[-1]] = chosen.masked_fill_(chosen == count, -1).int()
    return out
