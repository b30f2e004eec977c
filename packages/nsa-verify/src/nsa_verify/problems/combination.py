"""Combination: a backend for every slot, on one device, and the combinations that can run here."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import BRANCHES, SLOTS, BackendSpec
from nsa_core.errors import Unsupported
from nsa_core.plan.candidates import find_candidates
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan, decide, resolve
from nsa_core.plan.registry import Registry, default_registry, named_backends
from nsa_verify.problems import cases


@dataclasses.dataclass(frozen=True)
class Combination:
    """A backend for every slot, as the user named it, on one device.

    Attributes:
        backends: Backend name of each slot. Slots without an entry are planned as auto.
        device: A torch device such as "cuda:1".
        registry: Registry of backends; None uses the installed plugins.
        name: Name in reports.
    """

    backends: Mapping[str, str]
    device: str = "cpu"
    registry: Registry | None = None
    name: str = ""

    def plan(self, config: NSAConfig, dtype: torch.dtype, **fields: Any) -> Plan:
        """Plan this combination with :func:`nsa_core.resolve`.

        Args:
            config: Configuration of the layer.
            dtype: Dtype of q, k and v.
            **fields: Other fields of PlanOptions. ``needs_grad`` defaults to True.

        Raises:
            NSAError: A slot has no backend that accepts the request.
        """
        options = PlanOptions(device=self.device, dtype=dtype, backends=dict(self.backends))
        return resolve(config, options, registry=self.registry, **{"needs_grad": True, **fields})

    def plugins(self) -> tuple[str, ...]:
        """Return the third-party backends that it may use, if they run in child processes.

        A backend whose process has ended counts only if a slot names it.
        """
        entries = self.registry.ready() if self.registry else ()
        named = {*self.backends.values()}
        return tuple(
            entry.name
            for entry in entries
            if entry.child is not None
            and entry.spec is not None
            and (
                entry.name in named
                or (entry.spec.slots.keys() - self.backends.keys() and not entry.child.has_ended)
            )
        )

    def for_child(self) -> Combination:
        """Return the combination without the third-party backends that it does not use."""
        if self.registry is None:
            return self
        used = self.plugins()
        entries = (e for e in self.registry.entries if e.child is None or e.name in used)
        return dataclasses.replace(self, registry=Registry(tuple(entries)))

    def plan_partial(self, slot: str, config: NSAConfig, dtype: torch.dtype, **fields: Any) -> Plan:
        """Plan ``slot`` for queries that begin inside a sequence, other slots for whole sequences.

        The arguments after ``slot`` are those of :meth:`plan`.

        Raises:
            NSAError: A slot has no backend that accepts the request.
        """
        options = PlanOptions(device=self.device, dtype=dtype, backends=dict(self.backends))
        options = dataclasses.replace(options, **{"needs_grad": True, **fields})
        registry = self.registry or default_registry()
        whole, partial = (
            find_candidates(config, dataclasses.replace(options, partial=p), registry=registry)
            for p in (False, True)
        )
        return decide(
            dataclasses.replace(
                whole,
                requests={**whole.requests, slot: partial.requests[slot]},
                by_slot={**whole.by_slot, slot: partial.by_slot[slot]},
                tuned={**whole.tuned, slot: partial.tuned.get(slot, "")},
            )
        )

    def declares_partial(self, slot: str) -> bool:
        """Return whether a backend that may run ``slot`` declares queries inside a sequence."""
        ready = (self.registry or default_registry()).ready()
        names = {self.backends.get(slot, entry.name) for entry in ready}
        specs = [
            entry.spec.slots.get(slot) for entry in ready if entry.name in names and entry.spec
        ]
        return any(spec is not None and spec.partial for spec in specs)


def accepted_dtypes(
    combination: Combination, dtypes: Sequence[torch.dtype], decode: bool = False
) -> list[torch.dtype]:
    """Return those of ``dtypes`` in which ``combination`` accepts a small layer.

    Raises:
        BackendUnavailable: A named backend cannot run on this machine.
    """
    config, accepted = cases.quick_cases()[0].config, []
    fields: dict[str, Any] = {"phase": "decode", "needs_grad": False} if decode else {}
    for dtype in dtypes:
        with contextlib.suppress(Unsupported):
            combination.plan(config, dtype, **fields)
            accepted.append(dtype)
    return accepted


def spec_of(combination: Combination, plan: Plan, slot: str) -> BackendSpec:
    """Return the specification of the backend that ``plan`` chose for ``slot``."""
    registry = combination.registry or default_registry()
    entry = registry.get(plan.choices[slot].backend)
    assert entry.spec is not None  # a chosen backend is ready
    return entry.spec


def parse_combination(text: str) -> Combination:
    """Parse a combination as :func:`nsa_core.plan.registry.named_backends` does.

    Raises:
        InvalidInput: ``text`` is no combination.
    """
    backends = named_backends(text)
    is_single = "=" not in text
    name = ",".join(f"{slot}={backends[slot]}" for slot in SLOTS if slot in backends)
    return Combination(backends, name=text.strip(" ,") if is_single else name)


def ready_combinations(
    registry: Registry, config: NSAConfig, options: PlanOptions
) -> list[Combination]:
    """List "auto", and for each ready backend the combination that uses it wherever it accepts.

    Each assignment of backends to slots is listed once.
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
    """List every combination of backends over the branches cmp, sel and win.

    A backend is used in a branch if it accepts it on ``device`` in at least one of ``dtypes``,
    forward and backward.

    Args:
        registry: Registry of backends.
        device: Torch device.
        dtypes: Candidate dtypes of q, k and v.
        named: Backends that the user fixed, by slot; these slots do not vary.
        decode: Require decode forms instead of forward and backward.

    Returns:
        Backend names by slot, one mapping per combination. Slots that are not branches stay with
        auto unless ``named`` has them. If no backend accepts a branch, the only entry is ``named``:
        planning it raises an error with every reason.
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
    combinations = [
        {**named, **dict(zip(BRANCHES, names))} for names in itertools.product(*choices)
    ]
    return combinations or [dict(named)]
