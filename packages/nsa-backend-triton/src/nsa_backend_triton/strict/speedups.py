"""Replacements that make Triton's interpreter twice as fast without changing a bit of its results.

Triton's front end describes the shape of every intermediate tensor by a dozen objects, compares
shapes by more of them, and runs a kernel's own reductions and scans element by element. Here each
shape is described once, reductions run slice by slice, and a scan of n integers takes log2(n)
steps. ``strict.interpreter`` uses this module. Needs triton and numpy. Written for triton 3.6.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Triton's descriptions of one shape: of a block type, of its tensors, and as text."""

    block: Any
    numel: int
    tensor: Any
    tensor_numel: Any
    text: str


class Shapes:
    """One description per shape, shared by all blocks of that shape, so that ``is`` compares."""

    def __init__(self, language: Any) -> None:
        core, semantic = language.core, language.semantic.TritonSemantic
        self._core, self._semantic = core, semantic
        self._stock_block = core.block_type.__init__
        self._stock_operands, self._stock_broadcast = (
            semantic.binary_op_type_checking_impl,
            semantic.broadcast_impl_value,
        )
        self._by_size: dict[tuple[Any, ...], _Shape] = {}
        self._by_block: dict[int, _Shape] = {}  # id of _Shape.block, which lives as long as this
        self._numbers: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        self._scalar = core.tuple([]), core.constexpr(1)

    def methods(self) -> dict[Any, dict[str, Any]]:
        """Return the replaced methods of Triton's classes: class -> name -> method."""
        core, semantic = self._core, self._semantic
        return {
            core.block_type: {"__init__": method(self.block_type)},
            core.tensor: {"__init__": method(self.tensor)},
            semantic: {
                "binary_op_type_checking_impl": method(self.operands),
                "broadcast_impl_value": method(self.broadcast),
            },
        }

    def _find(self, shape: Any) -> _Shape | None:
        """Return the description of ``shape``, of integers or constexprs, if it exists."""
        described = self._by_block.get(id(shape))
        if described is None:
            size = tuple(getattr(n, "value", n) for n in shape)
            if all(type(n) is int for n in size):  # 4.0 equals the key 4 but is not a size
                described = self._by_size.get(size)
        return described

    def _describe(self, block: Any) -> _Shape:
        size = tuple(block.shape.values)
        tensor_shape = self._core.tuple([self._core.constexpr(n) for n in size])
        described = _Shape(
            block.shape,
            block.numel,
            tensor_shape,
            self._core.constexpr(math.prod(size)),
            str(block.shape),
        )
        self._by_size[size] = self._by_block[id(block.shape)] = described
        return described

    def block_type(self, block: Any, element_ty: Any, shape: Any) -> None:
        """block_type.__init__."""
        described = self._find(shape)
        if described is None:
            self._stock_block(block, element_ty, shape)
            described = self._describe(block)
        block.element_ty, block.shape, block.numel = element_ty, described.block, described.numel
        block.name = f"<{described.text}, {element_ty.name}>"

    def tensor(self, tensor: Any, handle: Any, type_: Any) -> None:
        """tensor.__init__."""
        if type_.is_block():
            # The type may be older than this object.
            described = self._find(type_.shape) or self._describe(type_)
            tensor.shape, tensor.numel = described.tensor, described.tensor_numel
        else:
            tensor.shape, tensor.numel = self._scalar
        tensor.handle, tensor.type, tensor.dtype = handle, type_, type_.scalar

    def operands(self, semantic: Any, a: Any, b: Any, *rest: bool, **named: bool) -> Any:
        """TritonSemantic.binary_op_type_checking_impl.

        Shortens two cases: operands of one type, and a number, whose conversion is cached.
        """
        tensor, widens = self._core.tensor, named or len(rest) > 3  # a division of bf16 widens
        if widens or not isinstance(a, tensor):
            return self._stock_operands(semantic, a, b, *rest, **named)
        if isinstance(b, tensor):
            if a.dtype is b.dtype and a.shape is b.shape and not a.dtype.is_ptr():
                return a, b
            return self._stock_operands(semantic, a, b, *rest)
        key = (type(b), b, a.dtype.name, id(a.shape), rest)
        cached = self._numbers.get(key)
        if cached is None:
            converted, number = self._stock_operands(semantic, a, b, *rest)
            if converted is a:
                data = number.handle.data.copy()
                data.setflags(write=False)
                self._numbers[key] = data, number.handle.dtype, number.type
            return converted, number
        data, dtype, type_ = cached
        return a, semantic.tensor(type(a.handle)(data, dtype), type_)

    def broadcast(self, semantic: Any, a: Any, b: Any) -> Any:
        """TritonSemantic.broadcast_impl_value, for blocks of one rank and for scalars."""
        type_a, type_b = a.type, b.type
        if not type_a.is_block() or not type_b.is_block():
            return (
                (a, b)
                if type_a.is_block() == type_b.is_block()
                else self._stock_broadcast(semantic, a, b)
            )
        if type_a.shape is type_b.shape:
            return a, b
        sizes = type_a.shape.values, type_b.shape.values
        if len(sizes[0]) != len(sizes[1]) or any(
            m != n and 1 not in (m, n) for m, n in zip(*sizes)
        ):
            return self._stock_broadcast(semantic, a, b)
        shape = [max(m, n) for m, n in zip(*sizes)]
        return tuple(
            x if size == shape else self._expand(semantic, x, shape)
            for x, size in zip((a, b), sizes)
        )

    def _expand(self, semantic: Any, x: Any, shape: list[int]) -> Any:
        block_type = self._core.block_type(x.dtype, shape)
        return semantic.tensor(semantic.builder.create_broadcast(x.handle, shape), block_type)


def _combine(ops: Any, a: list[Any], b: list[Any], dtypes: list[Any]) -> list[Any]:
    """Apply the kernel's own function to two slices, each a list of arrays, one per dtype."""
    results = ops.combine_fn.fn(*map(ops.to_tensor, a, dtypes), *map(ops.to_tensor, b, dtypes))
    results = results if isinstance(results, tuple) else (results,)
    arrays = []
    for x, like in zip(results, a):
        data = np.asarray(x.handle.data if hasattr(x, "handle") else x)
        arrays.append(
            data.reshape(like.shape)
            if data.size == like.size
            else np.broadcast_to(data, like.shape)
        )
    return arrays


def _accumulate(ops: Any, arrays: list[Any], axis: int, dtypes: list[Any]) -> Iterator[list[Any]]:
    """Yield the combination of the first slice along ``axis``, of the first two, and so on."""
    total = None
    for i in range(arrays[0].shape[axis]):
        current = [x.take(i, axis) for x in arrays]
        total = current if total is None else _combine(ops, total, current, dtypes)
        yield total


def reduce(ops: Any, operands: Any) -> list[Any]:
    """ReduceOps.generic_reduce, slice by slice; keeps as many dimensions as a GPU does."""
    tensors, axis = ops.unravel(operands, ops.axis)
    dtypes, arrays = [x.dtype for x in tensors], [x.handle.data for x in tensors]
    *_, last = _accumulate(ops, arrays, axis, dtypes)
    if ops.keep_dims:
        all_axes = ops.axis is None
        last = [
            x.reshape((1,) * operands[0].handle.data.ndim) if all_axes else np.expand_dims(x, axis)
            for x in last
        ]
    elif ops.axis is None:
        last = [x.item() for x in last]
    return list(map(ops.to_tensor, last, dtypes))


def scan(ops: Any, operands: Any) -> list[Any]:
    """ScanOps.generic_scan: integers by doubling, as a GPU does; floats slice by slice."""
    dtypes, arrays = [x.dtype for x in operands], [x.handle.data for x in operands]
    if all(x.dtype.kind in "iu" for x in arrays):  # no rounding, so the order changes no bit
        arrays = _scan_by_doubling(ops, arrays, dtypes)
    else:
        steps = list(_accumulate(ops, arrays, ops.axis, dtypes))
        arrays = [np.stack(slices, ops.axis) for slices in zip(*steps)]
    return list(map(ops.to_tensor, arrays, dtypes))


def _scan_by_doubling(ops: Any, arrays: list[Any], dtypes: list[Any]) -> list[Any]:
    """Combine each element with the one before it, then with those 2, 4, 8 and so on before it."""
    length = arrays[0].shape[ops.axis]
    index = np.moveaxis(np.arange(length).reshape([-1] + [1] * (arrays[0].ndim - 1)), 0, ops.axis)
    distance = 1
    while distance < length:
        earlier = [np.roll(x, distance, ops.axis) for x in arrays]
        combined = _combine(ops, earlier, arrays, dtypes)
        arrays = [np.where(index < distance, x, both) for x, both in zip(arrays, combined)]
        distance *= 2
    return arrays


@contextlib.contextmanager
def speedups(interpreter: Any) -> Iterator[None]:
    """Make Triton's module ``interpreter`` faster inside the block."""
    replaced = Shapes(interpreter.tl).methods()
    replaced[interpreter.ReduceOps] = {"generic_reduce": method(reduce)}
    replaced[interpreter.ScanOps] = {"generic_scan": method(scan)}
    with contextlib.ExitStack() as stack:
        for owner, methods in replaced.items():
            stack.enter_context(mock.patch.multiple(owner, **methods))
        yield


def method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which takes the instance first, as a method for a class of Triton."""

    @functools.wraps(function)
    def bound(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return function(instance, *args, **kwargs)

    return bound
