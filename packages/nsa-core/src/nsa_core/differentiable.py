"""Autograd of an operator whose forward and gradient are each a Python function over a fixed list of arguments.

What torch.library.register_autograd does, for schemas without keyword-only arguments, defaults and lists of tensors:
those make it walk the schema at every call, which took half of an operator's host time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _after_autograd_keyset, _any_requires_grad, _AutoDispatchBelowAutograd

_AS_IT_IS = contextlib.nullcontext()


def once() -> contextlib.AbstractContextManager[Any]:
    """Around an operator's backward: where nobody differentiates it, its own autograd kernel has nothing to do."""
    return _AS_IT_IS if torch.is_grad_enabled() else _AutoDispatchBelowAutograd()


def _below(op: Any) -> Callable[..., Any]:
    """``op`` without its autograd kernel, told the keys of the call."""

    def below(keyset: Any, *arguments: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _after_autograd_keyset, *arguments)

    return below


def register_constant(lib: torch.library.Library, short: str, op: Any) -> None:
    """``op`` has no gradient: what it does inside is not recorded, which would keep every tensor that it makes."""
    lib.impl(short, _below(op), "Autograd", with_keyset=True)


def register(
    lib: torch.library.Library,
    short: str,
    op: Any,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., tuple[Any, ...]],
) -> None:
    """Differentiate ``op``, the overload of ``lib``'s operator ``short``.

    ``setup_context(ctx, arguments, result)`` keeps what ``backward(ctx, *grads)`` needs to return a gradient, or None,
    per argument.
    """
    below = _below(op)

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
            result = below(keyset, *arguments)
            setup_context(ctx, arguments, result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return (None, *backward(ctx, *grads))

    Node.__name__ = Node.__qualname__ = f"{short}_node"

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and _any_requires_grad(*arguments):
            return Node.apply(keyset, *arguments)  # type: ignore[no-untyped-call]
        return below(keyset, *arguments)

    lib.impl(short, kernel, "Autograd", with_keyset=True)
