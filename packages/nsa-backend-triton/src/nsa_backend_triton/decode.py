"""Decode forms: cmp, select, sel and win alone, and a whole step.

step   One token: decode_step does it all. Several tokens, and where the table says so: decode_span (compressed tokens
       and window), decode_choose (their blocks), decode_sel (the chosen blocks, and the gates).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_backend_triton import configs
from nsa_backend_triton.decode_launch import Pair, Sel, Span, Step, allocate
from nsa_core.contract import DecodeCall

SUM_BYTES = 2**28  # of what the choice of blocks reads again: tokens are done in runs that need no more

Settings = configs.Settings | None


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _runs(q: Tensor, call: DecodeCall) -> Iterator[tuple[int, int]]:
    """Runs (first, count) of a step's tokens whose sums over blocks fit SUM_BYTES."""
    each = q.shape[0] * q.shape[2] * max(1, call.geometry.num_select_blocks(call.max_len)) * 2 * max(4, q.itemsize)
    most = max(1, SUM_BYTES // each)
    for first in range(0, q.shape[1], most):
        yield first, min(most, q.shape[1] - first)


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """o [B, m, Hq, Dv] and lse [B, Hq, m], to be filled."""
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    return o, torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=stats, device=q.device)


def _blocks(q: Tensor, k_cmp: Tensor, call: DecodeCall) -> Tensor:
    shape = (*q.shape[:2], k_cmp.shape[2], call.geometry.num_selected_blocks)
    return torch.empty(shape, dtype=torch.int32, device=q.device)


def _span(q: Tensor, cmp: Pair | None, win: Pair | None, call: DecodeCall, chosen: Settings) -> tuple[Tensor, Tensor]:
    """One branch alone."""
    q = _unit(q)
    span = Span(q, q.shape[1], cmp, win, call, True, False, chosen)
    o, lse = _outputs(q, (cmp or win)[1])  # type: ignore[index]  # one of them is given
    span.launch(q, 0, (o, o, lse, lse), None, *allocate(q, *span.sizes(), span.split))
    return o, lse


def cmp(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page / d, G, Dk]
    v_cmp: Tensor,  # [P, page / d, G, Dv]
    *,
    call: DecodeCall,
    settings: Settings = None,
) -> tuple[Tensor, Tensor]:
    """o [B, m, Hq, Dv] and lse [B, Hq, m] over the compressed tokens that each query sees."""
    return _span(q, (k_cmp, v_cmp), None, call, settings)


def win(
    q: Tensor,  # [B, m, Hq, Dk]
    k: Tensor,  # [B, R, G, Dk], a ring
    v: Tensor,  # [B, R, G, Dv]
    *,
    call: DecodeCall,
    settings: Settings = None,
) -> tuple[Tensor, Tensor]:
    """o [B, m, Hq, Dv] and lse [B, Hq, m] over the last w tokens up to each query."""
    return _span(q, None, (k, v), call, settings)


def select(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page / d, G, Dk]
    lse: Tensor,  # [B, Hq, m]
    *,
    call: DecodeCall,
    settings: Settings = None,
) -> Tensor:
    """blocks int32 [B, m, G, n], ascending, -1 at the end."""
    q, lse, blocks = _unit(q), _unit(lse), _blocks(q, k_cmp, call)
    for first, count in _runs(q, call):
        part, of = slice(first, first + count), q[:, first : first + count]
        span = Span(of, count, (k_cmp, k_cmp), None, call, False, True, settings)
        stats = (of, of, lse[..., part], lse)
        span.launch(of, first, stats, blocks[:, part], *allocate(q, *span.sizes(), span.split))
    return blocks


def sel(
    q: Tensor,  # [B, m, Hq, Dk]
    k: Tensor,  # [P, page, G, Dk]
    v: Tensor,  # [P, page, G, Dv]
    blocks: Tensor,  # int32 or int64 [B, m, G, n]
    *,
    call: DecodeCall,
    settings: Settings = None,
) -> tuple[Tensor, Tensor]:
    """o [B, m, Hq, Dv] and lse [B, Hq, m] over the chosen blocks, keys up to each query."""
    q = _unit(q)
    of = Sel(q, q.shape[1], k, v, call, settings)
    o, lse = _outputs(q, v)
    of.launch(q, 0, _unit(blocks), o, lse, *allocate(q, *of.sizes(), of.split))
    return o, lse


def step(
    q: Tensor,  # [B, m, Hq, Dk]
    gates: Tensor,  # [B, m, Hq, 3]
    k_cmp: Tensor,  # [P, page / d, G, Dk]
    v_cmp: Tensor,  # [P, page / d, G, Dv]
    k_sel: Tensor,  # [P, page, G, Dk]
    v_sel: Tensor,  # [P, page, G, Dv]
    k_win: Tensor,  # [B, R, G, Dk], a ring
    v_win: Tensor,  # [B, R, G, Dv]
    *,
    call: DecodeCall,
    settings: tuple[Settings, Settings] = (None, None),
) -> tuple[Tensor, Tensor]:
    """o [B, m, Hq, Dv] of all branches and gates, and blocks int32 [B, m, G, n]; ``settings`` of span and sel."""
    q, gates, blocks = _unit(q), _unit(gates), _blocks(q, k_cmp, call)
    o = torch.empty((*q.shape[:3], v_sel.shape[3]), dtype=q.dtype, device=q.device)
    for first, count in _runs(q, call):
        part = slice(first, first + count)
        of = q[:, part]
        span = Span(of, count, (k_cmp, v_cmp), (k_win, v_win), call, True, True, settings[0])
        chosen = Sel(of, count, k_sel, v_sel, call, settings[1], span.keys if span.merge else None)
        whole = Step(span, chosen)
        sizes = [whole.sizes()] if span.merge else [span.sizes(), chosen.sizes()]
        lead = (q.shape[0], count, q.shape[2])
        size = lead[0] * lead[1] * lead[2]
        floats = [size * o.shape[3]] * 2 + [size] * 2 + [n for f, _ in sizes for n in f]
        zeros = span.merge or span.split or chosen.split
        scratch, counters = allocate(q, floats, [n for _, i in sizes for n in i], zeros)
        o_cmp, o_win = (x[: floats[0]].view(*lead, o.shape[3]) for x in scratch[:2])
        lse, lse_win = (x[:size].view(lead[0], lead[2], count) for x in scratch[2:4])
        if span.merge:
            outputs = (o[:, part], o_cmp, o_win, lse, lse_win)
            whole.launch(of, gates[:, part], first, outputs, blocks[:, part], scratch[4:], counters)
        else:
            span.launch(of, first, (o_cmp, o_win, lse, lse_win), blocks[:, part], scratch[4:8], counters[:1])
            chosen.launch(
                of, first, blocks[:, part], o[:, part], lse, scratch[8:], counters[1:], gates[:, part], (o_cmp, o_win)
            )
    return o, blocks
