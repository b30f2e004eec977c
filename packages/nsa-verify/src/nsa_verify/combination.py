"""Combination: a backend for every slot, on a device; and the combinations that are ready here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import BRANCHES, SLOTS, BackendSpec
from nsa_core.dispatch.candidates import find_candidates
from nsa_core.dispatch.options import PlanOptions
from nsa_core.dispatch.plan import Plan, resolve
from nsa_core.dispatch.registry import Registry, default_registry
from nsa_core.errors import InvalidInput
from nsa_core.util.text import did_you_mean
from nsa_verify import cases


@dataclasses.dataclass(frozen=True)
class Combination:
    """A backend for every slot, as the user named it, on a device.

    Attributes:
        backends: slot -> backend; a slot left out is auto.
        device: a torch device, "cuda:1".
        registry: where backends come from; None: the installed plugins.
        name: how reports call it.
    """

    backends: Mapping[str, str]
    device: str = "cpu"
    registry: Registry | None = None
    name: str = ""

    def plan(self, config: NSAConfig, dtype: torch.dtype, **fields: Any) -> Plan:
        """The plan of this combination, with gradients unless ``fields`` say otherwise.

        Args:
            config: the layer's configuration.
            dtype: dtype of q, k and v.
            **fields: other fields of PlanOptions, by name.

        Raises:
            NSAError: as :func:`nsa_core.resolve`.
        """
        options = PlanOptions(device=self.device, dtype=dtype, backends=dict(self.backends))
        return resolve(config, options, registry=self.registry, **{"needs_grad": True, **fields})


def spec_of(combination: Combination, plan: Plan, slot: str) -> BackendSpec:
    """The specification of the backend that ``plan`` chose for ``slot``."""
    registry = combination.registry or default_registry()
    entry = registry.get(plan.choices[slot].backend)
    assert entry.spec is not None  # a chosen backend is ready
    return entry.spec


def parse_combination(text: str) -> Combination:
    """The combination that "win=sdpa,cmp=fa2", "sdpa" (every slot) or "auto" stands for.

    Raises:
        InvalidInput: an unknown slot, a slot named twice, or something that is no assignment.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if len(words) == 1 and "=" not in words[0]:
        named = {} if words[0] == "auto" else dict.fromkeys(SLOTS, words[0])
        return Combination(named, name=words[0])
    backends: dict[str, str] = {}
    for word in words:
        slot, equals, name = (part.strip() for part in word.partition("="))
        if not equals or not name:
            raise InvalidInput(
                f"combo must be like win=sdpa,cmp=fa2 or one backend's name, got {text!r}"
            )
        if slot not in SLOTS:
            raise InvalidInput(f"combo {text!r}: unknown slot {slot!r}{did_you_mean(slot, SLOTS)}")
        if slot in backends:
            raise InvalidInput(f"combo {text!r} names slot {slot!r} twice")
        backends[slot] = name
    if not backends:
        raise InvalidInput("combo must not be empty")
    name = ",".join(f"{slot}={backends[slot]}" for slot in SLOTS if slot in backends)
    return Combination(backends, name=name)


def ready_combinations(
    registry: Registry, config: NSAConfig, options: PlanOptions
) -> list[Combination]:
    """ "auto", and per ready backend the combination that uses it wherever it accepts.

    Each assignment is listed once.
    """
    candidates = find_candidates(config, options, registry=registry).by_slot
    accepted = {slot: [c.backend for c in candidates[slot] if c.accepted] for slot in SLOTS}
    best = {slot: names[0] for slot, names in accepted.items() if names}
    combinations = [Combination({}, name="auto")]
    assignments = [best]
    for entry in registry.ready():
        own = {slot: entry.name for slot in SLOTS if entry.name in accepted[slot]}
        if own and best | own not in assignments:
            assignments.append(best | own)
            combinations.append(Combination(own, name=entry.name))
    return combinations


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
        options = PlanOptions(
            device=device,
            dtype=dtype,
            needs_grad=not decode,
            phase="decode" if decode else "prefill",
        )
        config = cases.quick_cases()[0].config
        candidates = find_candidates(config, options, registry=registry).by_slot
        for slot in BRANCHES:
            accepted[slot].update(dict.fromkeys(c.backend for c in candidates[slot] if c.accepted))
    choices = [[named[slot]] if slot in named else list(accepted[slot]) for slot in BRANCHES]
    found = [{**named, **dict(zip(BRANCHES, names))} for names in itertools.product(*choices)]
    return found or [dict(named)]
