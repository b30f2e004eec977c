"""Causal attention with as many queries as keys on PyTorch's attention operators, and its gradient.

The public scaled_dot_product_attention does not return the log-sum-exp, so this module calls the
operators below it. :func:`route` chooses one of three:

    CPU                        the CPU flash operator, on operands converted to fp32, because it
                               returns the log-sum-exp of bf16 operands with 14 bits only
    CUDA bf16/fp16, D <= 256   the FlashAttention-2 operator
    otherwise                  tiles of engine.py, which keep fp32 products IEEE, support fp64 and
                               wide heads, and are deterministic

The shapes are q [N, H, L, Dk], k [N, L, Dk], v [N, L, Dv]. N is batch size times kv heads, and the
H query heads of an entry share its keys. cuDNN's operator has its own module, cudnn.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_backend_sdpa import device, engine
from nsa_backend_sdpa.engine import stats_dtype

_MAX_FLASH_WIDTH = 256  # widest head that the CUDA operator supports
_MAX_BATCH = 65_535  # entries per call: the limit of the second axis of a CUDA grid
_ops = torch.ops.aten


def route(
    dtype: torch.dtype, device_type: str, width: int, capability: tuple[int, int] | None
) -> str:
    """Return the implementation for heads of ``width`` = max(Dk, Dv): "cpu", "flash" or "tiles"."""
    if device_type == "cpu":
        return "cpu"
    half = dtype in (torch.bfloat16, torch.float16)
    if (
        device_type == "cuda"
        and half
        and width <= _MAX_FLASH_WIDTH
        and capability is not None
        and capability >= (8, 0)
    ):
        return "flash"
    return "tiles"


def _route(q: Tensor, v: Tensor) -> str:
    width = max(q.shape[-1], v.shape[-1])
    return route(q.dtype, device.device_type(q), width, device.capability(q))


def _with_positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q and a positive scale with the same scores.

    The operators scale the scores after masking them with -inf, so that a negative or zero scale
    would break the mask.
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def _pad_to(x: Tensor, width: int) -> Tensor:
    """Pad the last axis of ``x`` with zeros to ``width``, and give it unit stride.

    The operators require unit stride without checking it. ``pad`` alone does not ensure it: it
    keeps the memory format that the strides suggest, and heads of one element suggest
    channels_last.
    """
    if x.shape[-1] < width:
        x = pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def causal(
    q: Tensor,  # [N, H, L, Dk]
    k: Tensor,  # [N, L, Dk]
    v: Tensor,  # [N, L, Dv]
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return o [N, H, L, Dv] in q's dtype, with any strides, and lse [N, H, L]."""
    assert q.shape[2] == k.shape[1] == v.shape[1], (
        "is_causal aligns top-left: it requires as many queries as keys"
    )
    kernel, q_width, v_width = _route(q, v), q.shape[-1], v.shape[-1]
    if kernel == "tiles":
        return _tiles_forward(q, k, v, scale)
    if kernel == "flash" and len(q) > _MAX_BATCH:
        chunks = [slice(n, n + _MAX_BATCH) for n in range(0, len(q), _MAX_BATCH)]
        parts = [causal(q[n], k[n], v[n], scale) for n in chunks]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])
    q, scale = _with_positive_scale(q, scale)
    if kernel == "cpu":
        stats, width = stats_dtype(q.dtype), max(q_width, v_width)
        q4, k4, v4 = _operands(q.to(stats), k.to(stats), v.to(stats), width)
        o, lse = _ops._scaled_dot_product_flash_attention_for_cpu(
            q4, k4, v4, 0.0, True, scale=scale
        )
        # The operator returns 0 for a row of NaN scores, as for a row without keys. Put NaN back
        # into rows whose query is NaN and rows that see a NaN key.
        nan_rows = q4.isnan().any(-1) | k4[:, :1].isnan().any(-1).cummax(-1).values
        o = o.masked_fill(nan_rows.unsqueeze(-1), torch.nan)
        lse = lse.masked_fill(nan_rows, torch.nan)
    else:
        q4, k4, v4 = _operands(q, k, v, -(-max(q_width, v_width) // 8) * 8)
        o, lse = _ops._scaled_dot_product_flash_attention(
            q4, k4, v4, 0.0, True, False, scale=scale
        )[:2]
    return o[..., :v_width].to(q.dtype), lse


def _operands(q: Tensor, k: Tensor, v: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad q, k and v to one width, and expand k and v over the heads with stride 0, uncopied."""
    heads = (-1, q.shape[1], -1, -1)
    return (
        _pad_to(q, width),
        _pad_to(k, width).unsqueeze(1).expand(heads),
        _pad_to(v, width).unsqueeze(1).expand(heads),
    )


def causal_backward(
    do: Tensor,  # [N, H, L, Dv]
    q: Tensor,  # [N, H, L, Dk]
    k: Tensor,  # [N, L, Dk]
    v: Tensor,  # [N, L, Dv]
    o: Tensor,  # [N, H, L, Dv]
    lse: Tensor,  # [N, H, L]
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [N, H, L, Dk], dk [N, L, Dk] and dv [N, L, Dv].

    dk and dv are summed over the heads in the statistics' dtype, and returned in it.
    """
    assert q.shape[2] == k.shape[1] == v.shape[1], (
        "is_causal aligns top-left: it requires as many queries as keys"
    )
    kernel, q_width, v_width, stats = _route(q, v), q.shape[-1], v.shape[-1], stats_dtype(q.dtype)
    if kernel == "tiles" or (kernel == "flash" and deterministic):
        return _tiles_backward(do, q, k, v, o, lse, scale)
    if kernel == "flash" and len(q) > _MAX_BATCH:
        chunks = [slice(n, n + _MAX_BATCH) for n in range(0, len(q), _MAX_BATCH)]
        grads = [
            causal_backward(do[n], q[n], k[n], v[n], o[n], lse[n], scale, deterministic)
            for n in chunks
        ]
        d_q, d_k, d_v = (torch.cat(parts) for parts in zip(*grads))
        return d_q, d_k, d_v
    signed_q, positive_scale = _with_positive_scale(q, scale)
    if kernel == "cpu":
        width = max(q_width, v_width)
        q4, k4, v4 = _operands(signed_q.to(stats), k.to(stats), v.to(stats), width)
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            _pad_to(do.to(stats), width),
            q4,
            k4,
            v4,
            _pad_to(o.to(stats), width),
            lse,
            0.0,
            True,
            scale=positive_scale,
        )
    else:
        width, length = -(-max(q_width, v_width) // 8) * 8, q.shape[2]
        q4, k4, v4 = _operands(signed_q, k, v, width)
        # The state of the random generator for dropout, unused because dropout is 0.
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_backward(
            _pad_to(do, width),
            q4,
            k4,
            v4,
            _pad_to(o, width),
            lse.contiguous(),
            None,
            None,
            length,
            length,
            0.0,
            True,
            state,
            state,
            scale=positive_scale,
        )
    dq = dq[..., :q_width].to(q.dtype)
    if scale <= 0:
        dq = -dq if scale < 0 else dq * 0
    return dq, dk[..., :q_width].sum(1, dtype=stats), dv[..., :v_width].sum(1, dtype=stats)


def tile_shape(
    count: int, heads: int, length: int, itemsize: int, budget: int
) -> tuple[int, int, int]:
    """Return (batch entries, query rows, keys) of a tile whose scores fit into ``budget`` bytes."""
    keys = min(length, 1024)
    rows = max(1, min(length, budget // (heads * keys * itemsize)))
    return max(1, min(count, budget // (heads * keys * rows * itemsize))), rows, keys


def _tiles(q: Tensor) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Yield (batch entries, query rows, chunks of the keys that these rows see) for each tile."""
    count, heads, length, _ = q.shape
    itemsize, budget = stats_dtype(q.dtype).itemsize, engine.score_bytes(q)
    entries, rows, keys = tile_shape(count, heads, length, itemsize, budget)
    for n in device.chunks(count, entries):
        for r in device.chunks(length, rows):
            yield n, r, list(device.chunks(r.stop, keys))


def _causal_mask(rows: slice, keys: slice, q: Tensor) -> Tensor:
    """Return a mask [R, 1, L] that is True where the key comes after the row."""
    row = torch.arange(rows.start, rows.stop, device=q.device)
    return (torch.arange(keys.start, keys.stop, device=q.device) > row[:, None]).unsqueeze(1)


def _tiles_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    count, heads, length, _ = q.shape
    operand = engine.operand_dtype(q)
    o = q.new_empty((count, length, heads, v.shape[-1]))
    lse = q.new_empty((count, length, heads), dtype=stats_dtype(q.dtype))
    for n, rows, key_chunks in _tiles(q):
        tile_q = engine.contiguous_as(q[n, :, rows].transpose(1, 2), operand)
        merged: tuple[Tensor, Tensor] | None = None
        for keys in key_chunks:
            hidden = _causal_mask(rows, keys, q)
            partial = engine.attend(
                tile_q, k[n, keys].to(operand), v[n, keys].to(operand), hidden, scale
            )
            merged = engine.merge(merged, partial)
        assert merged is not None
        o[n, rows], lse[n, rows] = merged
        del tile_q, merged, partial, hidden
    return o.transpose(1, 2), lse.transpose(1, 2)


def _tiles_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    count, heads, length, width = q.shape
    dq = torch.empty((count, length, heads, width), dtype=q.dtype, device=q.device).transpose(1, 2)
    dk, dv = (torch.zeros(x.shape, dtype=stats_dtype(x.dtype), device=x.device) for x in (k, v))
    for n, rows, key_chunks in _tiles(q):
        queries = [x[n, :, rows].transpose(1, 2) for x in (do, q, o, lse.unsqueeze(-1))]
        dq[n, :, rows] = _tile_backward(
            queries, k[n], v[n], dk[n], dv[n], rows, key_chunks, scale
        ).transpose(1, 2)
    return dq, dk, dv


def _tile_backward(
    queries: list[Tensor],  # do, q, o, lse [N, R, H, D]
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    rows: slice,
    key_chunks: list[slice],
    scale: float,
) -> Tensor:
    """Return dq [N, R, H, Dk] of the rows; add to dk and dv in place."""
    do, q, o, lse = queries
    operand, stats = engine.operand_dtype(q), stats_dtype(q.dtype)
    delta = (do.to(stats) * o).sum(-1)
    do, q = engine.contiguous_as(do, operand), engine.contiguous_as(q, operand)
    dq: Tensor | None = None
    for keys in key_chunks:
        tile_k, tile_v, hidden = (
            k[:, keys].to(operand),
            v[:, keys].to(operand),
            _causal_mask(rows, keys, q),
        )
        grads = engine.attend_backward(do, delta, q, tile_k, tile_v, lse.squeeze(-1), hidden, scale)
        dq = grads[0] if dq is None else dq.add_(grads[0])
        dk[:, keys] += grads[1]
        dv[:, keys] += grads[2]
    assert dq is not None
    return dq
