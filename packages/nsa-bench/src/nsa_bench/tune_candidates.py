"""The backends that a tuning run compares; third-party ones run in child processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from nsa_bench.cells import kernel_workload
from nsa_bench.gate import Gate, run_gate
from nsa_bench.inputs import Inputs, make_inputs
from nsa_bench.isolation import failed_gate
from nsa_bench.shapes import Shape
from nsa_bench.timing import Workload
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS, Request
from nsa_core.errors import BackendUnavailable, NSAError
from nsa_core.plan.candidates import find_candidates
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan, resolve
from nsa_core.plan.registry import Registry
from nsa_verify.isolation.children import PLAN_LIMIT_S, call_in_child, needs_isolation, preload
from nsa_verify.problems.cases import Case

PHASES = {"inference": "forward", "training": "both"}
_Accepted = dict[str, list[str]]  # use -> slots that a backend accepts


@dataclasses.dataclass(frozen=True)
class TuneCandidate:
    """A backend that is judged and timed in one slot.

    Attributes:
        slot: The slot.
        backend: Name of the backend.
        version: Version of its distribution.
        use: "inference" or "training".
        isolated: Whether it runs in child processes only.
    """

    slot: str
    backend: str
    version: str
    use: str
    isolated: bool

    @property
    def key(self) -> str:
        """Key of its workload."""
        return f"{self.slot} {self.backend}"


@dataclasses.dataclass(frozen=True)
class TuneCandidates:
    """The candidates of a tuning run.

    Attributes:
        config: The layer.
        registry: The installed backends.
        device: "cpu", "cuda" or "cuda:N".
        dtype: Dtype of the inputs.
        accepted: The candidates whose probes accept.
        requests: use -> slot -> the request.
        failed: The candidates whose probes ended their process, and how.
    """

    config: NSAConfig
    registry: Registry
    device: str
    dtype: torch.dtype
    accepted: list[TuneCandidate]
    requests: Mapping[str, Mapping[str, Request]]
    failed: list[tuple[TuneCandidate, str]]

    @property
    def steps(self) -> int:
        """Number of steps of the run: one per candidate, and one per use."""
        return len(self.accepted) + len(PHASES)

    def inputs(self, length: int, seed: int) -> Inputs:
        """Return random inputs of one sequence of ``length`` tokens."""
        return make_inputs(
            "random",
            self.config,
            batch=1,
            length=length,
            dtype=self.dtype,
            device=self.device,
            seed=seed,
        )

    def plan(self, candidate: TuneCandidate, config: NSAConfig) -> Plan:
        """Return a plan with the candidate in its slot and, if possible, own backends elsewhere.

        Raises:
            NSAError: A slot has no backend.
        """
        options = _options(self.device, self.dtype, candidate.use)
        own = _own(self.registry)
        if not candidate.isolated:
            return resolve(
                config, options, registry=own, backends={candidate.slot: candidate.backend}
            )
        by_slot = find_candidates(config, options, registry=own).by_slot
        others = {s: c.backend for s in SLOTS for c in reversed(by_slot[s]) if c.accepted}
        backends = others | {candidate.slot: candidate.backend}
        # The probes of the whole registry run only if no other way is left.
        entry = self.registry.get(candidate.backend)
        registry = Registry((*own.entries, entry)) if backends.keys() == {*SLOTS} else self.registry
        return resolve(config, options, registry=registry, backends=backends)


def find_tune_candidates(
    config: NSAConfig, registry: Registry, *, device: str, dtype: torch.dtype
) -> TuneCandidates:
    """Return the backends that accept a slot, for inference and for training.

    The probes of a third-party backend run in a child process.

    Args:
        config: The layer.
        registry: The installed backends.
        device: "cpu", "cuda" or "cuda:N".
        dtype: Dtype of the inputs.
    """
    own = _own(registry)
    foreign = [entry for entry in registry.ready() if needs_isolation(entry)]
    if foreign:
        preload([__name__])  # while the own backends are probed
    requests, accepted = {}, []
    failed: list[tuple[TuneCandidate, str]] = []
    for use in PHASES:
        candidates = find_candidates(config, _options(device, dtype, use), registry=own)
        requests[use] = dict(candidates.requests)
        by_slot = candidates.by_slot
        is_complete = all(any(c.accepted for c in by_slot[slot]) for slot in SLOTS)
        accepted += [
            TuneCandidate(slot, c.backend, c.version, use, not is_complete)
            for slot in SLOTS
            for c in by_slot[slot]
            if c.accepted
        ]
    for entry in foreign:
        assert entry.spec is not None  # a ready backend has one
        arguments = (_accepted_slots, entry, config, device, dtype)
        try:
            uses: _Accepted = call_in_child(
                *arguments, limit_s=PLAN_LIMIT_S, doing="while planning"
            )
        except BackendUnavailable as error:
            failed += [
                (TuneCandidate(slot, entry.name, entry.version, use, True), str(error))
                for use in PHASES
                for slot in entry.spec.slots
            ]
            continue
        accepted += [
            TuneCandidate(slot, entry.name, entry.version, use, True)
            for use, slots in uses.items()
            for slot in slots
        ]
    return TuneCandidates(config, registry, device, dtype, accepted, requests, failed)


def _options(device: str, dtype: torch.dtype, use: str) -> PlanOptions:
    return PlanOptions(device=device, dtype=dtype, needs_grad=use == "training")


def _own(registry: Registry) -> Registry:
    """Return the backends of ``registry`` that share this process."""
    return Registry(tuple(entry for entry in registry.entries if not needs_isolation(entry)))


def _accepted_slots(
    entry: BackendEntry, config: NSAConfig, device: str, dtype: torch.dtype
) -> _Accepted:
    """Return the slots that a backend accepts, for each use."""
    registry, accepted = Registry((entry,)), {}
    for use in PHASES:
        candidates = find_candidates(config, _options(device, dtype, use), registry=registry)
        by_slot = candidates.by_slot
        accepted[use] = [s for s in SLOTS if any(c.accepted for c in by_slot[s])]
    return accepted


def judge_candidate(candidates: TuneCandidates, candidate: TuneCandidate, case: Case) -> Gate:
    """Plan and judge one candidate on ``case``; no plan is a failed gate."""
    shape, combo = Shape.of(candidates.config).name, f"{candidate.slot}={candidate.backend}"
    try:
        plan = candidates.plan(candidate, case.config)
    except NSAError as error:
        if not candidate.isolated:
            raise
        gate = failed_gate(combo, shape, candidates.dtype, case.name)
        return dataclasses.replace(gate, failures=[str(error)])
    gradients = candidate.use == "training"
    return run_gate(combo, plan, case, candidates.dtype, candidates.device, gradients, shape)


def workload_of(candidates: TuneCandidates, candidate: TuneCandidate, x: Inputs) -> Workload:
    """Return the workload of one candidate on the inputs ``x``."""
    phase = "forward" if candidate.slot == "select" else PHASES[candidate.use]
    plan = candidates.plan(candidate, candidates.config)
    return kernel_workload(x, candidates.config, plan, candidate.slot, phase)


def isolated_workload(
    candidates: TuneCandidates, candidate: TuneCandidate, length: int, seed: int
) -> Workload:
    """Return the workload of one candidate on inputs of its own, in a child process."""
    return workload_of(candidates, candidate, candidates.inputs(length, seed))
