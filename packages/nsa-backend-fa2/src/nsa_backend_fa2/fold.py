"""The fold: the compressed branch as one plain causal call, exactly, for any l, d and S.

Token t sees compressed tokens 0 .. floor((t+1-l)/d). Without its first l-1 tokens, a document's
queries come in runs of d that see the same keys: run r sees compressed tokens 0..r. Folding a run
into the head axis gives as many rows as keys and the ordinary causal mask, with the kv head
outermost:
    [S - (l-1) tokens, padded to I*d; G*h heads] -> [I rows; G*(d*h) heads]

What it costs: one copy of q and one of o forward; of q, o, do and dq backward. K and V are not
touched.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_core.layout import BlockGeometry
from nsa_core.packing import compressed_cu_seqlens, token_places


def fold(
    x: Tensor,  # [B, S, Hq, D]
    groups: int,
    geometry: BlockGeometry,
) -> Tensor:  # [B, I, G*d*h, D]
    """Rows of runs; 0 stands where the last run has no token: such a q sees keys, and such a dO
    gives them nothing.
    """
    stride, skip = geometry.compress_stride, geometry.compress_block_size - 1
    batch, length, heads, width = x.shape
    runs, per_group = geometry.num_compressed(length), heads // groups
    folded = x.new_empty((batch, runs, groups, stride, per_group, width))
    tokens = folded.transpose(2, 3)  # [B, I, d, G, h, D]
    source = x[:, skip:].unflatten(2, (groups, per_group))
    whole, rest = divmod(length - skip, stride)
    tokens[:, :whole] = source[:, : whole * stride].unflatten(1, (whole, stride))
    if rest:
        tokens[:, whole, :rest] = source[:, whole * stride :]
        tokens[:, whole, rest:] = 0
    return folded.view(batch, runs, groups * stride * per_group, width)


def unfold(
    folded: Tensor,  # [B, I, G*d*h, D]
    length: int,
    groups: int,
    geometry: BlockGeometry,
    blank: float = 0.0,
) -> Tensor:  # [B, S, Hq, D]
    """Inverse of :func:`fold`; ``blank`` stands in the first l-1 rows, which see nothing."""
    stride, skip = geometry.compress_stride, geometry.compress_block_size - 1
    batch, _, folded_heads, width = folded.shape
    per_group = folded_heads // (groups * stride)
    out = folded.new_empty((batch, length, groups * per_group, width))
    out[:, :skip] = blank
    target = out[:, skip:].unflatten(2, (groups, per_group))
    tokens = folded.unflatten(2, (groups, stride, per_group)).transpose(2, 3)
    whole, rest = divmod(length - skip, stride)
    target[:, : whole * stride].unflatten(1, (whole, stride)).copy_(tokens[:, :whole])
    if rest:
        target[:, whole * stride :] = tokens[:, whole, :rest]
    return out


class PackedFold(NamedTuple):
    """Where the fold of packed documents puts each token, computed on the device without a
    synchronisation.

    R = T // d rows, of which those of ``cu`` belong to documents. A place in a run that has no
    token repeats the last token of its document, which sees the same keys; ``empty`` marks it.
    """

    cu: Tensor  # int32 [documents + 1]: first row of each document, and of its compressed tokens
    token: Tensor  # int64 [R, d]: the token in each place
    empty: Tensor  # bool [R, d]
    row: Tensor  # int64 [T]: the run of each token
    place: Tensor  # int64 [T]: its place in the run
    hidden: Tensor  # bool [T]: it sees no compressed token

    @classmethod
    def of(cls, cu_seqlens: Tensor, total: int, geometry: BlockGeometry) -> PackedFold:
        """The fold of documents with these (well-formed) boundaries over ``total`` tokens."""
        stride, skip = geometry.compress_stride, geometry.compress_block_size - 1
        bounds, cu = cu_seqlens.long(), compressed_cu_seqlens(cu_seqlens, geometry)
        rows = token_places(cu, geometry.max_compressed(total))
        first = bounds[rows.document] + skip + rows.position * stride
        token = first[:, None] + torch.arange(stride, device=cu.device)
        end = bounds[rows.document + 1, None]
        tokens = token_places(cu_seqlens, total)
        run = (tokens.position - skip).div(stride, rounding_mode="floor")
        return cls(
            cu,
            torch.minimum(token, end - 1).clamp(0, total - 1),
            token >= end,
            (cu.long()[tokens.document] + run).clamp(0, max(0, rows.position.shape[0] - 1)),
            (tokens.position - skip) % stride,
            tokens.position < skip,
        )

    def fold(
        self,
        x: Tensor,  # [T, Hq, D]
        groups: int,
    ) -> Tensor:  # [R, G*d*h, D]
        """Rows of runs, one gather."""
        source = x.unflatten(1, (groups, -1))
        group = torch.arange(groups, device=x.device)[None, :, None]
        folded: Tensor = source[self.token[:, None, :], group].flatten(1, 3)
        return folded

    def unfold(
        self,
        folded: Tensor,  # [R, G*d*h, D]
        groups: int,
        blank: float = 0.0,
    ) -> Tensor:  # [T, Hq, D]
        """Inverse of :meth:`fold`; ``blank`` in the rows of tokens that see nothing."""
        source = folded.unflatten(1, (groups, self.token.shape[1], -1))
        group = torch.arange(groups, device=folded.device)
        out: Tensor = source[self.row[:, None], group, self.place[:, None]].flatten(1, 2)
        return out.masked_fill_(self.hidden[:, None, None], blank)

    def is_tail(self) -> Tensor:
        """bool [R]: rows that belong to no document."""
        return torch.arange(self.token.shape[0], device=self.cu.device) >= self.cu[-1]
