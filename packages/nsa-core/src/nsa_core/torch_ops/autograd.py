"""Autograd of an operator whose forward and gradient are each a Python function over a fixed list
of arguments.

What torch.library.register_autograd does, for schemas without keyword-only arguments, defaults and
lists of tensors: those make it walk the schema at every call, which took half of an operator's host
time. And where nobody looks on, an operator need not be called at all: its functions are, which
saves each call's two ways through PyTorch's dispatcher.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _after_autograd_keyset, _any_requires_grad, _AutoDispatchBelowAutograd

_AS_IT_IS = contextlib.nullcontext()
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def unseen(*tensors: torch.Tensor | None) -> bool:
    """Whether nobody could tell an operator of these from its function: no compiler, transform,
    mode or profiler.
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
        # The dispatcher alone gives an operator the values of a view that is negated lazily
        # (x.conj().imag).
        if tensor is not None and (type(tensor) not in _PLAIN or tensor.is_meta or tensor.is_neg()):
            return False
    return True


def once() -> contextlib.AbstractContextManager[Any]:
    """Around an operator's backward: where nobody differentiates it, its own autograd kernel has
    nothing to do.
    """
    return _AS_IT_IS if torch.is_grad_enabled() else _AutoDispatchBelowAutograd()


def _below(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """``op`` without its autograd kernel, told the keys of the call; without any, its
    ``function``.
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
    """``op`` has no gradient: what it does inside is not recorded, which would keep every tensor
    that it makes.

    Returns what does as ``op``, for calls that are :func:`unseen`.
    """
    below = _below(op, function)
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
    """Differentiate ``op``, the overload of ``lib``'s operator ``short``, which runs ``function``.

    ``setup_context(ctx, arguments, result)`` keeps what ``backward(ctx, *grads)`` needs to return a
    gradient, or None, per argument. Returns what does as ``op``, for calls that are :func:`unseen`.
    """
    below = _below(op, function)

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
