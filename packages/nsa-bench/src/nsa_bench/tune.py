"""Find the fastest correct backend for each slot on this device: judge first, then time."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable

import torch

from nsa_bench.cells import kernel_workload
from nsa_bench.clocks import clock_for
from nsa_bench.environment import device_name
from nsa_bench.gate import NOT_CORRECT, Gate, gate_case, run_gate
from nsa_bench.inputs import make_inputs
from nsa_bench.shapes import Shape
from nsa_bench.timing import measure
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS
from nsa_core.dispatch import tuned
from nsa_core.dispatch.candidates import find_candidates
from nsa_core.dispatch.options import PlanOptions
from nsa_core.dispatch.plan import Plan, resolve
from nsa_core.dispatch.registry import Registry

PHASES = {"inference": "forward", "training": "both"}


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


def tune(
    config: NSAConfig,
    registry: Registry,
    *,
    device: str,
    dtype: torch.dtype,
    length: int,
    seed: int = 0,
    budget_s: float = 0.5,
    advance: Callable[[str], None] = lambda label: None,
) -> Tuning:
    """Judge and time every backend that accepts a slot, for inference and for training.

    Inference is forward; training is forward and backward. A backend that fails its gate is not
    timed, and its slot gets no record: `auto` must neither prefer nor avoid a backend that is wrong
    here.

    Args:
        config: The layer.
        registry: The installed backends.
        device: "cpu", "cuda" or "cuda:N".
        dtype: Dtype of the inputs.
        length: Tokens of the one sequence.
        seed: Seed of the random inputs.
        budget_s: Seconds of samples per workload.
        advance: Called with a label after each gate and each use, :func:`step_count` times in all.

    Raises:
        Unsupported, BackendUnavailable: No backend accepts a slot.
    """
    times: list[SlotTime] = []
    gates: list[Gate] = []
    records: list[tuned.Record] = []
    name = device_name(device)
    for use, phase in PHASES.items():
        training = use == "training"
        plans = _plans(config, registry, device, dtype, training)
        case = gate_case(config, device, seed)
        gate_failures: dict[tuple[str, str], str] = {}
        for slot, backend in plans:
            gate_plan = resolve(
                case.config,
                device=device,
                dtype=dtype,
                backends={slot: backend},
                needs_grad=training,
                registry=registry,
            )
            gate = run_gate(
                f"{slot}={backend}", gate_plan, case, dtype, device, training, Shape.of(config).name
            )
            gates.append(gate)
            # How a failed verdict and an exception name the backend.
            mentions = (f"{slot} ({backend})", f"backend {backend!r}, slot {slot!r}")
            if any(mention in line for line in gate.failures for mention in mentions):
                gate_failures[slot, backend] = NOT_CORRECT
            advance(f"gate {slot}={backend}, {use}")
        x = make_inputs(
            "random", config, batch=1, length=length, dtype=dtype, device=device, seed=seed
        )
        workloads = [
            kernel_workload(x, config, plan, slot, "forward" if slot == "select" else phase)
            for (slot, backend), plan in plans.items()
            if (slot, backend) not in gate_failures
        ]
        outcomes = measure(workloads, clock_for(device), budget_s=budget_s)
        for (slot, backend), plan in plans.items():
            outcome = outcomes.get(f"{slot} {backend}")
            reason = gate_failures.get((slot, backend)) or (outcome.reason if outcome else "")
            median = outcome.performance.median_ms if outcome and outcome.performance else None
            times.append(SlotTime(slot, backend, plan.choices[slot].version, use, median, reason))
        records += _records([t for t in times if t.use == use], plans, name, length)
        advance(f"timed {use}")
    return Tuning(name, times, gates, records)


def step_count(config: NSAConfig, registry: Registry, device: str, dtype: torch.dtype) -> int:
    """Return how often :func:`tune` calls ``advance``.

    It calls it once per slot, accepting backend and use, and once more per use.
    """
    options = [
        PlanOptions(device=device, dtype=dtype, needs_grad=needs_grad)
        for needs_grad in (False, True)
    ]
    candidates_by_slot = [
        find_candidates(config, option, registry=registry).by_slot for option in options
    ]
    all_candidates = [
        c for by_slot in candidates_by_slot for of_slot in by_slot.values() for c in of_slot
    ]
    return len(PHASES) + sum(c.accepted for c in all_candidates)


def _plans(
    config: NSAConfig, registry: Registry, device: str, dtype: torch.dtype, training: bool
) -> dict[tuple[str, str], Plan]:
    """Return, per slot and accepting backend, a plan with that backend there and auto elsewhere."""
    options = PlanOptions(device=device, dtype=dtype, needs_grad=training)
    by_slot = find_candidates(config, options, registry=registry).by_slot
    return {
        (slot, c.backend): resolve(config, options, registry=registry, backends={slot: c.backend})
        for slot in SLOTS
        for c in by_slot[slot]
        if c.accepted
    }


def _records(
    times: list[SlotTime], plans: dict[tuple[str, str], Plan], device: str, length: int
) -> list[tuned.Record]:
    records = []
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    for slot in SLOTS:
        slot_times = [t for t in times if t.slot == slot]
        time_of = {t.backend: t.time_ms for t in slot_times if t.time_ms is not None}
        if len(time_of) < len(slot_times) or not slot_times:
            continue
        request = plans[slot, slot_times[0].backend].requests[slot]
        versions = {t.backend: t.version for t in slot_times}
        records.append(
            tuned.Record(
                device,
                tuned.torch_version(),
                tuned.shape_class(request),
                slot,
                time_of,
                versions,
                length,
                today,
            )
        )
    return records
