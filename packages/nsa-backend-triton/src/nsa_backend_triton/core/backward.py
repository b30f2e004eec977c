"""Backward of the whole core: the gated sum and its three branches (Eq. 5).

    dg_c = sum over columns of do o_c,   do_c = g_c do   for each branch c

In the backward of a branch, every do_c is multiplied by a P of the same row. So P can take the gate
instead of do:

    P = g_c exp(s - lse) = exp(s - (lse - ln g_c))
    dv = P^T do,  dS = P (do v^T - dg_c),  dq = scale dS k,  dk = scale dS^T q

The kernels of the slots compute this from do, delta = dg_c and lse - ln g_c. combine_statistics
computes both statistics in one pass over do and the three outputs. Compared with the backwards of
the slots, no do_c is written and read, and delta takes no second pass over do and o_c. cmp and win
add to the dq of sel, so that no kernel adds three gradients.

Gates must not be negative, because their logarithm is needed. In fp16, P g_c would underflow below
6e-5, even if the loss is scaled; do_c would not. In fp32, the logarithm of a gate of 1e-6 adds so
much rounding to the exponent that a row with only such gates can exceed its limit. So both take the
backwards of the slots.

If another backend runs cmp, its backward gets do, o_cmp and lse - ln g_cmp. So delta is dg_cmp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsa_backend_triton.combine import kernels as combine
from nsa_backend_triton.combine.kernels import combine_statistics
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.constexprs import accumulator
from nsa_backend_triton.host.device import architecture
from nsa_backend_triton.host.fork import Fork
from nsa_backend_triton.host.launch_cache import Launch, Memo, cached_by_metadata
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.host.strides import lse_strides, new_lse_strides, strides
from nsa_backend_triton.sel import backward as sel_backward
from nsa_backend_triton.sel.problem import Problem
from nsa_backend_triton.span import backward as span_backward
from nsa_backend_triton.span import cmp, win
from nsa_backend_triton.span.backward import Branch
from nsa_core.contract import SlotCall

_TAKES_SLOTS = (torch.float16, torch.float32)
_TOKENS = 8  # tokens of a program of combine_statistics: 32 bytes of a row of statistics


class Gradients(NamedTuple):
    """The gradients of the core, in the shapes and dtypes of what they belong to."""

    dq: Tensor
    dk_cmp: Tensor
    dv_cmp: Tensor
    dk_sel: Tensor
    dv_sel: Tensor
    dk_win: Tensor
    dv_win: Tensor
    dgates: Tensor


class Tensors(NamedTuple):
    """The inputs of the core and its statistics, in the order of the contract."""

    q: Tensor  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k_cmp: Tensor  # [B, n_c, G, Dk]
    v_cmp: Tensor
    k_sel: Tensor  # [B, S, G, Dk]
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor  # [B, S, Hq, 3]
    blocks: Tensor  # int32 or int64 [B, S, G, n]
    lse_cmp: Tensor  # [B, Hq, S], packed [Hq, T]
    lse_sel: Tensor
    lse_win: Tensor


def backward(
    do: Tensor,
    *tensors: Tensor,
    outputs: list[Tensor],
    call: SlotCall,
    cmp_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None,
) -> Gradients:
    """Return the gradients of the inputs; no gate is negative.

    Args:
        do: Gradient of the gated sum [B, S, Hq, Dv], packed [T, Hq, Dv].
        *tensors: Those of :class:`Tensors`.
        outputs: o_cmp, o_sel and o_win, of do's shape; emptied, so that they live until their last
            use.
        call: The call.
        cmp_backward: The backward of cmp if another backend runs it: a function (do, q, k_cmp,
            v_cmp, o_cmp, lse) -> dq, dk_cmp, dv_cmp.
    """
    x, packed, geometry = Tensors(*tensors), call.cu_seqlens is not None, call.geometry
    if do.dtype in _TAKES_SLOTS:
        return _by_slots(do, x, outputs, call, cmp_backward)
    stats_shape = (2, *span_backward.padded_rows(x.lse_cmp))
    stats_cmp, stats_win = x.lse_cmp.new_empty(stats_shape), x.lse_cmp.new_empty(stats_shape)
    stats_sel = x.lse_cmp.new_empty((2, *do.shape[:-1]))
    dgates = x.gates.new_empty(x.gates.shape)
    o_cmp, o_sel, o_win = outputs
    seqs = Sequences.of(x.q, x.k_sel, call)
    memo = _memo(do, *x, o_cmp, o_sel, o_win, seqs, call)
    rows = (do, x.gates, o_cmp, o_sel, o_win, x.lse_cmp, x.lse_sel, x.lse_win)
    prepare = memo.get_or_make("statistics", _prepare, *rows, packed)
    prepare(*rows, dgates, stats_cmp, stats_sel, stats_win)
    del rows, o_sel, o_win
    outputs.clear()
    delta, lse2 = stats_sel.unbind()
    window = Branch(x.k_win, x.v_win, x.lse_win, stats_win, (1, 1, geometry.window_size))
    branches, dq = [(window, seqs)], None
    of_cmp: list[tuple[Tensor, Tensor]] = []
    if cmp_backward is None:
        span = geometry.compress_block_size, geometry.compress_stride, 0
        compressed = Branch(x.k_cmp, x.v_cmp, x.lse_cmp, stats_cmp, span)
        branches.append((compressed, Sequences.of(x.q, x.k_cmp, call, compressed=True)))
    else:
        gated_lse = stats_cmp[1].narrow(-1, 0, do.shape[-3]) * math.log(2)
        dq, dk_cmp, dv_cmp = cmp_backward(do, x.q, x.k_cmp, x.v_cmp, o_cmp, gated_lse)
        of_cmp = [(dk_cmp, dv_cmp)]
    del o_cmp
    dkdv: list[tuple[Tensor, Tensor]] = []
    with Fork(do.device) as fork:
        if fork.active:  # dk and dv of both branches run beside all kernels of dq
            dkdv += [b.dkdv(do, x.q, of, call.scale, fork, memo) for b, of in branches]
        problem = Problem(do, x.q, x.k_sel, x.v_sel, lse2, delta, seqs, call)
        dq, dk_sel, dv_sel = sel_backward.gradients(problem, x.blocks, fork, memo, dq)
        for branch, sequences in branches:
            branch.add_dq(do, x.q, dq, sequences, call.scale, memo)
            if not fork.active:
                dkdv.append(branch.dkdv(do, x.q, sequences, call.scale, fork, memo))
    (dk_win, dv_win), (dk_cmp, dv_cmp) = *dkdv, *of_cmp
    return Gradients(dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates)


def _by_slots(
    do: Tensor,
    x: Tensors,
    outputs: list[Tensor],
    call: SlotCall,
    cmp_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None,
) -> Gradients:
    """Return the gradients as the backwards of the slots compute them."""
    cmp_backward = cmp_backward or functools.partial(cmp.backward, call=call)
    dgates, *of_outputs = combine.backward(do, x.gates, *outputs, call=call)
    dq, dk_win, dv_win = win.backward(
        of_outputs.pop(), x.q, x.k_win, x.v_win, outputs.pop(), x.lse_win, call=call
    )
    dq_sel, dk_sel, dv_sel = sel_backward.backward(
        of_outputs.pop(), x.q, x.k_sel, x.v_sel, x.blocks, outputs.pop(), x.lse_sel, call=call
    )
    dq_cmp, dk_cmp, dv_cmp = cmp_backward(
        of_outputs.pop(), x.q, x.k_cmp, x.v_cmp, outputs.pop(), x.lse_cmp
    )
    dq += dq_sel
    dq += dq_cmp
    return Gradients(dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates)


@cached_by_metadata
def _memo(do: Tensor, *others: Tensor | Sequences | SlotCall) -> Memo:
    """Return what is remembered about calls of this metadata: all launches of the backward."""
    return Memo()


@cached_by_metadata
def _prepare(
    do: Tensor,
    gates: Tensor,
    o_cmp: Tensor,
    o_sel: Tensor,
    o_win: Tensor,
    lse_cmp: Tensor,
    lse_sel: Tensor,
    lse_win: Tensor,
    packed: bool,
) -> Launch:
    """Return the launch of combine_statistics; the inputs may have any strides."""
    *lead, heads, width = do.shape
    num_tokens, padded = math.prod(lead), span_backward.padded_rows(lse_cmp)
    settings = dict(
        configs.pick(
            "combine_backward",
            architecture(do.device),
            v_head_dim=width,
            itemsize=do.element_size(),
        )
    )
    block_m = settings.pop("BLOCK_M")
    block_t = min(_TOKENS, block_m)
    block_h = min(block_m // block_t, triton.next_power_of_2(heads))
    tensors = (do, gates, o_cmp, o_sel, o_win)
    return Launch(
        combine_statistics, (triton.cdiv(num_tokens, block_t) * triton.cdiv(heads, block_h),),
        *(strides(x, packed, int64_products=True) for x in tensors),
        *(lse_strides(x, packed) for x in (lse_cmp, lse_sel, lse_win)),
        new_lse_strides(padded, packed),
        num_tokens, lead[-1], num_tokens * heads, math.prod(padded),
        NUM_HEADS=heads, V_HEAD_DIM=width, V_HEAD_DIM_PAD=triton.next_power_of_2(width),
        BLOCK_T=block_t, BLOCK_H=block_h, ACC=accumulator(do.dtype), **settings,
    )  # fmt: skip
