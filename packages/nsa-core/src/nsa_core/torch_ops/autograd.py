"""Autograd for operators whose forward and backward are Python functions of positional arguments.

This module replaces torch.library.register_autograd for schemas without keyword-only arguments,
default values and tensor lists. To support those, register_autograd walks the schema at every call,
which took half of an operator's host time.

If nothing can observe the difference (:func:`is_unobserved`), a call runs the operator's functions
directly. This saves two passes through PyTorch's dispatcher per call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _after_autograd_keyset, _any_requires_grad, _AutoDispatchBelowAutograd

_NO_CHANGE = contextlib.nullcontext()
_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}


def is_unobserved(*tensors: torch.Tensor | None) -> bool:
    """Return whether an operator on ``tensors`` can be replaced by its function unobserved.

    That is the case if no compiler, tracer, functorch transform, dispatch or function mode, or
    profiler is active, and all tensors are plain tensors with data.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    ):
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        # Only the dispatcher resolves a lazily negated view, such as x.conj().imag.
        if type(tensor) not in _PLAIN_TYPES or tensor.is_meta or tensor.is_neg():
            return False
    return True


def backward_context() -> contextlib.AbstractContextManager[Any]:
    """Return a context for an operator's backward that skips autograd if grad mode is off."""
    return _NO_CHANGE if torch.is_grad_enabled() else _AutoDispatchBelowAutograd()


def _below_autograd(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs ``op`` below autograd for a given key set.

    If the key set is None, it calls ``function`` without the dispatcher.
    """

    def below(keyset: Any, *arguments: Any) -> Any:
        with _AutoDispatchBelowAutograd():
            if keyset is None:
                return function(*arguments)
            return op.redispatch(keyset & _after_autograd_keyset, *arguments)

    return below


def register_constant(
    lib: torch.library.Library, short: str, op: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Register ``op`` as not differentiable.

    Autograd does not record the operations inside ``op``, which would keep their tensors alive.

    Returns:
        A function equivalent to ``op``, for calls that are :func:`is_unobserved`.
    """
    below = _below_autograd(op, function)
    lib.impl(short, below, "Autograd", with_keyset=True)
    return functools.partial(below, None)


def register(
    lib: torch.library.Library,
    short: str,
    op: Any,
    function: Callable[..., Any],
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., tuple[Any, ...]],
) -> Callable[..., Any]:
    """Register the gradient of an operator.

    Args:
        lib: The library that defines the operator.
        short: Name of the operator in ``lib``.
        op: Its overload.
        function: The implementation of its forward.
        setup_context: ``setup_context(ctx, arguments, result)`` saves the inputs of ``backward``.
        backward: ``backward(ctx, *grads)`` returns a gradient or None for each argument.

    Returns:
        A function equivalent to ``op``, for calls that are :func:`is_unobserved`.
    """
    below = _below_autograd(op, function)

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
    return functools.partial(kernel, None)
