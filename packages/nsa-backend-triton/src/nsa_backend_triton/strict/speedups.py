"""The same interpretation in half the time: what triton's front end works out anew at every
operation, worked out once.

Stock describes the shape of every intermediate tensor by a dozen objects, compares shapes by more
of them, and runs a kernel's own reductions and scans element by element. Results do not change by a
bit; :mod:`.interpreter` uses this. Needs triton and numpy. Written against triton 3.6.
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
    """One shape, as triton describes it: of a block, of a tensor of that block, and in the names of
    types.
    """

    block: Any
    numel: int
    tensor: Any
    tensor_numel: Any
    text: str


class Shapes:
    """Descriptions of shapes, one of each; blocks of one shape share it, so that ``is`` compares
    them.
    """

    def __init__(self, language: Any) -> None:
        core, semantic = language.core, language.semantic.TritonSemantic
        self._core, self._semantic = core, semantic
        self._stock_block = core.block_type.__init__
        self._stock_operands, self._stock_alike = (
            semantic.binary_op_type_checking_impl,
            semantic.broadcast_impl_value,
        )
        self._by_size: dict[tuple[Any, ...], _Shape] = {}
        self._by_block: dict[int, _Shape] = {}  # id of _Shape.block, which lives as long as this
        self._numbers: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        self._scalar = core.tuple([]), core.constexpr(1)

    def methods(self) -> dict[Any, dict[str, Any]]:
        """Class of triton's -> name -> what replaces its method."""
        core, semantic = self._core, self._semantic
        return {
            core.block_type: {"__init__": method(self.block_type)},
            core.tensor: {"__init__": method(self.tensor)},
            semantic: {
                "binary_op_type_checking_impl": method(self.operands),
                "broadcast_impl_value": method(self.broadcast),
            },
        }

    def _known(self, shape: Any) -> _Shape | None:
        """The description of ``shape``, of integers or constexprs, if there is one already."""
        known = self._by_block.get(id(shape))
        if known is None:
            size = tuple(getattr(n, "value", n) for n in shape)
            if all(type(n) is int for n in size):  # 4.0 is found under 4, but is no size
                known = self._by_size.get(size)
        return known

    def _describe(self, block: Any) -> _Shape:
        size = tuple(block.shape.values)
        of_tensor = self._core.tuple([self._core.constexpr(n) for n in size])
        made = _Shape(
            block.shape,
            block.numel,
            of_tensor,
            self._core.constexpr(math.prod(size)),
            str(block.shape),
        )
        self._by_size[size] = self._by_block[id(block.shape)] = made
        return made

    def block_type(self, block: Any, element_ty: Any, shape: Any) -> None:
        """block_type.__init__."""
        known = self._known(shape)
        if known is None:
            self._stock_block(block, element_ty, shape)
            known = self._describe(block)
        block.element_ty, block.shape, block.numel = element_ty, known.block, known.numel
        block.name = f"<{known.text}, {element_ty.name}>"

    def tensor(self, tensor: Any, handle: Any, kind: Any) -> None:
        """tensor.__init__."""
        if kind.is_block():
            known = self._known(kind.shape) or self._describe(kind)  # a type may be older than this
            tensor.shape, tensor.numel = known.tensor, known.tensor_numel
        else:
            tensor.shape, tensor.numel = self._scalar
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar

    def operands(self, semantic: Any, a: Any, b: Any, *rest: bool, **named: bool) -> Any:
        """TritonSemantic.binary_op_type_checking_impl: what it makes of two of one type, or of a
        number, is known.
        """
        tensor, widens = self._core.tensor, named or len(rest) > 3  # as a division of bf16 does
        if widens or not isinstance(a, tensor):
            return self._stock_operands(semantic, a, b, *rest, **named)
        if isinstance(b, tensor):
            if a.dtype is b.dtype and a.shape is b.shape and not a.dtype.is_ptr():
                return a, b
            return self._stock_operands(semantic, a, b, *rest)
        key = (type(b), b, a.dtype.name, id(a.shape), rest)
        known = self._numbers.get(key)
        if known is None:
            one, number = self._stock_operands(semantic, a, b, *rest)
            if one is a:
                held = number.handle.data.copy()
                held.setflags(write=False)
                self._numbers[key] = held, number.handle.dtype, number.type
            return one, number
        held, kind, of = known
        return a, semantic.tensor(type(a.handle)(held, kind), of)

    def broadcast(self, semantic: Any, a: Any, b: Any) -> Any:
        """TritonSemantic.broadcast_impl_value, for blocks of one rank and for scalars."""
        one, other = a.type, b.type
        if not one.is_block() or not other.is_block():
            return (
                (a, b) if one.is_block() == other.is_block() else self._stock_alike(semantic, a, b)
            )
        if one.shape is other.shape:
            return a, b
        sizes = one.shape.values, other.shape.values
        if len(sizes[0]) != len(sizes[1]) or any(
            m != n and 1 not in (m, n) for m, n in zip(*sizes)
        ):
            return self._stock_alike(semantic, a, b)
        both = [max(m, n) for m, n in zip(*sizes)]
        return tuple(
            x if size == both else self._wide(semantic, x, both) for x, size in zip((a, b), sizes)
        )

    def _wide(self, semantic: Any, x: Any, shape: list[int]) -> Any:
        kind = self._core.block_type(x.dtype, shape)
        return semantic.tensor(semantic.builder.create_broadcast(x.handle, shape), kind)


def _combined(ops: Any, one: list[Any], other: list[Any], kinds: list[Any]) -> list[Any]:
    """The kernel's own function of two slices, each a list of arrays, one of a dtype."""
    made = ops.combine_fn.fn(*map(ops.to_tensor, one, kinds), *map(ops.to_tensor, other, kinds))
    made = made if isinstance(made, tuple) else (made,)
    out = []
    for x, like in zip(made, one):
        data = np.asarray(x.handle.data if hasattr(x, "handle") else x)
        out.append(
            data.reshape(like.shape)
            if data.size == like.size
            else np.broadcast_to(data, like.shape)
        )
    return out


def _slices(ops: Any, given: list[Any], axis: int, kinds: list[Any]) -> Iterator[list[Any]]:
    """What ``given`` comes to behind the first slice along ``axis``, behind the second, and so
    on.
    """
    held = None
    for at in range(given[0].shape[axis]):
        here = [x.take(at, axis) for x in given]
        held = here if held is None else _combined(ops, held, here, kinds)
        yield held


def reduce(ops: Any, given: Any) -> list[Any]:
    """ReduceOps.generic_reduce, a slice at a time; keeps as many dimensions as a GPU does."""
    tensors, axis = ops.unravel(given, ops.axis)
    kinds, data = [x.dtype for x in tensors], [x.handle.data for x in tensors]
    *_, last = _slices(ops, data, axis, kinds)
    if ops.keep_dims:
        whole = ops.axis is None
        last = [
            x.reshape((1,) * given[0].handle.data.ndim) if whole else np.expand_dims(x, axis)
            for x in last
        ]
    elif ops.axis is None:
        last = [x.item() for x in last]
    return list(map(ops.to_tensor, last, kinds))


def scan(ops: Any, given: Any) -> list[Any]:
    """ScanOps.generic_scan, a slice at a time."""
    kinds, data = [x.dtype for x in given], [x.handle.data for x in given]
    steps = list(_slices(ops, data, ops.axis, kinds))
    return [
        ops.to_tensor(np.stack([step[i] for step in steps], ops.axis), kind)
        for i, kind in enumerate(kinds)
    ]


@contextlib.contextmanager
def quickly(interpreter: Any) -> Iterator[None]:
    """Inside the block triton's module ``interpreter`` is quicker."""
    of = Shapes(interpreter.tl).methods()
    of[interpreter.ReduceOps] = {"generic_reduce": method(reduce)}
    of[interpreter.ScanOps] = {"generic_scan": method(scan)}
    with contextlib.ExitStack() as stack:
        for owner, methods in of.items():
            stack.enter_context(mock.patch.multiple(owner, **methods))
        yield


def method(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which takes the instance first, as a method of a class of triton's."""

    @functools.wraps(function)
    def on(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return function(instance, *args, **kwargs)

    return on
