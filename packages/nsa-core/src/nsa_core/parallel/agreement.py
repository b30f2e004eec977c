"""NSA_CHECK=1: find ranks whose calls differ, in one collective.

Ranks that disagree on documents, configs or layouts would compute wrong values without an error, or
wait for each other for ever.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from nsa_core.errors import InvalidInput, Unsupported
from nsa_core.parallel.collectives import gather_rows, group_of
from nsa_core.torch_ops.packing_checks import has_values

if TYPE_CHECKING:
    from nsa_core.layer.module import NSAttention
    from nsa_core.plan.choosing import Choice
    from nsa_core.plan.plan import Plan

Prepared = TypeVar("Prepared")


def is_compared(x: torch.Tensor) -> bool:
    """Return whether NSA_CHECK=1 asks to compare a call with those of the other ranks.

    Args:
        x: an input of the call; fake and traced tensors are not compared.
    """
    return has_values(x) and os.environ.get("NSA_CHECK") == "1"


def agreed(
    prepare: Callable[[], Prepared],
    values: Callable[[Prepared | None], Mapping[str, object]],
    group: str,
    x: torch.Tensor,
) -> Prepared:
    """Prepare a call. With NSA_CHECK=1, check that all ranks make the same one, and synchronise.

    A rank whose call fails before its first collective takes part in the check, so that no rank
    waits for it.

    Args:
        prepare: runs the part of the call before its first collective.
        values: returns what all ranks must have in common, by name, from the result of ``prepare``,
            or from None if ``prepare`` raised. "the plan" may differ on ranks that raise.
        group: name of the process group.
        x: an input of the call.

    Returns:
        The result of ``prepare``.

    Raises:
        Unsupported: torch.func transforms the call, for which the collectives have no rules.
        InvalidInput: the calls differ, or another rank refuses its call; the message names the
            arguments that differ, and their ranks. All ranks raise.
        Exception: ``prepare`` raised it, and nothing else differs.
    """
    if torch._C._are_functorch_transforms_active():
        raise Unsupported(
            "a call that is divided over ranks is not supported under torch.func.grad, vjp, vmap"
            " and the like: use torch.autograd"
        )
    if not is_compared(x):
        return prepare()
    result: Prepared | None = None
    error: Exception | None = None
    try:
        result = prepare()
    except Exception as raised:  # noqa: BLE001  (raised again below: no error may skip the gather)
        error = raised
    mine = values(result)
    digests = [_digest(value) for value in mine.values()]
    numbers = torch.tensor([[*digests, int(error is not None)]], device=x.device)
    every = gather_rows(numbers, group, torch.float32).tolist()
    ranks = dist.get_process_group_ranks(group_of(group))
    refusing = [rank for rank, row in zip(ranks, every) if row[-1]]
    problems, differing = [], {}
    for index, name in enumerate(mine):
        other = [rank for rank, row in zip(ranks, every) if row[index] != every[0][index]]
        if other and not (refusing and name == "the plan"):
            problems.append(
                f"{name} on rank {', '.join(map(str, other))} differs from that on rank {ranks[0]}"
            )
            differing[name] = mine[name]
    this = ranks[group_of(group).rank()]
    if problems:
        raise InvalidInput(
            "; ".join(problems)
            + f" (rank {this} has {_described(differing)}): all ranks of a mesh must make the same"
            " call"
        ) from error
    if error is not None:
        raise error
    if refusing:
        raise InvalidInput(
            f"rank {', '.join(map(str, refusing))} refuses this call, for the reason in its own"
            f" error; rank {this} would wait for it"
        )
    assert result is not None  # prepare did not raise
    return result


def values_of_layer(
    layer: NSAttention,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    plan: Plan | None,
) -> dict[str, object]:
    """Return what all ranks must have in common in a call of a layer, by name."""
    parameters = layer.named_parameters()
    return {
        **values_of_packing(cu_seqlens, max_seqlen),
        "the shape of x": tuple(x.shape),
        "the dtype of x": x.dtype,
        "the config": layer.config,
        "the plan": None if plan is None else names_of(plan.choices),
        "recompute": layer.recompute,
        "grad mode": torch.is_grad_enabled(),
        "requires_grad": [n for n, t in (("x", x), *parameters) if t.requires_grad],
    }


def values_of_packing(cu_seqlens: torch.Tensor | None, max_seqlen: int | None) -> dict[str, object]:
    """Return the documents of a call by name."""
    bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
    return {"cu_seqlens": bounds, "max_seqlen": max_seqlen}


def names_of(choices: Mapping[str, Choice]) -> dict[str, str]:
    """Return the name and version of the backend of each slot."""
    return {slot: f"{c.backend} {c.version}" for slot, c in choices.items()}


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
