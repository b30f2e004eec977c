"""The compressed branch of a step: one call of flash_attn_with_kvcache over the cached compressed
tokens.

A row sees the compressed tokens 0 .. floor((t + 1 - l) / d) of its sequence, all of those and no
mask: it is a query of its own over a cache of that length. A cache of one piece a sequence is found
by cache_batch_idx, pages by block_table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_backend_fa2 import providers
from nsa_backend_fa2.padding import MAX_BATCH, fit, positive, width_of
from nsa_core.contract import DecodeCall

PAGE_ROWS = 256  # the library's pages are a multiple of it


def cmp(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page / d, G, Dk]
    v_cmp: Tensor,  # [P, page / d, G, Dv]
    *,
    call: DecodeCall,
) -> tuple[Tensor, Tensor]:
    """o [B, m, Hq, Dv] and lse [B, Hq, m]; 0 and -inf where no compressed token is visible."""
    batch, rows, heads, _ = q.shape
    seen = visible(rows, call).flatten()  # [B * m]
    table = call.block_table.repeat_interleave(rows, 0)
    width = width_of(q.shape[-1], v_cmp.shape[-1])
    # No copy here: the probe refuses caches that would need one.
    k, v = fit(k_cmp, width), fit(v_cmp, width)
    signed, scale = positive(fit(q.reshape(batch * rows, 1, heads, -1), width), call.scale)
    parts = [
        _attend(a, k, v, b, c, scale)
        for a, b, c in zip(*(x.split(MAX_BATCH) for x in (signed, seen, table)))
    ]
    o, lse = (torch.cat(x) if len(parts) > 1 else x[0] for x in zip(*parts))
    # The library returns +inf for a row whose sum is 0 (it has no keys) or NaN.
    blank = (seen == 0)[:, None, None]
    lse = lse.masked_fill(lse == torch.inf, torch.nan).masked_fill(blank, -torch.inf)
    o = o.masked_fill(blank[..., None], 0)
    return o.view(batch, rows, heads, -1), lse.view(batch, rows, heads).transpose(1, 2).contiguous()


def visible(rows: int, call: DecodeCall) -> Tensor:
    """Compressed tokens that each row of the step sees, int32 [B, m]; 0 for padding."""
    geometry = call.geometry
    token = call.starts[:, None] + torch.arange(rows, dtype=torch.int32, device=call.starts.device)
    ends = token + 1 - geometry.compress_block_size
    seen = ends.div(geometry.compress_stride, rounding_mode="floor") + 1
    return seen.clamp(min=0).masked_fill(token >= call.lengths[:, None], 0)


def _library() -> Callable[..., tuple[Tensor, Tensor]]:
    provider = providers.serving()
    function = provider.with_cache if isinstance(provider, providers.FlashAttnPackage) else None
    if function is None:
        raise RuntimeError(f"{provider.title} has no attention over a cache that returns the LSE")
    return function


def _attend(
    q: Tensor,  # [N, 1, Hq, D]
    k: Tensor,  # [P, rows, G, D]
    v: Tensor,
    seen: Tensor,  # int32 [N]
    table: Tensor,  # int32 [N, pages]
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o [N, 1, Hq, D] and lse [N, Hq, 1]."""
    one_piece = table.shape[1] == 1
    where = {"cache_batch_idx": table[:, 0].contiguous()} if one_piece else {"block_table": table}
    return _library()(
        q,
        k,
        v,
        cache_seqlens=seen,
        softmax_scale=scale,
        causal=False,
        return_softmax_lse=True,
        **where,
    )
