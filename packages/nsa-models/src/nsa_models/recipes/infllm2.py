"""InfLLM-v2 (arXiv 2509.24663; MiniCPM4, arXiv 2506.07900): attention to blocks of a shared KV."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from nsa_core import block_attention
from nsa_core.errors import InvalidInput
from nsa_core.limits import check_integers

QUERIES = 256  # scored at a time, which bounds the memory


@torch.no_grad()
def infllm2_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    block_size: int = 64,
    topk: int = 64,
    init_blocks: int = 1,
    local_blocks: int = 32,
    pool: int = 32,
    stride: int = 16,
    scale: float | None = None,
    first_query: int = 0,
) -> torch.Tensor:
    """Choose the blocks of InfLLM-v2 for each query and kv head.

    With the pooled keys c_i = mean(k[i * stride : i * stride + pool]), the query at position t, the
    query heads h of a kv head, and the i whose keys are all at or before t,

        p_t,i = sum over h of softmax_i(scale q_t,h . c_i)
        score_t,j = max of p_t,i over the i whose keys overlap block j

    The blocks are the ``local_blocks`` up to the query's own, and of the earlier ones the first
    ``init_blocks`` and those of the highest scores, ``topk`` in all. Of equal scores, which two
    blocks that share a pooled key often have, the earlier block wins.

    Args:
        q: Queries [B, S, Hq, D].
        k: Keys [B, N, G, D].
        block_size: Keys of a block, a multiple of ``stride``.
        topk: Number of blocks besides the local ones, the initial ones among them.
        init_blocks: Blocks at the start that are always chosen.
        local_blocks: Blocks up to the query's own that are always chosen, at least 1.
        pool: Keys of a pooled key, a multiple of ``stride``.
        stride: Keys from one pooled key to the next.
        scale: Factor of q . c before the softmax; default 1 / sqrt(D).
        first_query: Position of row 0 of q.

    Returns:
        int64 [B, S, G, min(local_blocks, number of blocks) + min(topk, number of blocks)], -1
        padded, without duplicates.

    Raises:
        InvalidInput: A number is out of range, or the sizes do not fit each other.
    """
    check_integers(
        {"block_size": block_size, "pool": pool, "stride": stride, "local_blocks": local_blocks},
        {"topk": topk, "init_blocks": init_blocks, "first_query": first_query},
    )
    if block_size % stride or pool % stride:
        raise InvalidInput(
            "block_size and pool must be multiples of stride, got block_size"
            f" {block_size}, pool {pool}, stride {stride}"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys = k.shape[1]
    block_size = min(block_size, max(1, -(-keys // stride)) * stride)  # one block has all keys
    count, ratio, overlap = max(1, -(-keys // block_size)), block_size // stride, pool // stride
    local_blocks = min(local_blocks, count)
    wide = torch.promote_types(q.dtype, torch.float32)
    if pool > keys:  # too few keys to pool
        pooled, overlap = k[:, :0].to(wide), 1
    else:
        columns = F.avg_pool1d(k.flatten(2).mT.to(wide), pool, stride)
        pooled = columns.mT.unflatten(2, (k.shape[2], -1))
    ends = torch.arange(pooled.shape[1], device=k.device) * stride + pool - 1
    blocks = torch.arange(count, device=k.device)
    chosen = []
    for start in range(0, max(q.shape[1], 1), QUERIES):
        rows = q[:, start : start + QUERIES].unflatten(2, (k.shape[2], -1)).to(wide)
        t = first_query + start + torch.arange(rows.shape[1], device=k.device)[:, None, None]
        weights = torch.einsum("bsghd,bpgd->bsghp", rows * scale, pooled)
        weights = weights.masked_fill(ends > t[..., None], -torch.inf).softmax(-1)
        shared = F.pad(weights.nan_to_num(0).sum(3), (overlap - 1, count * ratio), value=-1.0)
        windows = shared.unfold(-1, ratio + overlap - 1, ratio)[..., :count, :]
        own = t // block_size
        scores = windows.amax(-1).masked_fill(blocks < init_blocks, torch.inf)
        scores = scores.masked_fill(blocks > own - local_blocks, -torch.inf)
        values, order = scores.sort(dim=-1, descending=True, stable=True)
        local = own - torch.arange(local_blocks, device=k.device)
        local = local.clamp(min=-1).expand(*order.shape[:-1], -1)
        others = order.masked_fill(values == -torch.inf, -1)[..., :topk]
        chosen.append(torch.cat([local, others], -1))
    return torch.cat(chosen, 1)


def infllm2_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    first_query: int = 0,
    **sizes: int,
) -> Any:
    """Attend to the blocks of :func:`infllm2_blocks`; ``sizes`` are its other arguments.

    Returns:
        The output [B, S, Hq, Dv] of v [B, N, G, Dv], with gradients to q, k and v.
    """
    common: dict[str, Any] = {"block_size": block_size, "scale": scale, "first_query": first_query}
    return block_attention(q, k, v, infllm2_blocks(q, k, **common, **sizes), **common)
