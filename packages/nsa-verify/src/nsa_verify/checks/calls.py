"""The functions of a backend that a check may call, so that the others run when one hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from nsa_core.contract import FUSED_DECODE, SLOTS

# A slot and "prefill" (forward and backward), a slot or fused form and "decode", or the fused
# backward, ("core", "prefill").
Call = tuple[str, str]
PREFILL: tuple[Call, ...] = tuple((slot, "prefill") for slot in SLOTS)
CORE: Call = ("core", "prefill")
DECODE: tuple[Call, ...] = tuple((slot, "decode") for slot in SLOTS if slot != "combine")
EVERY: frozenset[Call] = frozenset(
    (*PREFILL, CORE, *DECODE, *((name, "decode") for name in FUSED_DECODE))
)

_Check = TypeVar("_Check", bound=Callable[..., Any])


def may_call(*calls: Call) -> Callable[[_Check], _Check]:
    """Declare that a check calls at most these functions of the combination."""

    def declare(check: _Check) -> _Check:
        vars(check)["calls"] = frozenset(calls)
        return check

    return declare


def prefill(*slots: str) -> tuple[Call, ...]:
    """Return the calls of ``slots`` forward and backward."""
    return tuple((slot, "prefill") for slot in slots)


def calls_of(check: Callable[..., Any]) -> frozenset[Call]:
    """Return the functions that ``check`` may call: the declared ones, or every function."""
    calls: frozenset[Call] = getattr(check, "calls", EVERY)
    return calls
