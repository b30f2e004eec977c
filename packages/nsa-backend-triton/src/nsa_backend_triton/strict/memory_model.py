"""The parts of triton's interpreter that :func:`nsa_backend_triton.strict.interpreter.strict`
replaces.

Needs triton and numpy. Written against triton 3.6.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from nsa_backend_triton.strict.speedups import method

MAX_GRID = (2**31 - 1, 65535, 65535)


class Violation(AssertionError):
    """The kernel did what a GPU would punish."""


@dataclasses.dataclass
class Seen:
    """What ran inside a :func:`strict` block."""

    programs: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    # loads, stores, products, comparisons and arithmetic of floats, each of a whole tensor
    operations: int = 0


def _widened(raw: Any) -> Any:
    """bf16 as the interpreter holds it, uint16, to float32."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def _narrowed(x: Any) -> Any:
    """float32 to bf16 bits, round to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(
        np.isnan(x),
        np.uint16(0x7FC0),
        ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16),
    )


class Machine:
    """The replacements for the interpreter's methods, and what they share."""

    _BUILDER = (
        "cast_impl",
        "create_fp_to_fp",
        "create_dot",
        "binary_op",
        "unary_op",
        "create_masked_load",
        "create_masked_store",
        "create_atomic_rmw",
        "set_grid_dim",
        "set_grid_idx",
    )

    def __init__(self, interpreter: Any, seed: int) -> None:
        import triton.language as tl

        self.interpreter, self.tl, self.seen = interpreter, tl, Seen()
        self._stock = {
            name: getattr(interpreter.InterpreterBuilder, name) for name in self._BUILDER
        }
        self._stock_args, self._stock_call = (
            interpreter.GridExecutor._init_args_hst,
            interpreter.GridExecutor.__call__,
        )
        self._stock_tensor, self._stock_lang = (
            interpreter._patch_lang_tensor,
            interpreter._patch_lang,
        )
        self._stock_kind = interpreter._get_np_dtype
        self._kinds: dict[str, Any] = {}
        self._patched: set[str] = set()
        self._order_of = np.random.default_rng(seed)
        self._spans: list[tuple[int, int]] = []
        self._owner: dict[int, tuple[int, ...]] = {}
        self._dim, self._order, self._now = (1, 1, 1), np.zeros(1, np.int64), (0, 0, 0)

    @contextlib.contextmanager
    def anew(self, seed: int) -> Iterator[Seen]:
        """Counts of their own, and an order of their own, for the launches inside the block."""
        outer = self.seen, self._order_of
        self.seen, self._order_of = Seen(), np.random.default_rng(seed)
        try:
            yield self.seen
        finally:
            self.seen, self._order_of = outer

    def builder_methods(self) -> dict[str, Any]:
        """Replacements of InterpreterBuilder's methods; each gets the builder as its first
        argument.
        """
        return {name: method(getattr(self, name)) for name in self._BUILDER}

    def executor_methods(self) -> dict[str, Any]:
        """Replacements of GridExecutor's methods."""
        return {
            "_init_args_hst": method(self.arguments),
            "__call__": method(self.launch),
        }

    def module_functions(self) -> dict[str, Any]:
        """Replacements of functions of triton's module ``interpreter``."""
        kind = self._numpy_kind
        return {
            "_patch_lang_tensor": self.patch_tensor,
            "_patch_lang": self.patch_lang,
            "_get_np_dtype": kind,
        }

    def _numpy_kind(self, kind: Any) -> Any:
        """The numpy dtype behind ``kind``, remembered: stock builds its table anew at each of a
        million calls.
        """
        scalar = kind.scalar
        if isinstance(scalar, self.tl.pointer_type):
            return np.dtype(np.uint64)
        if scalar.name not in self._kinds:
            self._kinds[scalar.name] = self._stock_kind(kind)
        return self._kinds[scalar.name]

    def semantic_methods(self) -> dict[str, Any]:
        """Replacements of TritonSemantic's methods."""
        return {"binary_op_sanitize_overflow_impl": method(self.overflow)}

    def patch_tensor(self, tensor: Any, scope: Any) -> None:
        """triton makes int(array of one element) of a loop's bound, which numpy 2.4 no longer
        does.
        """
        self._stock_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_lang(self, function: Any) -> Any:
        """Point triton.language at the interpreter, once a launch; stock does it at every call of a
        jit function.
        """
        modules = {
            m.__name__ for m in function.__globals__.values() if m is self.tl or m is self.tl.core
        }
        if modules <= self._patched:
            return self.interpreter._LangPatchScope()
        self._patched |= modules
        return self._stock_lang(function)

    def overflow(self, semantic: Any, a: Any, b: Any, op: Any) -> None:
        """Integer arithmetic must not leave its type; stock computes this too, in a dozen
        interpreted operations.
        """
        kind = a.type.scalar
        if kind.int_bitwidth >= 64:
            return
        arithmetic = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op.__name__]
        wide = arithmetic(a.handle.data.astype(np.int64), b.handle.data.astype(np.int64))
        if wide.size and (
            wide.max() > kind.get_int_max_value() or wide.min() < kind.get_int_min_value()
        ):
            raise Violation(f"{kind} overflow in {op.__name__} in program {self._now}")

    def _bf16(self, handle: Any) -> bool:
        # by name: dtypes are compared by a function of Python
        return bool(handle.dtype.scalar.name == "bf16")

    def _up(self, handle: Any) -> Any:
        tl = self.tl
        return (
            self.interpreter.TensorHandle(_widened(handle.data), tl.float32)
            if self._bf16(handle)
            else handle
        )

    def _down(self, handle: Any) -> Any:
        return self.interpreter.TensorHandle(_narrowed(handle.data), self.tl.bfloat16)

    def cast_impl(self, builder: Any, x: Any, to: Any) -> Any:
        """A cast; bf16 through float32, rounded to nearest even."""
        stock, source, target = self._stock["cast_impl"], x.dtype.scalar, to.scalar
        # Stock gives a comparison's truth values the dtype of what it compared.
        if source == target and x.data.dtype == self._numpy_kind(target):
            return x
        if source == self.tl.bfloat16:
            return self._up(x) if target == self.tl.float32 else stock(builder, self._up(x), to)
        if target == self.tl.bfloat16:
            return self._down(
                x if source == self.tl.float32 else stock(builder, x, self.tl.float32)
            )
        return stock(builder, x, to)

    def create_fp_to_fp(self, builder: Any, x: Any, to: Any, mode: Any) -> Any:
        """As :meth:`cast_impl`; other pairs keep the rounding mode that was asked for."""
        if self.tl.bfloat16 in (x.dtype.scalar, to.scalar):
            return self.cast_impl(builder, x, to)
        return self._stock["create_fp_to_fp"](builder, x, to, mode)

    def create_dot(self, builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        """tl.dot; products of bf16 in float32."""
        self.seen.operations += 1
        return self._stock["create_dot"](builder, self._up(a), self._up(b), *rest)

    def binary_op(self, builder: Any, a: Any, b: Any, op: Any) -> Any:
        """Arithmetic; bf16 in float32, rounded once."""
        out = self._stock["binary_op"](builder, self._up(a), self._up(b), op)
        self.seen.operations += out.data.dtype.kind != "i"
        return self._down(out) if self._bf16(a) and out.data.dtype == np.float32 else out

    def unary_op(self, builder: Any, a: Any, op: Any) -> Any:
        """exp2 and the like. Triton takes none of bf16; its |x| is a mask of bits, and not one of
        these.
        """
        self.seen.operations += 1
        return self._stock["unary_op"](builder, a, op)

    def _touch(self, what: str, pointers: Any, mask: Any) -> Any:
        """Addresses in use; all inside an argument."""
        self.seen.operations += 1
        width = self.interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        used = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        inside = np.zeros(used.shape, bool)
        for low, high in self._spans:
            inside |= (used >= low) & (used + width <= high)
        if not inside.all():
            lanes = f"{(~inside).sum()} of {used.size} lanes"
            raise Violation(f"{what} outside every argument in program {self._now}: {lanes}")
        if what == "load":
            self.seen.bytes_loaded += used.size * width
        else:
            self.seen.bytes_stored += used.size * width
        return used

    def create_masked_load(
        self, builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any
    ) -> Any:
        """tl.load; lanes that are masked off and have no ``other`` hold what no kernel may use."""
        self._touch("load", pointers, mask)
        if other is None and not np.all(mask.data):
            kind = pointers.get_element_ty()
            held = self.interpreter._get_np_dtype(kind)
            junk: Any = np.iinfo(held).max if np.issubdtype(held, np.integer) else True
            if np.issubdtype(held, np.floating) or kind == self.tl.bfloat16:
                junk = 0x7FC0 if kind == self.tl.bfloat16 else math.nan
            other = self.interpreter.TensorHandle(np.full(pointers.data.shape, junk, held), kind)
        return self._stock["create_masked_load"](builder, pointers, mask, other, *rest, **named)

    def create_masked_store(
        self, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        """tl.store; an address belongs to the program that stored to it first."""
        for address in self._touch("store", pointers, mask).tolist():
            if self._owner.setdefault(address, self._now) != self._now:
                raise Violation(
                    f"programs {self._owner[address]} and {self._now} store to one address"
                )
        return self._stock["create_masked_store"](builder, pointers, value, mask, *rest)

    def create_atomic_rmw(
        self, builder: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        """tl.atomic_add and the like."""
        self._touch("atomic", pointers, mask)
        return self._stock["create_atomic_rmw"](builder, op, pointers, value, mask, *rest)

    def set_grid_dim(self, builder: Any, x: int, y: int, z: int) -> Any:
        """A launch begins: the grid is one that a GPU takes, and its programs get a random
        order.
        """
        if any(size > most for size, most in zip((x, y, z), MAX_GRID)):
            raise Violation(f"grid {(x, y, z)} exceeds {MAX_GRID}")
        self._dim, self._order = (x, y, z), self._order_of.permutation(x * y * z)
        self._owner.clear()
        return self._stock["set_grid_dim"](builder, x, y, z)

    def set_grid_idx(self, builder: Any, x: int, y: int, z: int) -> Any:
        """The next program, by the random order."""
        _, ny, nz = self._dim
        place = int(self._order[(x * ny + y) * nz + z])
        self._now = (place // (ny * nz), place // nz % ny, place % nz)
        self.seen.programs += 1
        return self._stock["set_grid_idx"](builder, *self._now)

    def arguments(self, executor: Any, args: Any, kwargs: Any) -> Any:
        """The launch's arguments; the memory of their tensors is all that it may touch."""
        given = self._stock_args(executor, args, kwargs)
        self._spans.clear()
        for value in [*given[0], *given[1].values()]:
            tensor = getattr(value, "base", value)
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                last = sum(
                    (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())
                )
                self._spans.append(
                    (tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())
                )
        return given

    def launch(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """A launch, visible to the profiler."""
        self._patched.clear()
        with torch.profiler.record_function(executor.fn.__name__):
            return self._stock_call(executor, *args, **kwargs)
