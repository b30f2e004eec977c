"""The backends that a tuning run compares; third-party ones run in child processes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch

from nsa_bench.cells import kernel_workload
from nsa_bench.gate import Judge, judge_plan
from nsa_bench.inputs import Inputs, make_inputs
from nsa_bench.timing import Workload
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS, Request
from nsa_core.plan.candidates import find_candidates
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan, resolve
from nsa_core.plan.registry import Registry
from nsa_verify.problems.cases import Case

PHASES = {"inference": "forward", "training": "both"}
_ENDS = ("probe_ended", "probe_too_slow", "rank_ended", "rank_too_slow")  # codes of reasons


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
        if not candidate.isolated:
            backends = {candidate.slot: candidate.backend}
            # The backends that share this process.
            own = Registry(tuple(entry for entry in self.registry.entries if entry.child is None))
            return resolve(config, options, registry=own, backends=backends)
        by_slot = find_candidates(config, options, registry=self.registry).by_slot
        others = {
            slot: c.backend
            for slot in SLOTS
            for c in reversed(by_slot[slot])
            if c.accepted and c.backend != candidate.backend
        }
        backends = others | {candidate.slot: candidate.backend}
        return resolve(config, options, registry=self.registry, backends=backends)

    def for_child(self, candidate: TuneCandidate) -> TuneCandidates:
        """Return the candidates without the third-party backends that a plan does not need."""
        foreign = {entry.name for entry in self.registry.entries if entry.child is not None}
        own = {c.slot for c in self.accepted if c.use == candidate.use and c.backend not in foreign}
        if own | {candidate.slot} != {*SLOTS}:
            return self
        unused = foreign - {candidate.backend}
        entries = tuple(e for e in self.registry.entries if e.name not in unused)
        return dataclasses.replace(self, registry=Registry(entries))


def find_tune_candidates(
    config: NSAConfig, registry: Registry, *, device: str, dtype: torch.dtype
) -> TuneCandidates:
    """Return the backends that accept a slot, for inference and for training.

    Args:
        config: The layer.
        registry: The installed backends.
        device: "cpu", "cuda" or "cuda:N".
        dtype: Dtype of the inputs.
    """
    requests, accepted = {}, []
    failed: list[tuple[TuneCandidate, str]] = []
    for use in PHASES:
        candidates = find_candidates(config, _options(device, dtype, use), registry=registry)
        requests[use] = dict(candidates.requests)
        foreign = {entry.name for entry in registry.ready() if entry.child is not None}
        by_slot = candidates.by_slot
        is_complete = all(
            any(c.accepted and c.backend not in foreign for c in by_slot[each]) for each in SLOTS
        )
        for slot, c in [(each, c) for each in SLOTS for c in by_slot[each]]:
            isolated = c.backend in foreign or not is_complete
            candidate = TuneCandidate(slot, c.backend, c.version, use, isolated)
            ends = [str(reason) for reason in c.reasons if reason.code in _ENDS]
            if c.accepted:
                accepted.append(candidate)
            elif ends:
                failed.append((candidate, ends[0]))
    return TuneCandidates(config, registry, device, dtype, accepted, requests, failed)


def _options(device: str, dtype: torch.dtype, use: str) -> PlanOptions:
    return PlanOptions(device=device, dtype=dtype, needs_grad=use == "training")


def judge_of(candidates: TuneCandidates, candidate: TuneCandidate, case: Case) -> Judge:
    """Plan one candidate; return the function that judges it on ``case``.

    Raises:
        NSAError: A slot has no backend.
    """
    plan, gradients = candidates.plan(candidate, case.config), candidate.use == "training"
    target = (plan, case, candidates.dtype, candidates.device, gradients)
    return functools.partial(judge_plan, *target)


def judge_isolated(candidates: TuneCandidates, candidate: TuneCandidate, case: Case) -> list[str]:
    """Plan and judge one candidate, in a child process."""
    return judge_of(candidates, candidate, case)()


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
