"""Backward of attention over a span of keys: the compressed branch and the sliding window.

    p = exp(s - lse),  dv = p^T do,  ds = p (do v^T - delta),  delta = sum(do o),  dq = scale ds k,
    dk = scale ds^T q

Three kernels, no atomics, so the same bits every time; scores are recomputed in both passes (7
products where 5 are counted), which costs less than adding fp32 gradients of every tile through L2
and rounding them afterwards.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsa_backend_triton.host import configs
from nsa_backend_triton.host.descriptors import descriptors_fit, key_descriptor, stats_descriptor
from nsa_backend_triton.host.launch_cache import Launch, aligned, remembered
from nsa_backend_triton.host.sequences import (
    Sequences,
    accumulator,
    architecture,
    band,
    lse_strides,
    new_lse_strides,
    new_strides,
    strides,
)
from nsa_backend_triton.shared.rows import LOG2E
from nsa_backend_triton.span.backward_kernels import span_dkdv, span_dq, span_sum
from nsa_backend_triton.span.forward import heads_together, launch_options


def backward(
    do: Tensor,  # [B, S, Hq, Dv], packed [T, Hq, Dv]
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, L, G, Dk], packed [L, G, Dk]
    v: Tensor,  # [B, L, G, Dv]
    o: Tensor,  # [B, S, Hq, Dv]
    lse: Tensor,  # [B, Hq, S], packed [Hq, T]
    seqs: Sequences,
    span: tuple[int, int, int],  # SIZE, STRIDE, WINDOW
    scale: float,
    settings: tuple[configs.Settings, configs.Settings] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes of q, k, v; ``settings`` (span_dq, span_dkdv) replace the tuned
    ones.

    A window sums over the heads inside a program. The compressed branch has few keys and many
    queries: its parts are [h * CHUNKS, L, G, D] in fp32, for CHUNKS = 1 and d = 16 a quarter of q's
    bytes.
    """
    made = _launch_dkdv(
        q, k, v, do, lse, seqs, span, scale, aligned(q, do), settings and settings[1]
    )
    dq, stats = _dq(
        do, q, k, v, o, lse, seqs, span, scale, settings and settings[0], bool(made.rows)
    )
    return dq, *_dkdv(made, do, q, k, v, lse, stats, seqs)


def dq_of(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, settings: configs.Settings | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq as q, and stats [2, *lse], rows padded: delta = sum(do o), and lse in base 2, inf in a row
    without keys.
    """
    return _dq(do, q, k, v, o, lse, seqs, span, scale, settings, True)


def dkdv_of(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, stats: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, settings: configs.Settings | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk, dv as k, v."""
    made = _launch_dkdv(q, k, v, do, lse, seqs, span, scale, aligned(q, do), settings)
    return _dkdv(made, do, q, k, v, lse, stats, seqs)


def _dq(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int],
    scale: float, settings: configs.Settings | None, both: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``both``: stats hold lse in base 2 as well."""
    launch, rows = _launch_dq(q, k, v, o, do, lse, seqs, span, scale, aligned(k, v), settings, both)
    dq, stats = q.new_empty(q.shape), lse.new_empty((2 if both else 1, *_padded(lse)))
    of_keys = (key_descriptor(k, rows), key_descriptor(v, rows)) if rows else (None, None)
    launch(q, k, v, *of_keys, o, do, lse, dq, stats, seqs.cu, seqs.cu_cmp)
    return dq, stats


def _padded(lse: Tensor) -> tuple[int, ...]:
    """The shape of lse [B, H, S] (packed [H, T]) with rows that begin on 16 bytes, as descriptors
    ask.
    """
    return (*lse.shape[:-1], triton.cdiv(lse.shape[-1], 4) * 4)


def _dkdv(
    made: _Sums,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    stats: Tensor,
    seqs: Sequences,
) -> tuple[Tensor, Tensor]:
    grads = k.new_empty(k.shape), v.new_empty(v.shape)
    sums: tuple[Tensor, ...] = grads
    if made.parts:
        sums = tuple(
            torch.empty((made.parts, *x.shape), dtype=lse.dtype, device=x.device) for x in (k, v)
        )
    of_q, of_do = (
        (key_descriptor(q, made.rows), key_descriptor(do, made.rows)) if made.rows else (None, None)
    )
    of_stats = stats_descriptor(stats, lse.shape[-1], made.rows) if made.rows else None
    for launch in made.dkdv:
        launch(q, k, v, do, of_q, of_do, lse, stats, of_stats, *sums, seqs.cu, seqs.cu_cmp)
    for add, part, grad in zip(made.add, sums, grads):
        add(part, grad, seqs.cu_cmp)
    return grads


def _pick(kernel: str, q: Tensor, v: Tensor, window: int, described: bool) -> configs.Settings:
    heads, dk = q.shape[-2:]
    return configs.pick(
        kernel,
        architecture(q.device),
        head_dim=dk,
        v_head_dim=v.shape[-1],
        itemsize=q.itemsize,
        window=window,
        heads=heads,
        pointers=int(not described),
    )


def _blocks(dk: int, dv: int) -> dict[str, int]:
    return {"DK": dk, "DV": dv, "BLOCK_DK": band(dk), "BLOCK_DV": band(dv)}


@remembered
def _launch_dq(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, tensors_aligned: bool,
    settings: configs.Settings | None, both: bool,
) -> tuple[Launch, int]:  # fmt: skip
    """The launch of span_dq, and the rows of a descriptor's tile (0: no descriptors)."""
    described = tensors_aligned and descriptors_fit(seqs.packed, k, v)
    settings = settings or _pick("span_dq", q, v, span[2], described)
    heads, group = q.shape[-2], q.shape[-2] // k.shape[-2]
    tma = bool(settings.get("TMA"))
    together = heads_together(group, settings["HEADS"])
    tokens, stats = settings["BLOCK_M"] // together, _padded(lse)
    launch = Launch(
        span_dq, (seqs.tiles(tokens) * (heads // together),),
        *(n for x in (q, k, v, o, do) for n in strides(x, seqs.packed)), *new_strides(q.shape,
        seqs.packed),
        *lse_strides(lse, seqs.packed), *new_lse_strides(stats, seqs.packed), math.prod(stats),
        scale * LOG2E.value, scale, seqs.n, seqs.seq_len, k.shape[-3],
        N_HEADS=heads, GROUP=group, **_blocks(q.shape[-1], v.shape[-1]),
        TOKENS=tokens, HEADS=together, BLOCK_N=settings["BLOCK_N"],
        SIZE=span[0], STRIDE=span[1], WINDOW=span[2], VARLEN=seqs.packed, ACC=accumulator(q.dtype),
        TMA=tma,
        BOTH=both, **launch_options(settings),
    )  # fmt: skip
    return launch, settings["BLOCK_N"] if tma else 0


class _Sums(NamedTuple):
    """How dk and dv are made: span_dkdv, once or for each (APART), and span_sum for each where they
    come in parts.
    """

    dkdv: tuple[Launch, ...]
    add: tuple[Launch, ...]
    parts: int  # 0: the first launch writes the gradients
    rows: int  # of a descriptor's tile; 0: none


@remembered
def _launch_dkdv(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, seqs: Sequences,
    span: tuple[int, int, int], scale: float, tensors_aligned: bool,
    settings: configs.Settings | None,
) -> _Sums:  # fmt: skip
    described = tensors_aligned and descriptors_fit(seqs.packed, q, do)
    settings = settings or _pick("span_dkdv", q, v, span[2], described)
    groups, group = k.shape[-2], q.shape[-2] // k.shape[-2]
    together = group if span[2] else 1
    chunks = 1 if span[2] else settings["CHUNKS"]
    parts = group // together * chunks
    direct, tma = bool(span[2]), bool(settings.get("TMA"))
    passes = ((True, False), (False, True)) if settings.get("APART") else ((True, True),)
    launches = tuple(Launch(
        span_dkdv, (seqs.tiles(settings["BLOCK_N"] * span[1]) * groups * parts,),
        *(n for x in (q, k, v, do) for n in strides(x, seqs.packed)),
        *(n for x in (k, v) for n in new_strides(x.shape, seqs.packed)),
        *(0 if direct else x.numel() for x in (k, v)),
        *lse_strides(lse, seqs.packed), *new_lse_strides(_padded(lse), seqs.packed),
        scale * LOG2E.value, scale, seqs.n, seqs.seq_len, k.shape[-3],
        N_KV_HEADS=groups, GROUP=group, HEADS=together, CHUNKS=chunks, **_blocks(q.shape[-1],
        v.shape[-1]),
        BLOCK_N=settings["BLOCK_N"], BLOCK_M=settings["BLOCK_M"],
        SIZE=span[0], STRIDE=span[1], WINDOW=span[2], VARLEN=seqs.packed, ACC=accumulator(q.dtype),
        TMA=tma,
        WITH_DK=with_dk, WITH_DV=with_dv, **launch_options(settings),
    ) for with_dk, with_dv in passes)  # fmt: skip
    add = [
        Launch(
            span_sum, (triton.cdiv(x.numel(), 1024),), seqs.n, x.numel(), x.shape[-2] * x.shape[-1],
            N=parts, BLOCK=1024, VARLEN=seqs.packed, num_warps=4,
        )
        for x in (k, v) if not direct
    ]  # fmt: skip
    return _Sums(launches, tuple(add), 0 if direct else parts, settings["BLOCK_M"] if tma else 0)
