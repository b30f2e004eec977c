"""Sequence mode: every rank keeps its queries, and the keys travel.

A forward has three collectives: rows to the left of each piece for win and phi, all compressed keys
and values, and all keys and values of sel. Each piece of the rank is then one call of every slot,
with queries that begin inside the sequence. The backward gathers the keys and values of sel again;
with ``layer.recompute`` it runs all branches again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from nsa_core.parallel.compressed_rows import blocks_of_pieces, gathered_rows
from nsa_core.parallel.exchange_rows import (
    Pair,
    Ranks,
    attend_gathered,
    extend_pieces,
    gather_pairs,
    rows_first,
    slot_form,
)
from nsa_core.torch_ops.core_node import run_again_in_backward

if TYPE_CHECKING:
    from nsa_core.layer.module import NSAttention
    from nsa_core.parallel.exchange_rows import RankCall
    from nsa_core.plan.plan import Plan


class _Packing(NamedTuple):
    """The documents of a call.

    Attributes:
        bounds: int32 [documents + 1]; those of one document for a call that is not packed.
        packed: whether the call is packed.
        max_seqlen: length of the longest document, or an upper bound; None if not packed.
    """

    bounds: torch.Tensor
    packed: bool
    max_seqlen: int | None

    @property
    def of_slots(self) -> dict[str, Any]:
        """The packing arguments of a slot over all keys."""
        return {"cu_seqlens": self.bounds if self.packed else None, "max_seqlen": self.max_seqlen}


def attend(
    layer: NSAttention,
    call: RankCall,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    ranks: Ranks,
) -> torch.Tensor:
    """Attend from the rows of this rank to the keys of all ranks.

    Args:
        layer: the layer.
        call: the projected rows of this rank, and a plan for queries that begin inside a sequence.
        cu_seqlens: int32 [documents + 1], the documents of all ranks.
        max_seqlen: length of the longest document, or an upper bound.
        ranks: the rows and the process group.

    Returns:
        The heads [B, n, Hq, Dv], or packed [n, Hq, Dv].
    """
    config, (plan, q, gates, raw, ks, vs) = layer.config, call
    packing = _packing_of(q, cu_seqlens, max_seqlen, ranks.total)
    raw, sel, win = (
        (rows_first(k, packing.packed), rows_first(v, packing.packed))
        for k, v in (raw, (ks[0], vs[0]), (ks[-1], vs[-1]))
    )
    widths = [config.window_size - 1, config.compress_block_size - 1]
    windows, extended = extend_pieces(win, raw, ranks, widths)
    compressed = _compressed(layer, extended, packing, ranks)
    queries, gate_pieces = (x.split(ranks.chunk, -3) for x in (q, gates))
    recompute = layer.recompute and torch.is_grad_enabled()

    def core() -> list[torch.Tensor]:
        o_cmp, blocks = [], []
        for q, (k, v), (first, _) in zip(queries, compressed, ranks.pieces):
            o, lse = plan.cmp(q, k, v, **packing.of_slots, first_query=first)
            o_cmp.append(o)
            blocks.append(plan.select(q, k, lse, **packing.of_slots, first_query=first))

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            first, _ = ranks.pieces[index]
            o: torch.Tensor
            o, _ = plan.sel(q, k, v, blocks[index], **packing.of_slots, first_query=first)
            return o

        kernel: Any = getattr(plan.sel, "kernel", plan.sel)  # that of a checked plan is inside
        options = (packing.packed, ranks, recompute)
        o_sel = attend_gathered(attend, kernel, queries, sel, *options)
        o_win = _win(plan, queries, windows, packing, ranks)
        pieces = zip(gate_pieces, o_cmp, o_sel, o_win)
        return [_combined(plan, *piece) for piece in pieces]

    outputs = run_again_in_backward(core) if recompute else core()
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -3)


def _packing_of(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int | None, total: int
) -> _Packing:
    if cu_seqlens is None:
        bounds = torch.arange(2, device=x.device, dtype=torch.int32) * total
        return _Packing(bounds, False, None)
    return _Packing(cu_seqlens, True, total if max_seqlen is None else max_seqlen)


def _compressed(layer: NSAttention, raw: Pair, packing: _Packing, ranks: Ranks) -> list[Pair]:
    """Return the compressed keys and values of all ranks, a pair for each piece.

    Args:
        layer: the layer.
        raw: the extended pieces of this rank, one after the other (:func:`extend_pieces`).
        packing: the documents.
        ranks: the rows and the group.
    """
    geometry = layer.config.geometry
    blocks = blocks_of_pieces(packing.bounds, ranks, geometry)
    batch_and_heads = raw[0].shape[1:3]
    k_raw, v_raw = (x.flatten(1, 2) for x in raw)
    k, v = layer.compressed(k_raw, v_raw, blocks)
    k, v = (x.unflatten(1, batch_and_heads) for x in (k, v))
    rows = geometry.max_compressed if packing.packed else geometry.num_compressed
    at = gathered_rows(packing.bounds, ranks, geometry, rows(ranks.total))
    return [
        (slot_form(k, packing.packed), slot_form(v, packing.packed))
        for k, v in gather_pairs(k, v, at, ranks, len(ranks.pieces))
    ]


def _win(
    plan: Plan,
    queries: Sequence[torch.Tensor],
    extended: Sequence[Pair],
    packing: _Packing,
    ranks: Ranks,
) -> list[torch.Tensor]:
    """Return the output of win of each piece, over its own rows and those to their left."""
    outputs = []
    for q, pair, (first, end) in zip(queries, extended, ranks.pieces):
        k, v = (slot_form(x, packing.packed) for x in pair)
        rows, chunk = k.shape[-3], end - first
        halo = rows - chunk
        if packing.packed:
            # A document of its own holds the rows before row 0, which no query sees.
            bounds = F.pad((packing.bounds - (first - halo)).clamp(0, rows), (1, 0))
            o, _ = plan.win(q, k, v, cu_seqlens=bounds, max_seqlen=rows, first_query=halo)
        else:
            skipped = max(0, halo - first)
            k, v = (x.narrow(-3, skipped, rows - skipped) for x in (k, v))
            o, _ = plan.win(q, k, v, first_query=halo - skipped)
        outputs.append(o)
    return outputs


def _combined(plan: Plan, gates: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
    """Return the gated sum of the branches of one piece."""
    if gates.dim() == 4:
        o: torch.Tensor = plan.combine(gates, *outputs)
        return o
    # Packed rows as one sequence: the sum does not depend on documents.
    o = plan.combine(gates.unsqueeze(0), *[x.unsqueeze(0) for x in outputs])
    return o.squeeze(0)
