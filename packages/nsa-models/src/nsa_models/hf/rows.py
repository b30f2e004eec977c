"""Padded batches: the rows of a batch in an order in which all padding comes last."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class TokenRows(NamedTuple):
    """The rows of a padded batch that are tokens.

    NSA is causal, so padding after the tokens of a sequence does not change them. Both orders have
    static shapes, so a compiled forward needs no data from the device. They are not used by
    take_along_dim, for which torch.compile compiles each B and S anew.

    Attributes:
        is_token: bool [B, S].
        order: int64 [B, S], the rows of each sequence with its tokens first.
        back: int64 [B, S], the inverse of ``order``.
        counts: number of tokens of each sequence; None while torch.compile traces.
    """

    is_token: torch.Tensor
    order: torch.Tensor
    back: torch.Tensor
    counts: list[int] | None

    def to_front(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, S, dim] with the tokens of every sequence first."""
        return x.gather(1, self.order.to(x.device)[..., None].expand_as(x))

    def restore(self, y: torch.Tensor) -> torch.Tensor:
        """Return y [B, S, dim] in the order of the batch, with 0 where there is padding."""
        y = y.gather(1, self.back.to(y.device)[..., None].expand_as(y))
        return y.masked_fill(~self.is_token.to(y.device)[..., None], 0)


def nsa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    **other: Any,
) -> TokenRows | None:
    """Return the rows of this call that are tokens; None if all are.

    transformers calls this function once per forward, as the mask of attention "nsa".

    Args:
        batch_size: Number of sequences, B.
        q_length: Number of rows of this call, S.
        kv_length: Length of the mask; must be ``q_offset`` + ``q_length``.
        q_offset: Number of rows in the cache.
        attention_mask: bool [B, kv_length]; False marks padding.
        **other: Arguments of other kinds of masks.
    """
    if attention_mask is None:
        return None
    is_token = attention_mask[:, q_offset:].bool()
    counts: list[int] | None = None
    if not torch.compiler.is_compiling():
        counts = is_token.sum(1).tolist()  # one synchronisation per forward
        if sum(counts) == len(counts) * q_length:
            return None
    order = (~is_token).to(torch.uint8).argsort(dim=1, stable=True)
    return TokenRows(is_token, order, order.argsort(dim=1), counts)
