"""Plain causal attention with as many queries as keys, and its gradient: the one file that calls PyTorch's own kernels.

The public scaled_dot_product_attention returns no LSE, so the operators under it are called. Which one:
    CPU                        the CPU flash operator, on operands widened to fp32: its bf16 LSE is good to 14 bits
    CUDA bf16/fp16, D <= 256   the FlashAttention-2 operator
    otherwise                  tiles of engine.py: fp32 stays IEEE, fp64 and wide heads work, and the bits repeat

q [N, H, L, Dk] over k [N, L, Dk], v [N, L, Dv]: N counts batch entries times kv heads; H heads share keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_backend_sdpa import engine
from nsa_backend_sdpa.engine import stats_dtype

_FLASH_WIDTH = 256  # widest head of the CUDA operator
_ops = torch.ops.aten


def route(dtype: torch.dtype, device_type: str, width: int, capability: tuple[int, int] | None) -> str:
    """Which of "cpu", "flash", "tiles" runs heads of ``width`` = max(Dk, Dv)."""
    if device_type == "cpu":
        return "cpu"
    half = dtype in (torch.bfloat16, torch.float16)
    if device_type == "cuda" and half and width <= _FLASH_WIDTH and capability is not None and capability >= (8, 0):
        return "flash"
    return "tiles"


def _route(q: Tensor, v: Tensor) -> str:
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
    return route(q.dtype, q.device.type, max(q.shape[-1], v.shape[-1]), capability)


def _signed(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """A positive scale, its sign or zero moved into q: the kernels scale after masking with -inf."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def _fit(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def causal(
    q: Tensor,  # [N, H, L, Dk]
    k: Tensor,  # [N, L, Dk]
    v: Tensor,  # [N, L, Dv]
    scale: float,
) -> tuple[Tensor, Tensor]:
    """o [N, H, L, Dv] in q's dtype (strides are the kernel's) and lse [N, H, L]."""
    assert q.shape[2] == k.shape[1] == v.shape[1], "is_causal aligns top-left: only for as many queries as keys"
    how, q_width, v_width = _route(q, v), q.shape[-1], v.shape[-1]
    if how == "tiles":
        return _tiles_forward(q, k, v, scale)
    q, scale = _signed(q, scale)
    if how == "cpu":
        wide, width = stats_dtype(q.dtype), max(q_width, v_width)
        q4, k4, v4 = _operands(q.to(wide), k.to(wide), v.to(wide), width)
        o, lse = _ops._scaled_dot_product_flash_attention_for_cpu(q4, k4, v4, 0.0, True, scale=scale)
    else:
        q4, k4, v4 = _operands(q, k, v, -(-max(q_width, v_width) // 8) * 8)
        o, lse = _ops._scaled_dot_product_flash_attention(q4, k4, v4, 0.0, True, False, scale=scale)[:2]
    return o[..., :v_width].to(q.dtype), lse


def _operands(q: Tensor, k: Tensor, v: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """One width, and k, v seen by every head through stride 0: no copy."""
    heads = (-1, q.shape[1], -1, -1)
    return _fit(q, width), _fit(k, width).unsqueeze(1).expand(heads), _fit(v, width).unsqueeze(1).expand(heads)


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
    """dq [N, H, L, Dk]; dk [N, L, Dk] and dv [N, L, Dv] in the statistics' dtype, summed there over the heads."""
    assert q.shape[2] == k.shape[1] == v.shape[1], "is_causal aligns top-left: only for as many queries as keys"
    how, q_width, v_width, stats = _route(q, v), q.shape[-1], v.shape[-1], stats_dtype(q.dtype)
    if how == "tiles" or (how == "flash" and deterministic):
        return _tiles_backward(do, q, k, v, o, lse, scale)
    signed, positive = _signed(q, scale)
    if how == "cpu":
        width = max(q_width, v_width)
        q4, k4, v4 = _operands(signed.to(stats), k.to(stats), v.to(stats), width)
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            _fit(do.to(stats), width), q4, k4, v4, _fit(o.to(stats), width), lse, 0.0, True, scale=positive
        )
    else:
        width, length = -(-max(q_width, v_width) // 8) * 8, q.shape[2]
        q4, k4, v4 = _operands(signed, k, v, width)
        state = torch.zeros(2, dtype=torch.int64, device=q.device)  # of the dropout, which there is not
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_backward(
            _fit(do, width), q4, k4, v4, _fit(o, width), lse.contiguous(),
            None, None, length, length, 0.0, True, state, state, scale=positive,
        )  # fmt: skip
    dq = dq[..., :q_width].to(q.dtype)
    if scale <= 0:
        dq = -dq if scale < 0 else dq * 0
    return dq, dk[..., :q_width].sum(1, dtype=stats), dv[..., :v_width].sum(1, dtype=stats)


def _blocks(
    count: int, heads: int, length: int, stats: torch.dtype, device: str
) -> Iterator[tuple[slice, slice, range]]:
    """(batch slice, row slice, starts of the key blocks those rows see) with bounded scores."""
    keys = min(length, 1024)
    per_row = heads * keys * stats.itemsize
    rows = max(1, min(length, engine.score_bytes(device) // per_row))
    entries = max(1, engine.score_bytes(device) // (per_row * rows))
    for n in range(0, count, entries):
        for r in range(0, length, rows):
            yield slice(n, n + entries), slice(r, min(r + rows, length)), range(0, min(r + rows, length), keys)


def _hidden(rows: slice, keys: slice, device: torch.device) -> Tensor:
    """[R, 1, L]: key after row."""
    row = torch.arange(rows.start, rows.stop, device=device)
    return (torch.arange(keys.start, keys.stop, device=device) > row[:, None]).unsqueeze(1)


def _tiles_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    count, heads, length, _ = q.shape
    stats, operand = stats_dtype(q.dtype), engine.operand_dtype(q)
    o = q.new_empty((count, length, heads, v.shape[-1]))
    lse = q.new_empty((count, length, heads), dtype=stats)
    for n, rows, starts in _blocks(count, heads, length, stats, q.device.type):
        tile = q[n, :, rows].transpose(1, 2).to(operand)
        total: tuple[Tensor, Tensor] | None = None
        for first in starts:
            keys = slice(first, min(starts.stop, first + starts.step))
            hidden = _hidden(rows, keys, q.device)
            new = engine.attend(tile, k[n, keys].to(operand), v[n, keys].to(operand), hidden, scale)
            total = engine.merge(total, new)
        assert total is not None
        o[n, rows], lse[n, rows] = total
    return o.transpose(1, 2), lse.transpose(1, 2)


def _tiles_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    count, heads, length, _ = q.shape
    stats, operand = stats_dtype(q.dtype), engine.operand_dtype(q)
    dq = torch.empty((count, length, heads, q.shape[-1]), dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=stats, device=x.device) for x in (k, v))
    for n, rows, starts in _blocks(count, heads, length, stats, q.device.type):
        tile_q, tile_do, tile_o = (x[n, :, rows].transpose(1, 2) for x in (q, do, o))
        delta = (tile_do.to(stats) * tile_o).sum(-1)
        tile_q, tile_do = tile_q.to(operand), tile_do.to(operand)
        tile_lse, tile_dq = lse[n, :, rows].transpose(1, 2), torch.zeros(tile_q.shape, dtype=stats, device=q.device)
        for first in starts:
            keys = slice(first, min(starts.stop, first + starts.step))
            grads = engine.attend_backward(
                tile_do, delta, tile_q, k[n, keys].to(operand), v[n, keys].to(operand), tile_lse,
                _hidden(rows, keys, q.device), scale,
            )  # fmt: skip
            tile_dq += grads[0]
            dk[n, keys] += grads[1]
            dv[n, keys] += grads[2]
        dq[n, rows] = tile_dq
    return dq.transpose(1, 2), dk, dv
