"""The second implementation: boolean masks [rows, keys] and matrix products, in one of three
arithmetics.

exact      float64: a second oracle, built differently from nsa_verify.oracle
rounded    float32, rounded to the tested dtype only where every tensor-core kernel must: P, dS, O
           and the results
magnitude  float64 with every term made positive: how much cancels (P @ |V|, P^T |dO|, |dS|^T |Q|,
           ...)

Rows are taken in chunks, and a chunk's mask is cut to the columns it needs, so that memory stays
small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch

from nsa_core.layout import BlockGeometry

Arithmetic = Literal["exact", "rounded", "magnitude"]
Mask = Callable[[torch.Tensor, int], torch.Tensor]  # (rows int64 [R], kv head) -> bool [R, L]
Rows = Sequence[int] | torch.Tensor | None
_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Dense:
    """A slot's results in one arithmetic, on the CPU.

    Attributes:
        o, lse, grads: as nsa_verify.oracle.Truth; in float32 where ``rounded``.
        top: the largest |score| a row sees, laid out as ``lse``, 0 where it sees nothing; None for
            combine.
    """

    o: torch.Tensor
    lse: torch.Tensor | None
    grads: dict[str, torch.Tensor]
    top: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class _Maths:
    arithmetic: Arithmetic
    dtype: torch.dtype

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """An input, as this arithmetic sees it."""
        x = x.detach().to("cpu", torch.float32 if self.arithmetic == "rounded" else torch.float64)
        # Golden alone says where NaN and Inf belong; 0 * NaN in a matrix product would spread them
        # to other rows.
        return (
            x
            if self.arithmetic == "exact"
            else torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
        )

    def term(self, x: torch.Tensor) -> torch.Tensor:
        """A factor of a sum."""
        return x.abs() if self.arithmetic == "magnitude" else x

    def minus(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b if self.arithmetic == "magnitude" else a - b

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that every kernel holds in the tested dtype."""
        return x.to(self.dtype).to(x.dtype) if self.arithmetic == "rounded" else x


def _chunk(
    maths: _Maths,
    q: torch.Tensor,  # [R, Dk]
    k: torch.Tensor,  # [L, Dk]
    v: torch.Tensor,  # [L, Dv]
    mask: torch.Tensor,  # bool [R, L]
    scale: float,
    do: torch.Tensor | None,  # [R, Dv]
) -> tuple[torch.Tensor, ...]:
    """o [R, Dv], lse [R], top [R] and, with ``do``, dq [R, Dk], dk [L, Dk], dv [L, Dv] (not yet
    stored) of one head.
    """
    s = (q @ k.T * scale).masked_fill(~mask, -torch.inf)
    peak = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    e = (s - peak).exp()
    total = e.sum(-1, keepdim=True)
    alive = torch.where(total > 0, total, 1.0)
    o = maths.store((maths.store(e) @ maths.term(v)) / alive)
    lse = (peak + total.log()).squeeze(-1)
    top = s.masked_fill(~mask, 0.0).abs().amax(-1)
    if do is None:
        return o, lse, top
    p, d = e / alive, maths.term(do)
    dp = d @ maths.term(v).T
    ds = maths.store((p * maths.minus(dp, (d * o).sum(-1, keepdim=True))).masked_fill(~mask, 0.0))
    factor = abs(scale) if maths.arithmetic == "magnitude" else scale
    return (
        o,
        lse,
        top,
        factor * (ds @ maths.term(k)),
        factor * (ds.T @ maths.term(q)),
        maths.store(p).T @ d,
    )


def _chunks(
    rows: torch.Tensor, mask: Mask, g: int
) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor]]:
    for part in rows.split(_CHUNK):
        full = mask(part, g)
        used = full.any(0).nonzero().flatten()
        columns = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)
        yield part, columns, full[:, columns]


def _document(
    maths: _Maths,
    tensors: tuple[
        torch.Tensor, torch.Tensor, torch.Tensor
    ],  # q [S, Hq, Dk], k [L, G, Dk], v [L, G, Dv]
    results: tuple[torch.Tensor, ...],  # o, lse, top [S, Hq, ..], then dq, dk, dv, written in place
    do: torch.Tensor | None,
    mask: Mask,
    scale: float,
    rows: torch.Tensor,
) -> None:
    (q, k, v), (o, lse, top, *grads) = tensors, results
    heads, groups = q.shape[1], k.shape[1]
    for g in range(groups):
        for part, columns, seen in _chunks(rows, mask, g):
            lse[part, g * (heads // groups) : (g + 1) * (heads // groups)] = -torch.inf
            if not seen.numel():
                continue
            for head in range(g * (heads // groups), (g + 1) * (heads // groups)):
                d = do[part, head] if do is not None else None
                out = _chunk(maths, q[part, head], k[columns, g], v[columns, g], seen, scale, d)
                o[part, head], lse[part, head], top[part, head] = out[:3]
                if grads:
                    grads[0][part, head] = out[3]
                    grads[1][columns, g] += out[4]
                    grads[2][columns, g] += out[5]


def host_bounds(cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """``cu_seqlens`` as int64 on the CPU."""
    return None if cu_seqlens is None else cu_seqlens.detach().cpu().long()


def compressed_starts(bounds: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """First compressed row of each packed document, and the end of the last one's."""
    counts = ((bounds.diff() - geometry.compress_block_size) // geometry.compress_stride + 1).clamp(
        min=0
    )
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def spans(x: torch.Tensor, bounds: torch.Tensor | None) -> list[torch.Tensor]:
    """A view per batch entry, or per packed document."""
    if bounds is None:
        return [x.select(0, b) for b in range(len(x))]
    return list(x.narrow(0, 0, int(bounds[-1])).split(bounds.diff().tolist()))


def _pick(rows: Rows, bounds: torch.Tensor | None, batch: int, length: int) -> list[torch.Tensor]:
    """The rows to evaluate of each batch entry or document, counted from its start."""
    total = length if bounds is None else int(bounds[-1])
    wanted = torch.zeros(total, dtype=torch.bool)
    wanted[slice(None) if rows is None else torch.as_tensor(rows, dtype=torch.long)] = True
    parts = [wanted] * batch if bounds is None else spans(wanted, bounds)
    return [part.nonzero().flatten() for part in parts]


def _attend(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Callable[[int, int], Mask],  # (document, its number of keys) -> its mask
    scale: float,
    bounds: tuple[torch.Tensor | None, torch.Tensor | None],  # of tokens, of keys
    names: tuple[str, str, str],
    do: torch.Tensor | None,
    rows: Rows,
    maths: _Maths,
) -> Dense:
    q, k, v = (maths.take(x) for x in tensors)
    of_tokens, of_keys = bounds
    o, lse = q.new_zeros((*q.shape[:-1], v.shape[-1])), q.new_zeros(q.shape[:-1])
    top, grads = (
        torch.zeros_like(lse),
        [torch.zeros_like(x) for x in (q, k, v)] if do is not None else [],
    )
    picked = _pick(rows, of_tokens, len(q), q.shape[-3])
    token_spans = [spans(x, of_tokens) for x in (q, o, lse, top, *grads[:1])]
    key_spans = [spans(x, of_keys) for x in (k, v, *grads[1:])]
    do_spans = spans(maths.take(do), of_tokens) if do is not None else [None] * len(picked)
    for i, part in enumerate(picked):
        (q_, *results), (k_, v_, *dkv) = [x[i] for x in token_spans], [x[i] for x in key_spans]
        _document(maths, (q_, k_, v_), (*results, *dkv), do_spans[i], mask(i, len(k_)), scale, part)
    stored = {name: maths.store(x) for name, x in zip(names, grads)}
    return Dense(o, lse.transpose(-1, -2), stored, top.transpose(-1, -2))


def cmp(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k_cmp: torch.Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    v_cmp: torch.Tensor,  # [B, n_c, G, Dv]
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    rows: Rows = None,
    arithmetic: Arithmetic = "exact",
    dtype: torch.dtype = torch.float64,
) -> Dense:
    """The compressed branch: key i of a document is seen by t where i*d + l - 1 <= t."""

    def mask(document: int, keys: int) -> Mask:
        last = torch.arange(keys) * geometry.compress_stride + geometry.compress_block_size - 1
        return lambda rows, g: last <= rows[:, None]

    bounds = host_bounds(cu_seqlens)
    names, both = (
        ("dq", "dk_cmp", "dv_cmp"),
        (bounds, None if bounds is None else compressed_starts(bounds, geometry)),
    )
    return _attend((q, k_cmp, v_cmp), mask, scale, both, names, do, rows, _Maths(arithmetic, dtype))


def win(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k: torch.Tensor,  # [B, S, G, Dk]
    v: torch.Tensor,  # [B, S, G, Dv]
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    rows: Rows = None,
    arithmetic: Arithmetic = "exact",
    dtype: torch.dtype = torch.float64,
) -> Dense:
    """The window branch: key j is seen by t where 0 <= t - j < w."""

    def mask(document: int, keys: int) -> Mask:
        def seen(rows: torch.Tensor, g: int) -> torch.Tensor:
            behind = rows[:, None] - torch.arange(keys)
            return (behind >= 0) & (behind < geometry.window_size)

        return seen

    bounds = host_bounds(cu_seqlens)
    return _attend(
        (q, k, v),
        mask,
        scale,
        (bounds, bounds),
        ("dq", "dk", "dv"),
        do,
        rows,
        _Maths(arithmetic, dtype),
    )


def sel(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k: torch.Tensor,  # [B, S, G, Dk]
    v: torch.Tensor,  # [B, S, G, Dv]
    blocks: torch.Tensor,  # int [B, S, G, n]
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    rows: Rows = None,
    arithmetic: Arithmetic = "exact",
    dtype: torch.dtype = torch.float64,
) -> Dense:
    """The selected branch: key j is seen by t where j <= t and j // l' is among t's blocks."""
    bounds = host_bounds(cu_seqlens)
    chosen = spans(blocks.detach().cpu().long(), bounds)

    def mask(document: int, keys: int) -> Mask:
        key = torch.arange(keys)
        count = -(-keys // geometry.select_block_size)

        def seen(rows: torch.Tensor, g: int) -> torch.Tensor:
            picks = chosen[document][rows, g]
            # one spare column takes what is no block
            picks = torch.where((picks < 0) | (picks >= count), count, picks)
            hit = torch.zeros(len(rows), count + 1, dtype=torch.bool).scatter_(1, picks, True)
            return hit[:, key // geometry.select_block_size] & (key <= rows[:, None])

        return seen

    return _attend(
        (q, k, v),
        mask,
        scale,
        (bounds, bounds),
        ("dq", "dk", "dv"),
        do,
        rows,
        _Maths(arithmetic, dtype),
    )


def combine(
    gates: torch.Tensor,  # [.., S, Hq, 3]
    o_cmp: torch.Tensor,  # [.., S, Hq, Dv]
    o_sel: torch.Tensor,
    o_win: torch.Tensor,
    do: torch.Tensor | None = None,
    *,
    arithmetic: Arithmetic = "exact",
    dtype: torch.dtype = torch.float64,
) -> Dense:
    """The gated sum of the branches. Gates and their gradients are kept in fp32 and never stored in
    ``dtype``.
    """
    maths = _Maths(arithmetic, dtype)
    g = maths.term(maths.take(gates)).unsqueeze(-1)
    stack = torch.stack([maths.term(maths.take(x)) for x in (o_cmp, o_sel, o_win)], -2)
    o = maths.store((g * stack).sum(-2))
    if do is None:
        return Dense(o, None, {}, None)
    d = maths.term(maths.take(do)).unsqueeze(-2)
    d_branches = maths.store(g * d).unbind(-2)
    grads = {"dgates": (d * stack).sum(-1)} | dict(zip(("do_cmp", "do_sel", "do_win"), d_branches))
    return Dense(o, None, grads, None)
