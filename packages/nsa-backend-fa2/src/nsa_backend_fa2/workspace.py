"""Peak bytes of forward and backward beyond the inputs, what the library allocates inside included.

A Request that does not say its size counts as one sequence of one token.
"""

from __future__ import annotations

from nsa_backend_fa2.operands import width_of
from nsa_backend_fa2.sel import keys_per_token, tokens_at_once
from nsa_core.contract import Request

_ITEM, _STAT = 2, 4  # bytes of bf16 and fp16, and of fp32


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


def _sizes(request: Request) -> tuple[int, int, int]:
    """Batch entries (1 when packed), tokens of each, and head width of the library call."""
    batch = 1 if request.varlen else (request.batch or 1)
    return batch, request.seq_len or 1, width_of(request.head_dim, request.v_head_dim)


def _library_backward(batch: int, rows: int, heads: int, keys: int, kv_heads: int, width: int) -> int:
    """dq, dk, dv, dq in fp32, the rows' sums, and dk, dv per query head before they are summed over the group."""
    long, wide = _up(rows, 128), _up(width, 32 if width <= 128 else 64)
    grads = batch * width * (rows * heads + 2 * keys * kv_heads) * _ITEM
    expanded = 2 * batch * keys * heads * width * _ITEM if heads != kv_heads else 0
    return grads + expanded + batch * long * heads * (wide + 1) * _STAT


def _fits(batch: int, rows: int, widths: list[tuple[int, int]], width: int) -> int:
    """Copies of operands, (heads, width) each, that are not as wide as the call."""
    return sum(batch * rows * heads * width * _ITEM for heads, own in widths if own != width)


def win(request: Request) -> int:
    """Outputs, padded operands where a head is padded, and the library's own."""
    batch, length, width = _sizes(request)
    heads, groups, Dk, Dv = request.n_heads, request.n_kv_heads, request.head_dim, request.v_head_dim
    fits = _fits(batch, length, [(heads, Dk), (groups, Dk), (groups, Dv)], width)
    stats = batch * length * heads * _STAT
    out = batch * length * heads * (width + (Dv if Dv != width else 0)) * _ITEM
    forward = fits + stats + out
    if not request.needs_grad:
        return forward
    fits += 2 * _fits(batch, length, [(heads, Dv)], width)
    cut = batch * length * ((heads + groups) * Dk * (Dk != width) + groups * Dv * (Dv != width)) * _ITEM
    return max(forward, fits + _library_backward(batch, length, heads, length, groups, width) + cut)


def cmp(request: Request) -> int:
    """As :func:`win` for the folded call, and the folded copies."""
    batch, length, width = _sizes(request)
    geometry = request.geometry
    heads, groups, Dk, Dv = request.n_heads, request.n_kv_heads, request.head_dim, request.v_head_dim
    runs = geometry.max_compressed(length) if request.varlen else geometry.num_compressed(length)
    stats = batch * length * heads * _STAT
    if runs == 0:
        return stats + batch * length * heads * max(Dv, Dk if request.needs_grad else 0) * _ITEM
    folded_heads = heads * geometry.compress_stride
    item = batch * runs * folded_heads * _ITEM  # bytes of a folded tensor per unit of width
    keys = _fits(batch, runs, [(groups, Dk), (groups, Dv)], width)
    fold_q = item * (Dk + (width if Dk != width else 0))
    forward = keys + fold_q + item * width + batch * length * heads * Dv * _ITEM + 3 * stats
    if not request.needs_grad:
        return forward
    operands = fold_q + 2 * item * (Dv + (width if Dv != width else 0)) + 2 * stats + keys
    inside = _library_backward(batch, runs, folded_heads, runs, groups, width)
    return max(forward, operands + inside)


def sel(request: Request) -> int:
    """Outputs, the fp32 sums of dk and dv, and one chunk."""
    batch, length, width = _sizes(request)
    heads, groups, Dk, Dv = request.n_heads, request.n_kv_heads, request.head_dim, request.v_head_dim
    keys = keys_per_token(request.geometry, request.geometry.num_selected_blocks, length)
    tokens = min(batch * length, tokens_at_once(groups, keys))
    gathered, rows = tokens * groups * keys, tokens * heads
    index = gathered * 8 * 6  # int64 of the gathering
    chunk = gathered * (Dk + Dv + width * ((Dk != width) + (Dv != width))) * _ITEM + rows * 4 * width * _ITEM
    stats = 2 * batch * length * heads * _STAT + batch * length * 8 * 2
    forward = batch * length * heads * Dv * _ITEM + stats + chunk + index
    if not request.needs_grad:
        return forward
    sums = batch * length * groups * (Dk + Dv) * (_STAT + _ITEM)
    accumulate = tokens * groups * (_up(request.n_heads // groups, 128) + 128) * _up(width, 32) * _STAT
    inside = gathered * 2 * width * _ITEM + gathered * max(Dk, Dv) * _STAT + accumulate
    return max(forward, batch * length * heads * Dk * _ITEM + sums + stats + chunk + index + inside)
