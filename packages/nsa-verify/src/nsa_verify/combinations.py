"""Every combination of ready backends over the attention branches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from nsa_core.dispatch.candidates import survey
from nsa_core.dispatch.registry import Registry
from nsa_verify import cases

BRANCHES = ("cmp", "sel", "win")


def every_combination(
    registry: Registry,
    device: str,
    dtypes: Sequence[torch.dtype],
    named: Mapping[str, str],
    decode: bool = False,
) -> list[dict[str, str]]:
    """Backends by slot, an entry per combination of those that take each branch here, forward and
    backward, in a dtype.

    ``decode`` asks for decode forms instead. A slot of ``named`` keeps its backend; slots that are
    no branch are left to auto. Where a branch has no backend the one entry is ``named``, so that
    planning it gives every reason.
    """
    accepted: dict[str, dict[str, None]] = {slot: {} for slot in BRANCHES}
    for dtype in dtypes:
        answers = survey(
            cases.quick_cases()[0].config,
            device=device,
            dtype=dtype,
            needs_grad=not decode,
            registry=registry,
            phase="decode" if decode else "prefill",
        )
        for slot in BRANCHES:
            accepted[slot].update(
                dict.fromkeys(c.backend for c in answers.candidates[slot] if c.accepted)
            )
    choices = [[named[slot]] if slot in named else list(accepted[slot]) for slot in BRANCHES]
    found = [{**named, **dict(zip(BRANCHES, names))} for names in itertools.product(*choices)]
    return found or [dict(named)]
