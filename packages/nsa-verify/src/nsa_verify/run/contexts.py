"""Contexts in which backends are judged; emulators need one (``BackendSpec.judge_context``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nsa_core.contract import SLOTS, import_named
from nsa_core.errors import NSAError
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.plugin_calls import PROBE_LIMIT_S
from nsa_core.plan.registry import default_registry
from nsa_core.util.text import describe_error
from nsa_verify.problems.combination import Combination


def context_of(
    entry: BackendEntry, device: str
) -> contextlib.AbstractContextManager[object] | None:
    """Return the context that the backend of ``entry`` needs on ``device``, or None.

    Raises:
        NSAError: The judge_context function of the plugin raised; the message names the backend.
    """
    if entry.spec is None or entry.spec.judge_context is None:
        return None
    try:
        context: contextlib.AbstractContextManager[object] | None = import_named(
            entry.spec.judge_context
        )(device)
    except Exception as error:
        raise NSAError(
            f"backend {entry.name!r}: its judge_context raised {describe_error(error)}"
        ) from error
    return context


def needs_judge_context(combination: Combination) -> bool:
    """Return whether a backend that ``combination`` may use needs a context."""
    device = combination.device
    return any(
        _has_context(entry, device)
        if entry.child is None
        else entry.child.call(_has_context, entry, device, limit_s=PROBE_LIMIT_S)
        for entry in _backends(combination)
    )


def _has_context(entry: BackendEntry, device: str) -> bool:
    return context_of(entry, device) is not None


@contextlib.contextmanager
def judging(combination: Combination) -> Iterator[None]:
    """Enter the contexts of all backends that ``combination`` may use."""
    with contextlib.ExitStack() as stack:
        for entry in _backends(combination):
            context = context_of(entry, combination.device)
            if context is not None:
                stack.enter_context(context)
        yield


def _backends(combination: Combination) -> list[BackendEntry]:
    """Return the ready backends that the slots name, or all of them if a slot is auto."""
    ready = (combination.registry or default_registry()).ready()
    if not combination.backends.keys() >= set(SLOTS):
        return list(ready)
    return [entry for entry in ready if entry.name in combination.backends.values()]
