"""Find the fastest correct backend for each slot on this device: judge first, then time."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping, Sequence

from nsa_bench import isolation
from nsa_bench.child_call import in_child, not_here
from nsa_bench.clocks import clock_for
from nsa_bench.environment import device_name
from nsa_bench.gate import (
    NOT_CORRECT,
    failures_of,
    gate_case,
    gate_of,
    judge_plan,
    long_cases,
)
from nsa_bench.limits import Limits, lacks_memory
from nsa_bench.result import Gate
from nsa_bench.roofline import part_costs
from nsa_bench.shapes import Shape
from nsa_bench.timing import FAILED, Workload, measure
from nsa_bench.tune_candidates import PHASES, TuneCandidate, TuneCandidates
from nsa_core.contract import SLOTS, Request
from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.plan import tuned
from nsa_core.util.interruption import NEVER
from nsa_verify.problems.cases import Case

CALL_LIMIT_S = 60.0  # longest call of an isolated candidate, in seconds


@dataclasses.dataclass(frozen=True)
class SlotTime:
    """A backend's time in one slot; ``time_ms`` is None if ``reason`` is set."""

    slot: str
    backend: str
    version: str
    use: str  # inference or training
    time_ms: float | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The measurements of a tuning run, and the records for `auto`."""

    device: str
    times: list[SlotTime]
    gates: list[Gate]
    records: list[tuned.Record]

    @property
    def failed(self) -> bool:
        """Return whether a backend is not correct, or failed while it was probed or timed."""
        return any(not gate.ok for gate in self.gates) or any(
            time.reason.startswith(FAILED) for time in self.times
        )


def tune(
    candidates: TuneCandidates,
    *,
    length: int,
    seed: int = 0,
    budget_s: float = 0.5,
    advance: Callable[[str], None] = lambda label: None,
) -> Tuning:
    """Judge and time every backend that accepts a slot, for inference and for training.

    Inference is forward; training is forward and backward. A backend that fails its gate is not
    timed, and its slot gets no record: `auto` must neither prefer nor avoid a backend that is wrong
    here. Third-party backends run in child processes: one that crashes, exits or hangs has that as
    its reason, and the others are timed.

    Args:
        candidates: The backends to compare.
        length: Tokens of the one sequence.
        seed: Seed of the random inputs.
        budget_s: Seconds of samples per workload.
        advance: Called with a label after each gate and each use, ``candidates.steps`` times.

    Raises:
        InvalidInput: The inputs exceed the memory of the device.
    """
    element = candidates.dtype.itemsize
    least = part_costs(candidates.config, 1, length, element, "forward")["total"].bytes
    if no_memory := lacks_memory(least, candidates.device):
        raise InvalidInput(f"length {length}: {no_memory}; give a shorter one")
    times = [
        SlotTime(c.slot, c.backend, c.version, c.use, None, f"{FAILED}: {why}")
        for c, why in candidates.failed
    ]
    gates: list[Gate] = []
    records: list[tuned.Record] = []
    name = device_name(candidates.device)
    for use in PHASES:
        of_use = [c for c in candidates.accepted if c.use == use]
        correct = []
        for candidate in of_use:
            gate = _gate(candidate, seed, length)
            gates.append(gate)
            if not _is_at_fault(candidate, gate):
                correct.append(candidate)
            advance(f"gate {candidate.slot}={candidate.backend}, {use}")
        times += _timed(candidates.device, of_use, correct, length, seed, budget_s)
        of_slots = [time for time in times if time.use == use]
        records += _records(of_slots, candidates.requests[use], name, length)
        advance(f"timed {use}")
    return Tuning(name, times, gates, records)


def _gate(candidate: TuneCandidate, seed: int, length: int) -> Gate:
    """Judge a candidate, in a child process if it is isolated."""
    problem = (candidate.config, candidate.device, seed)
    backends = {candidate.slot: candidate.backend}
    cases = [gate_case(*problem), *long_cases(candidate.registry, backends, *problem, length)]
    judge = functools.partial(_judge, candidate, cases)
    run = functools.partial(failures_of, judge)
    if candidate.isolated:
        limits = (candidate.device, float("inf"))
        run = functools.partial(isolation.failures_in_child, judge, *limits)
    combo, shape = f"{candidate.slot}={candidate.backend}", Shape.of(candidate.config).name
    names = "; ".join(case.name for case in cases)
    return gate_of(combo, shape, dtype_name(candidate.dtype), names, run)


def _judge(candidate: TuneCandidate, cases: Sequence[Case]) -> list[str]:
    target = (candidate.dtype, candidate.device, candidate.use == "training")
    return [line for case in cases for line in judge_plan(candidate.plan, case, *target)]


def _is_at_fault(candidate: TuneCandidate, gate: Gate) -> bool:
    """Return whether the candidate itself failed its gate, not a backend of another slot."""
    if candidate.isolated:
        return not gate.ok
    slot, backend = candidate.slot, candidate.backend
    # How a failed verdict and an exception name the backend.
    mentions = (f"{slot} ({backend})", f"backend {backend!r}, slot {slot!r}")
    return any(mention in line for line in gate.failures for mention in mentions)


def _timed(
    device: str,
    of_use: list[TuneCandidate],
    correct: list[TuneCandidate],
    length: int,
    seed: int,
    budget_s: float,
) -> list[SlotTime]:
    """Time the ``correct`` ones of the candidates of a use, in turns."""
    with contextlib.ExitStack() as children:
        inputs = functools.cache(lambda: of_use[0].inputs(length, seed))  # equal for all
        workloads = [
            _workload_in_child(candidate, length, seed, children)
            if candidate.isolated
            else candidate.workload(inputs())
            for candidate in correct
        ]
        outcomes = measure(workloads, clock_for(device), budget_s=budget_s)
    times = []
    for c in of_use:
        outcome = outcomes.get(c.key)
        reason = outcome.reason if outcome else NOT_CORRECT
        median = outcome.performance.median_ms if outcome and outcome.performance else None
        times.append(SlotTime(c.slot, c.backend, c.version, c.use, median, reason))
    return times


def _workload_in_child(
    candidate: TuneCandidate, length: int, seed: int, children: contextlib.ExitStack
) -> Workload:
    """Return the workload of a candidate that runs in a child process, which ``children`` ends."""
    limits = dataclasses.replace(
        Limits.of_run(float("inf"), CALL_LIMIT_S, candidate.device),
        too_slow=f"{FAILED}: a call did not end within {CALL_LIMIT_S:g} s",
    )
    make = functools.partial(candidate.own_workload, length, seed)
    workload = Workload(candidate.key, not_here)
    return in_child(workload, make, candidate.device, limits, NEVER, children)


def _records(
    times: list[SlotTime], requests: Mapping[str, Request], device: str, length: int
) -> list[tuned.Record]:
    records = []
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    for slot in SLOTS:
        slot_times = [t for t in times if t.slot == slot]
        time_of = {t.backend: t.time_ms for t in slot_times if t.time_ms is not None}
        if len(time_of) < len(slot_times) or not slot_times:
            continue
        versions = {t.backend: t.version for t in slot_times}
        records.append(
            tuned.Record(
                device,
                tuned.torch_version(),
                tuned.shape_class(requests[slot]),
                slot,
                time_of,
                versions,
                length,
                today,
            )
        )
    return records
