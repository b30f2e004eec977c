"""Backward of the selected branch: dq, dk and dv from the (token, block) pairs sorted by block.

    P = exp(scale q k^T - lse), dP = do v^T, delta = sum over columns of do * o
    dS = scale P (dP - delta), dv = P^T do, dk = dS^T q, dq = dS k

over the keys <= t of the blocks that token t selected (Eq. 4 over the keys of Eq. 12).

There are three forms. In short sequences, the bitmask form needs no lists of pairs (bitmask.py); it
always adds in a fixed order. In longer ones, the unordered form is one pass with 5 matrix products,
which adds all three gradients in fp32, in no fixed order. The ordered form takes dk and dv from
partial sums that are added in a fixed order, and dq tile by tile: 7 products.
``call.deterministic`` selects it, and so does the setting ORDERED of rows of the tuned table where
it is faster.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from nsa_backend_triton.host import configs, constexprs, descriptors, device, strides
from nsa_backend_triton.host.fork import Fork
from nsa_backend_triton.host.launch_cache import Launch, Memo, aligned, cached_by_metadata
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel import bitmask, delta, pair_lists
from nsa_backend_triton.sel import forward as sel_forward
from nsa_backend_triton.sel import unions as sel_union
from nsa_backend_triton.sel.backward_blocks import (
    sel_add_chunks,
    sel_block_backward,
    sel_round,
    sel_segments,
)
from nsa_backend_triton.sel.backward_tiles import sel_tile_backward
from nsa_backend_triton.sel.pair_lists import PairLists
from nsa_backend_triton.sel.problem import Problem, tuned_settings
from nsa_core.contract import SlotCall

MAX_SEGMENTS = 32  # limits the programs per block at every sequence length
# In shorter segments (in tokens) and chunks (in pairs), starting and finishing a program takes
# longer than its pairs.
MIN_SEGMENT_TOKENS, MIN_CHUNK_PAIRS = 128, 256
ROUND_BLOCK = 4096  # elements per program of sel_round
# Settings of sel_block_backward that are no arguments of the kernel.
_SCHEDULE_SETTINGS = ("SEGMENT_ROWS", "CHUNK_PAIRS", "PROGRAMS_PER_SM", "ORDERED")


class _BlockLaunches(NamedTuple):
    """The launches over blocks, and the sizes that follow from a call's metadata."""

    segments: Launch | None  # None: ordered
    bounds_shape: tuple[int, int]
    gradients: Launch
    add_chunks: tuple[Launch, ...]  # of dk and of dv; empty: unordered
    partial_shapes: tuple[tuple[int, int], ...]  # of their inputs
    round: Launch
    # Where dq, dk and dv begin in the buffer of sums, and its end.
    sum_offsets: tuple[int, int, int, int]


class _Schedule(NamedTuple):
    """How the pairs of the blocks are distributed over programs."""

    items: int  # programs per key tile of a block, over all blocks
    segment_tokens: int
    num_segments: int
    chunk_pairs: int  # pairs of an ordered program


def _schedule(
    problem: Problem,
    num_pairs: int,
    num_buckets: int,
    settings: configs.Settings,
    ordered: bool,
) -> _Schedule:
    """Choose segments, or ordered chunks, that give each multiprocessor PROGRAMS_PER_SM programs.

    Short sequences would otherwise occupy few multiprocessors. A chunk is a power of two, so that
    sequences of similar length have their sums cut in the same places.
    """
    seqs = problem.seqs
    longest = problem.call.max_seqlen if seqs.packed else seqs.seq_len
    num_programs = settings["PROGRAMS_PER_SM"] * device.multiprocessors(problem.q.device)
    divided_pairs = num_pairs * seqs.divided.n // max(1, seqs.n)
    pairs_per_program = divided_pairs // num_programs
    segment_tokens = min(
        max(pairs_per_program, MIN_SEGMENT_TOKENS), settings["SEGMENT_ROWS"] // problem.group
    )
    segment_tokens = max(segment_tokens, triton.cdiv(longest, MAX_SEGMENTS), 1)
    num_segments = triton.cdiv(longest, segment_tokens)
    chunk_pairs = max(1 << pairs_per_program.bit_length() >> 1, MIN_CHUNK_PAIRS)
    chunk_pairs = min(chunk_pairs, settings["CHUNK_PAIRS"])
    items = num_pairs // chunk_pairs + num_buckets if ordered else num_buckets * num_segments
    return _Schedule(items, segment_tokens, num_segments, chunk_pairs)


def _needs_int64_offsets(problem: Problem) -> bool:
    """Return whether offsets inside a sequence of q, do or dq's contiguous sums need 64 bits.

    The kernel is then another binary, 2 to 5 % slower, compiled at the first call of so many tokens
    (262144 at 64 heads of 128).
    """
    q, seqs = problem.q, problem.seqs
    last_token = seqs.end - 1
    ends = [
        last_token * stride_t + (problem.group - 1) * stride_h + x.shape[-1]
        for x in (q, problem.do)
        for _, stride_t, stride_h in (strides.strides(x, seqs.packed, int64_products=True),)
    ]
    return max(*ends, seqs.end * q.shape[-2] * q.shape[-1]) >= 2**31


@cached_by_metadata
def _prepare_blocks(
    problem: Problem,
    num_pairs: int,
    num_buckets: int,
    settings: configs.Settings,
    ordered: bool,
    adds: bool,
) -> _BlockLaunches:
    q, k, v, seqs, call = problem.q, problem.k, problem.v, problem.seqs, problem.call
    key_tiles = triton.cdiv(call.geometry.select_block_size, settings["BLOCK_N"])
    schedule = _schedule(problem, num_pairs, num_buckets, settings, ordered)
    items, segment_tokens, num_segments, chunk_pairs = schedule
    per_head = pair_lists.buckets_per_head(seqs, call.geometry)
    kernel_settings = {
        name: value for name, value in settings.items() if name not in _SCHEDULE_SETTINGS
    }
    gradients = Launch(
        sel_block_backward, (items * key_tiles,),
        *problem.strides(),
        call.scale, seqs.n, seqs.seq_len, seqs.first_query, k.shape[-3],
        num_buckets, per_head, num_segments, chunk_pairs,
        **problem.constants(),
        **{**kernel_settings, "ORDERED": ordered, "INT64_OFFSETS": _needs_int64_offsets(problem)},
    )  # fmt: skip
    segments = None
    if not ordered:
        segments = Launch(
            sel_segments, (num_buckets,),
            segment_tokens, num_segments, 0 if seqs.packed else seqs.first_query,
            NUM_BOUNDS_PAD=2 * MAX_SEGMENTS, PARTIAL=seqs.partial,
            num_warps=2,
        )  # fmt: skip
    add_chunks = [
        Launch(
            sel_add_chunks, (num_buckets * key_tiles,),
            seqs.n, seqs.seq_len, seqs.first_query, k.shape[-3], per_head, chunk_pairs,
            NUM_KV_HEADS=x.shape[-2], WIDTH=x.shape[-1], BAND=constexprs.band(x.shape[-1]),
            SELECT_BLOCK=call.geometry.select_block_size, BLOCK_N=settings["BLOCK_N"],
            VARLEN=seqs.packed, PARTIAL=seqs.partial, ACC=constexprs.accumulator(x.dtype),
        )
        for x in (k, v) if ordered
    ]  # fmt: skip
    numels = [0 if ordered else x.numel() for x in (q, k, v)]
    padded_q, padded_k, padded_v = (triton.cdiv(n, ROUND_BLOCK) * ROUND_BLOCK for n in numels)
    end = padded_q + padded_k + padded_v
    rounding = Launch(
        sel_round, (end // ROUND_BLOCK,),
        *numels, call.scale,
        BLOCK_SIZE=ROUND_BLOCK, ADDS=adds,
        num_warps=4,
    )  # fmt: skip
    rows = items * key_tiles * settings["BLOCK_N"]
    return _BlockLaunches(
        segments,
        (num_buckets, num_segments + 1),
        gradients,
        tuple(add_chunks),
        tuple((rows, x.shape[-1]) for x in (k, v) if ordered),
        rounding,
        (0, padded_q, padded_q + padded_k, end),
    )


def block_gradients(
    problem: Problem,
    lists: PairLists,
    settings: configs.Settings,
    memo: Memo,
    *,
    ordered: bool,
    dq: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return dq, dk and dv in the inputs' dtypes.

    Args:
        problem: the inputs.
        lists: the (token, block) pairs sorted by block.
        settings: BLOCK_N and BLOCK_M of a tile; SEGMENT_ROWS, the rows of q that may share L2;
            CHUNK_PAIRS, the pairs of an ordered program at most; PROGRAMS_PER_SM, the programs
            that each multiprocessor should get.
        memo: that of ``problem``.
        ordered: whether to add dk and dv in a fixed order, and to return None as dq. Otherwise all
            three are added to one buffer of fp32 zeros.
        dq: that of :func:`gradients`.
    """
    q, k, v, adds = problem.q, problem.k, problem.v, dq is not None
    num_pairs, num_buckets = lists.tokens.shape[0], lists.offsets.shape[0] - 1
    launches = memo.get_or_make(
        ("blocks", adds), _prepare_blocks,
        problem, num_pairs, num_buckets, settings, ordered, adds,
    )  # fmt: skip
    _, dk_start, dv_start, end = launches.sum_offsets
    sums = problem.delta.new_zeros(end) if end else problem.delta
    partial = [problem.delta.new_empty(shape) for shape in launches.partial_shapes] or [
        sums[dk_start:],
        sums[dv_start:],
    ]
    bounds = None
    if launches.segments:
        bounds = lists.offsets.new_empty(launches.bounds_shape)
        launches.segments(lists.tokens, lists.offsets, bounds)
    rows = (problem.do, problem.lse2, problem.delta)
    launches.gradients(
        q, k, v, *rows, lists.tokens, lists.offsets, bounds, problem.seqs.cu, sums, *partial
    )
    # No program writes the keys after the last query.
    unseen = ordered and k.shape[-3] > problem.seqs.end
    grads = [x.new_zeros(x.shape) if unseen else x.new_empty(x.shape) for x in (k, v)]
    if ordered:
        dq = None
    elif dq is None:
        dq = q.new_empty(q.shape)
    for add_chunks, chunks, grad in zip(launches.add_chunks, partial, grads):
        add_chunks(chunks, lists.offsets, problem.seqs.cu, grad)
    if dq is not None and end:
        launches.round(sums, dq, *grads)
    return dq, grads[0], grads[1]


@cached_by_metadata
def _prepare_tiles(
    problem: Problem, n: int, settings: configs.Settings, tensors_aligned: bool
) -> tuple[Launch, int, int]:
    """Return the launch over tiles, the tokens of a tile and the keys of a descriptor's tile.

    The last is 0 if the kernel takes no descriptors.
    """
    seqs = problem.seqs
    num_blocks = triton.cdiv(seqs.end, problem.call.geometry.select_block_size)
    block_t = sel_forward.tile_tokens(settings["BLOCK_M"], problem.group, n, num_blocks)
    tiles = seqs.tiles(block_t)
    tile = {
        "BLOCK_M": max(16, triton.next_power_of_2(block_t * problem.group)),
        "BLOCK_N": min(
            settings["BLOCK_N"],
            max(16, triton.next_power_of_2(problem.call.geometry.select_block_size)),
        ),
    }
    use_tma = bool(settings.get("USE_TMA")) and tensors_aligned
    use_tma = use_tma and descriptors.descriptors_fit(seqs.packed, problem.k, problem.v)
    use_tma = use_tma and problem.call.geometry.select_block_size % tile["BLOCK_N"] == 0
    launch = Launch(
        sel_tile_backward, (tiles * problem.k.shape[-2],),
        *problem.strides(),
        problem.call.scale, seqs.n, seqs.seq_len, seqs.first_query, tiles,
        BLOCK_T=block_t, MAX_ENTRIES=block_t * n,
        **problem.constants(), **{**settings, **tile, "USE_TMA": use_tma},
    )  # fmt: skip
    return launch, block_t, tile["BLOCK_N"] if use_tma else 0


def tile_gradients(
    problem: Problem, blocks: Tensor, settings: configs.Settings, memo: Memo
) -> Tensor:
    """Return dq in the dtype of q, computed tile by tile.

    ``settings``: BLOCK_N and BLOCK_M of a tile, and USE_TMA where descriptors fit. ``memo`` is that
    of ``problem`` and ``blocks``.
    """
    q, k, v, seqs = problem.q, problem.k, problem.v, problem.seqs
    tensors_aligned = aligned(k, v)
    launch, block_t, desc_block_n = memo.get_or_make(
        ("tiles", tensors_aligned), _prepare_tiles,
        problem, blocks.shape[-1], settings, tensors_aligned,
    )  # fmt: skip
    unions = sel_union.build(blocks, seqs, problem.call.geometry, block_t, 1, memo)
    dq = q.new_empty(q.shape)
    described = descriptors.key_descriptors(k, v, desc_block_n, seqs.end)
    rows = (problem.do, problem.lse2, problem.delta)
    launch(q, k, v, *described, *rows, unions.entries, unions.counts, seqs.cu, dq)
    return dq


def prepare(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, call: SlotCall
) -> Problem:
    """Compute delta and lse2, and return them with the inputs."""
    seqs = Sequences.of(q, k, call)
    delta_rows, lse2 = delta.rows(do, o, lse, packed=seqs.packed)
    return Problem(do, q, k, v, lse2, delta_rows, seqs, call)


def backward(
    do: Tensor,  # [B, S, Hq, Dv], packed [T, Hq, Dv]
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, S, G, Dk]
    v: Tensor,  # [B, S, G, Dv]
    blocks: Tensor,  # int32 or int64 [B, S, G, n]
    o: Tensor,  # [B, S, Hq, Dv]
    lse: Tensor,  # [B, Hq, S], packed [Hq, T]
    *,
    call: SlotCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in the shapes and dtypes of q, k and v."""
    return gradients(prepare(do, q, k, v, o, lse, call=call), blocks)


def gradients(
    problem: Problem,
    blocks: Tensor,
    fork: Fork | None = None,
    memo: Memo | None = None,
    dq: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in the shapes and dtypes of q, k and v.

    dq is complete at once, dk and dv when ``fork`` ends, if it is given. ``memo`` belongs to the
    metadata of ``problem`` and ``blocks``; None: it is looked up. If ``dq`` is given, a contiguous
    gradient of q, this one is added to it in place.
    """
    memo = _memo(problem, blocks) if memo is None else memo
    if memo.get_or_make("bitmask fits", bitmask.fits, problem, blocks):
        of_sel, dk, dv = bitmask.gradients(problem, blocks, memo, fork)
        return of_sel if dq is None else dq.add_(of_sel), dk, dv
    problem = problem._replace(seqs=problem.seqs.disjoint())  # as the lists of pairs require
    q, k, v, call = problem.q, problem.k, problem.v, problem.call
    lists = pair_lists.build(blocks, problem.seqs, call.geometry, memo)
    settings, tile_settings = (
        memo.get_or_make(name, tuned_settings, q, k, v, call.geometry, name)
        for name in ("sel_block_backward", "sel_tile_backward")
    )
    ordered = call.deterministic or bool(settings.get("ORDERED"))
    of_blocks, dk, dv = block_gradients(problem, lists, settings, memo, ordered=ordered, dq=dq)
    if of_blocks is not None:
        return of_blocks, dk, dv
    of_tiles = tile_gradients(problem, blocks, tile_settings, memo)
    return of_tiles if dq is None else dq.add_(of_tiles), dk, dv


@cached_by_metadata
def _memo(problem: Problem, blocks: Tensor) -> Memo:
    """Return what is remembered about calls of this metadata: all launches of the backward."""
    return Memo()
