"""Refuse arguments that are not dense tensors, with the conversion."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nsa_core.errors import InvalidInput, Unsupported
from nsa_core.torch_ops.autograd import refuse_dual
from nsa_core.torch_ops.tensor_checks import argument_of, joined

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}


def is_tensor(x: object) -> bool:
    """Return whether ``x`` is a tensor but not a DTensor, whose shape is not that of its memory."""
    return isinstance(x, torch.Tensor) and type(x).__name__ != "DTensor"


def is_strided(x: torch.Tensor) -> bool:
    """Return whether ``x`` is a dense tensor with strides: not sparse and not nested."""
    return x.layout is torch.strided and not x.is_nested


def kind_problem(name: str, x: torch.Tensor) -> str | None:
    """Return why ``x`` cannot be read as a dense tensor, and the conversion; None if it can.

    Args:
        name: name of the argument, for the message.
        x: the argument.
    """
    if x.is_nested:
        return _nested_problem(name, x)
    if x.layout is not torch.strided:
        return f"{name} is sparse ({x.layout}): pass {name}.to_dense()"
    if x.is_quantized:
        return f"{name} is quantised: pass {name}.dequantize()"
    return None


def _nested_problem(name: str, x: torch.Tensor) -> str:
    if name == "cu_seqlens":
        return "cu_seqlens is a nested tensor: pass the offsets, cu_seqlens=x.offsets().int()"
    if x.layout is not torch.jagged:
        return (
            f"{name} is a nested tensor: pass torch.cat({name}.unbind()) as {name}, and the first"
            " row of each sequence and the number of rows as cu_seqlens=, int32"
        )
    source = name
    if getattr(x, "_lengths", None) is not None:  # a view with gaps between its sequences
        source = f"{name}.contiguous()"
    return (
        f"{name} is a nested tensor: pass {source}.values() as {name}, and"
        f" cu_seqlens={source}.offsets().int()"
    )


def refuse_jit_trace() -> None:
    """Check that torch.jit.trace does not record the call, with the sizes of one input.

    Raises:
        Unsupported: It does.
    """
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise Unsupported(
            "torch.jit.trace, on which torch.onnx.export(dynamo=False) and add_graph of TensorBoard"
            " build, does not support NSA: use torch.export or torch.compile"
        )


def check_types(tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that the arguments ``tensors``, by name, are dense tensors without tangents.

    Raises:
        InvalidInput: One is another object, a DTensor, or sparse, nested or quantised; the message
            gives the conversion.
        Unsupported: One carries a tangent of forward-mode differentiation, or torch.jit.trace
            records the call.
    """
    refuse_jit_trace()
    refuse_dual("NSA", tensors.values())
    if torch.compiler.is_compiling():
        _refuse_wrong_types(tensors)
        return
    odd = {
        n: t
        for n, t in tensors.items()
        if type(t) not in _PLAIN_TYPES
        or t.layout is not torch.strided
        or t.is_nested
        or t.is_quantized
    }
    if odd:
        _refuse_wrong_types(odd)
        if kinds := [problem for n, t in odd.items() if (problem := kind_problem(n, t))]:
            raise InvalidInput("; ".join(kinds))


def _refuse_wrong_types(tensors: Mapping[str, object]) -> None:
    """Raise InvalidInput, with one sentence per type, if an argument is no tensor or a DTensor."""
    by_type: dict[str, list[str]] = {}
    for name, value in tensors.items():
        if not is_tensor(value):
            by_type.setdefault(type(value).__name__, []).append(name)
    problems = []
    for kind, names in by_type.items():
        first = argument_of(names[0])
        fix = {
            "DTensor": " (pass to_local() of a DTensor)",
            "ndarray": f": pass torch.from_numpy({first})",
            "list": f": pass torch.tensor({first})",
        }.get(kind, "")
        if names == ["gates"] and kind in ("list", "tuple"):
            fix = ": pass torch.stack(gates, dim=-1)"
        noun = "tensors" if len(names) > 1 else "a tensor"
        problems.append(f"{joined(names)} must be {noun}, got {kind}{fix}")
    if problems:
        raise InvalidInput("; ".join(problems))
