"""Causal attention on PyTorch's attention operators, and its gradient.

The last query sees the last key. There may be more keys than queries: every query then sees the
first keys, which come before the first query. The operators cannot align a causal mask at its end,
so those keys take a second call, without a mask, and the two results are merged.

The public scaled_dot_product_attention does not return the log-sum-exp, so this module calls the
operators below it. :func:`route` chooses one of three:

    CPU                        the CPU flash operator, on operands converted to fp32, because it
                               returns the log-sum-exp of bf16 operands with 14 bits only
    CUDA bf16/fp16, D <= 256   the FlashAttention-2 operator
    otherwise                  tiles of engine.py, which keep fp32 products IEEE, support fp64 and
                               wide heads, and are deterministic

The shapes are q [N, H, R, Dk], k [N, L, Dk], v [N, L, Dv], L >= R. N is batch size times kv heads,
and the H query heads of an entry share its keys. cuDNN's operator has its own module, cudnn.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_backend_sdpa import device, engine
from nsa_core import flash
from nsa_core.dtypes import stats_dtype

_MAX_FLASH_WIDTH = 256  # widest head that the CUDA operator supports
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


def _pad_to(x: Tensor, width: int) -> Tensor:
    """Pad the last axis of ``x`` with zeros to ``width``; give it unit stride, on CUDA alignment.

    The operators require them without checking.
    """
    x = flash.padded(x, width)
    if device.device_type(x) == "cpu":
        return x if x.stride(-1) == 1 else x.contiguous()
    return flash.aligned(x)


def causal(
    q: Tensor,  # [N, H, R, Dk]
    k: Tensor,  # [N, L, Dk], L >= R
    v: Tensor,  # [N, L, Dv]
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return o [N, H, R, Dv] in q's dtype, with any strides, and lse [N, H, R]."""
    kernel, before = _route(q, v), _keys_before(q, k, v)
    if kernel == "tiles":
        return _tiles_forward(q, k, v, scale)
    if not before:
        o, lse = _attend(q, k, v, scale, kernel, causal=True)
        return o.to(q.dtype), lse
    stats = stats_dtype(q.dtype)
    first = _attend(q, k[:, :before], v[:, :before], scale, kernel, causal=False)
    second = _attend(q, k[:, before:], v[:, before:], scale, kernel, causal=True)
    o, lse = engine.merge(*((o.to(stats), lse) for o, lse in (first, second)))
    return o.to(q.dtype), lse


def _keys_before(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return how many keys come before the first query."""
    before = k.shape[1] - q.shape[2]
    assert before >= 0, "each query requires a key of its own"
    assert k.shape[1] == v.shape[1], "k and v require equal lengths"
    return before


def _batches(count: int) -> list[slice]:
    """Return slices of a batch that the CUDA operators support."""
    return [slice(n, n + flash.MAX_BATCH) for n in range(0, count, flash.MAX_BATCH)]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, kernel: str, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Run the operator. Causal: with as many queries as keys, because it aligns top-left.

    o is in q's dtype on CUDA, and in the statistics' dtype on the CPU.
    """
    assert not causal or q.shape[2] == k.shape[1], "is_causal aligns the mask top-left"
    if kernel == "flash" and len(q) > flash.MAX_BATCH:
        parts = [_attend(q[n], k[n], v[n], scale, kernel, causal=causal) for n in _batches(len(q))]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])
    q_width, v_width = q.shape[-1], v.shape[-1]
    q, scale = flash.with_positive_scale(q, scale)
    if kernel == "cpu":
        stats, width = stats_dtype(q.dtype), max(q_width, v_width)
        q4, k4, v4 = _operands(q.to(stats), k.to(stats), v.to(stats), width)
        o, lse = _ops._scaled_dot_product_flash_attention_for_cpu(
            q4, k4, v4, 0.0, causal, scale=scale
        )
        # The operator returns 0 for a row of NaN scores, as for a row without keys. Put NaN back
        # into rows whose query is NaN and rows that see a NaN key.
        nan_keys = k4[:, :1].isnan().any(-1)
        nan_seen = nan_keys.cummax(-1).values if causal else nan_keys.any(-1, keepdim=True)
        nan_rows = q4.isnan().any(-1) | nan_seen
        o = o.masked_fill(nan_rows.unsqueeze(-1), torch.nan)
        lse = lse.masked_fill(nan_rows, torch.nan)
    else:
        q4, k4, v4 = _operands(q, k, v, -(-max(q_width, v_width) // 8) * 8)
        o, lse = _ops._scaled_dot_product_flash_attention(
            q4, k4, v4, 0.0, causal, False, scale=scale
        )[:2]
        if flash.may_split_keys(q, q.shape[0] * q.shape[1], q.shape[2]):
            # A part of the keys whose sum is NaN is left out of lse. The row of o is NaN in every
            # column.
            lse.masked_fill_(o[..., 0].isnan(), torch.nan)
        # The operator returns +inf for a row whose sum is NaN, as for a row without keys.
        lse.masked_fill_(lse == torch.inf, torch.nan)
    return o[..., :v_width], lse


def _operands(q: Tensor, k: Tensor, v: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pad q, k and v to one width, and expand k and v over the heads with stride 0, uncopied."""
    heads = (-1, q.shape[1], -1, -1)
    return (
        _pad_to(q, width),
        _pad_to(k, width).unsqueeze(1).expand(heads),
        _pad_to(v, width).unsqueeze(1).expand(heads),
    )


def causal_backward(
    do: Tensor,  # [N, H, R, Dv]
    q: Tensor,  # [N, H, R, Dk]
    k: Tensor,  # [N, L, Dk], L >= R
    v: Tensor,  # [N, L, Dv]
    o: Tensor,  # [N, H, R, Dv]
    lse: Tensor,  # [N, H, R]
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [N, H, R, Dk], dk [N, L, Dk] and dv [N, L, Dv].

    dk and dv are summed over the heads in the statistics' dtype, and returned in it.
    """
    kernel, before = _route(q, v), _keys_before(q, k, v)
    if kernel == "tiles" or (kernel == "flash" and deterministic):
        return _tiles_backward(do, q, k, v, o, lse, scale)
    if not before:
        dq, dk, dv = _attend_backward([do, q, k, v, o, lse], scale, kernel, causal=True)
        return dq.to(q.dtype), dk, dv
    # o and lse are those over all keys, so that each call returns its part of the gradient.
    parts = [
        _attend_backward([do, q, k[:, keys], v[:, keys], o, lse], scale, kernel, causal=masked)
        for keys, masked in ((slice(before), False), (slice(before, None), True))
    ]
    dq = parts[0][0].to(stats_dtype(q.dtype)) + parts[1][0]
    dk, dv = (torch.cat(grads, 1) for grads in list(zip(*parts))[1:])
    return dq.to(q.dtype), dk, dv


def _attend_backward(
    tensors: list[Tensor],  # do, q, k, v, o, lse
    scale: float,
    kernel: str,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the gradient operator. Causal: with as many queries as keys, as :func:`_attend`.

    dq is in q's dtype on CUDA, and in the statistics' dtype on the CPU.
    """
    do, q, k, v, o, lse = tensors
    assert not causal or q.shape[2] == k.shape[1], "is_causal aligns the mask top-left"
    if kernel == "flash" and len(q) > flash.MAX_BATCH:
        grads = [
            _attend_backward([x[n] for x in tensors], scale, kernel, causal=causal)
            for n in _batches(len(q))
        ]
        d_q, d_k, d_v = (torch.cat(parts) for parts in zip(*grads))
        return d_q, d_k, d_v
    q_width, v_width, stats = q.shape[-1], v.shape[-1], stats_dtype(q.dtype)
    signed_q, positive_scale = flash.with_positive_scale(q, scale)
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
            causal,
            scale=positive_scale,
        )
    else:
        width = -(-max(q_width, v_width) // 8) * 8
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
            q.shape[2],
            k.shape[1],
            0.0,
            causal,
            state,
            state,
            scale=positive_scale,
        )
    dq = flash.with_sign_of_scale(dq[..., :q_width], scale)
    return dq, dk[..., :q_width].sum(1, dtype=stats), dv[..., :v_width].sum(1, dtype=stats)


def _tiles(q: Tensor, before: int) -> Iterator[tuple[slice, slice, list[slice]]]:
    """Yield (batch entries, query rows, chunks of the keys that these rows see) for each tile.

    The scores of a tile stay within their limit.
    """
    count, heads, length, _ = q.shape
    keys = min(before + length, 1024)
    scores = engine.score_bytes(q) // stats_dtype(q.dtype).itemsize
    rows = max(1, min(length, scores // (heads * keys)))
    entries = max(1, min(count, scores // (heads * keys * rows)))
    for n in device.chunks(count, entries):
        for r in device.chunks(length, rows):
            yield n, r, list(device.chunks(before + r.stop, keys))


def _causal_mask(rows: slice, keys: slice, before: int, q: Tensor) -> Tensor:
    """Return a mask [R, 1, L] that is True where the key comes after that of the row."""
    row = torch.arange(before + rows.start, before + rows.stop, device=q.device)
    return (torch.arange(keys.start, keys.stop, device=q.device) > row[:, None]).unsqueeze(1)


def _tiles_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    count, heads, length, _ = q.shape
    operand, before = engine.operand_dtype(q), _keys_before(q, k, v)
    o = q.new_empty((count, length, heads, v.shape[-1]))
    lse = q.new_empty((count, length, heads), dtype=stats_dtype(q.dtype))
    for n, rows, key_chunks in _tiles(q, before):
        tile_q = engine.contiguous_as(q[n, :, rows].transpose(1, 2), operand)
        merged: tuple[Tensor, Tensor] | None = None
        for keys in key_chunks:
            hidden = _causal_mask(rows, keys, before, q)
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
    (count, heads, length, width), before = q.shape, _keys_before(q, k, v)
    dq = torch.empty((count, length, heads, width), dtype=q.dtype, device=q.device).transpose(1, 2)
    dk, dv = (torch.zeros(x.shape, dtype=stats_dtype(x.dtype), device=x.device) for x in (k, v))
    operand, stats = engine.operand_dtype(q), stats_dtype(q.dtype)
    for n, rows, key_chunks in _tiles(q, before):
        tile_do, tile_q, tile_o, tile_lse = (
            x[n, :, rows].transpose(1, 2) for x in (do, q, o, lse.unsqueeze(-1))
        )
        delta = (tile_do.to(stats) * tile_o).sum(-1)
        tile_do, tile_q = (engine.contiguous_as(x, operand) for x in (tile_do, tile_q))
        tile_dq: Tensor | None = None
        for keys in key_chunks:
            tile_k, tile_v = k[n, keys].to(operand), v[n, keys].to(operand)
            hidden = _causal_mask(rows, keys, before, q)
            grads = engine.attend_backward(
                tile_do, delta, tile_q, tile_k, tile_v, tile_lse.squeeze(-1), hidden, scale
            )
            tile_dq = grads[0] if tile_dq is None else tile_dq.add_(grads[0])
            dk[n, keys] += grads[1]
            dv[n, keys] += grads[2]
        assert tile_dq is not None
        dq[n, :, rows] = tile_dq.transpose(1, 2)
        del delta, tile_do, tile_q, tile_dq, tile_k, tile_v, hidden, grads  # before the next tile
    return dq, dk, dv
