"""Reference scores and selection with an overlap matrix and stable sorts instead of row loops."""

from __future__ import annotations

from typing import Any

import torch

from nsa_core.layout import BlockGeometry
from nsa_verify.reference.attention import (
    compressed_starts,
    host_bounds,
    query_rows,
    spans,
)


def _overlap(n_c: int, blocks: int, geometry: BlockGeometry) -> torch.Tensor:
    """Return Eq. 9 as a matrix [n_c, blocks] of token overlaps divided by d.

    Entry (i, j) is the number of tokens that compression block i and selection block j share.
    """
    cmp_start = torch.arange(n_c)[:, None] * geometry.compress_stride
    sel_start = torch.arange(blocks)[None] * geometry.select_block_size
    ends = torch.minimum(
        cmp_start + geometry.compress_block_size, sel_start + geometry.select_block_size
    )
    overlap = (ends - torch.maximum(cmp_start, sel_start)).clamp(min=0).double()
    return overlap / geometry.compress_stride


def _document_scores(
    q: torch.Tensor,  # [S, Hq, Dk] float64
    k_cmp: torch.Tensor,  # [n_c, G, Dk]
    lse: torch.Tensor,  # [S, Hq]
    geometry: BlockGeometry,
    scale: float,
    first: int,
) -> torch.Tensor:
    """Return the group scores [S, G, NB] of one document (Eq. 8 to 10).

    Row 0 of q is the token ``first`` of the document.
    """
    positions, groups = first + torch.arange(len(q)), k_cmp.shape[1]
    blocks = -(-(first + len(q)) // geometry.select_block_size)
    last = torch.arange(len(k_cmp)) * geometry.compress_stride + geometry.compress_block_size - 1
    visible = last[None] <= positions[:, None]
    logits = torch.einsum("sghd,igd->sghi", q.unflatten(1, (groups, -1)), k_cmp) * scale
    p = (
        (logits - lse.unflatten(1, (groups, -1))[..., None])
        .masked_fill(~visible[:, None, None], -torch.inf)
        .exp()
    )
    return torch.einsum("sghi,ij->sgj", p, _overlap(len(k_cmp), blocks, geometry))


def scores(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k_cmp: torch.Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    lse: torch.Tensor,  # [B, Hq, S]
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    first_query: int | None = None,
) -> list[torch.Tensor]:
    """Compute group scores [S, G, NB] in float64, one tensor per batch entry or document.

    ``first_query`` is the position of row 0 of q, if q holds only some rows.
    """
    bounds = host_bounds(cu_seqlens)
    queries = query_rows(q, bounds, first_query)
    q, k_cmp, lse = (x.detach().cpu().double() for x in (q, k_cmp, lse.transpose(-1, -2)))
    per_key = spans(k_cmp, None if bounds is None else compressed_starts(bounds, geometry))
    parts = zip(spans(q, queries.bounds), per_key, spans(lse, queries.bounds))
    return [
        _document_scores(*part, geometry, scale, first) for part, first in zip(parts, queries.first)
    ]


def choose(score: torch.Tensor, geometry: BlockGeometry, first: int = 0) -> torch.Tensor:
    """Select the blocks int32 [S, G, n] of a document from its group scores [S, G, NB] (Eq. 11).

    Row 0 of ``score`` is the token ``first`` of the document.
    """
    blocks = score.shape[-1]
    t, j = first + torch.arange(len(score))[:, None, None], torch.arange(blocks)
    newest = t // geometry.select_block_size
    forced = (j < geometry.init_blocks) | (j > newest - geometry.local_blocks)
    key = (
        torch.nan_to_num(score, nan=-1.0)
        .masked_fill(forced, torch.inf)
        .masked_fill(j > newest, -torch.inf)
    )
    order = key.argsort(dim=-1, descending=True, stable=True)[..., : geometry.num_selected_blocks]
    order = order.masked_fill(order > newest, blocks).sort(dim=-1).values
    missing = geometry.num_selected_blocks - order.shape[-1]
    selected = torch.nn.functional.pad(order, (0, missing), value=blocks)
    return selected.masked_fill(selected == blocks, -1).to(torch.int32)


def select(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    first_query: int | None = None,
) -> torch.Tensor:
    """Select blocks (Eq. 8 to 12); arguments as in :func:`scores`.

    Returns:
        int32 [B, S, G, n], packed [T, G, n]: blocks in ascending order, then -1.
    """
    queries = query_rows(q, host_bounds(cu_seqlens), first_query)
    call: dict[str, Any] = {"cu_seqlens": cu_seqlens, "first_query": first_query}
    blocks = [
        choose(score, geometry, first)
        for score, first in zip(scores(q, k_cmp, lse, geometry, scale, **call), queries.first)
    ]
    if cu_seqlens is not None:
        return torch.cat(blocks)
    empty = q.new_zeros(
        (0, q.shape[1], k_cmp.shape[2], geometry.num_selected_blocks), dtype=torch.int32
    )
    return torch.stack(blocks) if blocks else empty
