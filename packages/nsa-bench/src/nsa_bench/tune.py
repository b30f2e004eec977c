"""Which backend is fastest for each slot of a shape class on this device: judged first, then timed
side by side.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable

import torch

from nsa_bench.cells import part_work
from nsa_bench.clocks import clock_for
from nsa_bench.environment import device_name
from nsa_bench.gate import NOT_CORRECT, Gate, gate_case, pass_gate
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
    """A backend's time in one slot; ``time_ms`` None where ``reason`` says why."""

    slot: str
    backend: str
    version: str
    use: str  # inference or training
    time_ms: float | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What was measured, and the records that follow from it."""

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
    """Judge and time every backend that takes a slot, forward (inference) and forward with backward
    (training).

    A backend that fails its gate is not timed, and leaves its slot's record out altogether: `auto`
    must not be told to prefer, nor to pass over, what is wrong here.

    Raises:
        Unsupported, BackendUnavailable: a slot has nobody to run it.
    """
    times: list[SlotTime] = []
    gates: list[Gate] = []
    records: list[tuned.Record] = []
    name = device_name(device)
    for use, phase in PHASES.items():
        training = use == "training"
        plans = _plans(config, registry, device, dtype, training)
        case = gate_case(config, device, seed)
        wrong: dict[tuple[str, str], str] = {}
        for slot, backend in plans:
            small = resolve(
                case.config,
                device=device,
                dtype=dtype,
                backends={slot: backend},
                needs_grad=training,
                registry=registry,
            )
            gate = pass_gate(
                f"{slot}={backend}", small, case, dtype, device, training, Shape.of(config).name
            )
            gates.append(gate)
            named = (f"{slot} ({backend})", f"backend {backend!r}, slot {slot!r}")
            if any(said in line for line in gate.failures for said in named):
                wrong[slot, backend] = NOT_CORRECT
            advance(f"gate {slot}={backend}, {use}")
        x = make_inputs(
            "random", config, batch=1, length=length, dtype=dtype, device=device, seed=seed
        )
        works = [
            part_work(x, config, plan, slot, "forward" if slot == "select" else phase)
            for (slot, backend), plan in plans.items()
            if (slot, backend) not in wrong
        ]
        outcomes = measure(works, clock_for(device), budget_s=budget_s)
        for (slot, backend), plan in plans.items():
            outcome = outcomes.get(f"{slot} {backend}")
            reason = wrong.get((slot, backend)) or (outcome.reason if outcome else "")
            median = outcome.performance.median_ms if outcome and outcome.performance else None
            times.append(SlotTime(slot, backend, plan.choices[slot].version, use, median, reason))
        records += _records([t for t in times if t.use == use], plans, name, length)
        advance(f"timed {use}")
    return Tuning(name, times, gates, records)


def steps(config: NSAConfig, registry: Registry, device: str, dtype: torch.dtype) -> int:
    """How often :func:`tune` tells ``advance``: of each backend that takes a slot, and of each
    use.
    """
    options = [PlanOptions(device=device, dtype=dtype, needs_grad=grad) for grad in (False, True)]
    asked = [find_candidates(config, each, registry=registry).by_slot for each in options]
    candidates = [c for by_slot in asked for of_slot in by_slot.values() for c in of_slot]
    return len(PHASES) + sum(c.accepted for c in candidates)


def _plans(
    config: NSAConfig, registry: Registry, device: str, dtype: torch.dtype, training: bool
) -> dict[tuple[str, str], Plan]:
    """Per slot and accepting backend the plan that runs it there, everything else auto."""
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
        of = [t for t in times if t.slot == slot]
        known = {t.backend: t.time_ms for t in of if t.time_ms is not None}
        if len(known) < len(of) or not of:
            continue
        request = plans[slot, of[0].backend].requests[slot]
        versions = {t.backend: t.version for t in of}
        records.append(
            tuned.Record(
                device,
                tuned.torch_version(),
                tuned.shape_class(request),
                slot,
                known,
                versions,
                length,
                today,
            )
        )
    return records
