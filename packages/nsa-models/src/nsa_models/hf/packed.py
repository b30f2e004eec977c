"""The boundaries of packed documents, and the positions of tokens, in a call of a decoder."""

from __future__ import annotations

import os
from typing import Any

import torch

from nsa_core.errors import InvalidInput
from nsa_core.packing import token_positions
from nsa_core.torch_ops.torch_state import is_capturing
from nsa_models.hf.cache import NSAModelCache


def packed_boundaries(
    size: torch.Size,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cache: NSAModelCache | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return ``cu_seq_lens_q`` and ``max_length_q`` for the layers; empty if not packed.

    Args:
        size: Shape of the input, [B, S].
        attention_mask: [B, S] with the tokens of the cache before the input, or None.
        position_ids: The argument of the decoder. Positions that start again at 0 mark documents.
        cache: The cache of the call.
        options: Other arguments of the decoder.

    Raises:
        InvalidInput: The arguments contradict each other, the boundaries do not divide each of
            several rows, or the positions do not count the tokens of each sequence or document.
            Positions beside boundaries are checked on the CPU, and on a GPU with NSA_CHECK=1.
    """
    boundaries = options.get("cu_seq_lens_q")
    if boundaries is None:
        if options.get("cu_seq_lens_k") is not None:
            raise InvalidInput(
                "cu_seq_lens_k is passed without cu_seq_lens_q: pass the boundaries of the packed"
                " documents as cu_seq_lens_q"
            )
        if position_ids is None:
            return {}
        packing: dict[str, Any] = _from_positions(size, attention_mask, position_ids, cache)
        return packing
    if cache is not None or attention_mask is not None:
        other = "attention_mask" if cache is None else "a cache (past_key_values or use_cache)"
        raise InvalidInput(f"cu_seq_lens_q and {other} are passed; pass only one of them")
    if not isinstance(boundaries, torch.Tensor) or boundaries.dim() != 1:
        is_tensor = isinstance(boundaries, torch.Tensor)
        passed = list(boundaries.shape) if is_tensor else type(boundaries).__name__
        raise InvalidInput(f"cu_seq_lens_q must be a tensor [documents + 1], got {passed}")
    if size[0] != 1:
        _check_rows(size, boundaries)
    if position_ids is not None:
        positions = _rows_of(size, position_ids)
        if positions.device.type == "cpu" or os.environ.get("NSA_CHECK") == "1":
            _check_documents(boundaries, positions.flatten())
    longest = options.get("max_length_q")
    return {
        "cu_seq_lens_q": boundaries.to(torch.int32),
        "max_length_q": None if longest is None else int(longest),
    }


@torch.compiler.disable(reason="it reads the boundaries on the host")
def _check_rows(size: torch.Size, boundaries: torch.Tensor) -> None:
    """Check that the boundaries are those of all rows laid end to end. Synchronises.

    Raises:
        InvalidInput: They end elsewhere, or a document has tokens of two rows.
    """
    rows, columns = size
    starts_of_rows = range(0, rows * columns + 1, columns)
    _check_readable("cu_seq_lens_q of several rows", boundaries)
    bounds = boundaries.tolist()
    if bounds[-1:] != [rows * columns] or not set(starts_of_rows) <= set(bounds):
        raise InvalidInput(
            f"cu_seq_lens_q must hold the boundaries of the {rows} rows laid end to end, from 0 to"
            f" {rows} * {columns} = {rows * columns} with every multiple of {columns}, got {bounds}"
        )


@torch.compiler.disable(reason="it reads the positions on the host")
def _check_documents(boundaries: torch.Tensor, positions: torch.Tensor) -> None:
    """Check that positions count up by 1 in each document; where they start has no effect."""
    counted = token_positions(boundaries, len(positions)).position
    steps = (positions - counted.to(positions.device)).diff()
    if bool(steps.masked_fill(counted[1:].to(steps.device) == 0, 0).any()):
        raise InvalidInput(
            "position_ids must count up by 1 in each document of cu_seq_lens_q, because NSA rotates"
            " at these positions: leave them out"
        )


def _check_readable(name: str, tensor: torch.Tensor) -> None:
    if is_capturing(tensor.device):
        raise InvalidInput(
            f"{name} cannot be read while a CUDA graph is captured: leave the argument out"
        )


@torch.compiler.disable(reason="it reads the positions on the host")
def _from_positions(
    size: torch.Size,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor,
    cache: NSAModelCache | None,
) -> dict[str, Any]:
    """Check the positions, and return the boundaries that they mark. Synchronises."""
    batch, columns = size
    positions = _rows_of(size, position_ids)
    _check_readable("position_ids", positions)
    index = torch.arange(columns, device=positions.device)
    counted, is_padding = index, torch.zeros_like(index, dtype=torch.bool)
    if attention_mask is not None:
        is_token = attention_mask[:, -columns:].to(positions.device).bool()
        counted, is_padding = is_token.cumsum(-1) - 1, ~is_token
    if cache is not None:
        counted = counted + positions.new_tensor(cache.host_lengths(batch))[:, None]
    if bool(((positions == counted) | is_padding).all()):
        return {}
    is_first = positions == 0
    starts = torch.where(is_first, index, 0).cummax(-1).values
    is_packed = bool((positions == index - starts).all())
    if attention_mask is not None or cache is not None or not is_packed:
        raise InvalidInput(
            f"position_ids {list(position_ids.shape)} must count the tokens of each sequence from"
            " 0, those in the cache included, because NSA rotates at these positions; documents"
            " packed in a row may each start at 0 again, without an attention_mask and a cache"
        )
    first_rows = is_first.flatten().nonzero().flatten()
    boundaries = torch.cat([first_rows, first_rows.new_tensor([positions.numel()])])
    return {
        "cu_seq_lens_q": boundaries.to(torch.int32),
        "max_length_q": int(boundaries.diff().max()),
    }


def _rows_of(size: torch.Size, position_ids: torch.Tensor) -> torch.Tensor:
    """Return the positions as [B, S]."""
    if position_ids.shape not in (size, (1, size[1])):
        raise InvalidInput(
            f"position_ids must be {list(size)} or {[1, size[1]]}, like the input, got"
            f" {list(position_ids.shape)}"
        )
    return position_ids.expand(size)
