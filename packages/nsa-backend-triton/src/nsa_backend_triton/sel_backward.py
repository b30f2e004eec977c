"""Backward of the selected branch: dq, dk, dv from the (token, block) pairs sorted by block.

With P = exp(scale q k - lse), dP = do v^T and delta = sum of do o:  dS = scale P (dP - delta),
dv = P^T do, dk = dS^T q, dq = dS k, over the keys <= t of the blocks chosen by t (Eq. 4 over the union of Eq. 12).
One pass with 5 products adds all three in fp32, in no fixed order. ``call.deterministic``, and ORDERED in the table
where that is faster, takes dk and dv from fixed partial sums, and dq tile by tile: 7 products.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
from torch import Tensor

from nsa_backend_triton import configs, delta, descriptors, launch, sel_forward, sel_lists, sel_union
from nsa_backend_triton.launch import Sequences
from nsa_backend_triton.sel_blocks_backward import sel_add_chunks, sel_block_backward, sel_segments
from nsa_backend_triton.sel_lists import PairLists
from nsa_backend_triton.sel_tiles_backward import sel_tile_backward
from nsa_core.contract import SlotCall

MAX_SEGMENTS = 32  # of tokens: programs per block stay bounded whatever S


@dataclasses.dataclass(frozen=True)
class Problem:
    """What the kernels share: inputs, sequences, lse and delta as [tokens, Hq], constants."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor  # [B, S, Hq], in base 2, inf for a row without keys
    delta: Tensor  # [B, S, Hq]
    seqs: Sequences
    call: SlotCall

    @property
    def heads(self) -> int:
        """Query heads a kv head serves."""
        return self.q.shape[-2] // self.k.shape[-2]

    def strides(self) -> tuple[int, ...]:
        """(sequence, token, head) strides of q, k, v, do."""
        each = [launch.strides(x, self.seqs.packed) for x in (self.q, self.k, self.v, self.do)]
        return tuple(number for three in each for number in three)

    def constants(self) -> dict[str, object]:
        """constexpr arguments."""
        width_k, width_v = self.k.shape[-1], self.v.shape[-1]
        return {
            "HEADS": self.heads, "GROUPS": self.k.shape[-2], "DIM_K": width_k, "DIM_V": width_v,
            "WIDTH_K": max(16, triton.next_power_of_2(width_k)), "WIDTH_V": max(16, triton.next_power_of_2(width_v)),
            "SIZE": self.call.geometry.select_block_size, "VARLEN": self.seqs.packed,
            "ACC": launch.accumulator(self.q.dtype), "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
        }  # fmt: skip

    def settings(self, kernel: str) -> configs.Settings:
        """The tuned row of ``kernel``."""
        return configs.pick(
            kernel, launch.architecture(self.q.device), head_dim=self.k.shape[-1], v_head_dim=self.v.shape[-1],
            itemsize=self.q.itemsize, heads=self.heads, block=self.call.geometry.select_block_size,
        )  # fmt: skip


def block_gradients(
    problem: Problem, lists: PairLists, settings: configs.Settings, *, ordered: bool, add_dq: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """dq (None unless ``add_dq``), dk, dv in the inputs' dtypes; ``ordered`` adds dk and dv in a fixed order.

    ``settings``: KEYS and ROWS of a tile, SEGMENT rows of q that share L2, CHUNK pairs of an ordered program.
    """
    q, k, v, seqs, call = problem.q, problem.k, problem.v, problem.seqs, problem.call
    n_buckets, parts = len(lists.offsets) - 1, triton.cdiv(call.geometry.select_block_size, settings["KEYS"])
    longest = call.max_seqlen if seqs.packed else seqs.seq_len
    segment = max(settings["SEGMENT"] // problem.heads, triton.cdiv(longest, MAX_SEGMENTS))
    segments, chunk = triton.cdiv(longest, segment), settings["CHUNK"] if ordered else 0
    items = len(lists.tokens) // chunk + n_buckets if ordered else n_buckets * segments
    wide, per_head = problem.delta.dtype, sel_lists.buckets_per_head(seqs, call.geometry)
    bounds = lists.offsets
    if not ordered:
        bounds = lists.offsets.new_empty((n_buckets, segments + 1))
        sel_segments[(n_buckets,)](
            lists.tokens, lists.offsets, bounds, segment, segments, MOST=2 * MAX_SEGMENTS, num_warps=2
        )
    dq = torch.zeros(q.shape, dtype=wide, device=q.device) if add_dq else None
    if ordered:
        dk, dv = (x.new_empty((items * parts * settings["KEYS"], x.shape[-1]), dtype=wide) for x in (k, v))
    else:
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    tiles = {name: value for name, value in settings.items() if name not in ("SEGMENT", "CHUNK", "ORDERED")}
    sel_block_backward[(items * parts,)](
        q, k, v, problem.do, problem.lse, problem.delta, lists.tokens, lists.offsets, bounds, seqs.cu,
        dk if dq is None else dq, dk, dv, *problem.strides(),
        call.scale, seqs.n, seqs.seq_len, n_buckets, per_head, segments,
        CHUNK=chunk, ADD_DQ=add_dq, **problem.constants(), **{"WHOLE": 0, **tiles},
    )  # fmt: skip
    if ordered:
        dk, dv = (_add_chunks(problem, part, x, lists, settings) for part, x in ((dk, k), (dv, v)))
    return None if dq is None else dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _add_chunks(problem: Problem, partial: Tensor, x: Tensor, lists: PairLists, settings: configs.Settings) -> Tensor:
    """Partial sums [items * parts * KEYS, D] to the gradient of ``x``, in its dtype."""
    seqs, size, keys = problem.seqs, problem.call.geometry.select_block_size, settings["KEYS"]
    per_head = sel_lists.buckets_per_head(seqs, problem.call.geometry)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sel_add_chunks[((len(lists.offsets) - 1) * triton.cdiv(size, keys),)](
        partial, lists.offsets, seqs.cu, out, seqs.n, seqs.seq_len, per_head,
        GROUPS=x.shape[-2], DIM=x.shape[-1], WIDTH=triton.next_power_of_2(x.shape[-1]), SIZE=size, KEYS=keys,
        CHUNK=settings["CHUNK"], VARLEN=seqs.packed, ACC=launch.accumulator(x.dtype),
    )  # fmt: skip
    return out


def tile_gradients(problem: Problem, blocks: Tensor, settings: configs.Settings) -> Tensor:
    """dq in q's dtype, tile by tile. ``settings``: KEYS and ROWS of a tile, AHEAD, TMA where descriptors fit."""
    q, seqs, geometry = problem.q, problem.seqs, problem.call.geometry
    size = sel_forward.tile_tokens(settings["ROWS"], problem.heads)
    unions, tiles = sel_union.build(blocks, seqs, geometry, size, 1), seqs.tiles(size)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    fitted = {
        "ROWS": max(16, triton.next_power_of_2(size * problem.heads)),
        "KEYS": min(settings["KEYS"], max(16, triton.next_power_of_2(geometry.select_block_size))),
    }
    tma = bool(settings.get("TMA")) and descriptors.descriptors_fit(seqs.packed, problem.k, problem.v)
    tma = tma and geometry.select_block_size % fitted["KEYS"] == 0
    described = (descriptors.key_descriptor(x, fitted["KEYS"]) if tma else None for x in (problem.k, problem.v))
    sel_tile_backward[(tiles * problem.k.shape[-2],)](
        q, problem.k, problem.v, *described, problem.do, problem.lse, problem.delta, unions.entries,
        unions.counts, seqs.cu, dq,
        *problem.strides(), problem.call.scale, seqs.n, seqs.seq_len, tiles,
        TOKENS=size, MOST=unions.entries.shape[-1], **problem.constants(),
        **{"AHEAD": 0, **settings, **fitted, "TMA": tma},
    )  # fmt: skip
    return dq


def prepare(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *, call: SlotCall) -> Problem:
    """Delta, and lse beside it: a row's h numbers lie together."""
    seqs = Sequences.of(q, call)
    rows, stats = delta.rows(do, o, lse, packed=seqs.packed)
    return Problem(do, q, k, v, stats, rows, seqs, call)


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
    problem = prepare(do, q, k, v, o, lse, call=call)
    lists = sel_lists.build(blocks, problem.seqs, call.geometry)
    settings = problem.settings("sel_block_backward")
    ordered = call.deterministic or bool(settings.get("ORDERED"))
    dq, dk, dv = block_gradients(problem, lists, settings, ordered=ordered, add_dq=not ordered)
    if dq is None:
        dq = tile_gradients(problem, blocks, problem.settings("sel_tile_backward"))
    return dq, dk, dv
