"""Third-party backends in a benchmark: they are judged and timed in child processes."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from nsa_bench.gate import Judge, failures_of
from nsa_core.config import NSAConfig
from nsa_core.errors import NSAError
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan, resolve
from nsa_core.plan.registry import Registry
from nsa_core.util.child import Child
from nsa_verify.isolation.call_guard import guarded_calls

GATE_LIMIT_S = {"cpu": 60.0, "cuda": 300.0}


def has_plugins(registry: Registry) -> bool:
    """Return whether a third-party backend may take part."""
    return any(entry.child is not None for entry in registry.ready())


def is_foreign(registry: Registry, plan: Plan) -> bool:
    """Return whether ``plan`` uses a backend that runs in child processes only."""
    return any(registry.get(c.backend).child is not None for c in plan.choices.values())


def only_of(registry: Registry, plan: Plan) -> Registry:
    """Return ``registry`` without the third-party backends that ``plan`` does not use."""
    used = {choice.backend for choice in plan.choices.values()}
    entries = (e for e in registry.entries if e.child is None or e.name in used)
    return Registry(tuple(entries))


def planner(registry: Registry, plan: Plan, options: PlanOptions) -> Callable[[NSAConfig], Plan]:
    """Return a function that plans with the backends of ``plan``; pickle can send it to a child.

    Args:
        registry: The installed backends.
        plan: The plan.
        options: Its options; their backends do not count.
    """
    backends = {slot: choice.backend for slot, choice in plan.choices.items()}
    named = dataclasses.replace(options, backends=backends)
    return functools.partial(resolve, options=named, registry=only_of(registry, plan))


def call_in_child(function: Callable[..., Any], *arguments: Any, limit_s: float, doing: str) -> Any:
    """Return ``function(*arguments)``, called in a child that guards the calls of kernels.

    Raises:
        NSAError: The function raised it, or the child ended.
    """
    child = Child("a third-party backend")
    try:
        return child.call(_guarded, function, arguments, limit_s=limit_s, doing=doing)
    finally:
        child.end()


def _guarded(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    with guarded_calls():
        return function(*arguments)


def failures_in_child(judge: Judge, device: str, deadline: float) -> list[str]:
    """Return the failures of ``judge()``, called in a child; so is the end of the child.

    Args:
        judge: Judges a combination; pickle can send it.
        device: The device of the run.
        deadline: Value of time.monotonic() at which the run's time is over.
    """
    limit_s = min(GATE_LIMIT_S[device.partition(":")[0]], max(1.0, deadline - time.monotonic()))
    try:
        failures: list[str] = call_in_child(
            failures_of, judge, limit_s=limit_s, doing="in its gate"
        )
    except NSAError as error:
        return [str(error)]
    return failures
