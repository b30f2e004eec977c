"""Third-party backends in a benchmark: they are planned and judged in child processes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nsa_bench.gate import Gate
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS
from nsa_core.dtypes import dtype_name
from nsa_core.errors import BackendUnavailable
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan, resolve
from nsa_core.plan.registry import Registry
from nsa_verify.isolation.children import PLAN_LIMIT_S, call_in_child, needs_isolation
from nsa_verify.problems.combination import Combination, ready_combinations

GATE_LIMIT_S = {"cpu": 60.0, "cuda": 300.0}


def may_be_foreign(registry: Registry, backends: Mapping[str, str]) -> bool:
    """Return whether a plan with ``backends`` by slot may use a third-party backend."""
    foreign = {entry.name for entry in registry.ready() if needs_isolation(entry)}
    named = foreign & {*backends.values()}
    return bool(named) or (bool(foreign) and not backends.keys() >= {*SLOTS})


def is_foreign(registry: Registry, plan: Plan) -> bool:
    """Return whether ``plan`` uses a third-party backend."""
    return any(needs_isolation(registry.get(c.backend)) for c in plan.choices.values())


def combinations(
    registry: Registry, config: NSAConfig, options: PlanOptions
) -> Sequence[Combination]:
    """Return the result of :func:`nsa_verify.problems.combination.ready_combinations`.

    Third-party plugins are asked in a child process.

    Raises:
        BackendUnavailable: A probe ended its process.
    """
    if not may_be_foreign(registry, {}):
        return ready_combinations(registry, config, options)
    found: Sequence[Combination] = call_in_child(
        ready_combinations, registry, config, options, limit_s=PLAN_LIMIT_S, doing="while planning"
    )
    return found


def check_plan(registry: Registry, config: NSAConfig, options: PlanOptions) -> None:
    """Plan in a child first, if a third-party backend may take part.

    Raises:
        NSAError: The plan is refused.
        BackendUnavailable: A probe or the import of a kernel ended its process.
    """
    named = options.backends if isinstance(options.backends, Mapping) else {}
    if may_be_foreign(registry, {slot: name for slot, name in named.items() if name}):
        arguments = (registry, config, options)
        call_in_child(_plan, *arguments, limit_s=PLAN_LIMIT_S, doing="while planning")


def _plan(registry: Registry, config: NSAConfig, options: PlanOptions) -> None:
    resolve(config, options, registry=registry)


def gate_in_child(
    function: Callable[..., Gate], *arguments: Any, failed: Gate, device: str, deadline: float
) -> Gate:
    """Return ``function(*arguments)``, called in a child; a child that ends is a failed gate.

    Args:
        function: Returns the gate.
        arguments: Its arguments.
        failed: The gate to return with the reason if there is no other.
        device: The device of the run.
        deadline: Value of time.monotonic() at which the run's time is over.
    """
    started = time.monotonic()
    limit_s = min(GATE_LIMIT_S[device.partition(":")[0]], max(1.0, deadline - started))
    try:
        gate: Gate = call_in_child(function, *arguments, limit_s=limit_s, doing="in its gate")
    except BackendUnavailable as error:
        seconds = round(time.monotonic() - started, 3)
        return dataclasses.replace(failed, ok=False, seconds=seconds, failures=[str(error)])
    return gate


def failed_gate(combo: str, shape: str, dtype: Any, case: str) -> Gate:
    """Return a gate that failed, without a reason yet."""
    return Gate(combo, shape, dtype_name(dtype), False, case, 0.0, [])
