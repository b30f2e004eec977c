"""The decode form of cmp: one call of flash_attn_with_kvcache over the cached compressed tokens.

A query at token t sees the compressed tokens 0 .. floor((t + 1 - l) / d) of its sequence. It is
passed as a sequence of its own, with a cache of that length and without a mask. The cache is
addressed by cache_batch_idx if each sequence is contiguous, and by block_table if it is paged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_backend_fa2 import providers
from nsa_backend_fa2.padding import fit, mark_nan_rows, width_of
from nsa_core.contract import DecodeCall
from nsa_core.flash import MAX_BATCH, with_positive_scale

PAGE_ROWS = 256  # the page size of the library must be a multiple of this


def cmp(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page, G, Dk]
    v_cmp: Tensor,  # [P, page, G, Dv]
    *,
    call: DecodeCall,
) -> tuple[Tensor, Tensor]:
    """Return o [B, m, Hq, Dv] and lse [B, Hq, m].

    Rows that see no compressed token have o = 0 and lse = -inf.
    """
    batch, rows, heads, _ = q.shape
    lengths = visible(rows, call).flatten()  # [B * m]
    table = call.table("cmp").repeat_interleave(rows, 0)
    width = width_of(q.shape[-1], v_cmp.shape[-1])
    # This copies nothing: the probe refuses caches that would need a copy.
    k, v = fit(k_cmp, width), fit(v_cmp, width)
    signed_q, scale = with_positive_scale(
        fit(q.reshape(batch * rows, 1, heads, -1), width), call.scale
    )
    parts = [
        _attend(part_q, k, v, part_lengths, part_table, scale)
        for part_q, part_lengths, part_table in zip(
            *(x.split(MAX_BATCH) for x in (signed_q, lengths, table))
        )
    ]
    o, lse = (torch.cat(x) if len(parts) > 1 else x[0] for x in zip(*parts))
    # The library returns +inf for a row whose sum is 0 (no keys) or NaN.
    blank = (lengths == 0)[:, None, None]
    mark_nan_rows(o, lse)
    lse = lse.masked_fill(lse == torch.inf, torch.nan).masked_fill(blank, -torch.inf)
    o = o.masked_fill(blank[..., None], 0)
    return o.view(batch, rows, heads, -1), lse.view(batch, rows, heads).transpose(1, 2).contiguous()


def visible(rows: int, call: DecodeCall) -> Tensor:
    """Return how many compressed tokens each query sees, int32 [B, m]; 0 for padding."""
    geometry = call.geometry
    token = call.starts[:, None] + torch.arange(rows, dtype=torch.int32, device=call.starts.device)
    last_start = token + 1 - geometry.compress_block_size  # first token of the last whole block
    count = last_start.div(geometry.compress_stride, rounding_mode="floor") + 1
    return count.clamp(min=0).masked_fill(token >= call.lengths[:, None], 0)


def _attend(
    q: Tensor,  # [N, 1, Hq, D]
    k: Tensor,  # [P, rows, G, D]
    v: Tensor,
    lengths: Tensor,  # int32 [N]
    table: Tensor,  # int32 [N, pages]
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return o [N, 1, Hq, D] and lse [N, Hq, 1].

    Raises:
        RuntimeError: The provider has no attention over a cache that returns the log-sum-exp.
    """
    provider = providers.active_provider()
    attend = provider.with_cache if isinstance(provider, providers.FlashAttnPackage) else None
    if attend is None:
        raise RuntimeError(
            f"{provider.title} has no attention over a cache that returns the LSE;"
            f" install a newer flash-attn: {providers.INSTALL}"
        )
    contiguous = table.shape[1] == 1
    address = (
        {"cache_batch_idx": table[:, 0].contiguous()} if contiguous else {"block_table": table}
    )
    options = {"softmax_scale": scale, "causal": False, "return_softmax_lse": True}
    return attend(q, k, v, cache_seqlens=lengths, **options, **address)
