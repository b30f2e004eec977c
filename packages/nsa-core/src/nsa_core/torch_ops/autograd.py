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
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch._C import _after_autograd_keyset, _any_requires_grad, _AutoDispatchBelowAutograd
from torch._C._functorch import is_legacy_batchedtensor
from torch._functorch import autograd_function, pyfunctorch
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from nsa_core.errors import Unsupported
from nsa_core.torch_ops.torch_state import is_transformed

_NO_CHANGE = contextlib.nullcontext()
_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}


def is_unobserved(*tensors: torch.Tensor | None) -> bool:
    """Return whether an operator on ``tensors`` can be replaced by its function unobserved.

    That is the case if no compiler, tracer, functorch transform, level of forward_ad, dispatch or
    function mode, or profiler is active, and all tensors are plain tensors with data.
    """
    if (
        torch.compiler.is_compiling()
        or is_transformed()
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
    """Return a context for an operator's backward that skips autograd if it has nothing to do.

    That is the case if grad mode is off and no gradient can carry a tangent.
    """
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return _NO_CHANGE
    return _AutoDispatchBelowAutograd()


def _tensors(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among ``arguments``, those in lists included."""
    tensors = []
    for argument in arguments:
        tensors += argument if isinstance(argument, list) else [argument]
    return [each for each in tensors if isinstance(each, torch.Tensor)]


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` carries a tangent at the current level of torch.func."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def _has_tangent_below(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` carries a tangent at any level of torch.func, or at none."""
    functorch = torch._C._functorch
    if not torch._C._are_functorch_transforms_active():
        return _has_tangent(tensor)
    level = pyfunctorch.retrieve_current_functorch_interpreter()
    # vmap has no rule for unpack_dual.
    if level.key() == functorch.TransformType.Jvp and _has_tangent(tensor):
        return True
    if functorch.maybe_get_level(tensor) == level.level():
        tensor = functorch.get_unwrapped(tensor)
    with pyfunctorch.temporarily_pop_interpreter_stack():
        return _has_tangent_below(tensor)


def _in_compiled_backward() -> bool:
    """Return whether the backward of a compiled call runs, whose code may have dropped tangents."""
    return type(torch._C._current_autograd_node()).__name__ == "CompiledFunctionBackward"


def refuse_forward_mode(name: str) -> NoReturn:
    """Raise Unsupported, because ``name`` cannot propagate tangents."""
    raise Unsupported(
        f"{name}: forward-mode differentiation of NSA (torch.func.jvp, jacfwd, hessian and"
        " linearize, torch.autograd.forward_ad) is not supported; use reverse mode:"
        " torch.func.grad, vjp or jacrev, or torch.autograd"
    )


def refuse_tangents(name: str, arguments: Iterable[Any]) -> None:
    """Check that no tensor among ``arguments`` carries a tangent, which ``name`` would drop.

    For functions that are not operators: it looks at all levels of torch.func. A compiler does not
    see whether a tensor carries a tangent, and its code may drop it before an operator.

    Raises:
        Unsupported: One does, or a compiler traces a call inside a level of forward_ad.
    """
    if forward_ad._current_level < 0:
        return
    if torch.compiler.is_compiling() or any(map(_has_tangent_below, _tensors(arguments))):
        refuse_forward_mode(name)


def refuse_dual(name: str, arguments: Iterable[Any]) -> None:
    """:func:`refuse_tangents` for a function whose operators see the tangents of torch.func."""
    if not torch._C._are_functorch_transforms_active():
        refuse_tangents(name, arguments)


def refuse_batches(name: str, grads: Iterable[torch.Tensor | None]) -> None:
    """Check that no gradient is a batch of gradients, which a backend cannot read.

    Raises:
        Unsupported: One is.
    """
    for grad in grads:
        if grad is not None and is_legacy_batchedtensor(grad):
            raise Unsupported(
                f"{name}: a backward of a batch of gradients (is_grads_batched=True,"
                " vectorize=True, check_batched_grad=True) is not supported; use"
                " torch.func.jacrev, or torch.func.vmap over torch.func.vjp"
            )


def without_tangents(op: Any) -> Callable[..., Any]:
    """Return an operator of torch.library.custom_op that refuses tangents.

    PyTorch drops them without an error.
    """
    name = op._init_fn.__name__

    @functools.wraps(op._init_fn)
    def checked(*arguments: Any) -> Any:
        refuse_tangents(name, arguments)
        return op(*arguments)

    return checked


def refuse_second_derivative(name: str) -> NoReturn:
    """Raise Unsupported, because the gradient of ``name`` has no gradient."""
    raise Unsupported(
        f"{name}: NSA kernels are differentiable once, not twice; for a second derivative, take"
        " finite differences of the gradient"
    )


class _Final(torch.autograd.Function):
    """The identity for the first ``count`` tensors; it cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Any) -> tuple[torch.Tensor, ...]:
        ctx.name = name
        return tuple([x.view_as(x) for x in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        refuse_second_derivative(ctx.name)


def final_gradients(
    name: str, gradients: Iterable[torch.Tensor | None], sources: Iterable[Any]
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients, computed without a graph, as functions of ``sources``.

    Without it, a second derivative would silently lack their part.

    Args:
        name: what was differentiated, for the error of a second derivative.
        gradients: the gradients.
        sources: the tensors on which they depend, with their graph.
    """
    gradients = list(gradients)
    flat = [x for x in gradients if x is not None]
    arguments = (name, len(flat), *flat, *_tensors(sources))
    final = iter(_Final.apply(*arguments))  # type: ignore[no-untyped-call]
    return tuple([None if x is None else next(final) for x in gradients])


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
        refuse_batches(op.name(), grads)
        return (None, *backward(ctx, *grads))

    def level_forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
        # A node runs its forward without gradients and tangents, but the outer levels need theirs.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return forward(ctx, keyset, *arguments)

    def new_node(base: type, node_forward: Callable[..., Any]) -> Any:
        methods = {"forward": staticmethod(node_forward), "backward": staticmethod(node_backward)}
        return type(f"{short}_node", (base,), methods)

    # torch.func differentiates one level of transforms at a time. The dispatcher calls the kernel
    # once per level, and only this base class of Function records a single level.
    level_node = new_node(_SingleLevelFunction, level_forward)
    node = new_node(torch.autograd.Function, forward)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        # It runs once per level of torch.func, so a look at the current level suffices.
        if forward_ad._current_level >= 0 and (
            any(map(_has_tangent, _tensors(arguments))) or _in_compiled_backward()
        ):
            refuse_forward_mode(op.name())
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


def register_backward(
    lib: torch.library.Library, short: str, op: Any, function: Callable[..., Any], name: str
) -> None:
    """Register the operator of a gradient, which cannot be differentiated again.

    Args:
        lib, short, op, function: as for :func:`register`.
        name: what it is the gradient of, for the error.
    """
    register(lib, short, op, function, lambda *_: None, lambda *_: refuse_second_derivative(name))
