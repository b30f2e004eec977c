"""The backends that a tuning run compares; third-party ones run in child processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from nsa_bench.cells import kernel_workload
from nsa_bench.inputs import Inputs, make_inputs
from nsa_bench.timing import Workload
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS, Request
from nsa_core.plan.candidates import find_candidates
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan, resolve
from nsa_core.plan.registry import Registry

PHASES = {"inference": "forward", "training": "both"}
_ENDS = ("probe_ended", "probe_too_slow", "rank_ended", "rank_too_slow")  # codes of reasons


@dataclasses.dataclass(frozen=True)
class TuneCandidate:
    """A backend that is judged and timed in one slot; pickle can send it to a child process.

    Attributes:
        slot: The slot.
        backend: Name of the backend.
        version: Version of its distribution.
        use: "inference" or "training".
        isolated: Whether it runs in child processes only.
        config: The layer.
        device: "cpu", "cuda" or "cuda:N".
        dtype: Dtype of the inputs.
        registry: The backends that its plans may use.
    """

    slot: str
    backend: str
    version: str
    use: str
    isolated: bool
    config: NSAConfig
    device: str
    dtype: torch.dtype
    registry: Registry

    @property
    def key(self) -> str:
        """Key of its workload."""
        return f"{self.slot} {self.backend}"

    def plan(self, config: NSAConfig) -> Plan:
        """Return a plan with the candidate in its slot and, if possible, own backends elsewhere.

        Raises:
            NSAError: A slot has no backend.
        """
        options, others = _options(self.device, self.dtype, self.use), dict[str, str]()
        if self.isolated:  # its priority may be the highest in other slots, too
            by_slot = find_candidates(config, options, registry=self.registry).by_slot
            others = {
                slot: c.backend
                for slot in SLOTS
                for c in reversed(by_slot[slot])
                if c.accepted and c.backend != self.backend
            }
        backends = others | {self.slot: self.backend}
        return resolve(config, options, registry=self.registry, backends=backends)

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

    def workload(self, x: Inputs) -> Workload:
        """Return its workload on the inputs ``x``."""
        phase = "forward" if self.slot == "select" else PHASES[self.use]
        return kernel_workload(x, self.config, self.plan(self.config), self.slot, phase)

    def own_workload(self, length: int, seed: int) -> Workload:
        """Return its workload on inputs of its own, in a child process."""
        return self.workload(self.inputs(length, seed))


@dataclasses.dataclass(frozen=True)
class TuneCandidates:
    """The candidates of a tuning run.

    Attributes:
        config: The layer.
        device: "cpu", "cuda" or "cuda:N".
        dtype: Dtype of the inputs.
        accepted: The candidates whose probes accept.
        requests: use -> slot -> the request.
        failed: The candidates whose probes ended their process, and how.
    """

    config: NSAConfig
    device: str
    dtype: torch.dtype
    accepted: list[TuneCandidate]
    requests: Mapping[str, Mapping[str, Request]]
    failed: list[tuple[TuneCandidate, str]]

    @property
    def steps(self) -> int:
        """Number of steps of the run: one per candidate, and one per use."""
        return len(self.accepted) + len(PHASES)


def find_tune_candidates(
    config: NSAConfig, registry: Registry, *, device: str, dtype: torch.dtype
) -> TuneCandidates:
    """Return the backends that accept a slot, for inference and for training.

    Args:
        config: The layer.
        registry: The installed backends.
        device: "cpu", "cuda" or "cuda:N".
        dtype: Dtype of the inputs.

    Raises:
        Unsupported, BackendUnavailable: No backend accepts any slot; the message has the reasons.
    """
    requests, accepted = {}, []
    failed: list[tuple[TuneCandidate, str]] = []
    foreign = {entry.name for entry in registry.entries if entry.child is not None}
    for use in PHASES:
        candidates = find_candidates(config, _options(device, dtype, use), registry=registry)
        requests[use] = dict(candidates.requests)
        by_slot = candidates.by_slot
        own = {s for s in SLOTS for c in by_slot[s] if c.accepted and c.backend not in foreign}
        for slot, c in [(each, c) for each in SLOTS for c in by_slot[each]]:
            # A plan needs third-party backends in the slots that no own backend accepts.
            needed = {c.backend} if own | {slot} == {*SLOTS} else foreign
            usable = Registry(
                tuple(e for e in registry.entries if e.child is None or e.name in needed)
            )
            isolated = c.backend in foreign or own != {*SLOTS}
            named = (slot, c.backend, c.version, use, isolated)
            candidate = TuneCandidate(*named, config, device, dtype, usable)
            ends = [str(reason) for reason in c.reasons if reason.code in _ENDS]
            if c.accepted:
                accepted.append(candidate)
            elif ends:
                failed.append((candidate, ends[0]))
    if not (accepted or failed):  # raises the error with the reasons
        resolve(config, _options(device, dtype, "inference"), registry=registry)
    return TuneCandidates(config, device, dtype, accepted, requests, failed)


def _options(device: str, dtype: torch.dtype, use: str) -> PlanOptions:
    return PlanOptions(device=device, dtype=dtype, needs_grad=use == "training")
