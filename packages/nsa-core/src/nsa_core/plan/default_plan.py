"""Default plans: the cached plans of calls without an explicit plan, readable by torch.compile."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import PLANNED_LENGTHS
from nsa_core.errors import BackendUnavailable, InvalidInput, Unsupported
from nsa_core.plan.options import PlanOptions, backends_problems
from nsa_core.plan.plan import Plan, resolve
from nsa_core.plan.registry import check_backend_names
from nsa_core.torch_ops.torch_state import is_exporting

Function = TypeVar("Function", bound=Callable[..., object])
Value = TypeVar("Value")
Result = TypeVar("Result")
CACHED = (
    256  # objects of an ObjectCache; a plan has about 13 KiB, and a layer uses two to nine plans
)
Backends = str | tuple[tuple[str, str], ...] | None


def frozen_backends(backends: str | Mapping[str, str] | None) -> Backends:
    """Return ``backends``, an argument of :func:`nsa_core.resolve`, as a hashable value.

    Raises:
        InvalidInput: The type is wrong, or a slot or a backend is unknown.
    """
    if problems := backends_problems(backends):
        raise InvalidInput("; ".join(problems))
    names = backends.values() if isinstance(backends, Mapping) else (backends,)
    check_backend_names(name for name in names if name not in (None, "auto"))
    return tuple(sorted(backends.items())) if isinstance(backends, Mapping) else backends


def check_is_plan(plan: object) -> None:
    """Check that an argument ``plan`` is a Plan.

    Raises:
        InvalidInput: It is not; the message gives its type and how to get a plan.
    """
    if not isinstance(plan, Plan):
        hint = (
            "; to choose a backend by name, pass it as backends= to the layer or to"
            " nsa_core.resolve()" * isinstance(plan, str)
        )
        raise InvalidInput(
            f"plan must be what nsa_core.resolve() returns, got {type(plan).__name__}{hint}"
        )


def planned_length(tokens: int, varlen: bool) -> int | None:
    """Return the tokens for which a call is planned: one of contract.PLANNED_LENGTHS, or None.

    Args:
        tokens: Tokens per sequence, S; torch.compile may have made it symbolic.
        varlen: Whether the call has packed documents.
    """
    reaches: Callable[[bool], bool] = bool
    if is_exporting():  # an exported graph has one plan, without a guard on S
        from torch.fx.experimental.symbolic_shapes import statically_known_true as reaches

    for length in () if varlen else PLANNED_LENGTHS[::-1]:
        if reaches(tokens >= length):  # torch.compile guards on a symbolic S
            return length
    return None


class ObjectCache(Generic[Value]):
    """Objects by the arguments from which they are made: plans, or configs.

    Eager calls use the CACHED latest of them, so that a server whose requests never repeat keeps a
    few MiB at most; an object that was dropped is made again. A compiled graph reads its object
    as an attribute and guards on it, so each object of a graph stays.

    Args:
        make: Makes an object.
        typed: Whether equal arguments of different types, such as 1 and True, are distinct.
    """

    def __init__(self, make: Callable[..., Value], typed: bool = False) -> None:
        self.get: Callable[..., Value] = functools.lru_cache(CACHED, typed)(make)
        self.name_of: Callable[..., str] = functools.lru_cache(None, typed)(self._name)
        self._numbers = itertools.count()

    def _name(self, *arguments: Any) -> str:
        """Set the object of ``arguments`` as an attribute; return the attribute's name."""
        name = f"object_{next(self._numbers)}"
        setattr(self, name, self.get(*arguments))
        return name


def default_plan(
    config: NSAConfig,
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    wants_grad: bool,
    backends: Backends = None,
    seq_len: int | None = None,
    partial: bool = False,
) -> Plan:
    """Return the cached plan of calls without an explicit plan.

    The plan supports gradients, so that a call runs the same kernels with and without grad mode.
    If no such plan exists and ``wants_grad`` is False, the plan is forward-only. Meta tensors, on
    which no kernel runs, use the plan for the CPU.

    Args:
        config: Configuration of the layer.
        device: Device of the tensors.
        dtype: dtype of q, k and v.
        varlen: Whether the call has packed documents.
        wants_grad: Whether the call needs gradients.
        backends: Result of :func:`frozen_backends`.
        seq_len: Result of :func:`planned_length`.
        partial: Whether queries may begin inside a sequence.

    Raises:
        Unsupported, BackendUnavailable, InvalidInput: As :func:`nsa_core.resolve`.
    """
    arguments = (device, dtype, varlen, wants_grad, backends, seq_len, partial)
    if torch.compiler.is_compiling():
        plan: Plan = getattr(_plans, _plan_name(as_constant(config.values), *arguments))
        return plan
    return planned(_plans.get, config.values, *arguments)


def backends_of(plan: Plan) -> Backends:
    """Return the backend of each slot of ``plan``."""
    return tuple(sorted((slot, choice.backend) for slot, choice in plan.choices.items()))


@functools.lru_cache(maxsize=64)
def partial_plan(
    config: NSAConfig,
    device: torch.device,
    dtype: torch.dtype,
    backends: Backends,
    deterministic: bool,
) -> Plan | None:
    """Return the forward-only plan for queries that begin inside a sequence.

    It is None if no backend takes them in some slot, or if a backend of ``backends`` does not.

    Args:
        config: Configuration of the layer.
        device: Device of the tensors.
        dtype: dtype of q, k and v.
        backends: Result of :func:`frozen_backends`.
        deterministic: Whether every run must give the same bits.
    """
    options = PlanOptions(
        device=device,
        dtype=dtype,
        backends=dict(backends) if isinstance(backends, tuple) else backends,
        deterministic=deterministic,
        partial=True,
    )
    try:
        return resolve(config, options)
    except (Unsupported, BackendUnavailable):
        return None


def constant_result(function: Function) -> Function:
    """Mark ``function`` as torch.compiler.assume_constant_result does.

    torch.compiler.assume_constant_result imports the compiler, which takes as long again as
    importing torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def as_constant(value: Any) -> Any:
    """Return ``value``, which torch.compile may have made symbolic, as a constant with a guard.

    The numbers of a tuple become constants.
    """
    if isinstance(value, tuple):
        return tuple([as_constant(each) for each in value])
    if isinstance(value, int) and not isinstance(value, bool):
        return operator.index(value)
    return value.__float__() if isinstance(value, float) else value


@constant_result  # planning calls plugin code, which torch.compile must not trace
def _plan_name(*arguments: Any) -> str:
    """Return the name of the attribute of ``_plans`` that holds the default plan."""
    return planned(_plans.name_of, *arguments)


def planned(
    look_up: Callable[..., Result],
    # The sizes of a call, which some versions of torch.compile cannot pass as a dataclass.
    sizes: tuple[Any, ...],
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    wants_grad: bool,
    backends: Backends,
    seq_len: int | None,
    partial: bool,
) -> Result:
    """Return ``look_up`` of the plan with a backward, or without one if none is needed."""
    device = torch.device("cpu") if device.type == "meta" else device
    deterministic = torch.are_deterministic_algorithms_enabled()
    arguments = (device, dtype, varlen, deterministic, backends, seq_len, partial)
    try:
        return look_up(sizes, True, *arguments)
    except Unsupported:
        if wants_grad:
            raise
        return look_up(sizes, False, *arguments)


def options_of(
    needs_grad: bool,
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    deterministic: bool,
    backends: Backends,
    seq_len: int | None,
    partial: bool,
) -> PlanOptions:
    """Return the options of a plan that :func:`planned` looks up, from the values of its key."""
    return PlanOptions(
        device=device,
        dtype=dtype,
        backends=dict(backends) if isinstance(backends, tuple) else backends,
        needs_grad=needs_grad,
        deterministic=deterministic,
        varlen=varlen,
        partial=partial,
        seq_len=seq_len,
    )


def _resolve_default(values: tuple[Any, ...], *options: Any) -> Plan:
    return resolve(NSAConfig(*values), options_of(*options))


_plans = ObjectCache(_resolve_default)
