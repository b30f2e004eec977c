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
    sums = q.shape[0] * q.shape[2] * 2 * max(1, call.geometry.num_select_blocks(call.max_len))
    max_tokens = max(1, MAX_SUM_BYTES // (sums * max(4, q.itemsize)))
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
    scratch = allocate(q, aligned_slices(*span.sizes()), span.split)
    span.launch(q, 0, (o, o, lse, lse), None, *scratch)
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
        tokens = slice(first_token, first_token + count)
        part, lse_part = q[:, tokens], lse[..., tokens]
        span = SpanLaunch(part, count, (k_cmp, k_cmp), None, call, False, True, settings)
        scratch = allocate(q, aligned_slices(*span.sizes()), span.split)
        span.launch(part, first_token, (part, part, lse_part, lse), blocks[:, tokens], *scratch)
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
    blocks = _distinct(blocks, call) if distinct else blocks
    scratch = allocate(q, aligned_slices(*branch.sizes()), branch.split)
    branch.launch(q, 0, blocks, o, lse, *scratch, distinct=distinct)
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
    stores = [as_bytes(x) for x in (k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)]
    tables = (*call.tables[:3], *scales_of(call))
    constants = (call.geometry, call.scale, bound, call.sequences is not None)
    for first_token, chunk in _prepare(q, gates, constants, *settings, *stores, *tables):
        scratch, counters = allocate(q, chunk.scratch, chunk.zero)
        parts = (q, gates, o, blocks)
        if chunk.tokens < q.shape[1]:
            tokens = slice(first_token, first_token + chunk.tokens)
            parts = (q[:, tokens], gates[:, tokens], o[:, tokens], blocks[:, tokens])
        if chunk.launch is None:
            bounded = dataclasses.replace(call, max_len=bound)
            _three_launches(first_token, *parts, stores, scratch, counters, bounded, settings)
            continue
        q_part, gates_part, o_part, blocks_part = parts
        lse, lse_win, o_cmp, o_win, split_ml, split_acc, sums, maxima = scratch
        chunk.launch(
            q_part, gates_part, *stores, o_part, o_cmp, o_win, lse, lse_win, sums, maxima,
            split_ml, split_acc, *counters, blocks_part, call.starts, call.lengths,
            sequences_of(call), *tables,
        )  # fmt: skip
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
    constants: tuple[BlockGeometry, float, int, bool],
    span_settings: Settings,
    sel_settings: Settings,
    *tensors: Tensor,
) -> list[tuple[int, _Chunk]]:
    """Return the first token of each chunk, and the chunk.

    Args:
        q: As in :func:`step`.
        gates: As in :func:`step`.
        constants: geometry, scale and max_len of the call, and whether it has sequences.
        span_settings: As in :func:`step`.
        sel_settings: As in :func:`step`.
        *tensors: k and v of cmp, sel and win, then their tables, then their scales.
    """
    # Launches take starts and lengths as tensors; what is prepared does not depend on them.
    geometry, scale, max_len, ragged = constants
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, cmp_table, table, win_table, *of_pages = tensors
    tables = BlockTables(cmp_table, table, win_table, win_table)  # a step does not read raw
    scales = PageScales(*of_pages) if k_cmp.dtype != q.dtype else None
    sequences = table if ragged else None
    call = DecodeCall(geometry, scale, table, table, tables, max_len, sequences, scales)
    chunks = []
    for first_token, count in _chunks(q, call):
        stores = (k_cmp, v_cmp), (k_win, v_win)
        span = SpanLaunch(q, count, *stores, call, True, True, span_settings)
        block_n = span.block_n if span.fuse else None
        sel = SelLaunch(q, count, k_sel, v_sel, call, sel_settings, block_n)
        fused = StepLaunch(span, sel)
        sizes = [fused.sizes()] if span.fuse else [span.sizes(), sel.sizes()]
        rows = q.shape[0] * count * q.shape[2]
        floats = [rows, rows, rows * v_sel.shape[3], rows * v_sel.shape[3]]
        floats += [n for f, _ in sizes for n in f]
        scratch = aligned_slices(floats, [n for _, i in sizes for n in i])
        launch = fused.launch(q, gates, first_token, q.shape[1]) if span.fuse else None
        zero = span.fuse or span.split or sel.split
        chunks.append((first_token, _Chunk(count, launch, scratch, zero)))
    return chunks


def _three_launches(
    first_token: int,
    q: Tensor,  # of a chunk, as the next three
    gates: Tensor,
    o: Tensor,
    blocks: Tensor,
    stores: Sequence[Tensor],
    scratch: Sequence[Tensor],
    counters: Sequence[Tensor],
    call: DecodeCall,
    settings: tuple[Settings, Settings],
) -> None:
    """Run a chunk in three launches."""
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = stores
    batch, count, heads, _ = q.shape
    span = SpanLaunch(q, count, (k_cmp, v_cmp), (k_win, v_win), call, True, True, settings[0])
    sel = SelLaunch(q, count, k_sel, v_sel, call, settings[1])
    size, width = batch * count * heads, o.shape[3]
    lse, lse_win = (x[:size].view(batch, heads, count) for x in scratch[:2])
    o_cmp, o_win = (x[: size * width].view(batch, count, heads, width) for x in scratch[2:4])
    span.launch(q, first_token, (o_cmp, o_win, lse, lse_win), blocks, scratch[4:8], counters[:1])
    sel.launch(q, first_token, blocks, o, lse, scratch[8:], counters[1:], gates, (o_cmp, o_win))
