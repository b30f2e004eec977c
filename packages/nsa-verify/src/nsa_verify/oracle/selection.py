"""Oracle of block scores (Eq. 8 to 10) and of block selection (Eq. 11 and 12).

docs/explanation/semantics.md describes both under "Scores" and "Selection".
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from nsa_core.layout import BlockGeometry
from nsa_verify.oracle.rows import (
    check_size,
    compressed_bounds,
    document_rows,
    documents,
    f64,
    queries_of,
    token_bounds,
)

Rows = Sequence[int] | torch.Tensor | None


class RowScores(NamedTuple):
    """Block scores of one token and kv head, in float64.

    Attributes:
        document: Batch entry, or index of the packed document.
        token: Token position in the document.
        row: Row of q: of the batch entry, or of packed q.
        kv_head: Index of the kv head.
        terms: [h, weights, NB]: weight(i, j) * p[h, i] for the compressed blocks i that overlap
            selection block j, in ascending i; 0 where i < 0 or i is not visible. NB is the number
            of selection blocks of the document up to its last query.
        logits: [h, visible]: scale * q.k_cmp.
        spread: [h]: |scale| * max over visible i of sum_d |q_d k_id|.
    """

    document: int
    token: int
    row: int
    kv_head: int
    terms: torch.Tensor
    logits: torch.Tensor
    spread: torch.Tensor

    def per_head(self) -> torch.Tensor:
        """Return the scores per head [h, NB] (Eq. 9), with terms added in ascending i."""
        total = torch.zeros_like(self.terms[:, 0])
        for tap in range(self.terms.shape[1]):
            total = total + self.terms[:, tap]
        return total

    def per_group(self) -> torch.Tensor:
        """Return the scores per group [NB] (Eq. 10), with heads added in ascending order."""
        heads = self.per_head()
        total = torch.zeros_like(heads[0])
        for head in heads:
            total = total + head
        return total


@functools.lru_cache(maxsize=64)  # asked for every row
def _weights(geometry: BlockGeometry) -> list[tuple[int, int]]:
    """List (i, overlap / d) of the compression blocks i that overlap selection block 0.

    The overlap is the number of tokens in the intersection of [i*d, i*d + l) and [0, l').
    """
    size, stride, select = (
        geometry.compress_block_size,
        geometry.compress_stride,
        geometry.select_block_size,
    )
    weights = []
    for i in range(-size, select):
        overlap = len(range(max(i * stride, 0), min(i * stride + size, select)))
        if overlap:
            weights.append((i, overlap // stride))
    return weights


def row_scores(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k_cmp: torch.Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    lse: torch.Tensor,  # [B, Hq, S], packed [Hq, T], of the cmp branch
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    rows: Rows = None,
    first_query: int | None = None,
) -> Iterator[RowScores]:
    """Yield the scores of every evaluated token and kv head (Eq. 8 and the terms of Eq. 9).

    The probabilities are p = exp(scale q.k_cmp - lse) over the visible compressed tokens. The
    arguments after lse, and the errors, are those of :func:`nsa_verify.oracle.branches.cmp`.

    Args:
        q: Queries [B, S, Hq, Dk], packed [T, Hq, Dk].
        k_cmp: Compressed keys [B, n_c, G, Dk], packed [T // d, G, Dk].
        lse: Log-sum-exp of the cmp branch [B, Hq, S], packed [Hq, T].
    """
    queries = queries_of(q, cu_seqlens, first_query)
    bounds = queries.bounds
    key_bounds = compressed_bounds(token_bounds(cu_seqlens), geometry)
    evaluated = document_rows(rows, [len(x) for x in documents(q, bounds)], bounds)
    check_size(evaluated, [len(x) for x in documents(k_cmp, key_bounds)], q.shape[-2])
    per_q, per_k = documents(f64(q), bounds), documents(f64(k_cmp), key_bounds)
    per_lse = documents(f64(lse).transpose(-1, -2), bounds)
    groups, h = k_cmp.shape[-2], q.shape[-2] // k_cmp.shape[-2]
    for document, rows_ in enumerate(evaluated):
        first, start = queries.first[document], 0 if bounds is None else bounds[document]
        length = first + len(per_q[document])
        for row, g in itertools.product(rows_, range(groups)):
            t, group = first + row, slice(g * h, (g + 1) * h)
            visible = len(range(geometry.compress_block_size - 1, t + 1, geometry.compress_stride))
            heads, keys = per_q[document][row, group], per_k[document][:visible, g]
            logits = scale * (heads @ keys.T)
            p = (logits - per_lse[document][row, group, None]).exp()
            sums = abs(scale) * (heads.abs() @ keys.abs().T)
            spread = sums.amax(-1) if visible else sums.new_zeros(h)
            terms = _terms(p, length, geometry)
            yield RowScores(document, t, start + row, g, terms, logits, spread)


def _terms(p: torch.Tensor, length: int, geometry: BlockGeometry) -> torch.Tensor:
    """Turn probabilities [h, visible] into the weighted terms [h, weights, NB] of Eq. 9."""
    size, ratio = geometry.select_block_size, geometry.select_block_size // geometry.compress_stride
    weights, blocks = _weights(geometry), len(range(0, length, size))
    terms = p.new_zeros((p.shape[0], len(weights), blocks))
    for i, (offset, weight) in enumerate(weights):
        seen = [j for j in range(blocks) if 0 <= j * ratio + offset < p.shape[1]]
        if seen:
            first = seen[0] * ratio + offset
            terms[:, i, seen[0] : seen[-1] + 1] = weight * p[:, first::ratio][:, : len(seen)]
    return terms


def _index(row: RowScores, cu_seqlens: torch.Tensor | None) -> tuple[int, ...]:
    """Return the index of ``row`` in the leading axes [B, S, G], or [T, G] if packed."""
    packed = (row.row, row.kv_head)
    return packed if cu_seqlens is not None else (row.document, *packed)


def choose(score: Sequence[float], t: int, geometry: BlockGeometry) -> list[int]:
    """Select the blocks of token ``t`` from its scores [NB] (Eq. 11).

    Forced blocks come first, then the highest scores. Equal scores go to the lower index, and NaN
    ranks last.

    Returns:
        min(n, candidates) blocks in ascending order.
    """
    candidates = [j for j in range(len(score)) if j * geometry.select_block_size <= t]
    forced = set(candidates[: geometry.init_blocks])
    forced |= set(candidates[len(candidates) - min(len(candidates), geometry.local_blocks) :])

    def rank(j: int) -> tuple[float, int]:
        return (math.inf if math.isnan(score[j]) else -score[j], j)

    others = sorted((j for j in candidates if j not in forced), key=rank)
    return sorted([*forced, *others[: geometry.num_selected_blocks - len(forced)]])


def select(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    rows: Rows = None,
    first_query: int | None = None,
) -> torch.Tensor:
    """Select blocks (Eq. 8 to 12); arguments as in :func:`row_scores`.

    Returns:
        int32 [B, S, G, n], packed [T, G, n]: blocks in ascending order, then -1. Rows that are not
        evaluated hold -1.
    """
    shape = (*q.shape[:-2], k_cmp.shape[-2], geometry.num_selected_blocks)
    out = torch.full(shape, -1, dtype=torch.int32)
    call: dict[str, Any] = {"cu_seqlens": cu_seqlens, "rows": rows, "first_query": first_query}
    for row in row_scores(q, k_cmp, lse, geometry, scale, **call):
        blocks = choose(row.per_group().tolist(), row.token, geometry)
        chosen = torch.tensor(blocks, dtype=torch.int32)
        out[_index(row, cu_seqlens)][: len(blocks)] = chosen
    return out
