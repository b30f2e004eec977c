"""Packed training: the boundaries of documents that share one row of a batch."""

from __future__ import annotations

from typing import Any

import torch

from nsa_core.errors import InvalidInput


def packed_boundaries(
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    has_cache: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return ``cu_seq_lens_q`` and ``max_length_q`` of a call of a model; empty if not packed.

    Args:
        attention_mask: The argument of the model.
        position_ids: The argument of the model. Positions that start again at 0 mark documents.
        has_cache: Whether the call has a cache.
        options: Other arguments of the model.

    Raises:
        InvalidInput: The arguments contradict each other, or the positions do not count the tokens
            of each sequence or document from 0.
    """
    boundaries = options.get("cu_seq_lens_q")
    if boundaries is None:
        if has_cache or position_ids is None:
            return {}
        packing: dict[str, Any] = _from_positions(attention_mask, position_ids)
        return packing
    if has_cache or attention_mask is not None:
        other = "past_key_values" if has_cache else "attention_mask"
        raise InvalidInput(f"cu_seq_lens_q and {other} are passed; pass only one of them")
    longest = options.get("max_length_q")
    return {
        "cu_seq_lens_q": boundaries.to(torch.int32),
        "max_length_q": None if longest is None else int(longest),
    }


@torch.compiler.disable(reason="it reads the positions on the host")
def _from_positions(
    attention_mask: torch.Tensor | None, position_ids: torch.Tensor
) -> dict[str, Any]:
    positions = position_ids.flatten(0, -2)
    counted = torch.arange(positions.shape[-1], device=positions.device).expand_as(positions)
    is_token = torch.ones_like(counted, dtype=torch.bool)
    if attention_mask is not None:
        is_token = attention_mask.to(positions.device).bool()
        counted = is_token.cumsum(-1) - 1
    if bool(((positions == counted) | ~is_token).all()):
        return {}
    is_first = positions == 0
    rows = torch.arange(positions.shape[-1], device=positions.device)
    starts = torch.where(is_first, rows, 0).cummax(-1).values
    is_packed = bool((is_first[:, :1]).all()) and bool((positions == rows - starts).all())
    if attention_mask is not None or len(positions) != 1 or not is_packed:
        raise InvalidInput(
            f"position_ids {list(position_ids.shape)} must count the tokens of each sequence from"
            " 0, because NSA rotates at these positions; documents packed in one row, [1, T], may"
            " each start at 0 again, without an attention_mask"
        )
    first_rows = is_first[0].nonzero().flatten()
    boundaries = torch.cat([first_rows, first_rows.new_tensor([positions.shape[-1]])])
    return {
        "cu_seq_lens_q": boundaries.to(torch.int32),
        "max_length_q": int(boundaries.diff().max()),
    }
