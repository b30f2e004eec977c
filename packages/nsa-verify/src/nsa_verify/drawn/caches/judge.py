"""Check a cache: random histories of a real layer and its NSACache.

Each operation is compared with a model of the sequences: lengths, and every key and value that a
later step may read (bit for bit, because the layer's projections are exact). The selected blocks
and the output are judged by the oracle, given these keys and values. If the combination refuses
float64, the best backend that accepts it runs; the code of the cache is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from nsa_core.errors import Unsupported
from nsa_core.plan.plan import Plan, resolve
from nsa_verify.drawn.caches.history import AnyHistory, History
from nsa_verify.drawn.caches.outputs import judge_output
from nsa_verify.drawn.caches.replay import Plans, Replay
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding

Result = TypeVar("Result")


def history_findings(combination: Combination, history: History) -> list[Finding]:
    """Run a history on a layer of the combination; return its first fault, or that it passed.

    Raises:
        Unsupported: The combination does not take the layer.
    """
    failure = Replay(history, plans_of(combination, history)).first_failure(judge_output)
    if failure is None:
        return [history.findings.finding("", "history", True)]
    number, fault = failure
    operations = history.operations
    after = f"after {operations[number]}" if number < len(operations) else "at the end"
    detail = f"{after}: {fault.detail}"
    return [history.findings.finding(fault.slot, fault.quantity, False, detail=detail)]


def plans_of(combination: Combination, history: History) -> Plans:
    """Return the plans of a cache history; see :func:`planned`."""
    return planned(combination, history, _resolved)


def planned(
    combination: Combination, history: AnyHistory, resolved: Callable[..., Result]
) -> Result:
    """Return the plans of the combination, or in float64 the best ones that accept it.

    Args:
        combination: The combination.
        history: The history.
        resolved: Returns the plans, given a function that resolves one, the history and the device.
    """
    if history.torch_dtype == torch.float64:
        try:
            if combination.device != "cpu":
                raise Unsupported("float64 runs on the CPU")
            return resolved(combination.plan, history, "cpu")
        except Unsupported:
            return resolved(lambda c, d, **x: resolve(c, dtype=d, **x), history, "cpu")
    return resolved(combination.plan, history, combination.device)


def _resolved(plan: Callable[..., Plan], history: History, device: str) -> Plans:
    """Return the plans that ``plan(config, dtype, **options)`` resolves."""
    layer = (history.config, history.torch_dtype)
    page_size = history.page_size or None
    try:
        partial = plan(*layer, needs_grad=False, partial=True)
    except Unsupported:
        partial = None
    return Plans(
        plan(*layer, needs_grad=False),
        plan(*layer, needs_grad=False, phase="decode", page_size=page_size),
        partial,
        device,
    )
