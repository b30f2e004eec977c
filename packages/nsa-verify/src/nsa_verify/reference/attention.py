"""Reference attention with boolean masks [rows, keys] and matrix products, in three arithmetics.

exact      float64: a second oracle, implemented differently from nsa_verify.oracle
rounded    float32, rounded to the tested dtype only where every tensor-core kernel must round:
           P, dS, O and the results
magnitude  float64 with every term made positive (P @ |V|, P^T |dO|, |dS|^T |Q|, ...): the amount
           that can cancel

Rows are processed in chunks, with masks limited to the columns that a chunk needs, to save memory.

Arguments that the branches share:

- ``geometry``: Block sizes. ``scale``: Softmax scale.
- ``cu_seqlens``: Document bounds, int32 [documents + 1]; None if dense.
- ``do``: Gradient of o, [B, S, Hq, Dv]. With it, the result holds the gradients of all inputs.
- ``rows``: Rows of q to evaluate; None evaluates all. Other rows of the result are 0.
- ``first_query``: Position of row 0 of q, if q holds only some rows; None: whole sequences.
- ``arithmetic``: exact, rounded or magnitude. ``dtype``: The tested dtype, used by rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from nsa_core.layout import BlockGeometry
from nsa_verify.reference.score_noise import COVERED, score_noise, score_sizes, weight

Arithmetic = Literal["exact", "rounded", "magnitude"]
# (positions in the document int64 [R], kv head) -> bool [R, L]
Mask = Callable[[torch.Tensor, int], torch.Tensor]
Rows = Sequence[int] | torch.Tensor | None
_CHUNK = 256  # rows that are evaluated together, of one head or, if they are few, of several


@dataclasses.dataclass(frozen=True)
class Dense:
    """The results of a slot in one arithmetic, on the CPU.

    Attributes:
        o: Output, as in :class:`nsa_verify.oracle.Truth`; float32 if ``rounded``.
        lse: Log-sum-exp, likewise.
        grads: Gradients, likewise.
        top: Largest |score| of each row, laid out as ``lse``; 0 without a visible key. In magnitude
            it is the size of the scores times its weight, if that is larger. None for combine.
        score_noise: Noise of large scores by result ("o" and the names of the gradients), see
            :mod:`nsa_verify.reference.score_noise`. That of o has one element per row. Only
            magnitude computes it; empty without scores above 16.
    """

    o: torch.Tensor
    lse: torch.Tensor | None
    grads: dict[str, torch.Tensor]
    top: torch.Tensor | None
    score_noise: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Maths:
    """The operations in which the three arithmetics differ."""

    arithmetic: Arithmetic
    dtype: torch.dtype

    def load(self, x: torch.Tensor) -> torch.Tensor:
        """Convert an input."""
        x = x.detach().to("cpu", torch.float32 if self.arithmetic == "rounded" else torch.float64)
        # Only golden needs NaN and Inf; here 0 * NaN in a matrix product would spread them to other
        # rows.
        return (
            x
            if self.arithmetic == "exact"
            else torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
        )

    def term(self, x: torch.Tensor) -> torch.Tensor:
        """Make a factor of a sum positive if the arithmetic is magnitude."""
        return x.abs() if self.arithmetic == "magnitude" else x

    def minus(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Subtract, or add magnitudes."""
        return a + b if self.arithmetic == "magnitude" else a - b

    def store(self, x: torch.Tensor) -> torch.Tensor:
        """Round a tensor that every kernel stores in the tested dtype."""
        return x.to(self.dtype).to(x.dtype) if self.arithmetic == "rounded" else x


def _chunk(
    maths: _Maths,
    q: torch.Tensor,  # [R, Dk]; the rows of several heads follow each other
    k: torch.Tensor,  # [L, Dk]
    v: torch.Tensor,  # [L, Dv]
    mask: torch.Tensor,  # bool [R, L]
    scale: float,
    do: torch.Tensor | None,  # [R, Dv]
    heads: int,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Compute o [R, Dv], lse [R] and top [R] for a chunk of rows of ``heads`` heads.

    With ``do``, the results also have dq [R, Dk], dk [L, Dk] and dv [L, Dv], which the caller
    rounds. The second tuple has the sizes of the scores [R] and their noise in o, dq, dk and dv. It
    is empty if no score can exceed 16.
    """
    hidden = ~mask
    s = (q @ k.T * scale).masked_fill(hidden, -torch.inf)
    peak = s.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    e = (s - peak).exp()
    total = e.sum(-1, keepdim=True)
    divisor = torch.where(total > 0, total, 1.0)
    o = maths.store((maths.store(e) @ maths.term(v)) / divisor)
    lse = (peak + total.log()).squeeze(-1)
    visible_scores = s.masked_fill(hidden, 0.0)
    top, p = visible_scores.abs().amax(-1), e / divisor
    noise: tuple[torch.Tensor, ...] = ()
    if maths.arithmetic == "magnitude":
        rows = (visible_scores, p, mask, q, do)
        noise = _noise_of_heads(rows, k, v, scale, maths.dtype, heads)
    if do is None:
        return (o, lse, top), noise
    d = maths.term(do)
    dp = d @ maths.term(v).T
    ds = maths.store((p * maths.minus(dp, (d * o).sum(-1, keepdim=True))).masked_fill(hidden, 0.0))
    factor = abs(scale) if maths.arithmetic == "magnitude" else scale
    dq, dk = factor * (ds @ maths.term(k)), factor * (ds.T @ maths.term(q))
    return (o, lse, top, dq, dk, maths.store(p).T @ d), noise


def _noise_of_heads(
    rows: tuple[Any, ...],  # scores, P, mask [R, L], q and do
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
    heads: int,
) -> tuple[torch.Tensor, ...]:
    """Return the second result of :func:`_chunk`: the noise of each head, those of keys added."""
    # No size exceeds |scale| |q| |k|.
    q_norms = rows[3].norm(dim=-1).view(heads, -1).amax(-1)
    large = (abs(scale) * q_norms * k.norm(dim=-1).amax() > COVERED).tolist()
    if not any(large):
        return ()
    noises = []
    for is_large, s, p, mask, q, do in zip(large, *(_split(x, heads) for x in rows)):
        if is_large:
            sizes = score_sizes(s, q, k, mask, scale)
            noises.append((sizes, *score_noise(p, sizes, mask, q, k, v, do, scale, dtype)))
        else:
            noises.append(())
    empty = [torch.zeros_like(x) for x in next(noise for noise in noises if noise)]
    sizes_o_dq_dk_dv = list(zip(*(noise or empty for noise in noises)))
    rowwise = [torch.cat(parts) for parts in sizes_o_dq_dk_dv[:3]]
    return (*rowwise, *(torch.stack(parts).sum(0) for parts in sizes_o_dq_dk_dv[3:]))


def _split(x: torch.Tensor | None, heads: int) -> Sequence[Any]:
    """Return the rows of each of ``heads`` heads."""
    return [None] * heads if x is None else x.chunk(heads)


def _chunks(
    rows: torch.Tensor, mask: Mask, g: int, first: int
) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor]]:
    """Yield (rows, columns, mask) of each chunk of rows; the mask covers only ``columns``."""
    for chunk in rows.split(_CHUNK):
        full = mask(first + chunk, g)
        used = full.any(0).nonzero().flatten()
        columns = slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)
        yield chunk, columns, full[:, columns]


def _as_slice(rows: torch.Tensor) -> slice | torch.Tensor:
    """Return ``rows``, as a slice if they are consecutive, which copies them without a gather."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def _document(
    maths: _Maths,
    tensors: tuple[
        torch.Tensor, torch.Tensor, torch.Tensor
    ],  # q [S, Hq, Dk], k [L, G, Dk], v [L, G, Dv]
    results: tuple[torch.Tensor, ...],  # o, lse, top [S, Hq, ..], then dq, dk, dv, written in place
    noises: tuple[torch.Tensor, ...],  # sizes, noise of o, then of dq, dk, dv, likewise
    do: torch.Tensor | None,
    mask: Mask,
    scale: float,
    rows: torch.Tensor,
    first: int,
) -> None:
    """Evaluate ``rows`` of one document, whose row 0 is its token ``first``; write the results."""
    (q, k, v), (o, lse, top, *grads) = tensors, results
    heads, groups = q.shape[1], k.shape[1]
    h = heads // groups
    for g in range(groups):
        for chunk, columns, visible in _chunks(rows, mask, g, first):
            lse[chunk, g * h : (g + 1) * h] = -torch.inf
            if not visible.numel():
                continue
            row_index, together = _as_slice(chunk), max(1, _CHUNK // len(chunk))
            for head in range(g * h, (g + 1) * h, together):
                count = min(together, (g + 1) * h - head)
                place = row_index, slice(head, head + count)

                def fold(x: torch.Tensor) -> torch.Tensor:
                    by_head = x[place].transpose(0, 1)  # noqa: B023
                    # Always a copy: the bits of a product depend on the alignment of its factors.
                    return by_head.clone(memory_format=torch.contiguous_format).flatten(0, 1)

                def store(whole: torch.Tensor, rows: torch.Tensor) -> None:
                    by_head = rows.reshape(count, -1, *rows.shape[1:])  # noqa: B023
                    whole[place] = by_head.transpose(0, 1)  # noqa: B023

                out, noise = _chunk(
                    maths,
                    fold(q),
                    k[columns, g],
                    v[columns, g],
                    visible.repeat(count, 1),
                    scale,
                    None if do is None else fold(do),
                    count,
                )
                for whole, rows_ in zip((o, lse, top, *noises[:2]), (*out[:3], *noise[:2])):
                    store(whole, rows_)
                for sums, parts in ((grads, out[3:]), (noises[2:], noise[2:])):
                    if parts:
                        store(sums[0], parts[0])
                        sums[1][columns, g] += parts[1]
                        sums[2][columns, g] += parts[2]


def host_bounds(cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
    """Return ``cu_seqlens`` as int64 on the CPU; None if dense."""
    return None if cu_seqlens is None else cu_seqlens.detach().cpu().long()


def compressed_starts(bounds: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """Return the first compressed row of each packed document, and the end of the last one."""
    counts = ((bounds.diff() - geometry.compress_block_size) // geometry.compress_stride + 1).clamp(
        min=0
    )
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def spans(x: torch.Tensor, bounds: torch.Tensor | None) -> list[torch.Tensor]:
    """Return one view per batch entry, or per packed document."""
    if bounds is None:
        return [x.select(0, b) for b in range(len(x))]
    return list(x.narrow(0, 0, int(bounds[-1])).split(bounds.diff().tolist()))


class QueryRows(NamedTuple):
    """The rows of q that each batch entry or document has.

    Attributes:
        bounds: First row of q of each packed document, and the end of the last one; None if dense.
        first: Position of its first row of q, in each batch entry or document.
    """

    bounds: torch.Tensor | None
    first: list[int]


def query_rows(q: torch.Tensor, bounds: torch.Tensor | None, first_query: int | None) -> QueryRows:
    """Return the rows of ``q`` that each document has, from the position of every row.

    ``bounds`` are those of the axis of the keys, on which row 0 of q has the position
    ``first_query``.
    """
    if bounds is None:
        return QueryRows(None, [first_query or 0] * len(q))
    if first_query is None:
        return QueryRows(bounds, [0] * (len(bounds) - 1))
    position = torch.arange(len(q)) + first_query
    # The last document that begins at or before the row; empty documents have none.
    owner = torch.searchsorted(bounds, position, right=True) - 1
    counts = torch.bincount(owner, minlength=len(bounds) - 1)
    first = [
        int((position[owner == document] - bounds[document]).amin()) if count else 0
        for document, count in enumerate(counts.tolist())
    ]
    return QueryRows(torch.cat([counts.new_zeros(1), counts.cumsum(0)]), first)


def _document_rows(
    rows: Rows, bounds: torch.Tensor | None, batch: int, length: int
) -> list[torch.Tensor]:
    """Return the rows to evaluate in each batch entry or document, from its first row of q on."""
    total = length if bounds is None else int(bounds[-1])
    evaluated = torch.zeros(total, dtype=torch.bool)
    evaluated[slice(None) if rows is None else torch.as_tensor(rows, dtype=torch.long)] = True
    per_document = [evaluated] * batch if bounds is None else spans(evaluated, bounds)
    return [mask.nonzero().flatten() for mask in per_document]


def _attend(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Callable[[int, int], Mask],  # (document, its number of keys) -> its mask
    scale: float,
    bounds: tuple[QueryRows, torch.Tensor | None],  # of queries, of keys
    names: tuple[str, str, str],
    do: torch.Tensor | None,
    rows: Rows,
    maths: _Maths,
) -> Dense:
    """Compute attention of the evaluated rows under ``mask``, and its gradients by ``names``."""
    q, k, v = (maths.load(x) for x in tensors)
    (token_bounds, first), key_bounds = bounds
    o, lse = q.new_zeros((*q.shape[:-1], v.shape[-1])), q.new_zeros(q.shape[:-1])
    top, grads = (
        torch.zeros_like(lse),
        [torch.zeros_like(x) for x in (q, k, v)] if do is not None else [],
    )
    sizes = torch.zeros_like(lse)
    noises = [torch.zeros_like(x) for x in (o[..., :1], *grads)]
    evaluated = _document_rows(rows, token_bounds, len(q), q.shape[-3])
    token_spans = [spans(x, token_bounds) for x in (q, o, lse, top, *grads[:1])]
    token_noises = [spans(x, token_bounds) for x in (sizes, *noises[:2])]
    key_spans = [spans(x, key_bounds) for x in (k, v, *grads[1:])]
    key_noises = [spans(x, key_bounds) for x in noises[2:]]
    do_spans = spans(maths.load(do), token_bounds) if do is not None else [None] * len(evaluated)
    for i, rows_ in enumerate(evaluated):
        (q_, *results), (k_, v_, *dkv) = [x[i] for x in token_spans], [x[i] for x in key_spans]
        tensors_, results_ = (q_, k_, v_), (*results, *dkv)
        noises_ = tuple(x[i] for x in (*token_noises, *key_noises))
        seen = mask(i, len(k_))
        _document(maths, tensors_, results_, noises_, do_spans[i], seen, scale, rows_, first[i])
    stored = {name: maths.store(x) for name, x in zip(names, grads)}
    factor = weight(float(sizes.max()) if sizes.numel() else 0.0, q.shape[-1])
    top = torch.maximum(top, factor * sizes).transpose(-1, -2)
    score_noises = {n: factor * x for n, x in zip(("o", *names), noises) if factor}
    return Dense(o, lse.transpose(-1, -2), stored, top, score_noises)


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
    first_query: int | None = None,
    arithmetic: Arithmetic = "exact",
    dtype: torch.dtype = torch.float64,
) -> Dense:
    """Compute the cmp branch: compressed token i is visible to t if i*d + l - 1 <= t."""

    def mask(document: int, keys: int) -> Mask:
        last = torch.arange(keys) * geometry.compress_stride + geometry.compress_block_size - 1
        return lambda rows, g: last <= rows[:, None]

    bounds = host_bounds(cu_seqlens)
    names, all_bounds = (
        ("dq", "dk_cmp", "dv_cmp"),
        (
            query_rows(q, bounds, first_query),
            None if bounds is None else compressed_starts(bounds, geometry),
        ),
    )
    maths = _Maths(arithmetic, dtype)
    return _attend((q, k_cmp, v_cmp), mask, scale, all_bounds, names, do, rows, maths)


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
    first_query: int | None = None,
    arithmetic: Arithmetic = "exact",
    dtype: torch.dtype = torch.float64,
) -> Dense:
    """Compute the win branch: key j is visible to t if 0 <= t - j < w."""

    def mask(document: int, keys: int) -> Mask:
        def visible(rows: torch.Tensor, g: int) -> torch.Tensor:
            distance = rows[:, None] - torch.arange(keys)
            return (distance >= 0) & (distance < geometry.window_size)

        return visible

    bounds = host_bounds(cu_seqlens)
    return _attend(
        (q, k, v),
        mask,
        scale,
        (query_rows(q, bounds, first_query), bounds),
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
    first_query: int | None = None,
    arithmetic: Arithmetic = "exact",
    dtype: torch.dtype = torch.float64,
) -> Dense:
    """Compute the sel branch: key j is visible to t if j <= t and j // l' is a block of t."""
    bounds = host_bounds(cu_seqlens)
    queries = query_rows(q, bounds, first_query)
    per_document = spans(blocks.detach().cpu().long(), queries.bounds)

    def mask(document: int, keys: int) -> Mask:
        key = torch.arange(keys)
        count = -(-keys // geometry.select_block_size)

        def visible(rows: torch.Tensor, g: int) -> torch.Tensor:
            selected = per_document[document][rows - queries.first[document], g]
            # Entries that are not blocks go to one extra column.
            selected = torch.where((selected < 0) | (selected >= count), count, selected)
            member = torch.zeros(len(rows), count + 1, dtype=torch.bool)
            member.scatter_(1, selected, True)
            return member[:, key // geometry.select_block_size] & (key <= rows[:, None])

        return visible

    return _attend(
        (q, k, v),
        mask,
        scale,
        (queries, bounds),
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
    """Compute the gated sum (Eq. 5). Gates and their gradients are not rounded to ``dtype``."""
    maths = _Maths(arithmetic, dtype)
    g = maths.term(maths.load(gates)).unsqueeze(-1)
    stack = torch.stack([maths.term(maths.load(x)) for x in (o_cmp, o_sel, o_win)], -2)
    o = maths.store((g * stack).sum(-2))
    if do is None:
        return Dense(o, None, {}, None)
    d = maths.term(maths.load(do)).unsqueeze(-2)
    d_branches = maths.store(g * d).unbind(-2)
    grads = {"dgates": (d * stack).sum(-1)} | dict(zip(("do_cmp", "do_sel", "do_win"), d_branches))
    return Dense(o, None, grads, None)
