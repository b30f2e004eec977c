"""One step over the pages of a layer: append its tokens, compress their blocks, attend.

    pages[starts .. lengths)  <-  rotary(k), v                        tokens of the step
    k_cmp[i]                  <-  rotary(phi(raw[i*d .. i*d + l)))    blocks that are now complete
    o                         =   sum over c of g^c Attn(q, pages^c)  Eq. 5, by the decode forms

The functions run in this order. Each takes the fused form of the plan if there is one. They never
synchronise: rows without a token are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from nsa_core.contract import DecodeCall
from nsa_core.decode.pages import LayerPages
from nsa_core.errors import InvalidInput
from nsa_core.layer.phi.kinds import weights_of_pair
from nsa_core.layer.rope import RopeTable, rotate

if TYPE_CHECKING:
    from torch import nn

    from nsa_core.plan.plan import Plan

Branches = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of cmp, sel and win
Rope: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # cos and sin [positions, Dk / 2]


def per_branch(parts: Sequence[torch.Tensor]) -> Branches:
    """Return the tensors of (cmp, sel, win) from three, or from one that they share."""
    return parts[0], parts[len(parts) // 3], parts[-1]


def append(
    plan: Plan,
    pages: LayerPages,
    q: torch.Tensor,  # [B, m, Hq, Dk]
    keys: Branches,  # [B, m, G, Dk]
    values: Branches,  # [B, m, G, Dv]
    rope: Rope | None,
    call: DecodeCall,
    padded: bool,
) -> torch.Tensor:
    """Write the rotated keys and the values of a step to its pages, and return the rotated q.

    Args:
        plan: the decode plan.
        pages: the pages of the layer.
        q: queries of the step.
        keys: keys of the step, of each branch.
        values: values of the step, of each branch.
        rope: angles of all positions; None: nothing is rotated.
        call: the call of the step.
        padded: whether a row may hold no token.
    """
    rotate_raw = plan.config.rope_before_compress
    if "append" in plan.fused:
        targets = [(x.k, x.v) for x in (pages.raw, pages.sel, pages.win)]
        rotated: torch.Tensor = plan.fused["append"](
            q, keys, values, *targets, rope=rope, rotate_raw=rotate_raw, call=call
        )
        return rotated
    positions, absent = call.starts.long()[:, None], None
    if q.shape[1] > 1:
        positions = positions + torch.arange(q.shape[1], device=q.device)
    if padded:
        absent = positions >= call.lengths[:, None]
    raw, sel, win = keys
    if rope is not None:
        table = _angles(rope, positions, call)
        to_rotate = [q, sel, win, *([raw] if rotate_raw else [])]
        q, sel, win, *rest = rotate(torch.cat(to_rotate, -2), table).split(
            [x.shape[-2] for x in to_rotate], -2
        )
        raw = rest[0] if rest else raw
    targets_and_keys = ((pages.raw, raw), (pages.sel, sel), (pages.win, win))
    for (target, k), v in zip(targets_and_keys, values):
        target.write(positions, k, v, absent, call.sequences)
    return q


def compress(
    plan: Plan,
    pages: LayerPages,
    phis: tuple[nn.Module, nn.Module],
    rope: Rope | None,
    call: DecodeCall,
    rows: int,
    partly: bool,
) -> None:
    """Compress the blocks that a step of ``rows`` rows per run completes.

    phi is applied to the blocks that the step may complete, ceil(rows / d) per run. Only the
    compressed tokens of completed blocks are written.

    Args:
        plan: the decode plan.
        pages: the pages of the layer.
        phis: phi of keys and of values.
        rope: angles of all positions; None: nothing is rotated.
        call: the call of the step.
        rows: rows of a run, m.
        partly: whether a run may complete fewer blocks than ceil(rows / d).

    Raises:
        InvalidInput: a phi returns another shape or dtype.
    """
    raw, cmp = pages.raw, pages.cmp
    if plan.config.rope_before_compress:
        rope = None
    size, stride = call.geometry.compress_block_size, call.geometry.compress_stride
    number = -(-rows // stride)
    if number == 1 and "compress" in plan.fused:
        weights = weights_of_pair(*phis, raw.k, raw.v)
        if weights is not None:
            plan.fused["compress"](raw.k, raw.v, cmp.k, cmp.v, *weights, rope=rope, call=call)
            return
    count = torch.arange(size + (number - 1) * stride, device=raw.k.device)
    first = call.starts.long().sub_(size - stride).div_(stride, rounding_mode="floor")
    blocks = first.clamp_(min=0)[:, None]
    if number > 1:
        blocks = blocks + count[:number]
    starts = blocks * stride
    k, v = raw.read(starts[:, :1] + count, call.sequences)
    k_cmp, v_cmp = phis[0](k), phis[1](v)
    for i, (x, store) in enumerate(((k_cmp, cmp.k), (v_cmp, cmp.v))):
        shape = (*blocks.shape, *store.shape[2:])
        if x.shape != shape or x.dtype != k.dtype:
            raise InvalidInput(
                f"phi[{i}] must return {list(shape)} {k.dtype} for {list((k, v)[i].shape)},"
                f" got {list(x.shape)} {x.dtype}"
            )
    if rope is not None:
        k_cmp = rotate(k_cmp, _angles(rope, starts, call))
    incomplete = starts + size > call.lengths[:, None] if partly else None
    cmp.write(blocks, k_cmp, v_cmp, incomplete, call.sequences)


def _angles(rope: Rope, positions: torch.Tensor, call: DecodeCall) -> RopeTable:
    """Return the angles of positions [B, m]."""
    if call.sequences is not None or positions.shape[1] > 1:  # padding may lie after the last angle
        positions = positions.clamp(max=len(rope[0]) - 1)
    return RopeTable(*(x[positions].unsqueeze(-2) for x in rope))


def attend(
    plan: Plan, pages: LayerPages, q: torch.Tensor, gates: torch.Tensor, call: DecodeCall
) -> torch.Tensor:
    """Return Eq. 5 over the pages, [B, m, Hq, Dv]."""
    cmp, sel, win, _ = pages
    if "step" in plan.fused:
        o: torch.Tensor = plan.fused["step"](
            q, gates, cmp.k, cmp.v, sel.k, sel.v, win.k, win.v, call=call
        )[0]
        return o
    o_cmp, lse = plan.cmp(q, cmp.k, cmp.v, call=call)
    blocks = plan.select(q, cmp.k, lse, call=call)
    o_sel, _ = plan.sel(q, sel.k, sel.v, blocks, call=call)
    o_win, _ = plan.win(q, win.k, win.v, call=call)
    o = plan.combine(gates, o_cmp, o_sel, o_win)
    return o
