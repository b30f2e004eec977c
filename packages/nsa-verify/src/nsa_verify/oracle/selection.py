"""Block scores (Eq. 8 to 10) and the choice of blocks (docs/semantics.md, "Scores" and
"Selection").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from nsa_core.layout import BlockGeometry
from nsa_verify.oracle.rows import (
    compressed_bounds,
    document_rows,
    documents,
    f64,
    refuse_absurd,
    token_bounds,
)

Rows = Sequence[int] | torch.Tensor | None


class RowScores(NamedTuple):
    """The blocks' scores for one token and kv head.

    Attributes:
        document: batch entry, or packed document. token: counted from the document's start.
        terms: float64 [h, taps, NB]: weight(i, j) * p[h, i] of the tap-th compressed block that
            overlaps block j, in ascending i; 0 where i < 0 or i is not visible. NB is the
            document's number of selection blocks.
        logits: float64 [h, visible], scale * q.k_cmp. spread: [h], |scale| * the largest sum_d |q_d
            k_d| over them.
    """

    document: int
    token: int
    kv_head: int
    terms: torch.Tensor
    logits: torch.Tensor
    spread: torch.Tensor

    def per_head(self) -> torch.Tensor:
        """[h, NB]: Eq. 9, the taps added in ascending i."""
        total = torch.zeros_like(self.terms[:, 0])
        for tap in range(self.terms.shape[1]):
            total = total + self.terms[:, tap]
        return total

    def per_group(self) -> torch.Tensor:
        """[NB]: Eq. 10, the heads added in ascending order."""
        each = self.per_head()
        total = torch.zeros_like(each[0])
        for head in each:
            total = total + head
        return total


def _weights(geometry: BlockGeometry) -> list[tuple[int, int]]:
    """(i, |[i*d, i*d + l) cut [0, l')| / d) of the compressed blocks i that overlap selection block
    0, ascending i.
    """
    size, stride, select = (
        geometry.compress_block_size,
        geometry.compress_stride,
        geometry.select_block_size,
    )
    found = []
    for i in range(-size, select):
        shared = len(range(max(i * stride, 0), min(i * stride + size, select)))
        if shared:
            found.append((i, shared // stride))
    return found


def row_scores(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k_cmp: torch.Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    lse: torch.Tensor,  # [B, Hq, S], packed [Hq, T], of the cmp branch
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    rows: Rows = None,
) -> Iterator[RowScores]:
    """The scores of every evaluated token and kv head, with p = exp(scale q.k_cmp - lse) over the
    visible tokens.

    Raises:
        InvalidInput: more work than would end; ``rows=`` asks for less.
    """
    bounds = token_bounds(cu_seqlens)
    key_bounds = compressed_bounds(bounds, geometry)
    evaluated = document_rows(rows, [len(x) for x in documents(q, bounds)], bounds)
    refuse_absurd(evaluated, [len(x) for x in documents(k_cmp, key_bounds)], q.shape[-2])
    per_q, per_k = documents(f64(q), bounds), documents(f64(k_cmp), key_bounds)
    per_lse = documents(f64(lse).transpose(-1, -2), bounds)
    groups, h = k_cmp.shape[-2], q.shape[-2] // k_cmp.shape[-2]
    for document, rows_here in enumerate(evaluated):
        length = len(per_q[document])
        for t, g in itertools.product(rows_here, range(groups)):
            group = slice(g * h, (g + 1) * h)
            visible = len(range(geometry.compress_block_size - 1, t + 1, geometry.compress_stride))
            mine, keys = per_q[document][t, group], per_k[document][:visible, g]
            logits = scale * (mine @ keys.T)
            p = (logits - per_lse[document][t, group, None]).exp()
            spread = abs(scale) * (mine.abs() @ keys.abs().T)
            widest = spread.amax(-1) if visible else spread.new_zeros(h)
            yield RowScores(document, t, g, _terms(p, length, geometry), logits, widest)


def _terms(p: torch.Tensor, length: int, geometry: BlockGeometry) -> torch.Tensor:
    """[h, visible] probabilities as the weighted taps [h, taps, NB] of each selection block."""
    size, ratio = geometry.select_block_size, geometry.select_block_size // geometry.compress_stride
    taps, blocks = _weights(geometry), len(range(0, length, size))
    terms = p.new_zeros((p.shape[0], len(taps), blocks))
    for tap, (offset, weight) in enumerate(taps):
        seen = [j for j in range(blocks) if 0 <= j * ratio + offset < p.shape[1]]
        if seen:
            first = seen[0] * ratio + offset
            terms[:, tap, seen[0] : seen[-1] + 1] = weight * p[:, first::ratio][:, : len(seen)]
    return terms


def scores(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    rows: Rows = None,
) -> torch.Tensor:
    """Group scores, float64 [B, S, G, NB] (packed [T, G, NB], NB of the longest document);
    arguments of row_scores.

    0 for rows not evaluated, blocks in the future, and tokens that see no compressed token.
    """
    bounds, size = token_bounds(cu_seqlens), geometry.select_block_size
    lengths = [q.shape[-3]] if bounds is None else [b - a for a, b in itertools.pairwise(bounds)]
    blocks = max((len(range(0, n, size)) for n in lengths), default=0)
    out = torch.zeros((*q.shape[:-2], k_cmp.shape[-2], blocks), dtype=torch.float64)
    places = documents(out, bounds)
    for row in row_scores(q, k_cmp, lse, geometry, scale, cu_seqlens=cu_seqlens, rows=rows):
        group = row.per_group()
        places[row.document][row.token, row.kv_head, : len(group)] = group
    return out


def choose(score: Sequence[float], t: int, geometry: BlockGeometry) -> list[int]:
    """The blocks of token ``t``, ascending: the forced candidates, then the best scores, equal ones
    by lower index.
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
) -> torch.Tensor:
    """The chosen blocks, int32 [B, S, G, n], ascending, -1 at the end; arguments of row_scores.

    Rows not evaluated are all -1.
    """
    shape = (*q.shape[:-2], k_cmp.shape[-2], geometry.num_selected_blocks)
    out = torch.full(shape, -1, dtype=torch.int32)
    places = documents(out, token_bounds(cu_seqlens))
    for row in row_scores(q, k_cmp, lse, geometry, scale, cu_seqlens=cu_seqlens, rows=rows):
        mine = choose(row.per_group().tolist(), row.token, geometry)
        places[row.document][row.token, row.kv_head, : len(mine)] = torch.tensor(
            mine, dtype=torch.int32
        )
    return out
