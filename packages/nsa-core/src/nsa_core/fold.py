"""The fold: compressed attention as plain causal attention, exactly, for any l, d and length.

Token t sees the compressed tokens 0 .. floor((t + 1 - l) / d). The first l - 1 tokens of a document
see none. The others form runs of d tokens that see the same keys:

    token  l - 1 + r * d + j  sees compressed tokens  0 .. r        run r, residue j in 0 .. d - 1

A document of S tokens has as many runs as compressed tokens, I = num_compressed(S), and its last
run may have fewer than d tokens. The queries of one residue, one of each run, are therefore as many
as the keys, under an ordinary causal mask. The residues become heads or a batch axis:

    fold, unfold    copies between [B, S, Hq, D] and [B, I, G, d, h, D]
    PackedFold      the same for packed documents, computed on the device: [R, G, d, h, D]
    Residues        views of one sequence, without a copy: [residues, runs, Hq, D]

Hq = G * h query heads, of which the h heads of a group are contiguous. Backends choose the form and
make the attention call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.layout import BlockGeometry
from nsa_core.packing import compressed_cu_seqlens, token_places


def fold(x: Tensor, groups: int, geometry: BlockGeometry, *, group_major: bool = False) -> Tensor:
    """Copy the rows of ``x`` into runs.

    Places of the last run that have no token hold 0: a query of zeros sees keys, and an output
    gradient of zeros gives them nothing.

    Args:
        x: rows of query heads, of S >= l tokens.
        groups: kv heads, G.
        geometry: block sizes.
        group_major: lay the result out as [B, G, I, d, h, D] in memory, not as [B, I, G, d, h, D].

    Shapes:
        x: [B, S, Hq, D]

    Returns:
        [B, I, G, d, h, D], a view of one new tensor.
    """
    stride, first = geometry.compress_stride, geometry.compress_block_size - 1
    batch, length, heads, width = x.shape
    runs, per_run = geometry.num_compressed(length), (stride, heads // groups, width)
    if group_major:
        folded = x.new_empty((batch, groups, runs, *per_run)).transpose(1, 2)
    else:
        folded = x.new_empty((batch, runs, groups, *per_run))
    tokens, places = x[:, first:].unflatten(2, (groups, -1)), folded.transpose(2, 3)
    whole, rest = divmod(length - first, stride)
    places[:, :whole] = tokens[:, : whole * stride].unflatten(1, (whole, stride))
    if rest:
        places[:, whole, :rest] = tokens[:, whole * stride :]
        places[:, whole, rest:] = 0
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
        length: tokens of the sequence, S.
        geometry: block sizes.
        blank: the value of the first l - 1 rows, which see no key.
        out: where to store the rows; None: a new tensor.

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
    tokens, places = out[:, first:].unflatten(2, (groups, -1)), folded.transpose(2, 3)
    whole, rest = divmod(length - first, stride)
    tokens[:, : whole * stride].unflatten(1, (whole, stride)).copy_(places[:, :whole])
    if rest:
        tokens[:, whole * stride :] = places[:, whole, :rest]
    return out


class PackedFold(NamedTuple):
    """The fold of packed documents, computed on the device without a synchronisation.

    There are R = T // d runs, of which the first cu[-1] belong to documents. A place that has no
    token repeats the last token of its document, which sees the same keys.

    Attributes:
        cu: int32 [documents + 1], first run, and first compressed token, of each document.
        token: int64 [R, d], the token in each place.
        empty: bool [R, d], the places that have no token.
        run: int64 [T], the run of each token.
        place: int64 [T], the place of each token in its run.
        blank: bool [T], the tokens that see no compressed token.
    """

    cu: Tensor
    token: Tensor
    empty: Tensor
    run: Tensor
    place: Tensor
    blank: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, total: int, geometry: BlockGeometry) -> PackedFold:
        """The fold of documents with these boundaries.

        Args:
            cu_seqlens: int32 [documents + 1], within [0, total] and not decreasing.
            total: rows of the packed axis, T.
            geometry: block sizes.
        """
        stride, first = geometry.compress_stride, geometry.compress_block_size - 1
        bounds, cu = cu_seqlens.long(), compressed_cu_seqlens(cu_seqlens, geometry)
        runs = token_places(cu, geometry.max_compressed(total))
        start = bounds[runs.document] + first + runs.position * stride
        token = start[:, None] + torch.arange(stride, device=cu.device)
        end = bounds[runs.document + 1, None]
        tokens = token_places(cu_seqlens, total)
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
            blank: the value of the rows that see no key.

        Shapes:
            folded: [R, G, d, h, D]

        Returns:
            [T, Hq, D]
        """
        group = torch.arange(folded.shape[1], device=folded.device)
        out: Tensor = folded[self.run[:, None], group, self.place[:, None]].flatten(1, 2)
        return out.masked_fill_(self.blank[:, None, None], blank)

    def is_tail(self) -> Tensor:
        """bool [R]: the runs that belong to no document."""
        return torch.arange(len(self.token), device=self.cu.device) >= self.cu[-1]


class Residues(NamedTuple):
    """Some residues of one sequence as a batch axis: tokens ``first + j + r * stride``.

    Attributes:
        first: token of residue 0 in run 0.
        residues: how many, j < residues.
        runs: queries of each residue, r < runs.
        keys: compressed tokens that the last query of a residue sees.
        stride: tokens from one run to the next.
    """

    first: int
    residues: int
    runs: int
    keys: int
    stride: int

    def queries(self, x: Tensor) -> Tensor:
        """The rows of these tokens.

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
        """The keys or values that these tokens see, one copy for all residues.

        Shapes:
            x: [I, G, D]

        Returns:
            [residues, keys, G, D], a view with stride 0 along the residues.
        """
        return x[: self.keys].expand(self.residues, -1, -1, -1)
