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
from torch._functorch import autograd_function
from torch.autograd.function import _SingleLevelFunction

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
    instead: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register the gradient of an operator.

    Args:
        lib: The library that defines the operator.
        short: Name of the operator in ``lib``.
        op: Its overload.
        function: The implementation of its forward.
        setup_context: ``setup_context(ctx, arguments, result)`` saves the inputs of ``backward``.
        backward: ``backward(ctx, *grads)`` returns a gradient or None for each argument.
        instead: ``instead(*arguments)`` returns the result by other operators, whose gradients
            autograd records; None to run this one.

    Returns:
        A function equivalent to ``op``, for calls that are :func:`is_unobserved`.
    """
    below = _below_autograd(op, function)

    def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
        result = below(keyset, *arguments)
        setup_context(ctx, arguments, result)
        return result

    def node_backward(ctx: Any, *grads: Any) -> Any:
        return (None, *backward(ctx, *grads))

    def level_forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
        # A node runs its forward without gradient, but the outer levels need theirs.
        with torch.enable_grad():
            return forward(ctx, keyset, *arguments)

    def new_node(base: type, node_forward: Callable[..., Any]) -> Any:
        methods = {"forward": staticmethod(node_forward), "backward": staticmethod(node_backward)}
        return type(f"{short}_node", (base,), methods)

    # torch.func differentiates one level of transforms at a time. The dispatcher calls the kernel
    # once per level, and only this base class of Function records a single level.
    level_node = new_node(_SingleLevelFunction, level_forward)
    node = new_node(torch.autograd.Function, forward)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if instead is not None and (result := instead(*arguments)) is not None:
            return result
        if torch.is_grad_enabled() and _any_requires_grad(*arguments):
            if keyset is None or not torch._C._are_functorch_transforms_active():
                return node.apply(keyset, *arguments)
            with autograd_function.enable_single_level_autograd_function():  # type: ignore[attr-defined]
                return level_node.apply(keyset, *arguments)
        return below(keyset, *arguments)

    lib.impl(short, kernel, "Autograd", with_keyset=True)
    return functools.partial(kernel, None)
