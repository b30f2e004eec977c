"""NSA_CHECK=1: find ranks whose calls differ, in one collective.

Ranks that disagree on documents, configs or layouts would compute wrong values without an error, or
wait for each other for ever.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from nsa_core.errors import InvalidInput, NSAError
from nsa_core.parallel.collectives import gather_rows

if TYPE_CHECKING:
    from nsa_core.dispatch.plan import Plan
    from nsa_core.layer.module import NSAttention
    from nsa_core.parallel.exchange_rows import Ranks


def check_agreement(
    layer: NSAttention,
    mode: str,
    ranks: Ranks,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    plan: Plan | NSAError,
) -> Plan:
    """Check that all ranks make the same call. Synchronises.

    Args:
        layer: the layer.
        mode: "heads" or "sequence".
        ranks: the rows of this rank and the process group.
        x, cu_seqlens, max_seqlen: the arguments of the call.
        plan: the plan of the call, or the error with which this rank refuses the call. The other
            ranks would wait for it.

    Returns:
        The plan.

    Raises:
        InvalidInput: the calls differ, or another rank refuses its call; the message names the
            arguments that differ, and their ranks. All ranks raise.
        NSAError: ``plan`` is an error, and nothing else differs.
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
        "the plan": None
        if isinstance(plan, NSAError)
        else {slot: f"{c.backend} {c.version}" for slot, c in plan.choices.items()},
        "recompute": layer.recompute,
        "requires_grad": [
            name for name, tensor in (("x", x), *layer.named_parameters()) if tensor.requires_grad
        ],
    }
    digests = [_digest(value) for value in values.values()]
    every = _gathered([*digests, int(isinstance(plan, NSAError))], x.device, ranks)
    refusing = [rank for rank, row in enumerate(every) if row[-1]]
    problems, differing = [], {}
    for index, name in enumerate(values):
        other = [rank for rank in range(ranks.world) if every[rank][index] != every[0][index]]
        if other and not (refusing and name == "the plan"):
            problems.append(f"{name} on rank {_listed(other)} differs from that on rank 0")
            differing[name] = values[name]
    if problems:
        raise InvalidInput(
            "; ".join(problems)
            + f" (rank {ranks.rank} has {_described(differing)}): all ranks of a"
            " context-parallel mesh must make the same call"
        )
    if isinstance(plan, NSAError):
        raise plan
    if refusing:
        raise InvalidInput(
            f"rank {_listed(refusing)} refuses this call, for the reason in its own error; rank"
            f" {ranks.rank} would wait for it"
        )
    return plan


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _gathered(numbers: list[int], device: torch.device, ranks: Ranks) -> list[list[int]]:
    """Return the numbers of every rank."""
    mine = torch.tensor([numbers], device=device)
    rows: list[list[int]] = gather_rows(mine, ranks.group, ranks.world, torch.float32).tolist()
    return rows


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
