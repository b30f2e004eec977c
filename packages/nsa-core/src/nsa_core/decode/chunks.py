"""Chunks of prompts: many new tokens of a sequence, which attend by the prefill kernels.

The decode forms of a plan serve runs of few rows. In a run of many rows they read the keys of a
sequence once per row, or per small tile of queries, where the prefill kernels share them between
queries: they run with queries that begin inside their sequences. They take contiguous sequences, so
pages and rings are copied in the order of their tokens first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nsa_core.decode.pages import LayerPages, PagedKV

if TYPE_CHECKING:
    from nsa_core.plan.plan import Plan

# Shorter runs of nsa_decode are left to the decode forms, which take each of their rows alone: on a
# GPU, copying the keys and launching the prefill kernels takes as long as about 2,000 rows.
MIN_ROWS = {"cpu": 16, "cuda": 4096}
MAX_CHUNK_ROWS = 8192  # longer chunks are split, to bound their memory besides the pages


class Chunk(NamedTuple):
    """New tokens of one sequence that attend together, as host integers.

    Attributes:
        row: the row of the step that has the first of them.
        sequence: the row of the block tables.
        start: the position of the first of them.
        rows: their number.
    """

    row: int
    sequence: int
    start: int
    rows: int


def chunks_of(
    cu_seqlens: Sequence[int], lengths: Sequence[int], device: torch.device
) -> tuple[Chunk, ...]:
    """Return the chunks of a step; see :func:`nsa_core.decode_rows`."""
    least = MIN_ROWS["cpu" if device.type == "cpu" else "cuda"]
    return tuple(
        Chunk(row, b, lengths[b] - end + row, min(MAX_CHUNK_ROWS, end - row))
        for b, (first, end) in enumerate(itertools.pairwise(cu_seqlens))
        if end - first >= least
        for row in range(first, end, MAX_CHUNK_ROWS)
    )


def attend_chunk(
    plan: Plan,
    pages: LayerPages,
    q: torch.Tensor,
    gates: torch.Tensor,
    sequences: slice,
    start: int,
    in_order: bool = False,
) -> torch.Tensor:
    """Return Eq. 5 for new tokens of sequences that have ``start`` tokens before them.

    Args:
        plan: a plan of prefill kernels, from :func:`nsa_core.plan.default_plan.partial_plan`.
        pages: the pages, which have the new tokens already.
        q: queries [b, m, Hq, Dk].
        gates: gates [b, m, Hq, 3].
        sequences: the rows of the block tables.
        start: the position of the first new token.
        in_order: whether page b of cmp and sel is sequence b, so that it is read in place.

    Returns:
        [b, m, Hq, Dv].
    """
    geometry, end = plan.config.geometry, start + q.shape[1]
    rows = torch.arange(sequences.start, sequences.stop, device=q.device)

    def read(part: PagedKV, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        if in_order and part is not pages.win and part.scales is None:
            return part.k[sequences, first:end], part.v[sequences, first:end]
        tokens = torch.arange(first, end, device=q.device).expand(len(q), -1)
        k, v = part.read(tokens, rows)
        return k.to(q.dtype), v.to(q.dtype)

    k_cmp, v_cmp = read(pages.cmp, 0, geometry.num_compressed(end))
    first = max(start - geometry.window_size + 1, 0)
    o_cmp, lse = plan.cmp(q, k_cmp, v_cmp, first_query=start)
    blocks = plan.select(q, k_cmp, lse, first_query=start)
    o_sel, _ = plan.sel(q, *read(pages.sel, 0, end), blocks, first_query=start)
    o_win, _ = plan.win(q, *read(pages.win, first, end), first_query=start - first)
    o: torch.Tensor = plan.combine(gates, o_cmp, o_sel, o_win)
    return o
