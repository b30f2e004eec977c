"""Attention of a rank's pieces to the keys and values of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nsa_core.parallel.exchange_rows import Pair, Ranks, gather_pairs
from nsa_core.torch_ops.torch_state import is_eager

# (index of the piece, its queries, keys and values of all ranks [T, B, G, D]) -> outputs
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_gathered(
    attend: Attend,
    kernel: Any,
    queries: Sequence[torch.Tensor],
    local: Pair,
    ranks: Ranks,
    recomputed: bool = False,
) -> list[torch.Tensor]:
    """Gather the keys and values of all ranks, and attend from each piece to them.

    In eager mode, only the keys and values of this rank are kept for backward, which gathers the
    others again. torch.compile decides itself which tensors it keeps.

    Args:
        attend: Attends from the queries of a piece.
        kernel: The kernel that ``attend`` calls; its results are kept.
        queries: The queries of each piece.
        local: Keys and values of this rank [n, B, G, D].
        ranks: The rows and the group.
        recomputed: Whether the caller checkpoints this call, with all that it keeps.

    Returns:
        The output of each piece.
    """

    def run(k: torch.Tensor, v: torch.Tensor, *queries: torch.Tensor) -> list[torch.Tensor]:
        pairs = gather_pairs(k, v, None, ranks, len(queries))
        return [attend(i, q, *pair) for i, (q, pair) in enumerate(zip(queries, pairs))]

    if recomputed or not torch.is_grad_enabled() or not is_eager():
        return run(*local, *queries)
    policy = functools.partial(_keep_results_of, kernel.op)
    outputs: list[torch.Tensor] = checkpoint(
        run,
        *local,
        *queries,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
    )
    return outputs


def _keep_results_of(kept: Any, _: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == kept else CheckpointPolicy.PREFER_RECOMPUTE
