"""Backward of attention over a span of keys: the compressed branch and the sliding window.

    p = exp(s - lse),  dv = p^T do,  ds = p (do v^T - delta),  delta = sum over columns of do o
    dq = scale ds k,  dk = scale ds^T q

These are the gradients of one branch of Eq. 5. span_dq (backward_dq.py) owns a tile of queries and
walks keys, span_dkdv (backward_dkdv.py) owns a tile of keys and walks queries, sum_parts adds
partial sums of dk and dv. There are no atomics, so equal inputs give equal bits. Both passes
recompute the scores: 7 products where a fused pass needs 5, which costs less than to add fp32
gradients of every tile through L2 and to round them afterwards.
"""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_backend_triton.host import configs
from nsa_backend_triton.host.descriptors import descriptors_fit, key_descriptors, stats_descriptor
from nsa_backend_triton.host.device import multiprocessors
from nsa_backend_triton.host.fork import Fork
from nsa_backend_triton.host.launch_cache import Launch, Memo, aligned, cached_by_metadata
from nsa_backend_triton.host.parts import head_parts, sum_launch
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.host.strides import (
    batch_apart,
    lse_strides,
    new_lse_strides,
    new_strides,
    strides,
)
from nsa_backend_triton.shared.rows import LOG2E
from nsa_backend_triton.span.backward_dkdv import span_dkdv
from nsa_backend_triton.span.backward_dq import span_dq
from nsa_backend_triton.span.forward import constants, heads_together, pick

_GIVEN = 0  # kinds of statistics that span_dq stores if the caller gives them


def backward(
    do: Tensor,  # [B, S, Hq, Dv], packed [T, Hq, Dv]
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, L, G, Dk], packed [L, G, Dk]
    v: Tensor,  # [B, L, G, Dv]
    o: Tensor,  # [B, S, Hq, Dv]
    lse: Tensor,  # [B, Hq, S], packed [Hq, T]
    seqs: Sequences,
    span: tuple[int, int, int],  # COMPRESS_BLOCK, STRIDE, WINDOW
    scale: float,
    settings: tuple[configs.Settings, configs.Settings] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the shapes of q, k, v; ``settings`` replace span_dq's and span_dkdv's.

    For a window, one program sums over all heads of a group; in short sequences, several do. The
    compressed branch has few keys and many queries: its partial sums are [h * QUERY_SPLITS, L, G,
    D] in fp32, for QUERY_SPLITS = 1 and d = 16 a quarter of q's bytes. Short sequences have more.
    """
    dkdv_plan = _launch_dkdv(
        q, k, v, do, lse, seqs, span, scale, aligned(q, do), settings and settings[1]
    )
    dq, stats = _dq(
        do, q, k, v, o, lse, seqs, span, scale, settings and settings[0], bool(dkdv_plan.rows)
    )
    return dq, *_dkdv(dkdv_plan, do, q, k, v, lse, stats, seqs)


class Branch(NamedTuple):
    """A branch whose statistics the caller computes, and its backward in two parts.

    Attributes:
        k: [B, L, G, Dk], packed [L, G, Dk].
        v: [B, L, G, Dv].
        lse: [B, Hq, S], packed [Hq, T]; only its shape and strides are used.
        stats: [2, *padded_rows(lse)]: delta = sum over columns of do o, and a log-sum-exp in base 2
            that is inf in a row without keys. It need not be ``lse``: P is exp2(scores in base 2 -
            stats[1]).
        span: COMPRESS_BLOCK, STRIDE, WINDOW.
    """

    k: Tensor
    v: Tensor
    lse: Tensor
    stats: Tensor
    span: tuple[int, int, int]

    def add_dq(
        self, do: Tensor, q: Tensor, dq: Tensor, seqs: Sequences, scale: float, memo: Memo
    ) -> None:
        """Add to the contiguous ``dq`` [B, S, Hq, Dk], packed [T, Hq, Dk]."""
        k, v, lse, stats, span = self
        tensors_aligned = aligned(k, v)
        launch, rows = memo.get_or_make(
            ("dq", span, tensors_aligned), _launch_dq,
            q, k, v, do, do, lse, seqs, span, scale, tensors_aligned, None, _GIVEN,
        )  # fmt: skip
        described = key_descriptors(k, v, rows, seqs.num_keys(*span[:2]))
        launch(q, k, v, *described, None, do, lse, dq, stats, seqs.cu, seqs.cu_cmp)

    def dkdv(
        self, do: Tensor, q: Tensor, seqs: Sequences, scale: float, fork: Fork, memo: Memo
    ) -> tuple[Tensor, Tensor]:
        """Return dk and dv in the shapes of k and v, complete when ``fork`` ends."""
        k, v, lse, stats, span = self
        # Descriptors end at the last query: span_dkdv must read zeros after it.
        tensors_aligned, lse2 = aligned(q, do), stats[1]
        if lse2.shape != lse.shape:
            lse2 = lse2.narrow(-1, 0, lse.shape[-1])
        plan = memo.get_or_make(
            ("dkdv", span, tensors_aligned), _launch_dkdv,
            q, k, v, do, lse2, seqs, span, scale, tensors_aligned, None, True,
        )  # fmt: skip
        return _dkdv(plan, do, q, k, v, lse2, stats, seqs, fork)


def _dq(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    seqs: Sequences,
    span: tuple[int, int, int],
    scale: float,
    settings: configs.Settings | None,
    store_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Return dq and the statistics: delta and, with ``store_lse``, lse in base 2."""
    kinds = 2 if store_lse else 1
    launch, rows = _launch_dq(
        q, k, v, o, do, lse, seqs, span, scale, aligned(k, v), settings, kinds
    )
    dq, stats = q.new_empty(q.shape), lse.new_empty((kinds, *padded_rows(lse)))
    described = key_descriptors(k, v, rows, seqs.num_keys(*span[:2]))
    launch(q, k, v, *described, o, do, lse, dq, stats, seqs.cu, seqs.cu_cmp)
    return dq, stats


def padded_rows(lse: Tensor) -> tuple[int, ...]:
    """Return the shape of lse [B, H, S] (packed [H, T]) with rows padded to 16 bytes.

    Descriptors require that rows begin on 16 bytes.
    """
    return (*lse.shape[:-1], -(-lse.shape[-1] // 4) * 4)


def _dkdv(
    plan: _DkdvPlan,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    stats: Tensor,
    seqs: Sequences,
    fork: Fork | None = None,
) -> tuple[Tensor, Tensor]:
    grads = k.new_empty(k.shape), v.new_empty(v.shape)
    outputs: tuple[Tensor, ...] = grads
    if plan.num_parts:
        outputs = tuple(
            torch.empty((plan.num_parts, *x.shape), dtype=lse.dtype, device=x.device)
            for x in (k, v)
        )
    described = key_descriptors(q, do, plan.rows)
    stats_desc = stats_descriptor(stats, lse.shape[-1], plan.rows) if plan.rows else None
    with fork.beside(*outputs, *grads, stats) if fork else contextlib.nullcontext():
        for launch in plan.dkdv:
            launch(
                q, k, v, do, *described, lse, stats, stats_desc, *outputs,
                seqs.cu, seqs.cu_cmp,
            )  # fmt: skip
        if plan.add is not None:
            plan.add(*outputs, *grads, seqs.cu_cmp)
        if plan.num_rows < k.shape[-3]:
            for grad in grads:
                grad.narrow(-3, plan.num_rows, k.shape[-3] - plan.num_rows).zero_()
    return grads


@cached_by_metadata
def _launch_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    do: Tensor,
    lse: Tensor,
    seqs: Sequences,
    span: tuple[int, int, int],
    scale: float,
    tensors_aligned: bool,
    settings: configs.Settings | None,
    kinds: int,
) -> tuple[Launch, int]:
    """Return the launch of span_dq, and the rows of a descriptor's tile (0: pointers).

    ``kinds`` of statistics: 1, store delta; 2, store delta and lse; _GIVEN, read both.
    """
    described = tensors_aligned and descriptors_fit(seqs.packed, k, v)
    settings = settings or pick("span_dq", q, v, span[2], described)
    heads, group = q.shape[-2], q.shape[-2] // k.shape[-2]
    use_tma = bool(settings.get("USE_TMA"))
    block_h = heads_together(group, settings["BLOCK_H"])
    block_t, stats = settings["BLOCK_M"] // block_h, padded_rows(lse)
    launch = Launch(
        span_dq, (seqs.tiles(block_t) * (heads // block_h),),
        *(n for x in (q, k, v, o, do) for n in batch_apart(strides(x, seqs.packed))),
        *batch_apart(new_strides(q.shape, seqs.packed)),
        *lse_strides(lse, seqs.packed), *new_lse_strides(stats, seqs.packed), math.prod(stats),
        scale * LOG2E.value, scale, seqs.n, seqs.seq_len, k.shape[-3],
        seqs.first_query,
        NUM_HEADS=heads, **constants(q, k, v, seqs, span),
        BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_N=settings["BLOCK_N"],
        USE_TMA=use_tma, STORE_LSE=kinds == 2, GIVEN=kinds == _GIVEN,
        **configs.launch_options(settings),
    )  # fmt: skip
    return launch, settings["BLOCK_N"] if use_tma else 0


def _division(
    settings: configs.Settings,
    q: Tensor,
    seqs: Sequences,
    group: int,
    groups: int,
    span: tuple[int, int, int],
) -> tuple[int, int]:
    """Return the heads of a program of span_dkdv, and the parts of the queries that it walks.

    A window has one part, the compressed branch QUERY_SPLITS for each head. In short sequences,
    these are doubled, or the heads of a window divided, until each multiprocessor has
    PROGRAMS_PER_SM programs.
    """
    programs = seqs.divided.key_tiles(settings["BLOCK_N"] * span[1]) * groups
    least = settings["PROGRAMS_PER_SM"] * multiprocessors(q.device)
    if span[2]:
        # sum_parts reads the parts of every key, and no program writes those of keys after the last
        # query, which only a partial call has.
        return group // (1 if seqs.partial else head_parts(group, programs, least)), 1
    splits = settings["QUERY_SPLITS"]
    while group * programs * splits < least and 2 * splits * settings["BLOCK_M"] <= seqs.seq_len:
        splits *= 2
    return 1, splits


class _DkdvPlan(NamedTuple):
    """Launches that compute dk and dv.

    Attributes:
        dkdv: span_dkdv once for both gradients, or once for each (SEPARATE_DK_DV).
        add: sum_parts, if the gradients come in parts.
        num_parts: partial sums; 0: span_dkdv writes the gradients.
        rows: rows of a descriptor's tile; 0: pointers.
        num_rows: rows of the gradients that the launches write; the others are 0.
    """

    dkdv: tuple[Launch, ...]
    add: Launch | None
    num_parts: int
    rows: int
    num_rows: int


@cached_by_metadata
def _launch_dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    seqs: Sequences,
    span: tuple[int, int, int],
    scale: float,
    tensors_aligned: bool,
    settings: configs.Settings | None,
    given: bool = False,
) -> _DkdvPlan:
    described = tensors_aligned and descriptors_fit(seqs.packed, q, do)
    settings = settings or pick("span_dkdv", q, v, span[2], described)
    groups, group = k.shape[-2], q.shape[-2] // k.shape[-2]
    block_h, query_splits = _division(settings, q, seqs, group, groups, span)
    num_parts = group // block_h * query_splits
    direct, use_tma = bool(span[2]) and num_parts == 1, bool(settings.get("USE_TMA"))
    passes = ((True, False), (False, True)) if settings.get("SEPARATE_DK_DV") else ((True, True),)
    launches = tuple(Launch(
        span_dkdv, (seqs.key_tiles(settings["BLOCK_N"] * span[1]) * groups * num_parts,),
        *(n for x in (q, k, v, do) for n in batch_apart(strides(x, seqs.packed))),
        *(n for x in (k, v) for n in batch_apart(new_strides(x.shape, seqs.packed))),
        *(0 if direct else x.numel() for x in (k, v)),
        *lse_strides(lse, seqs.packed), *new_lse_strides(padded_rows(lse), seqs.packed),
        scale * LOG2E.value, scale, seqs.n, seqs.seq_len, k.shape[-3],
        seqs.first_query, block_h, query_splits,
        NUM_KV_HEADS=groups, **constants(q, k, v, seqs, span),
        BLOCK_N=settings["BLOCK_N"], BLOCK_M=settings["BLOCK_M"], USE_TMA=use_tma,
        COMPUTE_DK=compute_dk, COMPUTE_DV=compute_dv, GIVEN=given,
        **configs.launch_options(settings),
    ) for compute_dk, compute_dv in passes)  # fmt: skip
    add = None if direct else sum_launch(k, v, num_parts, seqs.n, varlen=seqs.packed)
    # sum_parts writes 0 to the packed rows that no query sees.
    fills = seqs.packed and not direct
    num_rows = k.shape[-3] if fills else seqs.num_keys(*span[:2])
    return _DkdvPlan(
        launches,
        add,
        0 if direct else num_parts,
        settings["BLOCK_M"] if use_tma else 0,
        num_rows,
    )
