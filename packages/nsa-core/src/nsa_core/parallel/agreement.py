"""NSA_CHECK=1: find ranks whose calls differ, in one collective.

Ranks that disagree on documents, configs or layouts would compute wrong values without an error, or
wait for each other for ever.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from nsa_core.errors import InvalidInput
from nsa_core.parallel.collectives import gather_rows

if TYPE_CHECKING:
    from nsa_core.layer.module import NSAttention
    from nsa_core.parallel.exchange_rows import Ranks


def check_agreement(
    layer: NSAttention,
    mode: str,
    ranks: Ranks,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> None:
    """Check that all ranks make the same call. Synchronises.

    Args:
        layer: the layer.
        mode: "heads" or "sequence".
        ranks: the rows of this rank and the process group.
        x, cu_seqlens, max_seqlen: the arguments of the call.

    Raises:
        InvalidInput: the calls differ; the message names the arguments that differ, and their
            ranks. It is raised on all ranks.
    """
    values: dict[str, object] = {
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.tolist(),
        "max_seqlen": max_seqlen,
        "the shape of x": tuple(x.shape),
        "the dtype of x": x.dtype,
        "the config": layer.config,
        "the layout": ranks.layout,
        "the mode": mode,
        "reduce_dtype": ranks.reduce,
        "grad mode": torch.is_grad_enabled(),
    }
    mine = torch.tensor([[_digest(v) for v in values.values()]], device=x.device)
    every = gather_rows(mine, ranks.group, ranks.world, torch.float32).tolist()
    problems, differing = [], {}
    for index, name in enumerate(values):
        other = [rank for rank in range(ranks.world) if every[rank][index] != every[0][index]]
        if other:
            listed = ", ".join(map(str, other))
            problems.append(f"{name} on rank {listed} differs from that on rank 0")
            differing[name] = values[name]
    if problems:
        raise InvalidInput(
            "; ".join(problems)
            + f" (rank {ranks.rank} has {_described(differing)}): all ranks of a"
            " context-parallel mesh must make the same call"
        )


def _digest(value: object) -> int:
    digest = hashlib.blake2b(repr(value).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _described(values: dict[str, object]) -> str:
    """Return names and values as text, each value shortened to 200 characters."""
    texts = {name: repr(value) for name, value in values.items()}
    return ", ".join(
        f"{name} = {text if len(text) < 200 else text[:200] + '...'}"
        for name, text in texts.items()
    )
