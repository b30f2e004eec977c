"""Decode forms: cmp, select, sel and win alone, and a whole step.

step   One token: decode_step does it all. Several tokens, and where the table says so: decode_span
       (compressed tokens
       and window), decode_choose (their blocks), decode_sel (the chosen blocks, and the gates).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_backend_triton.decode.launch import (
    Pair,
    Sel,
    Slices,
    Span,
    Step,
    aligned_slices,
    allocate,
    cdiv,
)
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.launch_cache import Launch, remembered
from nsa_core.contract import DecodeCall

BOUND = 256  # tokens: step by step of so many the launches of a growing cache are cut anew
# of what the choice of blocks reads again: tokens are done in runs that need no more
SUM_BYTES = 2**28

Settings = configs.Settings | None


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _runs(q: Tensor, call: DecodeCall) -> Iterator[tuple[int, int]]:
    """Runs (first, count) of a step's tokens whose sums over blocks fit SUM_BYTES."""
    each = (
        q.shape[0]
        * q.shape[2]
        * max(1, call.geometry.num_select_blocks(call.max_len))
        * 2
        * max(4, q.itemsize)
    )
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


def _span(
    q: Tensor, cmp: Pair | None, win: Pair | None, call: DecodeCall, chosen: Settings
) -> tuple[Tensor, Tensor]:
    """One branch alone."""
    q = _unit(q)
    span = Span(q, q.shape[1], cmp, win, call, True, False, chosen)
    o, lse = _outputs(q, (cmp or win)[1])  # type: ignore[index]  # one of them is given
    span.launch(
        q, 0, (o, o, lse, lse), None, *allocate(q, aligned_slices(*span.sizes()), span.split)
    )
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
        span.launch(
            of,
            first,
            stats,
            blocks[:, part],
            *allocate(q, aligned_slices(*span.sizes()), span.split),
        )
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
    of.launch(q, 0, _unit(blocks), o, lse, *allocate(q, aligned_slices(*of.sizes()), of.split))
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
    """o [B, m, Hq, Dv] of all branches and gates, and blocks int32 [B, m, G, n]; ``settings`` of
    span and sel.
    """
    q, gates, blocks = _unit(q), _unit(gates), _blocks(q, k_cmp, call)
    o = torch.empty((*q.shape[:3], v_sel.shape[3]), dtype=q.dtype, device=q.device)
    # A bound that grows with every token would have its launches worked out for every token.
    bound = cdiv(call.max_len, BOUND) * BOUND
    call = DecodeCall(call.geometry, call.scale, call.starts, call.lengths, call.block_table, bound)
    stores = (k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)
    for first, made in _prepare(q, gates, *stores, call, *settings):
        (scratch, counters), part = (
            allocate(q, made.scratch, made.zero),
            slice(first, first + made.rows),
        )
        # Slices of everything would be four operators for nothing.
        of, gate, out, picked = (
            x if made.rows == q.shape[1] else x[:, part] for x in (q, gates, o, blocks)
        )
        if made.launch is not None:
            lse, lse_win, o_cmp, o_win, stats, parts, sums, references = scratch
            branches = (o_cmp, o_win, lse, lse_win)
            made.launch(
                of,
                gate,
                *stores,
                out,
                *branches,
                sums,
                references,
                stats,
                parts,
                *counters,
                picked,
                call.starts,
                call.lengths,
                call.block_table,
            )
        else:
            _by_span_and_sel(
                made.rows, first, of, gate, stores, out, picked, scratch, counters, call, settings
            )
    return o, blocks


class _Run(NamedTuple):
    """What metadata decide of some tokens of a step."""

    rows: int
    launch: Launch | None  # of all of it; None: several launches
    scratch: Slices  # lse of cmp and of win, their o, and what the launches ask for
    zero: bool


@remembered
def _prepare(
    q: Tensor, gates: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor,
    k_win: Tensor, v_win: Tensor,
    call: DecodeCall, of_span: Settings, of_sel: Settings,
) -> list[tuple[int, _Run]]:  # fmt: skip
    """Each run's first token, and the run."""
    runs = []
    for first, count in _runs(q, call):
        span = Span(q, count, (k_cmp, v_cmp), (k_win, v_win), call, True, True, of_span)
        chosen = Sel(q, count, k_sel, v_sel, call, of_sel, span.keys if span.merge else None)
        whole = Step(span, chosen)
        sizes = [whole.sizes()] if span.merge else [span.sizes(), chosen.sizes()]
        size = q.shape[0] * count * q.shape[2]
        floats = [size] * 2 + [size * v_sel.shape[3]] * 2 + [n for f, _ in sizes for n in f]
        scratch = aligned_slices(floats, [n for _, i in sizes for n in i])
        launch = whole.launch(q, gates, first, q.shape[1]) if span.merge else None
        runs.append((first, _Run(count, launch, scratch, span.merge or span.split or chosen.split)))
    return runs


def _by_span_and_sel(
    count: int, first: int, q: Tensor, gates: Tensor, stores: tuple[Tensor, ...], o: Tensor,
    blocks: Tensor,
    scratch: Sequence[Tensor], counters: Sequence[Tensor], call: DecodeCall,
    settings: tuple[Settings, Settings],
) -> None:  # fmt: skip
    """A run in several launches."""
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = stores
    span = Span(q, count, (k_cmp, v_cmp), (k_win, v_win), call, True, True, settings[0])
    chosen = Sel(q, count, k_sel, v_sel, call, settings[1])
    lead = (q.shape[0], count, q.shape[2])
    size = lead[0] * lead[1] * lead[2]
    lse, lse_win = (x[:size].view(lead[0], lead[2], count) for x in scratch[:2])
    o_cmp, o_win = (x[: size * o.shape[3]].view(*lead, o.shape[3]) for x in scratch[2:4])
    span.launch(q, first, (o_cmp, o_win, lse, lse_win), blocks, scratch[4:8], counters[:1])
    chosen.launch(q, first, blocks, o, lse, scratch[8:], counters[1:], gates, (o_cmp, o_win))
