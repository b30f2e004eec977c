"""Backward of the selected branch: dq, dk, dv from the (token, block) pairs sorted by block.

With P = exp(scale q k - lse), dP = do v^T and delta = sum of do o:  dS = scale P (dP - delta),
dv = P^T do, dk = dS^T q, dq = dS k, over the keys <= t of the blocks chosen by t (Eq. 4 over the
union of Eq. 12).
One pass with 5 products adds all three in fp32, in no fixed order. ``call.deterministic``, and
ORDERED in the table
where that is faster, takes dk and dv from fixed partial sums, and dq tile by tile: 7 products.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from nsa_backend_triton.host import configs, descriptors, sequences
from nsa_backend_triton.host.launch_cache import Launch, aligned, remembered
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel import delta, pair_lists, unions
from nsa_backend_triton.sel.backward_blocks import (
    sel_add_chunks,
    sel_block_backward,
    sel_round,
    sel_segments,
)
from nsa_backend_triton.sel.backward_tiles import sel_tile_backward
from nsa_backend_triton.sel.forward import tile_tokens
from nsa_backend_triton.sel.pair_lists import PairLists
from nsa_core.contract import SlotCall

MAX_SEGMENTS = 32  # of tokens: programs per block stay bounded whatever S
# tokens: below, a program's beginning and end count for more than its pairs
LEAST_SEGMENT, LEAST_CHUNK = (
    128,
    256,
)
ROUNDED = 4096  # sums that a program of sel_round rounds
_SHARING = ("SEGMENT", "CHUNK", "PROGRAMS", "ORDERED")  # settings that are not the kernel's


class Problem(NamedTuple):
    """What the kernels share: inputs, sequences, lse and delta as [tokens, Hq], constants."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor  # [B, S, Hq], contiguous
    delta: Tensor  # [B, S, Hq], contiguous
    seqs: Sequences
    call: SlotCall

    @property
    def heads(self) -> int:
        """Query heads a kv head serves."""
        return self.q.shape[-2] // self.k.shape[-2]

    def strides(self) -> tuple[int, ...]:
        """(sequence, token, head) strides of q, k, v, do."""
        each = [
            sequences.strides(x, self.seqs.packed, far=True)
            for x in (self.q, self.k, self.v, self.do)
        ]
        return tuple(number for three in each for number in three)

    def constants(self) -> dict[str, object]:
        """constexpr arguments."""
        width_k, width_v = self.k.shape[-1], self.v.shape[-1]
        return {
            "HEADS": self.heads, "GROUPS": self.k.shape[-2], "DIM_K": width_k, "DIM_V": width_v,
            "WIDTH_K": sequences.band(width_k), "WIDTH_V": sequences.band(width_v),
            "SIZE": self.call.geometry.select_block_size, "VARLEN": self.seqs.packed,
            "ACC": sequences.accumulator(self.q.dtype),
        }  # fmt: skip


@remembered
def tuned(q: Tensor, k: Tensor, v: Tensor, size: int, kernel: str) -> configs.Settings:
    """The row of ``kernel`` for blocks of ``size`` keys."""
    return configs.pick(
        kernel, sequences.architecture(q.device), head_dim=k.shape[-1], v_head_dim=v.shape[-1],
        itemsize=q.itemsize, heads=q.shape[-2] // k.shape[-2], block=size,
    )  # fmt: skip


class _Blocks(NamedTuple):
    """What a call's metadata decide of the kernels over blocks."""

    segments: Launch | None  # where those of a bucket begin
    bounds: tuple[int, int]  # how many
    gradients: Launch
    add: tuple[Launch, ...]  # chunks of dk and of dv, where the order is fixed
    partial: tuple[tuple[int, int], ...]  # shapes of theirs
    round: Launch
    starts: tuple[int, int, int, int]  # of dq, dk and dv in one buffer of sums, and its end


class _Shares(NamedTuple):
    """How the pairs of the blocks are shared out to programs."""

    items: int  # programs per part of a block
    segment: int  # tokens
    segments: int
    chunk: int  # pairs of an ordered program


def _shares(
    problem: Problem, pairs: int, buckets: int, settings: configs.Settings, ordered: bool
) -> _Shares:
    """Segments, or ordered chunks, so short that PROGRAMS fall to each multiprocessor: few tokens
    would occupy few.

    A chunk is a power of two, so that sums are cut in the same places for lengths that are alike.
    """
    seqs = problem.seqs
    longest = problem.call.max_seqlen if seqs.packed else seqs.seq_len
    share = pairs // (settings["PROGRAMS"] * sequences.multiprocessors(problem.q.device))
    segment = min(max(share, LEAST_SEGMENT), settings["SEGMENT"] // problem.heads)
    segment = max(segment, triton.cdiv(longest, MAX_SEGMENTS), 1)
    segments = triton.cdiv(longest, segment)
    chunk = min(max(1 << share.bit_length() >> 1, LEAST_CHUNK), settings["CHUNK"])
    return _Shares(
        pairs // chunk + buckets if ordered else buckets * segments, segment, segments, chunk
    )


def _wide(problem: Problem) -> bool:
    """Whether offsets inside a sequence need 64 bits: of q, do, and dq's sums, which are
    contiguous.

    A binary of its own, 2 to 5 % slower, compiled at the first call of so many tokens (262144 at 64
    heads of 128).
    """
    q, seqs = problem.q, problem.seqs
    last = seqs.seq_len - 1
    ends = [
        last * token + (problem.heads - 1) * head + x.shape[-1]
        for x in (q, problem.do)
        for _, token, head in (sequences.strides(x, seqs.packed, far=True),)
    ]
    return max(*ends, seqs.seq_len * q.shape[-2] * q.shape[-1]) >= 2**31


@remembered
def _prepare_blocks(
    problem: Problem, pairs: int, buckets: int, settings: configs.Settings, ordered: bool
) -> _Blocks:
    q, k, v, seqs, call = problem.q, problem.k, problem.v, problem.seqs, problem.call
    parts = triton.cdiv(call.geometry.select_block_size, settings["KEYS"])
    items, segment, segments, chunk = _shares(problem, pairs, buckets, settings, ordered)
    per_head = pair_lists.buckets_per_head(seqs, call.geometry)
    tiles = {name: value for name, value in settings.items() if name not in _SHARING}
    gradients = Launch(
        sel_block_backward, (items * parts,), *problem.strides(),
        call.scale, seqs.n, seqs.seq_len, buckets, per_head, segments, chunk,
        **problem.constants(), **{**tiles, "ORDERED": ordered, "WIDE": _wide(problem)},
    )  # fmt: skip
    bounds = None
    if not ordered:
        bounds = Launch(
            sel_segments, (buckets,), segment, segments, MOST=2 * MAX_SEGMENTS, num_warps=2
        )
    add = [
        Launch(
            sel_add_chunks, (buckets * parts,), seqs.n, seqs.seq_len, per_head, chunk,
            GROUPS=x.shape[-2], DIM=x.shape[-1], WIDTH=sequences.band(x.shape[-1]),
            SIZE=call.geometry.select_block_size, KEYS=settings["KEYS"], VARLEN=seqs.packed,
            ACC=sequences.accumulator(x.dtype),
        )
        for x in (k, v) if ordered
    ]  # fmt: skip
    counts = [0 if ordered else x.numel() for x in (q, k, v)]
    first, second, third = (triton.cdiv(count, ROUNDED) * ROUNDED for count in counts)
    end = first + second + third
    rounding = Launch(sel_round, (end // ROUNDED,), *counts, call.scale, SIZE=ROUNDED, num_warps=4)
    partial = tuple((items * parts * settings["KEYS"], x.shape[-1]) for x in (k, v) if ordered)
    shape = (buckets, segments + 1)
    return _Blocks(
        bounds, shape, gradients, tuple(add), partial, rounding, (0, first, first + second, end)
    )


def block_gradients(
    problem: Problem, lists: PairLists, settings: configs.Settings, *, ordered: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """dq, dk, dv in the inputs' dtypes; ``ordered``: no dq, and dk and dv added in a fixed order.

    ``settings``: KEYS and ROWS of a tile, at most SEGMENT rows of q that share L2 and CHUNK pairs
    of an ordered program, PROGRAMS wanted for each multiprocessor. What is added in no order is
    added in one buffer of zeros.
    """
    q, k, v = problem.q, problem.k, problem.v
    made = _prepare_blocks(
        problem, lists.tokens.shape[0], lists.offsets.shape[0] - 1, settings, ordered
    )
    _, at_k, at_v, end = made.starts
    sums = problem.delta.new_zeros(end) if end else problem.delta
    partial = [problem.delta.new_empty(shape) for shape in made.partial] or [
        sums[at_k:],
        sums[at_v:],
    ]
    bounds = None
    if made.segments:
        bounds = lists.offsets.new_empty(made.bounds)
        made.segments(lists.tokens, lists.offsets, bounds)
    rows = (problem.do, problem.lse, problem.delta)
    made.gradients(
        q, k, v, *rows, lists.tokens, lists.offsets, bounds, problem.seqs.cu, sums, *partial
    )
    grads = [x.new_empty(x.shape) for x in (k, v)]
    dq = None if ordered else q.new_empty(q.shape)
    for add, part, grad in zip(made.add, partial, grads):
        add(part, lists.offsets, problem.seqs.cu, grad)
    if dq is not None and end:
        made.round(sums, dq, *grads)
    return dq, grads[0], grads[1]


@remembered
def _prepare_tiles(
    problem: Problem, n: int, settings: configs.Settings, tensors_aligned: bool
) -> tuple[Launch, int, int]:
    """The launch over tiles, how many tokens a tile has, and the keys of a descriptor's tile (0: no
    descriptors).
    """
    seqs, size = problem.seqs, tile_tokens(settings["ROWS"], problem.heads)
    tiles = seqs.tiles(size)
    fitted = {
        "ROWS": max(16, triton.next_power_of_2(size * problem.heads)),
        "KEYS": min(
            settings["KEYS"],
            max(16, triton.next_power_of_2(problem.call.geometry.select_block_size)),
        ),
    }
    tma = bool(settings.get("TMA")) and tensors_aligned
    tma = tma and descriptors.descriptors_fit(seqs.packed, problem.k, problem.v)
    tma = tma and problem.call.geometry.select_block_size % fitted["KEYS"] == 0
    made = Launch(
        sel_tile_backward, (tiles * problem.k.shape[-2],),
        *problem.strides(), problem.call.scale, seqs.n, seqs.seq_len, tiles,
        TOKENS=size, MOST=size * n, **problem.constants(), **{**settings, **fitted, "TMA": tma},
    )  # fmt: skip
    return made, size, fitted["KEYS"] if tma else 0


def tile_gradients(problem: Problem, blocks: Tensor, settings: configs.Settings) -> Tensor:
    """dq in q's dtype, tile by tile. ``settings``: KEYS and ROWS of a tile, TMA where descriptors
    fit.
    """
    q, k, v, seqs = problem.q, problem.k, problem.v, problem.seqs
    made, size, keys = _prepare_tiles(problem, blocks.shape[-1], settings, aligned(k, v))
    joined = unions.build(blocks, seqs, problem.call.geometry, size, 1)
    dq = q.new_empty(q.shape)
    described = [descriptors.key_descriptor(x, keys) if keys else None for x in (k, v)]
    rows = (problem.do, problem.lse, problem.delta)
    made(q, k, v, *described, *rows, joined.entries, joined.counts, seqs.cu, dq)
    return dq


def prepare(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, call: SlotCall
) -> Problem:
    """Delta, and lse beside it: a row's h numbers lie together."""
    seqs = Sequences.of(q, call)
    rows, turned = delta.rows(do, o, lse, packed=seqs.packed)
    return Problem(do, q, k, v, turned, rows, seqs, call)


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
    """dq, dk, dv in the shapes and dtypes of q, k, v."""
    problem, size = prepare(do, q, k, v, o, lse, call=call), call.geometry.select_block_size
    lists = pair_lists.build(blocks, problem.seqs, call.geometry)
    settings = tuned(q, k, v, size, "sel_block_backward")
    ordered = call.deterministic or bool(settings.get("ORDERED"))
    dq, dk, dv = block_gradients(problem, lists, settings, ordered=ordered)
    if dq is None:
        dq = tile_gradients(problem, blocks, tuned(q, k, v, size, "sel_tile_backward"))
    return dq, dk, dv
