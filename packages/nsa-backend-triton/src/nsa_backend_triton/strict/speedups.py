"""Replacements that run Triton's interpreter in two thirds of the time, with the same results.

Triton's front end describes the shape of every intermediate tensor by a dozen objects, and compares
shapes by more of them. Here each shape is described once. ``strict.interpreter`` uses this module.
Needs triton. Written for triton 3.6.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


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
        self._stock_broadcast = semantic.broadcast_impl_value
        self._by_size: dict[tuple[Any, ...], _Shape] = {}
        self._by_block: dict[int, _Shape] = {}  # id of _Shape.block, which lives as long as this
        self._scalar = core.tuple([]), core.constexpr(1)

    def methods(self) -> dict[Any, dict[str, Any]]:
        """Return the replaced methods of Triton's classes: class -> name -> method."""
        core, semantic = self._core, self._semantic
        return {
            core.block_type: {"__init__": method(self.block_type)},
            core.tensor: {"__init__": method(self.tensor)},
            semantic: {"broadcast_impl_value": method(self.broadcast)},
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


@contextlib.contextmanager
def speedups(interpreter: Any) -> Iterator[None]:
    """Make Triton's module ``interpreter`` faster inside the block."""
    with contextlib.ExitStack() as stack:
        for owner, methods in Shapes(interpreter.tl).methods().items():
            stack.enter_context(mock.patch.multiple(owner, **methods))
        yield


def method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which takes the instance first, as a method for a class of Triton."""

    @functools.wraps(function)
    def bound(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return function(instance, *args, **kwargs)

    return bound
