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


def share_blocks(blocks: torch.Tensor, lists: int, seed: int = 0) -> torch.Tensor:
    """Let every eight neighbouring tokens choose again, among the blocks of the first few of them.

    Neighbouring tokens of a trained model share blocks: eight of them choose about 2.4 * n
    different ones, which lies between two and three lists.

    Args:
        blocks: Blocks [batch, seq_len, groups, n], with -1 for none.
        lists: Number of tokens, 1 to 8, whose blocks the eight choose from; 1: they all have the
            same.
        seed: Seed of the choice.

    Returns:
        Blocks of the same shape and dtype, in ascending order before -1. Tokens after the last
        multiple of eight keep theirs.
    """
    if not 1 <= lists <= 8:
        raise ValueError(f"lists must be 1 to 8, got {lists}")
    *_, n = blocks.shape
    whole = blocks.shape[1] // 8 * 8
    eights = blocks[:, :whole].unflatten(1, (-1, 8))
    pool = eights[:, :, :lists].transpose(2, 3).flatten(3).sort(-1).values
    repeated = torch.zeros_like(pool, dtype=torch.bool)
    repeated[..., 1:] = pool[..., 1:] == pool[..., :-1]
    pool = pool.masked_fill(repeated, -1)[:, :, None].expand(-1, -1, 8, -1, -1)
    generator = torch.Generator(blocks.device).manual_seed(seed)
    rank = torch.rand(pool.shape, generator=generator, device=blocks.device)
    chosen = pool.gather(-1, rank.masked_fill_(pool < 0, -1.0).topk(n).indices)
    none = torch.iinfo(blocks.dtype).max
    chosen = chosen.masked_fill(chosen < 0, none).sort(-1).values
    out = blocks.clone()
    out[:, :whole] = chosen.masked_fill(chosen == none, -1).flatten(1, 2)
    return out
