"""The decode forms of cmp, select, sel and win, and the fused decode step.

A step is one launch of decode_step if its query tiles hold one token each and the tuned table sets
FUSE_STEP. Any other step takes three launches: decode_span (compressed tokens and window),
decode_choose (selection) and decode_sel (selected blocks and gates).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_backend_triton.decode.codes import scales_of
from nsa_backend_triton.decode.launch import (
    Pair,
    SelLaunch,
    Slices,
    SpanLaunch,
    StepLaunch,
    aligned_slices,
    allocate,
    cdiv,
    sequences_of,
)
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.launch_cache import Launch, cached_by_metadata
from nsa_core.contract import BlockTables, DecodeCall, PageScales
from nsa_core.dtypes import as_bytes
from nsa_core.layout import BlockGeometry

# A growing cache prepares its launches anew once per this many tokens.
BOUND = 256
# Upper limit of the sums that the selection reads back; a step runs in chunks of tokens within it.
MAX_SUM_BYTES = 2**28

# decode_sel compares up to so many blocks of a token with each other; longer lists are sorted.
MAX_COMPARED = 64

Settings = configs.Settings | None


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()


def _chunks(q: Tensor, call: DecodeCall) -> Iterator[tuple[int, int]]:
    """Yield chunks (first token, tokens) of a step whose sums over blocks fit MAX_SUM_BYTES."""
    bytes_per_token = (
        q.shape[0]
        * q.shape[2]
        * max(1, call.geometry.num_select_blocks(call.max_len))
        * 2
        * max(4, q.itemsize)
    )
    max_tokens = max(1, MAX_SUM_BYTES // bytes_per_token)
    for first_token in range(0, q.shape[1], max_tokens):
        yield first_token, min(max_tokens, q.shape[1] - first_token)


def _new_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate o [B, m, Hq, Dv] and lse [B, Hq, m]."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    return o, torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype, device=q.device)


def _new_blocks(q: Tensor, k_cmp: Tensor, call: DecodeCall) -> Tensor:
    shape = (*q.shape[:2], k_cmp.shape[2], call.geometry.num_selected_blocks)
    return torch.empty(shape, dtype=torch.int32, device=q.device)


def _span(
    q: Tensor, cmp: Pair | None, win: Pair | None, call: DecodeCall, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Run one branch of decode_span alone."""
    q = _unit_stride(q)
    span = SpanLaunch(q, q.shape[1], cmp, win, call, True, False, settings)
    o, lse = _new_outputs(q, (cmp or win)[1])  # type: ignore[index]  # one of them is given
    span.launch(
        q, 0, (o, o, lse, lse), None, *allocate(q, aligned_slices(*span.sizes()), span.split)
    )
    return o, lse


def cmp(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page, G, Dk]
    v_cmp: Tensor,  # [P, page, G, Dv]
    *,
    call: DecodeCall,
    settings: Settings = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, m, Hq, Dv] and lse [B, Hq, m] over the compressed tokens that a query sees."""
    return _span(q, (k_cmp, v_cmp), None, call, settings)


def win(
    q: Tensor,  # [B, m, Hq, Dk]
    k: Tensor,  # [P, page, G, Dk]
    v: Tensor,  # [P, page, G, Dv]
    *,
    call: DecodeCall,
    settings: Settings = None,
) -> tuple[Tensor, Tensor]:
    """Return o [B, m, Hq, Dv] and lse [B, Hq, m] over the last w tokens up to each query."""
    return _span(q, None, (k, v), call, settings)


def select(
    q: Tensor,  # [B, m, Hq, Dk]
    k_cmp: Tensor,  # [P, page, G, Dk]
    lse: Tensor,  # [B, Hq, m]
    *,
    call: DecodeCall,
    settings: Settings = None,
) -> Tensor:
    """Return the selected blocks, int32 [B, m, G, n], ascending, -1 at the end."""
    q, lse, blocks = _unit_stride(q), _unit_stride(lse), _new_blocks(q, k_cmp, call)
    for first_token, count in _chunks(q, call):
        tokens, q_chunk = (
            slice(first_token, first_token + count),
            q[:, first_token : first_token + count],
        )
        span = SpanLaunch(q_chunk, count, (k_cmp, k_cmp), None, call, False, True, settings)
        outputs = (q_chunk, q_chunk, lse[..., tokens], lse)
        span.launch(
            q_chunk,
            first_token,
            outputs,
            blocks[:, tokens],
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
    """Return o [B, m, Hq, Dv] and lse [B, Hq, m] over the selected blocks, up to each query."""
    q = _unit_stride(q)
    branch = SelLaunch(q, q.shape[1], k, v, call, settings)
    o, lse = _new_outputs(q, v)
    distinct = call.geometry.num_selected_blocks > MAX_COMPARED
    branch.launch(
        q,
        0,
        _distinct(blocks, call) if distinct else blocks,
        o,
        lse,
        *allocate(q, aligned_slices(*branch.sizes()), branch.split),
        distinct=distinct,
    )
    return o, lse


def _distinct(blocks: Tensor, call: DecodeCall) -> Tensor:
    """Return the blocks of each token in ascending order without repetition.

    The places that remain at the end hold a number beyond every block.
    """
    beyond = 2**31 // call.geometry.select_block_size - 1  # the last key fits 32 bits
    ordered = blocks.masked_fill(blocks < 0, beyond).clamp_(max=beyond).sort(-1).values
    repeated = ordered[..., 1:] == ordered[..., :-1]
    ordered[..., 1:].masked_fill_(repeated, beyond)
    return ordered.sort(-1).values


def step(
    q: Tensor,  # [B, m, Hq, Dk]
    gates: Tensor,  # [B, m, Hq, 3]
    k_cmp: Tensor,  # [P, page, G, Dk]
    v_cmp: Tensor,  # [P, page, G, Dv]
    k_sel: Tensor,  # [P, page, G, Dk]
    v_sel: Tensor,  # [P, page, G, Dv]
    k_win: Tensor,  # [P, page, G, Dk]
    v_win: Tensor,  # [P, page, G, Dv]
    *,
    call: DecodeCall,
    settings: tuple[Settings, Settings] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Return o [B, m, Hq, Dv], the gated sum of the branches, and the blocks, int32 [B, m, G, n].

    ``settings`` replace the tuned settings of decode_span and decode_sel.
    """
    q, gates, blocks = _unit_stride(q), _unit_stride(gates), _new_blocks(q, k_cmp, call)
    o = torch.empty((*q.shape[:3], v_sel.shape[3]), dtype=q.dtype, device=q.device)
    # A bound that grew with every token would prepare new launches for every token.
    bound = cdiv(call.max_len, BOUND) * BOUND
    k_cmp, k_sel, k_win = (as_bytes(x) for x in (k_cmp, k_sel, k_win))
    v_cmp, v_sel, v_win = (as_bytes(x) for x in (v_cmp, v_sel, v_win))
    stores = (k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)
    constants = (call.geometry, call.scale, bound, call.sequences is not None)
    sequences, (cmp_table, sel_table, win_table, _) = sequences_of(call), call.tables
    tables = (cmp_table, sel_table, win_table, *scales_of(call))
    chunks = _prepare(q, gates, *stores, *tables, constants, *settings)
    for first_token, chunk in chunks:
        scratch, counters = allocate(q, chunk.scratch, chunk.zero)
        q_chunk, gates_chunk, o_chunk, blocks_chunk = q, gates, o, blocks
        if chunk.tokens < q.shape[1]:
            tokens = slice(first_token, first_token + chunk.tokens)
            q_chunk, gates_chunk, o_chunk, blocks_chunk = (
                x[:, tokens] for x in (q, gates, o, blocks)
            )
        if chunk.launch is not None:
            lse, lse_win, o_cmp, o_win, split_ml, split_acc, sums, maxima = scratch
            branches = (o_cmp, o_win, lse, lse_win)
            chunk.launch(
                q_chunk,
                gates_chunk,
                *stores,
                o_chunk,
                *branches,
                sums,
                maxima,
                split_ml,
                split_acc,
                *counters,
                blocks_chunk,
                call.starts,
                call.lengths,
                sequences,
                *tables,
            )
        else:
            _three_launches(
                chunk.tokens,
                first_token,
                q_chunk,
                gates_chunk,
                stores,
                o_chunk,
                blocks_chunk,
                scratch,
                counters,
                dataclasses.replace(call, max_len=bound),
                settings,
            )
    return o, blocks


class _Chunk(NamedTuple):
    """The part of a chunk of tokens that follows from metadata."""

    tokens: int
    launch: Launch | None  # decode_step; None: three launches
    scratch: Slices  # lse of cmp and of win, their o, and the scratch of the launches
    zero: bool


@cached_by_metadata
def _prepare(
    q: Tensor,
    gates: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    cmp_table: Tensor,
    sel_table: Tensor,
    win_table: Tensor,
    cmp_scales: Tensor,
    sel_scales: Tensor,
    win_scales: Tensor,
    constants: tuple[BlockGeometry, float, int, bool],
    span_settings: Settings,
    sel_settings: Settings,
) -> list[tuple[int, _Chunk]]:
    """Return the first token of each chunk, and the chunk.

    ``constants``: geometry, scale and max_len of the call, and whether it has sequences.
    """
    # Launches take starts and lengths as tensors; what is prepared does not depend on them.
    geometry, scale, max_len, ragged = constants
    tables = BlockTables(cmp_table, sel_table, win_table, win_table)  # a step does not read raw
    sequences = sel_table if ragged else None
    scales = PageScales(cmp_scales, sel_scales, win_scales) if k_cmp.dtype != q.dtype else None
    call = DecodeCall(geometry, scale, sel_table, sel_table, tables, max_len, sequences, scales)
    chunks = []
    for first_token, count in _chunks(q, call):
        stores = (k_cmp, v_cmp), (k_win, v_win)
        span = SpanLaunch(q, count, *stores, call, True, True, span_settings)
        sel = SelLaunch(
            q, count, k_sel, v_sel, call, sel_settings, span.block_n if span.fuse else None
        )
        fused = StepLaunch(span, sel)
        sizes = [fused.sizes()] if span.fuse else [span.sizes(), sel.sizes()]
        head_rows = q.shape[0] * count * q.shape[2]
        floats = (
            [head_rows] * 2 + [head_rows * v_sel.shape[3]] * 2 + [n for f, _ in sizes for n in f]
        )
        scratch = aligned_slices(floats, [n for _, i in sizes for n in i])
        launch = fused.launch(q, gates, first_token, q.shape[1]) if span.fuse else None
        zero = span.fuse or span.split or sel.split
        chunks.append((first_token, _Chunk(count, launch, scratch, zero)))
    return chunks


def _three_launches(
    count: int,
    first_token: int,
    q: Tensor,
    gates: Tensor,
    stores: tuple[Tensor, ...],
    o: Tensor,
    blocks: Tensor,
    scratch: Sequence[Tensor],
    counters: Sequence[Tensor],
    call: DecodeCall,
    settings: tuple[Settings, Settings],
) -> None:
    """Run a chunk in three launches."""
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = stores
    span = SpanLaunch(q, count, (k_cmp, v_cmp), (k_win, v_win), call, True, True, settings[0])
    sel = SelLaunch(q, count, k_sel, v_sel, call, settings[1])
    lead = (q.shape[0], count, q.shape[2])
    size = lead[0] * lead[1] * lead[2]
    lse, lse_win = (x[:size].view(lead[0], lead[2], count) for x in scratch[:2])
    o_cmp, o_win = (x[: size * o.shape[3]].view(*lead, o.shape[3]) for x in scratch[2:4])
    span.launch(q, first_token, (o_cmp, o_win, lse, lse_win), blocks, scratch[4:8], counters[:1])
    sel.launch(q, first_token, blocks, o, lse, scratch[8:], counters[1:], gates, (o_cmp, o_win))
