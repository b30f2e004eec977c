"""MoBA, mixture of block attention (arXiv 2502.13189)."""

from __future__ import annotations

import torch

from nsa_core import block_attention
from nsa_core.limits import check_integers


@torch.no_grad()
def moba_blocks(
    q: torch.Tensor, k: torch.Tensor, *, block_size: int, topk: int, first_query: int = 0
) -> torch.Tensor:
    """Choose the blocks of MoBA for each query and query head.

    The score of block j is q_t . mean(keys of block j). The query's own block is always chosen;
    of the earlier blocks, those of the ``topk - 1`` highest scores.

    Args:
        q: Queries [B, S, H, D].
        k: Keys [B, N, G, D]; G divides H.
        block_size: Keys of a block.
        topk: Number of blocks, the query's own among them, at least 1.
        first_query: Position of row 0 of q.

    Returns:
        int64 [B, S, H, min(topk, 1 + number of full blocks)], the own block first, -1 padded.

    Raises:
        InvalidInput: A number is out of range.
    """
    check_integers({"block_size": block_size, "topk": topk}, {"first_query": first_query})
    whole = k.shape[1] // block_size  # a block that is not full is nobody's earlier block
    blocks = k[:, : whole * block_size].unflatten(1, (whole, block_size))
    wide = torch.promote_types(q.dtype, torch.float32)
    means = blocks.to(wide).mean(2)  # [B, whole, G, D]
    rows = q.to(wide).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bsghd,bjgd->bsghj", rows, means).flatten(2, 3)
    own = (first_query + torch.arange(q.shape[1], device=q.device))[:, None, None] // block_size
    earlier = torch.arange(whole, device=q.device) < own
    best = scores.masked_fill(~earlier, -torch.inf).topk(min(topk - 1, whole), -1)
    others = best.indices.masked_fill(best.values == -torch.inf, -1)
    return torch.cat([own.expand(*others.shape[:-1], 1), others], -1)


def moba_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_size: int = 512,
    topk: int = 3,
    scale: float | None = None,
    first_query: int = 0,
) -> torch.Tensor:
    """Attend to the blocks of :func:`moba_blocks`, with the softmax scale ``scale``.

    Returns:
        The output [B, S, H, Dv] of v [B, N, G, Dv], with gradients to q, k and v.
    """
    blocks = moba_blocks(q, k, block_size=block_size, topk=topk, first_query=first_query)
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    o: torch.Tensor = block_attention(
        q, k, v, blocks, block_size=block_size, scale=scale, first_query=first_query
    )
    return o
