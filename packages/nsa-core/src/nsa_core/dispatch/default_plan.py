"""The plan of calls that bring none: made once per configuration, device and dtype, and visible to
torch.compile.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import LONG_SEQUENCE
from nsa_core.dispatch.candidates import backends_problems
from nsa_core.dispatch.options import PlanOptions
from nsa_core.dispatch.plan import Plan, resolve
from nsa_core.errors import InvalidInput, Unsupported

Function = TypeVar("Function", bound=Callable[..., object])
Backends = str | tuple[tuple[str, str], ...] | None


def frozen_backends(backends: str | Mapping[str, str] | None) -> Backends:
    """``backends`` of :func:`nsa_core.resolve` as a hashable value.

    Raises:
        InvalidInput: a kind or a slot that resolve() would refuse; whether a name is known shows
            when planning.
    """
    if wrong := backends_problems(backends):
        raise InvalidInput("; ".join(wrong))
    return tuple(sorted(backends.items())) if isinstance(backends, Mapping) else backends


def must_be_plan(plan: object) -> None:
    """Refuse what a caller gave as a plan and is none.

    Raises:
        InvalidInput: its type, and what makes a plan.
    """
    if not isinstance(plan, Plan):
        why = (
            "; a backend's name goes to backends= of the layer or of nsa_core.resolve()"
            * isinstance(plan, str)
        )
        raise InvalidInput(
            f"plan must be what nsa_core.resolve() returns, got {type(plan).__name__}{why}"
        )


def is_long(tokens: int, varlen: bool) -> bool:
    """Whether a call on sequences of ``tokens``, not on packed documents, has the plan of long
    sequences.
    """
    # A branch, so that torch.compile has a constant and a guard where S is a symbol.
    return True if not varlen and tokens >= LONG_SEQUENCE else False  # noqa: SIM210


class _Plans:
    """Every default plan made, as attributes: torch.compile follows an attribute down to a kernel,
    with guards.
    """


_plans = _Plans()


def default_plan(
    config: NSAConfig,
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    wants_grad: bool,
    backends: Backends = None,
    long: bool = False,
) -> Plan:
    """The plan for calls that name none, made once per process and arguments.

    ``long``: for dense calls of contract.LONG_SEQUENCE tokens or more, see :func:`is_long`.

    One that can train, so that grad and no_grad run the same kernels; only where none can and no
    gradient is wanted, one that cannot. Meta tensors, which run nothing, take the CPU's plan.

    Raises:
        Unsupported, BackendUnavailable, InvalidInput: as :func:`nsa_core.resolve`.
    """
    plan: Plan = getattr(
        _plans, _plan_name(config.values, device, dtype, varlen, wants_grad, backends, long)
    )
    return plan


def constant_result(function: Function) -> Function:
    """torch.compiler.assume_constant_result, which would import the compiler: as long again as
    torch itself takes.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_result  # planning is Python over plugins: torch.compile takes its result, not its code
def _plan_name(
    # of the config: torch.compile passes plain values on, not every torch a dataclass
    values: tuple[Any, ...],
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    wants_grad: bool,
    backends: Backends,
    long: bool,
) -> str:
    device = torch.device("cpu") if device.type == "meta" else device
    asked = (
        values,
        device,
        dtype,
        varlen,
        torch.are_deterministic_algorithms_enabled(),
        backends,
        long,
    )
    try:
        return _made(_plans, True, *asked)
    except Unsupported:
        if wants_grad:
            raise
        return _made(_plans, False, *asked)


@functools.cache
def _made(
    plans: _Plans,
    needs_grad: bool,
    values: tuple[Any, ...],
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    deterministic: bool,
    backends: Backends,
    long: bool,
) -> str:
    """Name of the attribute of ``plans`` that holds the plan."""
    options = PlanOptions(
        device=device,
        dtype=dtype,
        backends=dict(backends) if isinstance(backends, tuple) else backends,
        needs_grad=needs_grad,
        deterministic=deterministic,
        varlen=varlen,
        seq_len=LONG_SEQUENCE if long else None,
    )
    plan = resolve(NSAConfig(*values), options)
    name = f"plan_{next(_numbers)}"
    setattr(plans, name, plan)
    return name


_numbers = itertools.count()
