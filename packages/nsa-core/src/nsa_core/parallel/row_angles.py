"""The rotary angles of the rows of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_core.layer.rope import Table, rope_table, wide_if_eager
from nsa_core.packing import token_positions
from nsa_core.parallel.exchange_rows import Ranks

if TYPE_CHECKING:
    from nsa_core.config import NSAConfig


def rope_of_rows(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    ranks: Ranks,
    config: NSAConfig,
    dtype: torch.dtype,
) -> Table:
    """Return the angles of this rank's rows by their positions in their documents.

    Args:
        x: a tensor on the device of the table.
        cu_seqlens: int32 [documents + 1], the documents of all ranks; None for one sequence.
        ranks: the rows of this rank.
        config: the config of the layer.
        dtype: dtype of the tensors to rotate.
    """
    positions = [
        torch.arange(first, end, device=x.device)
        if cu_seqlens is None
        else token_positions(cu_seqlens, end - first, first).position
        for first, end in ranks.pieces
    ]
    return wide_if_eager(rope_table(torch.cat(positions), config.qk_dim, config.frequencies, dtype))
