"""Documents packed in rows, as models of transformers mark them for attention implementations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function

from nsa_core.errors import InvalidInput


def is_causal(mask_function: Callable[..., Any]) -> bool:
    """Return whether it is transformers' causal mask, or that of packed documents.

    The latter is ``and_masks`` of the causal mask at the tokens' positions and of
    ``packed_sequence_mask_function``.
    """
    if mask_function is causal_mask_function:
        return True
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    if [part.__qualname__.split(".")[0] for part in parts] != [
        "remap_positions_for_packed_sequence",
        "packed_sequence_mask_function",
    ]:
        return False
    return inspect.getclosurevars(parts[0]).nonlocals["mask_function"] is causal_mask_function


def boundaries(position_ids: torch.Tensor) -> list[int] | None:
    """Return the boundaries of the documents in the rows of [B, S], laid end to end. Synchronises.

    None: the positions of every row count from 0 to S - 1.
    """
    columns = position_ids.shape[1]
    if bool((position_ids == torch.arange(columns, device=position_ids.device)).all()):
        return None
    is_first = position_ids.diff(prepend=position_ids[:, :1]) != 1  # also in column 0
    return [*is_first.flatten().nonzero().flatten().tolist(), position_ids.numel()]


def is_packed(position_ids: torch.Tensor, usable: torch.Tensor | None) -> bool:
    """Return whether a document starts after a token of its row. Synchronises.

    Positions of padding repeat, or start again and do not count on.
    """
    steps = position_ids.diff()
    starts = (steps[:, :-1] != 1) & (steps[:, 1:] == 1)  # at columns 1 to S - 2
    if usable is not None:
        is_token = usable[:, -position_ids.shape[1] :]
        starts = starts & is_token[:, :-2] & is_token[:, 1:-1]
    return bool(starts.any())


def check_passed_boundaries(
    options: dict[str, Any], bounds: list[int] | None, batch: int, columns: int
) -> None:
    """Check that ``cu_seq_lens_q`` and ``cu_seq_lens_k``, if passed, agree with the positions.

    Args:
        options: Keyword arguments of an attention implementation.
        bounds: Result of :func:`boundaries`.
        batch: Number of rows.
        columns: Tokens of a row.

    Raises:
        InvalidInput: They differ from each other or from ``bounds``.
    """
    passed, other = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if passed is None:
        return
    if other is not None and not torch.equal(passed, other):
        raise InvalidInput(
            "cu_seq_lens_q and cu_seq_lens_k differ: pass the boundaries of the documents as both"
        )
    rows = list(range(0, batch * columns + 1, columns))
    if passed.tolist() != (rows if bounds is None else bounds):
        raise InvalidInput(
            "position_ids do not start again where cu_seq_lens_q says that a document starts:"
            " pass position_ids that count the tokens of each document from 0"
        )
