"""Plain causal attention with as many queries as keys, and its gradient: the one file that calls
PyTorch's own kernels.

The public scaled_dot_product_attention returns no LSE, so the operators under it are called. Which
one:
    CPU                        the CPU flash operator, on operands widened to fp32: its bf16 LSE is
                               good to 14 bits
    CUDA bf16/fp16, D <= 256   the FlashAttention-2 operator
    otherwise                  tiles of engine.py: fp32 stays IEEE, fp64 and wide heads work, and
                               the bits repeat

q [N, H, L, Dk] over k [N, L, Dk], v [N, L, Dv]: N counts batch entries times kv heads; H heads
share keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_backend_sdpa import device, engine
from nsa_backend_sdpa.engine import stats_dtype

_FLASH_WIDTH = 256  # widest head of the CUDA operator
_GRID = 65_535  # batch entries of one call: a grid's second axis ends there
_ops = torch.ops.aten


def route(
    dtype: torch.dtype, device_type: str, width: int, capability: tuple[int, int] | None
) -> str:
    """Which of "cpu", "flash", "tiles" runs heads of ``width`` = max(Dk, Dv)."""
    if device_type == "cpu":
        return "cpu"
    half = dtype in (torch.bfloat16, torch.float16)
    if (
        device_type == "cuda"
        and half
        and width <= _FLASH_WIDTH
        and capability is not None
        and capability >= (8, 0)
    ):
        return "flash"
    return "tiles"


def _route(q: Tensor, v: Tensor) -> str:
    width = max(q.shape[-1], v.shape[-1])
    return route(q.dtype, device.device_type(q), width, device.capability(q))


def _signed(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """A positive scale, its sign or zero moved into q: the kernels scale after masking with
    -inf.
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def _fit(x: Tensor, width: int) -> Tensor:
    """``x`` [..., width], zeros behind it, and a last axis of unit stride, which the operators
    assume unchecked.

    ``pad`` keeps the memory format that the strides suggest: heads of one element suggest
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
    """o [N, H, L, Dv] in q's dtype (strides are the kernel's) and lse [N, H, L]."""
    assert q.shape[2] == k.shape[1] == v.shape[1], (
        "is_causal aligns top-left: only for as many queries as keys"
    )
    kernel, q_width, v_width = _route(q, v), q.shape[-1], v.shape[-1]
    if kernel == "tiles":
        return _tiles_forward(q, k, v, scale)
    if kernel == "flash" and len(q) > _GRID:
        cuts = [slice(n, n + _GRID) for n in range(0, len(q), _GRID)]
        parts = [causal(q[n], k[n], v[n], scale) for n in cuts]
        return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])
    q, scale = _signed(q, scale)
    if kernel == "cpu":
        wide, width = stats_dtype(q.dtype), max(q_width, v_width)
        q4, k4, v4 = _operands(q.to(wide), k.to(wide), v.to(wide), width)
        o, lse = _ops._scaled_dot_product_flash_attention_for_cpu(
            q4, k4, v4, 0.0, True, scale=scale
        )
        # The operator returns 0 for a row of NaN scores, as for a row without keys.
        lost = q4.isnan().any(-1) | k4[:, :1].isnan().any(-1).cummax(-1).values
        o, lse = o.masked_fill(lost.unsqueeze(-1), torch.nan), lse.masked_fill(lost, torch.nan)
    else:
        q4, k4, v4 = _operands(q, k, v, -(-max(q_width, v_width) // 8) * 8)
        o, lse = _ops._scaled_dot_product_flash_attention(
            q4, k4, v4, 0.0, True, False, scale=scale
        )[:2]
    return o[..., :v_width].to(q.dtype), lse


def _operands(q: Tensor, k: Tensor, v: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """One width, and k, v seen by every head through stride 0: no copy."""
    heads = (-1, q.shape[1], -1, -1)
    return (
        _fit(q, width),
        _fit(k, width).unsqueeze(1).expand(heads),
        _fit(v, width).unsqueeze(1).expand(heads),
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
    """dq [N, H, L, Dk]; dk [N, L, Dk] and dv [N, L, Dv] in the statistics' dtype, summed there over
    the heads.
    """
    assert q.shape[2] == k.shape[1] == v.shape[1], (
        "is_causal aligns top-left: only for as many queries as keys"
    )
    kernel, q_width, v_width, stats = _route(q, v), q.shape[-1], v.shape[-1], stats_dtype(q.dtype)
    if kernel == "tiles" or (kernel == "flash" and deterministic):
        return _tiles_backward(do, q, k, v, o, lse, scale)
    if kernel == "flash" and len(q) > _GRID:
        cuts = [slice(n, n + _GRID) for n in range(0, len(q), _GRID)]
        grads = [
            causal_backward(do[n], q[n], k[n], v[n], o[n], lse[n], scale, deterministic)
            for n in cuts
        ]
        d_q, d_k, d_v = (torch.cat(parts) for parts in zip(*grads))
        return d_q, d_k, d_v
    signed, positive = _signed(q, scale)
    if kernel == "cpu":
        width = max(q_width, v_width)
        q4, k4, v4 = _operands(signed.to(stats), k.to(stats), v.to(stats), width)
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            _fit(do.to(stats), width),
            q4,
            k4,
            v4,
            _fit(o.to(stats), width),
            lse,
            0.0,
            True,
            scale=positive,
        )
    else:
        width, length = -(-max(q_width, v_width) // 8) * 8, q.shape[2]
        q4, k4, v4 = _operands(signed, k, v, width)
        # state of the dropout's generator, which is not used
        state = torch.zeros(2, dtype=torch.int64, device=q.device)
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_backward(
            _fit(do, width),
            q4,
            k4,
            v4,
            _fit(o, width),
            lse.contiguous(),
            None,
            None,
            length,
            length,
            0.0,
            True,
            state,
            state,
            scale=positive,
        )
    dq = dq[..., :q_width].to(q.dtype)
    if scale <= 0:
        dq = -dq if scale < 0 else dq * 0
    return dq, dk[..., :q_width].sum(1, dtype=stats), dv[..., :v_width].sum(1, dtype=stats)


def tile_of(
    count: int, heads: int, length: int, itemsize: int, budget: int
) -> tuple[int, int, int]:
    """Batch entries, query rows and keys of one tile, so that its scores take at most ``budget``
    bytes.
    """
    keys = min(length, 1024)
    rows = max(1, min(length, budget // (heads * keys * itemsize)))
    return max(1, min(count, budget // (heads * keys * rows * itemsize))), rows, keys


def _tiles(q: Tensor) -> Iterator[tuple[slice, slice, list[slice]]]:
    """(batch entries, query rows, runs of keys those rows see)."""
    count, heads, length, _ = q.shape
    itemsize, budget = stats_dtype(q.dtype).itemsize, engine.score_bytes(q)
    entries, rows, keys = tile_of(count, heads, length, itemsize, budget)
    for n in device.pieces(count, entries):
        for r in device.pieces(length, rows):
            yield n, r, list(device.pieces(r.stop, keys))


def _hidden(rows: slice, keys: slice, q: Tensor) -> Tensor:
    """[R, 1, L]: key after row."""
    row = torch.arange(rows.start, rows.stop, device=q.device)
    return (torch.arange(keys.start, keys.stop, device=q.device) > row[:, None]).unsqueeze(1)


def _tiles_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    count, heads, length, _ = q.shape
    operand = engine.operand_dtype(q)
    o = q.new_empty((count, length, heads, v.shape[-1]))
    lse = q.new_empty((count, length, heads), dtype=stats_dtype(q.dtype))
    for n, rows, runs in _tiles(q):
        tile = engine.packed_as(q[n, :, rows].transpose(1, 2), operand)
        total: tuple[Tensor, Tensor] | None = None
        for keys in runs:
            hidden = _hidden(rows, keys, q)
            new = engine.attend(tile, k[n, keys].to(operand), v[n, keys].to(operand), hidden, scale)
            total = engine.merge(total, new)
        assert total is not None
        o[n, rows], lse[n, rows] = total
        del tile, total, new, hidden
    return o.transpose(1, 2), lse.transpose(1, 2)


def _tiles_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    count, heads, length, width = q.shape
    dq = torch.empty((count, length, heads, width), dtype=q.dtype, device=q.device).transpose(1, 2)
    dk, dv = (torch.zeros(x.shape, dtype=stats_dtype(x.dtype), device=x.device) for x in (k, v))
    for n, rows, runs in _tiles(q):
        queries = [x[n, :, rows].transpose(1, 2) for x in (do, q, o, lse.unsqueeze(-1))]
        dq[n, :, rows] = _tile_backward(
            queries, k[n], v[n], dk[n], dv[n], rows, runs, scale
        ).transpose(1, 2)
    return dq, dk, dv


def _tile_backward(
    queries: list[Tensor],  # do, q, o, lse [N, R, H, D]
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    rows: slice,
    runs: list[slice],
    scale: float,
) -> Tensor:
    """dq [N, R, H, Dk] of the rows; adds to dk and dv."""
    do, q, o, lse = queries
    operand, stats = engine.operand_dtype(q), stats_dtype(q.dtype)
    delta = (do.to(stats) * o).sum(-1)
    do, q = engine.packed_as(do, operand), engine.packed_as(q, operand)
    total: Tensor | None = None
    for keys in runs:
        tile_k, tile_v, hidden = (
            k[:, keys].to(operand),
            v[:, keys].to(operand),
            _hidden(rows, keys, q),
        )
        new = engine.attend_backward(do, delta, q, tile_k, tile_v, lse.squeeze(-1), hidden, scale)
        total = new[0] if total is None else total.add_(new[0])
        dk[:, keys] += new[1]
        dv[:, keys] += new[2]
    assert total is not None
    return total
