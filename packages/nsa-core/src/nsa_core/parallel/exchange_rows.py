"""The rows that a rank needs from others, as autograd nodes around the collectives.

A row that several pieces read receives several gradients. These nodes add them in fp32 before they
round once, and without atomics, so that the result has the same bits in every run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nsa_core.parallel.collectives import (
    extend,
    extend_back,
    gather_rows,
    scatter_sum,
    sum_dtype,
)
from nsa_core.parallel.layouts import in_order, in_rank_order
from nsa_core.torch_ops.torch_state import is_eager

if TYPE_CHECKING:
    from nsa_core.parallel.shards import Shards
    from nsa_core.plan.plan import Plan


class Ranks(NamedTuple):
    """The rows of this rank in a call, and the process group; torch.compile can trace it.

    Attributes:
        total: number of rows of all ranks together, T.
        world: number of ranks, P.
        layout: "head_tail" or "contiguous".
        chunk: number of rows of a piece.
        pieces: the rows of this rank as ranges (first, end), in order.
        group: name of the process group.
        reduce: dtype in which gradients are summed, if it is wider than that of the tensors.
    """

    total: int
    world: int
    layout: str
    chunk: int
    pieces: tuple[tuple[int, int], ...]
    group: str
    reduce: torch.dtype

    @classmethod
    def of(cls, shards: Shards, total: int, group: str, reduce: torch.dtype) -> Ranks:
        """Return the ranks of a call.

        Args:
            shards: the place of this rank; its number of rows is not read.
            total: number of rows of all ranks together, which divides over them.
            group: name of the process group.
            reduce: dtype in which gradients are summed.
        """
        world, layout = shards.world, shards.layout
        chunk = total // shards.chunks
        pieces = tuple([(k * chunk, (k + 1) * chunk) for k in shards.numbers])
        return cls(total, world, layout, chunk, pieces, group, reduce)


Pair = tuple[torch.Tensor, torch.Tensor]


class RankCall(NamedTuple):
    """The facts about a call that a rank knows before the first collective; traceable.

    Attributes:
        plan: the plan of the call.
        q: queries of this rank's rows, rotated.
        gates: gates of these rows.
        raw: keys and values of these rows that phi compresses.
        ks: keys of (sel, win), or of the shared pair, rotated.
        vs: values of (sel, win), or of the shared pair.
    """

    plan: Plan
    q: torch.Tensor
    gates: torch.Tensor
    raw: Pair
    ks: list[torch.Tensor]
    vs: list[torch.Tensor]


def rows_first(x: torch.Tensor, packed: bool) -> torch.Tensor:
    """Return x [B, n, G, D], or packed [n, G, D], as [n, B, G, D]."""
    return x.unsqueeze(1) if packed else x.transpose(0, 1)


def slot_form(x: torch.Tensor, packed: bool) -> torch.Tensor:
    """Return x [n, B, G, D] as the slots take it: the inverse of :func:`rows_first`."""
    return x.squeeze(1) if packed else x.transpose(0, 1)


class _Gathered(torch.autograd.Function):
    """See :func:`gather_pairs`."""

    @staticmethod
    def forward(
        ctx: Any,
        k: torch.Tensor,
        v: torch.Tensor,
        at: torch.Tensor | None,
        ranks: Ranks,
        copies: int,
    ) -> tuple[torch.Tensor, ...]:
        width, world = k.shape[-1], ranks.world
        joint = torch.cat((k, v), -1)
        rows = gather_rows(joint, ranks.group, ranks.reduce)
        rows = in_order(rows, world, ranks.layout) if at is None else rows.index_select(0, at)
        ctx.save_for_backward(at)
        ctx.ranks, ctx.width, ctx.dtype = ranks, width, k.dtype
        ctx.gathered = (world * k.shape[0], *joint.shape[1:])
        pairs = [(rows[..., :width], rows[..., width:]) for _ in range(copies)]
        return tuple(x for pair in pairs for x in pair)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (at,), ranks = ctx.saved_tensors, ctx.ranks
        precise = sum_dtype(ctx.dtype, ranks.reduce)
        total = torch.cat((_sum(grads[::2], precise), _sum(grads[1::2], precise)), -1)
        if at is None:
            total = in_rank_order(total, ranks.world, ranks.layout)
        else:
            # Rows that no query reads repeat an index, and their gradient is 0.
            total = total.new_zeros(ctx.gathered).index_add_(0, at, total)
        mine = scatter_sum(total, ranks.group).to(ctx.dtype)
        return mine[..., : ctx.width], mine[..., ctx.width :], None, None, None


def _sum(grads: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    total = grads[0].to(dtype)
    for grad in grads[1:]:
        total = total + grad
    return total


def gather_pairs(
    k: torch.Tensor, v: torch.Tensor, at: torch.Tensor | None, ranks: Ranks, copies: int
) -> list[Pair]:
    """Gather keys and values of all ranks in one collective, in the order of the sequence.

    Args:
        k: keys of this rank [n, B, G, Dk].
        v: values of this rank [n, B, G, Dv].
        at: int64, the gathered rows to return, where gathered rows lie in the order of the ranks;
            None: all rows of the sequence.
        ranks: the rows and the group.
        copies: number of pairs to return; they share memory, and their gradients are added in fp32.

    Returns:
        ``copies`` pairs of keys and values, [T, B, G, D] or one row for each entry of ``at``.
    """
    flat = _Gathered.apply(k, v, at, ranks, copies)  # type: ignore[no-untyped-call]
    return list(zip(flat[::2], flat[1::2]))


# (index of the piece, its queries, keys and values of all ranks in the form of slots) -> outputs
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_gathered(
    attend: Attend,
    kernel: Any,
    queries: Sequence[torch.Tensor],
    local: Pair,
    packed: bool,
    ranks: Ranks,
    recomputed: bool = False,
) -> list[torch.Tensor]:
    """Gather the keys and values of all ranks, and attend from each piece to them.

    In eager mode, only the keys and values of this rank are kept for backward, which gathers the
    others again. torch.compile decides itself which tensors it keeps.

    Args:
        attend: Attends from the queries of a piece.
        kernel: The kernel that ``attend`` calls; its results are kept.
        queries: The queries of each piece.
        local: Keys and values of this rank [n, B, G, D].
        packed: Whether the call is packed.
        ranks: The rows and the group.
        recomputed: Whether the caller checkpoints this call, with all that it keeps.

    Returns:
        The output of each piece.
    """

    def run(k: torch.Tensor, v: torch.Tensor, *queries: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for i, pair in enumerate(gather_pairs(k, v, None, ranks, len(queries))):
            outputs.append(attend(i, queries[i], *[slot_form(x, packed) for x in pair]))
        return outputs

    if recomputed or not torch.is_grad_enabled() or not is_eager():
        return run(*local, *queries)
    policy = functools.partial(_keep_results_of, kernel.op)
    outputs: list[torch.Tensor] = checkpoint(
        run,
        *local,
        *queries,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
    )
    return outputs


def _keep_results_of(kept: Any, _: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == kept else CheckpointPolicy.PREFER_RECOMPUTE


class _Extended(torch.autograd.Function):
    """See :func:`extend_pieces`."""

    @staticmethod
    def forward(
        ctx: Any,
        k_win: torch.Tensor,
        v_win: torch.Tensor,
        k_raw: torch.Tensor,
        v_raw: torch.Tensor,
        ranks: Ranks,
        widths: list[int],
    ) -> tuple[torch.Tensor, ...]:
        joint = [torch.cat(pair, -1) for pair in ((k_win, v_win), (k_raw, v_raw))]
        win, raw = extend(joint, ranks.total, ranks.layout, widths, ranks.group)
        ctx.ranks, ctx.widths, ctx.dtype = ranks, widths, k_win.dtype
        dk, dk_raw, raw = k_win.shape[-1], k_raw.shape[-1], raw.flatten(0, 1)
        pairs = [(win[j][..., :dk], win[j][..., dk:]) for j in range(len(ranks.pieces))]
        return (*[x for pair in pairs for x in pair], raw[..., :dk_raw], raw[..., dk_raw:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ranks, pieces = ctx.ranks, len(ctx.ranks.pieces)
        win = torch.stack([torch.cat(grads[j : j + 2], -1) for j in range(0, 2 * pieces, 2)])
        raw = torch.cat(grads[-2:], -1)
        raw = raw.unflatten(0, (pieces, len(raw) // pieces))
        precise = sum_dtype(ctx.dtype, ranks.reduce)
        arguments = (ranks.total, ranks.layout, ctx.widths, ranks.group, precise)
        d_win, d_raw = (total.to(ctx.dtype) for total in extend_back([win, raw], *arguments))
        dk, dk_raw = grads[0].shape[-1], grads[-2].shape[-1]
        gradients = (d_win[..., :dk], d_win[..., dk:], d_raw[..., :dk_raw], d_raw[..., dk_raw:])
        return (*gradients, None, None)


def extend_pieces(
    win: Pair,  # each [n, B, G, D]
    raw: Pair,  # each [n, B, G, D]
    ranks: Ranks,
    widths: list[int],
) -> tuple[list[Pair], Pair]:
    """Extend the pieces of this rank by rows to their left, in one collective.

    Args:
        win: keys and values of win of this rank's rows.
        raw: keys and values of this rank's rows that phi compresses.
        ranks: the rows and the group.
        widths: number of rows, w - 1 for win and l - 1 for phi.

    Returns:
        For each piece its keys and values of win, [w - 1 + chunk, B, G, D]; and the keys and values
        that phi compresses, all pieces in one tensor each, [pieces * (l - 1 + chunk), B, G, D].
        Rows before row 0 of all are zero.
    """
    flat = _Extended.apply(*win, *raw, ranks, widths)  # type: ignore[no-untyped-call]
    return list(zip(flat[:-2:2], flat[1:-2:2])), (flat[-2], flat[-1])
