"""The fold: compressed attention as plain causal attention, exact for any l, d and length.

Token t sees the compressed tokens 0 .. floor((t + 1 - l) / d). The first l - 1 tokens of a document
see none. The other tokens form runs of d tokens with the same visible keys:

    token  l - 1 + r * d + j  sees compressed tokens  0 .. r        run r, residue j in 0 .. d - 1

A document of S tokens has as many runs as compressed tokens, I = num_compressed(S). Its last run
may have fewer than d tokens. The queries of one residue, one per run, therefore attend to the keys
under an ordinary causal mask with as many queries as keys. The residues become heads or a batch
axis:

    fold, unfold    copies between [B, S, Hq, D] and [B, I, G, d, h, D]
    PackedFold      the same for packed documents, computed on the device: [R, G, d, h, D]
    Residues        views of one sequence without a copy: [residues, runs, Hq, D]

There are Hq = G * h query heads; the h heads of a group are contiguous. A backend chooses the form
and calls its attention kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.layout import BlockGeometry
from nsa_core.packing import compressed_cu_seqlens, token_positions


def fold(x: Tensor, groups: int, geometry: BlockGeometry, *, group_major: bool = False) -> Tensor:
    """Copy the rows of ``x`` into runs.

    Entries of the last run without a token are 0. A zero query attends to keys, but its output is
    discarded, and a zero output gradient contributes nothing.

    Args:
        x: rows of query heads of S >= l tokens.
        groups: number of kv heads, G.
        geometry: the block sizes.
        group_major: use the memory layout [B, G, I, d, h, D] instead of [B, I, G, d, h, D].

    Shapes:
        x: [B, S, Hq, D]

    Returns:
        [B, I, G, d, h, D], a view of one new tensor.
    """
    stride, first = geometry.compress_stride, geometry.compress_block_size - 1
    batch, length, heads, width = x.shape
    runs, run_shape = geometry.num_compressed(length), (stride, heads // groups, width)
    if group_major:
        folded = x.new_empty((batch, groups, runs, *run_shape)).transpose(1, 2)
    else:
        folded = x.new_empty((batch, runs, groups, *run_shape))
    tokens, entries = x[:, first:].unflatten(2, (groups, -1)), folded.transpose(2, 3)
    full_runs, remainder = divmod(length - first, stride)
    entries[:, :full_runs] = tokens[:, : full_runs * stride].unflatten(1, (full_runs, stride))
    if remainder:
        entries[:, full_runs, :remainder] = tokens[:, full_runs * stride :]
        entries[:, full_runs, remainder:] = 0
    return folded


def unfold(
    folded: Tensor,
    length: int,
    geometry: BlockGeometry,
    *,
    blank: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Copy runs back into rows: the inverse of :func:`fold`.

    Args:
        folded: runs, with any strides.
        length: number of tokens of the sequence, S.
        geometry: the block sizes.
        blank: value of the first l - 1 rows, which see no key.
        out: tensor for the result; None allocates one.

    Shapes:
        folded: [B, I, G, d, h, D]
        out: [B, S, Hq, D]

    Returns:
        [B, S, Hq, D]
    """
    stride, first = geometry.compress_stride, geometry.compress_block_size - 1
    batch, _, groups, _, per_group, width = folded.shape
    if out is None:
        out = folded.new_empty((batch, length, groups * per_group, width))
    out[:, :first] = blank
    tokens, entries = out[:, first:].unflatten(2, (groups, -1)), folded.transpose(2, 3)
    full_runs, remainder = divmod(length - first, stride)
    tokens[:, : full_runs * stride].unflatten(1, (full_runs, stride)).copy_(entries[:, :full_runs])
    if remainder:
        tokens[:, full_runs * stride :] = entries[:, full_runs, :remainder]
    return out


class PackedFold(NamedTuple):
    """The fold of packed documents, computed on the device without synchronisation.

    There are R = T // d runs; the first cu[-1] of them belong to documents. An entry of a run
    without a token repeats the last token of the document, which sees the same keys.

    Attributes:
        cu: int32 [documents + 1], the first run, and the first compressed token, of each document.
        token: int64 [R, d], the token of each entry.
        empty: bool [R, d], whether an entry has no token.
        run: int64 [T], the run of each token.
        place: int64 [T], the index of each token in its run.
        blank: bool [T], whether a token sees no compressed token.
    """

    cu: Tensor
    token: Tensor
    empty: Tensor
    run: Tensor
    place: Tensor
    blank: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, total: int, geometry: BlockGeometry) -> PackedFold:
        """Compute the fold of documents with the boundaries ``cu_seqlens``.

        Args:
            cu_seqlens: int32 [documents + 1], not decreasing, within [0, total].
            total: number of packed rows, T.
            geometry: the block sizes.
        """
        stride, first = geometry.compress_stride, geometry.compress_block_size - 1
        bounds, cu = cu_seqlens.long(), compressed_cu_seqlens(cu_seqlens, geometry)
        runs = token_positions(cu, geometry.max_compressed(total))
        start = bounds[runs.document] + first + runs.position * stride
        token = start[:, None] + torch.arange(stride, device=cu.device)
        end = bounds[runs.document + 1, None]
        tokens = token_positions(cu_seqlens, total)
        run = (tokens.position - first).div(stride, rounding_mode="floor")
        return cls(
            cu,
            torch.minimum(token, end - 1).clamp(0, total - 1),
            token >= end,
            (cu.long()[tokens.document] + run).clamp(0, max(0, len(token) - 1)),
            (tokens.position - first) % stride,
            tokens.position < first,
        )

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

    def is_tail(self) -> Tensor:
        """Return bool [R], whether a run belongs to no document."""
        return torch.arange(len(self.token), device=self.cu.device) >= self.cu[-1]


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
