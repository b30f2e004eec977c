"""Heads mode: all-to-alls give every rank all rows of some key/value heads, and bring rows back.

    to_heads   rows of all heads become all rows of some heads    gradient: to_rows
    to_rows    the inverse                                        gradient: to_heads

The core is that of one process on G / P groups. Every element of its results has the bits of one
process, because no sum crosses groups. A rank rotates its rows before it sends them: one node then
splits and rotates all heads, and the table has the angles of these rows only.

An all-to-all moves any number of tensors. Every piece of every tensor is a message of its own,
which arrives at its place in the sequence. So no copy brings chunks into the order of the sequence:
every element is copied once, to or from the heads of a row. Only keys and values are joined before
and split after it, because many small messages take the host longer than the copies take the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nsa_core.layer.phi.chunks import packed_blocks
from nsa_core.parallel.collectives import group_of, group_size, named_errors
from nsa_core.parallel.layouts import chunks_of, pieces_per_rank
from nsa_core.torch_ops.autograd import without_tangents
from nsa_core.torch_ops.core_kernels import CoreInputs

if TYPE_CHECKING:
    from nsa_core.layer.module import NSAttention
    from nsa_core.parallel.exchange_rows import RankCall, Ranks

Pair = tuple[torch.Tensor, torch.Tensor]


@torch.library.custom_op("nsa_parallel::to_heads", mutates_args=())
def to_heads(tensors: list[torch.Tensor], layout: str, group: str) -> list[torch.Tensor]:
    """Give every rank all rows of its heads.

    Args:
        tensors: each [..., n, H, D], of any dtype; the rows of this rank.
        layout: "head_tail" or "contiguous".
        group: name of the process group of P ranks.

    Returns:
        For each tensor [..., T, H / P, D], in the order of the sequence; rows are contiguous.
    """
    world = group_size(group)
    outs = [_new_heads(x, world) for x in tensors]
    pairs = [(_by_rank(x, world), out.movedim(-3, 0)) for x, out in zip(tensors, outs)]
    _transfer("to_heads", list(_pieces(pairs, world, layout)), group)
    return outs


@to_heads.register_fake
def _(tensors: list[torch.Tensor], layout: str, group: str) -> list[torch.Tensor]:
    return [_new_heads(x, group_size(group)) for x in tensors]


@torch.library.custom_op("nsa_parallel::to_rows", mutates_args=())
def to_rows(tensors: list[torch.Tensor], layout: str, group: str) -> list[torch.Tensor]:
    """Give every rank all heads of its rows: the inverse of :func:`to_heads`.

    Args:
        tensors: each [..., T, h, D], of any dtype; the heads of this rank.
        layout: "head_tail" or "contiguous".
        group: name of the process group of P ranks.

    Returns:
        For each tensor [..., n, P * h, D], contiguous.
    """
    world = group_size(group)
    outs = [_new_rows(x, world) for x in tensors]
    pairs = [(_by_rank(out, world), x.movedim(-3, 0)) for x, out in zip(tensors, outs)]
    back = [(rank, segment, part) for rank, part, segment in _pieces(pairs, world, layout)]
    _transfer("to_rows", back, group)
    return outs


@to_rows.register_fake
def _(tensors: list[torch.Tensor], layout: str, group: str) -> list[torch.Tensor]:
    return [_new_rows(x, group_size(group)) for x in tensors]


def _new_heads(x: torch.Tensor, world: int) -> torch.Tensor:
    """Return an empty tensor [..., T, H / P, D] whose rows are outermost in memory."""
    *batch, rows, heads, width = x.shape
    return x.new_empty((world * rows, *batch, heads // world, width)).movedim(0, -3)


def _new_rows(x: torch.Tensor, world: int) -> torch.Tensor:
    """Return an empty tensor [..., n, P * h, D]."""
    *batch, rows, heads, width = x.shape
    return x.new_empty((*batch, rows // world, world * heads, width))


def _by_rank(x: torch.Tensor, world: int) -> torch.Tensor:
    """Return x [..., n, P * h, D] as a view [P, n, ..., h, D]."""
    view: torch.Tensor = x.unflatten(-2, (world, -1)).movedim(-3, 0).movedim(-3, 1)
    return view


def _pieces(
    pairs: Sequence[Pair], world: int, layout: str
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (rank r, part, segment) for every tensor, rank and piece.

    ``part`` is a piece of this rank's rows, with the heads of r. ``segment`` is the same piece of
    r's rows, with the heads of this rank. One is sent to r, the other one comes from r.

    Args:
        pairs: for each tensor, the rows of this rank [P, n, ...] and the rows of all [T, ...].
        world: number of ranks.
        layout: the layout.
    """
    for by_rank, whole in pairs:
        chunk = whole.shape[0] // (world * pieces_per_rank(layout))
        for rank in range(world):
            for index, number in enumerate(chunks_of(rank, world, layout)):
                part = by_rank[rank].narrow(0, index * chunk, chunk)
                segment = whole.narrow(0, number * chunk, chunk)
                yield rank, part, segment


def _transfer(
    operator: str, pieces: Sequence[tuple[int, torch.Tensor, torch.Tensor]], group: str
) -> None:
    """Send the first tensor of each piece to its rank, and receive the second from there.

    Args:
        operator: name of the operator, for errors.
        pieces: (rank, source, target); between two ranks in the same order on both.
        group: name of the process group.
    """
    this = group_of(group)
    messages, arriving, own = [], list[Pair](), list[Pair]()
    for rank, source, target in pieces:
        if rank == this.rank():
            own.append((target, source))
        elif source.numel():
            buffer = target if target.is_contiguous() else target.new_empty(target.shape)
            place: dict[str, Any] = {"group": this, "group_peer": rank}
            messages.append(dist.P2POp(dist.isend, source.contiguous(), **place))
            messages.append(dist.P2POp(dist.irecv, buffer, **place))
            if buffer is not target:
                arriving.append((target, buffer))
    with named_errors(operator, group):
        works = dist.batch_isend_irecv(messages) if messages else []
        for target, source in own:  # while the messages travel
            target.copy_(source)
        for work in works:
            work.wait()
    for target, buffer in arriving:
        target.copy_(buffer)


def _save_arguments(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.arguments = inputs[1:]


def _to_heads_backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, None, None]:
    return to_rows(grads, *ctx.arguments), None, None


def _to_rows_backward(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, None, None]:
    return to_heads(grads, *ctx.arguments), None, None


to_heads.register_autograd(_to_heads_backward, setup_context=_save_arguments)
to_rows.register_autograd(_to_rows_backward, setup_context=_save_arguments)

to_heads, to_rows = (  # type: ignore[assignment]
    without_tangents(op) for op in (to_heads, to_rows)
)


def attend(
    layer: NSAttention,
    call: RankCall,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    ranks: Ranks,
) -> torch.Tensor:
    """Attend from all rows to all keys of this rank's heads, and bring the rows back.

    Args:
        layer: the layer.
        call: the projected rows of this rank, and a plan for the heads of one rank.
        cu_seqlens: int32 [documents + 1], the documents of all ranks.
        max_seqlen: length of the longest document, or an upper bound.
        ranks: the rows and the process group.

    Returns:
        The heads [B, n, Hq, Dv], or packed [n, Hq, Dv], of this rank's rows.
    """
    plan, *rows, raw, ks, vs = call
    place = (ranks.layout, ranks.group)
    kv = [*raw, *ks, *vs]
    q, gates, joined = to_heads([*rows, torch.cat(kv, -1)], *place)
    parts = joined.split([x.shape[-1] for x in kv], -1)
    k_raw, v_raw, *kv = [x.contiguous() for x in parts]
    ks, vs = kv[: len(ks)], kv[len(ks) :]
    packed = None
    if cu_seqlens is not None:
        packed = packed_blocks(cu_seqlens, q.shape[0], layer.config.geometry)
    compressed = layer.compressed(k_raw, v_raw, packed)
    tensors = CoreInputs(q, *compressed, ks[0], vs[0], ks[-1], vs[-1], gates)
    o = layer.attend_with(plan, tensors, cu_seqlens, max_seqlen)
    rows_of_o: torch.Tensor
    (rows_of_o,) = to_rows([o], *place)
    return rows_of_o
