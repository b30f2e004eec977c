"""The fold: compressed attention as plain causal attention, exact for any l, d and length.

Token t sees the compressed tokens 0 .. floor((t + 1 - l) / d). The first l - 1 tokens of a document
see none. The other tokens form runs of d tokens with the same visible keys:

    token  l - 1 + r * d + j  sees compressed tokens  0 .. r        run r, residue j in 0 .. d - 1

A document of S tokens has as many runs as compressed tokens, I = num_compressed(S). Its last run
may have fewer than d tokens. The queries of one residue, one per run, therefore attend to the keys
under an ordinary causal mask with as many queries as keys. The residues become heads or a batch
axis:

    fold, unfold    copies between [B, S, Hq, D] and [B, I, G, d, h, D]; also of queries that begin
                    inside a sequence
    PackedFold      the same for packed documents, computed on the device: [R, G, d, h, D]
    Residues        views of one sequence without a copy: [residues, runs, Hq, D]

There are Hq = G * h query heads; the h heads of a group are contiguous. A backend chooses the form
and calls its attention kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_core.layout import BlockGeometry
from nsa_core.packing import compressed_cu_seqlens, token_positions


class PartialFold(NamedTuple):
    """The runs of the queries of one sequence that begin at token ``first_query``.

    Run r of the sequence sees the keys 0 .. r. The folded queries are therefore causal over the
    keys 0 .. ``stop`` - 1, with the last run aligned to the last key. The first and the last run
    may hold fewer than d of these queries.

    Attributes:
        blank: number of rows at the start that see no key.
        first: the first run.
        stop: end of the runs, exclusive, and number of keys that the last query sees; at least
            ``first``. Equal to ``first`` if no query sees a key.
        lead: number of entries of the first run whose tokens come before ``first_query``.
    """

    blank: int
    first: int
    stop: int
    lead: int

    def spans(self, length: int, stride: int) -> list[tuple[slice, slice, slice]]:
        """Return (rows, runs, entries of each run) of the first, the full and the last runs.

        Rows count without the blank ones. Spans without a row are left out.
        """
        count, runs = length - self.blank, self.stop - self.first
        spans, row, run = [], 0, 0
        if self.lead and count:
            row, run = min(stride - self.lead, count), 1
            spans.append((slice(0, row), slice(0, 1), slice(self.lead, self.lead + row)))
        full, remainder = divmod(count - row, stride)
        if full:
            rows = slice(row, row + full * stride)
            spans.append((rows, slice(run, run + full), slice(0, stride)))
        if remainder:
            rows = slice(count - remainder, count)
            spans.append((rows, slice(runs - 1, runs), slice(0, remainder)))
        return spans


def partial_fold(first_query: int, length: int, geometry: BlockGeometry) -> PartialFold:
    """Return the runs of the queries ``first_query`` .. ``first_query + length - 1``.

    Args:
        first_query: position of the first query in its sequence; 0 for a whole sequence.
        length: number of queries.
        geometry: the block sizes.
    """
    stride, hidden = geometry.compress_stride, geometry.compress_block_size - 1
    blank = min(length, max(0, hidden - first_query))
    stop = geometry.num_compressed(first_query + length)
    if blank == length:
        return PartialFold(blank, stop, stop, 0)
    first, lead = divmod(first_query + blank - hidden, stride)
    return PartialFold(blank, first, stop, lead)


def fold(
    x: Tensor,
    groups: int,
    geometry: BlockGeometry,
    *,
    first_query: int = 0,
    group_major: bool = False,
) -> Tensor:
    """Copy the rows of ``x`` into runs.

    Entries of a run without a row are 0. A zero query attends to keys, but its output is
    discarded, and a zero output gradient contributes nothing.

    Args:
        x: rows of query heads of S tokens, of which at least one sees a key.
        groups: number of kv heads, G.
        geometry: the block sizes.
        first_query: position of row 0 in its sequence. The runs are those of :func:`partial_fold`.
        group_major: use the memory layout [B, G, I, d, h, D] instead of [B, I, G, d, h, D].

    Shapes:
        x: [B, S, Hq, D]

    Returns:
        [B, I, G, d, h, D], a view of one new tensor.
    """
    stride, (batch, length, heads, width) = geometry.compress_stride, x.shape
    part = partial_fold(first_query, length, geometry)
    runs, run_shape = part.stop - part.first, (stride, heads // groups, width)
    if group_major:
        folded = x.new_empty((batch, groups, runs, *run_shape)).transpose(1, 2)
    else:
        folded = x.new_empty((batch, runs, groups, *run_shape))
    tokens, entries = x[:, part.blank :].unflatten(2, (groups, -1)), folded.transpose(2, 3)
    for rows, run, entry in part.spans(length, stride):
        if entry.start:
            entries[:, run, : entry.start] = 0
        if entry.stop < stride:
            entries[:, run, entry.stop :] = 0
        rows_per_run = entry.stop - entry.start
        entries[:, run, entry] = tokens[:, rows].unflatten(1, (-1, rows_per_run))
    return folded


def unfold(
    folded: Tensor,
    length: int,
    geometry: BlockGeometry,
    *,
    first_query: int = 0,
    blank: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Copy runs back into rows: the inverse of :func:`fold`.

    Args:
        folded: runs, with any strides.
        length: number of rows, S.
        geometry: the block sizes.
        first_query: position of row 0 in its sequence.
        blank: value of the rows that see no key.
        out: tensor for the result; None allocates one.

    Shapes:
        folded: [B, I, G, d, h, D]
        out: [B, S, Hq, D]

    Returns:
        [B, S, Hq, D]
    """
    batch, _, groups, _, per_group, width = folded.shape
    if out is None:
        out = folded.new_empty((batch, length, groups * per_group, width))
    part = partial_fold(first_query, length, geometry)
    out[:, : part.blank] = blank
    tokens, entries = out[:, part.blank :].unflatten(2, (groups, -1)), folded.transpose(2, 3)
    for rows, run, entry in part.spans(length, geometry.compress_stride):
        rows_per_run = entry.stop - entry.start
        tokens[:, rows].unflatten(1, (-1, rows_per_run)).copy_(entries[:, run, entry])
    return out


class PackedFold(NamedTuple):
    """The fold of packed documents, computed on the device without synchronisation.

    There are R runs, T // d for whole documents; the first cu[-1] of them belong to documents. An
    entry of a run without a token repeats the nearest token of the document in this run, which sees
    the same keys.

    Attributes:
        cu: int32 [documents + 1], the first run of each document.
        cu_keys: int32 [documents + 1], the first compressed token of each document; ``cu`` for
            whole documents. Documents that end before row 0 have keys but no run.
        token: int64 [R, d], the row of each entry in x.
        empty: bool [R, d], whether an entry has no token.
        run: int64 [T], the run of each row of x.
        place: int64 [T], the index of each row in its run.
        blank: bool [T], whether a row sees no compressed token.
    """

    cu: Tensor
    cu_keys: Tensor
    token: Tensor
    empty: Tensor
    run: Tensor
    place: Tensor
    blank: Tensor

    @classmethod
    def of(
        cls, cu_seqlens: Tensor, total: int, geometry: BlockGeometry, first_query: int = 0
    ) -> PackedFold:
        """Compute the fold of documents with the boundaries ``cu_seqlens``.

        Args:
            cu_seqlens: int32 [documents + 1], not decreasing, within [0, first_query + total].
            total: number of packed rows, T.
            geometry: the block sizes.
            first_query: row 0 of x on the axis that ``cu_seqlens`` divides.
        """
        stride, first = geometry.compress_stride, geometry.compress_block_size - 1
        bounds, cu_keys = cu_seqlens.long(), compressed_cu_seqlens(cu_seqlens, geometry)
        cu, before = cu_keys, None
        if first_query:
            before = _runs_before(cu_seqlens, cu_keys, first_query, geometry)
            cu = pad((cu_keys.diff() - before).cumsum(0, dtype=torch.int32), (1, 0))
        runs = token_positions(cu, cls.max_runs(total, geometry, first_query))
        tokens = token_positions(cu_seqlens, total, first_query)
        start = bounds[runs.document] + first + runs.position * stride
        run = cu.long()[tokens.document]
        run += (tokens.position - first).div(stride, rounding_mode="floor")
        if before is not None:
            start += before[runs.document] * stride
            run -= before[tokens.document]
        token = start[:, None] + torch.arange(stride, device=cu.device)
        end = bounds[runs.document + 1, None]
        empty = token >= end
        if first_query:
            empty |= token < first_query
        return cls(
            cu,
            cu_keys,
            (torch.minimum(token, end - 1) - first_query).clamp(0, total - 1),
            empty,
            run.clamp(0, max(0, len(token) - 1)),
            (tokens.position - first) % stride,
            tokens.position < first,
        )

    @staticmethod
    def max_runs(total: int, geometry: BlockGeometry, first_query: int = 0) -> int:
        """Return R, an upper bound of the runs of ``total`` rows that needs no boundaries.

        The rows of a document cut at ``first_query`` may begin with the last token of a run.
        """
        if not first_query:
            return geometry.max_compressed(total)
        return (total + geometry.compress_stride - 2) // geometry.compress_stride + 1

    def fold(self, x: Tensor, groups: int) -> Tensor:
        """Gather the rows of ``x`` into runs.

        Shapes:
            x: [T, Hq, D]

        Returns:
            [R, G, d, h, D]
        """
        group = torch.arange(groups, device=x.device)[None, :, None]
        folded: Tensor = x.unflatten(1, (groups, -1))[self.token[:, None, :], group]
        return folded

    def unfold(self, folded: Tensor, *, blank: float = 0.0) -> Tensor:
        """Gather runs back into rows: the inverse of :meth:`fold`.

        Args:
            folded: runs.
            blank: value of the rows that see no key.

        Shapes:
            folded: [R, G, d, h, D]

        Returns:
            [T, Hq, D]
        """
        group = torch.arange(folded.shape[1], device=folded.device)
        out: Tensor = folded[self.run[:, None], group, self.place[:, None]].flatten(1, 2)
        return out.masked_fill_(self.blank[:, None, None], blank)

    def is_tail(self, rows: int) -> Tensor:
        """Return bool [rows], whether a compressed row belongs to no document."""
        return torch.arange(rows, device=self.cu.device) >= self.cu_keys[-1]


def _runs_before(
    cu_seqlens: Tensor, cu_cmp: Tensor, first_query: int, geometry: BlockGeometry
) -> Tensor:
    """Return the number of runs of each document that end before row ``first_query``.

    Args:
        cu_seqlens: int32 [documents + 1], the first row of each document.
        cu_cmp: int32 [documents + 1], the first compressed token of each document.
        first_query: a row.
        geometry: the block sizes.

    Returns:
        int32 [documents]
    """
    first = cu_seqlens[:-1] + geometry.compress_block_size - 1
    runs = ((first_query - first) // geometry.compress_stride).clamp(min=0)
    # The last run of a document may have fewer than d tokens.
    return torch.where(cu_seqlens[1:] <= first_query, cu_cmp.diff(), runs)


class Residues(NamedTuple):
    """Some residues of one sequence as a batch axis: tokens ``first + j + r * stride``.

    Attributes:
        first: token of residue 0 in run 0.
        residues: number of residues, j < residues.
        runs: number of queries per residue, r < runs.
        keys: number of compressed tokens that the last query of a residue sees.
        stride: number of tokens between two runs, d.
    """

    first: int
    residues: int
    runs: int
    keys: int
    stride: int

    def queries(self, x: Tensor) -> Tensor:
        """Return the rows of these tokens.

        Shapes:
            x: [S, H, D], any strides

        Returns:
            [residues, runs, H, D], a view.
        """
        token, head, element = x.stride()
        shape = (self.residues, self.runs, *x.shape[1:])
        strides = (token, self.stride * token, head, element)
        return x.as_strided(shape, strides, x.storage_offset() + self.first * token)

    def shared(self, x: Tensor) -> Tensor:
        """Return the keys or values that these tokens see, shared by all residues.

        Shapes:
            x: [I, G, D]

        Returns:
            [residues, keys, G, D], a view with stride 0 along the residues.
        """
        return x[: self.keys].expand(self.residues, -1, -1, -1)
