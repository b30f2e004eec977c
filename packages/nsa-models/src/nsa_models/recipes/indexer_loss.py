"""The loss that trains the indexer of MiniMax sparse attention (arXiv 2606.13392)."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from nsa_core.errors import InvalidInput
from nsa_core.limits import check_integers

GATHERED = 2**25  # elements of the keys that are gathered at a time, which bounds the memory


def indexer_loss(
    q: torch.Tensor,
    k: torch.Tensor,
    index_q: torch.Tensor,
    index_k: torch.Tensor,
    blocks: torch.Tensor,
    *,
    block_size: int,
    scale: float | None = None,
    index_scale: float | None = None,
    first_query: int = 0,
) -> torch.Tensor:
    """Return how far the indexer's attention is from the main attention, over the chosen blocks.

    For the query at position t, a head i of the indexer, the query heads h of its group, and the
    keys s <= t of the blocks that head i chose for t,

        p_t,i(s) = mean over h of softmax_s(scale q_t,h . k_s)
        r_t,i(s) = softmax_s(index_scale index_q_t,i . index_k_s)
        loss = mean over t and i of the sum over s of p_t,i(s) log(p_t,i(s) / r_t,i(s))

    p is a constant: the gradient index_scale (r - p) / (number of t and i) of the scores reaches
    ``index_q`` and ``index_k`` only. MiniMax trains the indexer with the KL divergence from the
    mean of the group's main attention to the indexer's, over the selected blocks (figure 1 of the
    paper). That p and r are over keys, the default scales, and the mean over t and i are those of
    the eager model in the package flash-msa 0.1.1. Add the loss to that of the model; the input of
    the indexer is detached from the model.

    Before the choice is sparse, the paper trains the indexer on all keys: pass all blocks.

    Args:
        q: Queries [B, S, Hq, D].
        k: Keys [B, N, G, D].
        index_q: Queries of the indexer [B, S, I, E]; I divides Hq.
        index_k: Keys of the indexer [B, N, E], one head for all, or [B, N, I, E].
        blocks: Blocks that each head of the indexer chose, integers [B, S, I, n], -1 padded, each
            block once.
        block_size: Keys of a block.
        scale: Factor of q . k; default 1 / sqrt(D).
        index_scale: Factor of index_q . index_k; default 1 / sqrt(E).
        first_query: Position of row 0 of q.

    Returns:
        The loss in float32, or float64 for such inputs. It is 0 for queries without a block.

    Raises:
        InvalidInput: The shapes do not fit, or a number is out of range.
    """
    check_integers({"block_size": block_size}, {"first_query": first_query})
    if index_k.dim() == 3:
        index_k = index_k[:, :, None].expand(-1, -1, index_q.shape[2], -1)
    heads, groups, chosen = q.shape[2], k.shape[2], index_q.shape[2]
    expected = {
        "k": ((q.shape[0], k.shape[1], groups, q.shape[3]), k),
        "index_q": ((*q.shape[:2], chosen, index_q.shape[3]), index_q),
        "index_k": ((q.shape[0], k.shape[1], chosen, index_q.shape[3]), index_k),
        "blocks": ((*q.shape[:2], chosen, blocks.shape[3]), blocks),
    }
    for name, (shape, x) in expected.items():
        if x.shape != shape:
            raise InvalidInput(f"{name} must be {list(shape)}, got {list(x.shape)}")
    if heads % groups or heads % chosen or max(groups, chosen) % min(groups, chosen):
        raise InvalidInput(
            "the heads of k and of index_q must divide those of q, and one of them the other, got"
            f" q {heads}, k {groups} and index_q {chosen}"
        )
    if first_query + q.shape[1] > k.shape[1]:
        raise InvalidInput(
            f"the {q.shape[1]} queries from first_query {first_query} on need"
            f" {first_query + q.shape[1]} keys, got {k.shape[1]}"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    index_scale = index_q.shape[-1] ** -0.5 if index_scale is None else index_scale
    tensors = q.detach(), k.detach(), index_q, index_k, blocks
    with torch.autocast(q.device.type, enabled=False):
        loss: torch.Tensor = _IndexerLoss.apply(  # type: ignore[no-untyped-call]
            *tensors, block_size, scale, index_scale, first_query
        )
    return loss


class _IndexerLoss(torch.autograd.Function):
    """Compute the loss and its gradients in one pass over the queries."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        index_q: torch.Tensor,
        index_k: torch.Tensor,
        blocks: torch.Tensor,
        block_size: int,
        scale: float,
        index_scale: float,
        first_query: int,
    ) -> torch.Tensor:
        chosen, count = index_q.shape[2], index_q[..., 0].numel()
        wide = torch.promote_types(index_q.dtype, torch.float32)
        d_index_q = torch.empty_like(index_q, dtype=wide)
        d_index_k = torch.zeros(index_k.shape, dtype=wide, device=index_k.device)
        loss = torch.zeros((), dtype=wide, device=q.device)
        inside = torch.arange(block_size, device=q.device)
        widest = max(q.shape[-1], index_q.shape[-1]) * blocks.shape[-1] * block_size
        rows = max(1, GATHERED // (widest * q.shape[0]))
        for start in range(0, q.shape[1], rows):
            part = slice(start, start + rows)
            t = first_query + start + torch.arange(q[:, part].shape[1], device=q.device)
            for i in range(chosen):
                own = blocks[:, part, i].long()
                keys = (own[..., None] * block_size + inside).flatten(2)  # [B, rows, n keys]
                valid = (own >= 0).repeat_interleave(block_size, 2) & (keys <= t[:, None])
                keys = keys.masked_fill(~valid, 0)
                target = _mean_attention(q[:, part], k, keys, valid, i, chosen, scale)
                ik, iq = _gather(index_k[:, :, i], keys).to(wide), index_q[:, part, i].to(wide)
                scores = torch.einsum("bse,bsne->bsn", iq, ik) * index_scale
                logs = scores.masked_fill(~valid, -torch.inf).log_softmax(-1).masked_fill(~valid, 0)
                loss += (torch.xlogy(target, target) - target * logs).sum()
                slope = (logs.exp().masked_fill(~valid, 0) - target) * (index_scale / count)
                d_index_q[:, part, i] = torch.einsum("bsn,bsne->bse", slope, ik)
                d_keys = slope[..., None] * iq[:, :, None]
                at = keys.flatten(1)[..., None].expand(-1, -1, d_keys.shape[-1])
                d_index_k[:, :, i].scatter_add_(1, at, d_keys.flatten(1, 2))
        ctx.save_for_backward(d_index_q, d_index_k)
        ctx.dtypes = index_q.dtype, index_k.dtype
        return loss / count

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        both = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        d_index_q, d_index_k = ((grad * x).to(dtype) for x, dtype in both)
        return None, None, d_index_q, d_index_k, *[None] * 5


def _mean_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor,
    head: int,
    chosen: int,
    scale: float,
) -> torch.Tensor:
    """Return the attention to ``keys`` [B, rows, m], averaged over the query heads of ``head``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    per_head, per_group = q.shape[2] // chosen, q.shape[2] // k.shape[2]
    total = torch.zeros(keys.shape, dtype=wide, device=q.device)
    first = head * per_head
    while first < (head + 1) * per_head:  # the query heads that share a key head
        group = first // per_group
        last = min((group + 1) * per_group, (head + 1) * per_head)
        gathered = _gather(k[:, :, group], keys).to(wide)
        scores = torch.einsum("bshd,bsnd->bshn", q[:, :, first:last].to(wide), gathered) * scale
        weights = scores.masked_fill(~valid[:, :, None], -torch.inf).softmax(-1)
        total += weights.nan_to_num(0).sum(2)
        first = last
    return total / per_head


def _gather(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the rows ``keys`` [B, S, m] of x [B, N, D], as [B, S, m, D]."""
    at = keys.flatten(1)[..., None].expand(-1, -1, x.shape[-1])
    rows: torch.Tensor = x.gather(1, at).unflatten(1, keys.shape[1:])
    return rows
