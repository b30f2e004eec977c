"""Replacements of parts of Triton's interpreter, installed by ``strict.interpreter.strict``.

Needs triton and numpy. Written for triton 3.6.
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
    """A kernel broke a rule of the strict interpreter."""


@dataclasses.dataclass
class Counts:
    """Counts of what ran inside a ``strict`` block."""

    programs: int = 0
    # loads, stores, products, comparisons and float arithmetic; one tensor operation counts once
    operations: int = 0


def _bf16_to_float32(raw: Any) -> Any:
    """Convert bf16 in the interpreter's representation, uint16, to float32."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def _float32_to_bf16(x: Any) -> Any:
    """Convert float32 to bf16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(
        np.isnan(x),
        np.uint16(0x7FC0),
        ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16),
    )


class Machine:
    """The replaced methods of the interpreter, and their state."""

    _BUILDER = (
        "cast_impl",
        "create_fp_to_fp",
        "create_dot",
        "binary_op",
        "unary_op",
        "create_fma",
        "create_masked_load",
        "create_masked_store",
        "create_atomic_rmw",
        "set_grid_dim",
        "set_grid_idx",
    )

    def __init__(self, interpreter: Any, seed: int) -> None:
        import triton.language as tl

        self.interpreter, self.tl, self.counts = interpreter, tl, Counts()
        self._stock = {
            name: getattr(interpreter.InterpreterBuilder, name) for name in self._BUILDER
        }
        self._stock_call = interpreter.GridExecutor.__call__
        self._stock_tensor, self._stock_lang = (
            interpreter._patch_lang_tensor,
            interpreter._patch_lang,
        )
        self._stock_numpy_dtype = interpreter._get_np_dtype
        self._numpy_dtypes: dict[str, Any] = {}
        self._patched: set[str] = set()
        self._modules: dict[str, frozenset[str]] = {}  # of triton.language, by importing module
        self._rng = np.random.default_rng(seed)
        self._argument_ranges: list[tuple[int, int]] = []
        self._owner: dict[int, tuple[int, ...]] = {}
        self._grid_dim, self._order, self._program = (1, 1, 1), np.zeros(1, np.int64), (0, 0, 0)

    @contextlib.contextmanager
    def nested(self, seed: int) -> Iterator[Counts]:
        """Give the launches inside the block their own counts and their own random order."""
        outer = self.counts, self._rng
        self.counts, self._rng = Counts(), np.random.default_rng(seed)
        try:
            yield self.counts
        finally:
            self.counts, self._rng = outer

    def methods(self) -> dict[Any, dict[str, Any]]:
        """Return the replacements: class or module of Triton -> name -> function."""
        interpreter = self.interpreter
        return {
            interpreter.InterpreterBuilder: {n: method(getattr(self, n)) for n in self._BUILDER},
            interpreter.GridExecutor: {
                "_init_args_hst": method(self.arguments),
                "_restore_args_dev": lambda *_: None,  # nothing was copied
                "__call__": method(self.launch),
            },
            interpreter: {
                "_patch_lang_tensor": self.patch_tensor,
                "_patch_lang": self.patch_lang,
                "_get_np_dtype": self._numpy_dtype,
            },
            self.tl.semantic.TritonSemantic: {
                "binary_op_sanitize_overflow_impl": method(self.overflow)
            },
        }

    def _numpy_dtype(self, dtype: Any) -> Any:
        """Return the cached numpy dtype of a Triton dtype.

        Triton builds its table again at each of a million calls.
        """
        scalar = dtype.scalar
        if isinstance(scalar, self.tl.pointer_type):
            return np.dtype(np.uint64)
        if scalar.name not in self._numpy_dtypes:
            self._numpy_dtypes[scalar.name] = self._stock_numpy_dtype(dtype)
        return self._numpy_dtypes[scalar.name]

    def patch_tensor(self, tensor: Any, scope: Any) -> None:
        """Patch a tensor class so that its tensors can be bounds of loops.

        Triton calls int() on an array of one element there, which numpy 2.4 no longer allows.
        """
        self._stock_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_lang(self, function: Any) -> Any:
        """Point triton.language at the interpreter once per launch.

        Triton does so at every call of a jit function.
        """
        modules = self._language_modules(function.__module__, function.__globals__)
        if modules <= self._patched:
            return self.interpreter._LangPatchScope()
        self._patched |= modules
        return self._stock_lang(function)

    def _language_modules(self, module: str, variables: dict[str, Any]) -> frozenset[str]:
        """Return the names of the modules of triton.language among the variables of a module."""
        if module not in self._modules:
            self._modules[module] = frozenset(
                m.__name__ for m in variables.values() if m is self.tl or m is self.tl.core
            )
        return self._modules[module]

    def overflow(self, semantic: Any, a: Any, b: Any, op: Any) -> None:
        """Raise if integer arithmetic overflows its type.

        Triton checks this too, with a dozen interpreted operations.
        """
        dtype = a.type.scalar
        if dtype.int_bitwidth >= 64:
            return
        arithmetic = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[op.__name__]
        wide = arithmetic(a.handle.data.astype(np.int64), b.handle.data.astype(np.int64))
        if wide.size and (
            wide.max() > dtype.get_int_max_value() or wide.min() < dtype.get_int_min_value()
        ):
            raise Violation(f"{dtype} overflow in {op.__name__} in program {self._program}")

    def _is_bf16(self, handle: Any) -> bool:
        # Comparing names is quicker than Triton's comparison of dtypes, which is in Python.
        return bool(handle.dtype.scalar.name == "bf16")

    def _to_float32(self, handle: Any) -> Any:
        tl = self.tl
        return (
            self.interpreter.TensorHandle(_bf16_to_float32(handle.data), tl.float32)
            if self._is_bf16(handle)
            else handle
        )

    def _to_bf16(self, handle: Any) -> Any:
        return self.interpreter.TensorHandle(_float32_to_bf16(handle.data), self.tl.bfloat16)

    def cast_impl(self, builder: Any, x: Any, to: Any) -> Any:
        """Cast; bf16 goes through float32 and is rounded to nearest even."""
        stock, source, target = self._stock["cast_impl"], x.dtype.scalar, to.scalar
        # Triton gives the result of a comparison the dtype of its operands.
        if source == target and x.data.dtype == self._numpy_dtype(target):
            return x
        if source == self.tl.bfloat16:
            return (
                self._to_float32(x)
                if target == self.tl.float32
                else stock(builder, self._to_float32(x), to)
            )
        if target == self.tl.bfloat16:
            return self._to_bf16(
                x if source == self.tl.float32 else stock(builder, x, self.tl.float32)
            )
        return stock(builder, x, to)

    def create_fp_to_fp(self, builder: Any, x: Any, to: Any, mode: Any) -> Any:
        """Cast bf16 by :meth:`cast_impl`, other dtypes with the given rounding mode."""
        if self.tl.bfloat16 in (x.dtype.scalar, to.scalar):
            return self.cast_impl(builder, x, to)
        return self._stock["create_fp_to_fp"](builder, x, to, mode)

    def create_dot(self, builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        """tl.dot; bf16 is multiplied in float32."""
        self.counts.operations += 1
        return self._stock["create_dot"](builder, self._to_float32(a), self._to_float32(b), *rest)

    def binary_op(self, builder: Any, a: Any, b: Any, op: Any) -> Any:
        """Arithmetic; bf16 is computed in float32 and rounded once."""
        out = self._stock["binary_op"](builder, self._to_float32(a), self._to_float32(b), op)
        self.counts.operations += out.data.dtype.kind != "i"
        return self._to_bf16(out) if self._is_bf16(a) and out.data.dtype == np.float32 else out

    def unary_op(self, builder: Any, a: Any, op: Any) -> Any:
        """exp2 and similar functions.

        Triton has none for bf16. Its |x| is a bit mask, which is not a unary operation here.
        """
        self.counts.operations += 1
        return self._stock["unary_op"](builder, a, op)

    def create_fma(self, builder: Any, x: Any, y: Any, z: Any) -> Any:
        """Multiply and add with one rounding, as a GPU does; Triton rounds the product too.

        Products of float32 are exact in float64.
        """
        if x.data.dtype != np.float32:
            return self._stock["create_fma"](builder, x, y, z)
        exact = x.data.astype(np.float64) * y.data + z.data
        return self.interpreter.TensorHandle(exact.astype(np.float32), x.dtype.scalar)

    def _check_access(self, access: str, pointers: Any, mask: Any) -> Any:
        """Return the addresses in use; raise if one is outside every argument."""
        self.counts.operations += 1
        width = self.interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        used = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        inside = np.zeros(used.shape, bool)
        for low, high in self._argument_ranges:
            inside |= (used >= low) & (used + width <= high)
        if not inside.all():
            lanes = f"{(~inside).sum()} of {used.size} lanes"
            raise Violation(f"{access} outside every argument in program {self._program}: {lanes}")
        return used

    def create_masked_load(
        self, builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any
    ) -> Any:
        """tl.load; masked-off lanes without ``other`` hold NaN, or the largest integer."""
        self._check_access("load", pointers, mask)
        if other is None and not np.all(mask.data):
            dtype = pointers.get_element_ty()
            np_dtype = self.interpreter._get_np_dtype(dtype)
            filler: Any = np.iinfo(np_dtype).max if np.issubdtype(np_dtype, np.integer) else True
            if np.issubdtype(np_dtype, np.floating) or dtype == self.tl.bfloat16:
                filler = 0x7FC0 if dtype == self.tl.bfloat16 else math.nan
            other = self.interpreter.TensorHandle(
                np.full(pointers.data.shape, filler, np_dtype), dtype
            )
        return self._stock["create_masked_load"](builder, pointers, mask, other, *rest, **named)

    def create_masked_store(
        self, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        """tl.store; an address belongs to the first program that stores to it."""
        for address in self._check_access("store", pointers, mask).tolist():
            if self._owner.setdefault(address, self._program) != self._program:
                raise Violation(
                    f"programs {self._owner[address]} and {self._program} store to one address"
                )
        return self._stock["create_masked_store"](builder, pointers, value, mask, *rest)

    def create_atomic_rmw(
        self, builder: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        """tl.atomic_add and the other atomics."""
        self._check_access("atomic", pointers, mask)
        return self._stock["create_atomic_rmw"](builder, op, pointers, value, mask, *rest)

    def set_grid_dim(self, builder: Any, x: int, y: int, z: int) -> Any:
        """Begin a launch: check its grid and draw a random order of its programs."""
        if any(size > limit for size, limit in zip((x, y, z), MAX_GRID)):
            raise Violation(f"grid {(x, y, z)} exceeds {MAX_GRID}")
        self._grid_dim, self._order = (x, y, z), self._rng.permutation(x * y * z)
        self._owner.clear()
        return self._stock["set_grid_dim"](builder, x, y, z)

    def set_grid_idx(self, builder: Any, x: int, y: int, z: int) -> Any:
        """Go to the next program of the random order."""
        _, ny, nz = self._grid_dim
        index = int(self._order[(x * ny + y) * nz + z])
        self._program = (index // (ny * nz), index // nz % ny, index % nz)
        self.counts.programs += 1
        return self._stock["set_grid_idx"](builder, *self._program)

    def arguments(self, executor: Any, args: Any, kwargs: Any) -> Any:
        """Return a launch's arguments; it may only access the memory of their tensors.

        Triton would copy tensors of other devices, by recursive inner functions. Each is a
        reference cycle, which keeps the tensors alive until Python collects garbage.
        """
        self._argument_ranges.clear()
        for value in [*args, *kwargs.values()]:
            tensor = getattr(value, "base", value)
            if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
                raise Violation(f"expected tensors on the CPU, got one on {tensor.device}")
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                last = sum(
                    (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())
                )
                self._argument_ranges.append(
                    (tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())
                )
        return args, kwargs

    def launch(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a launch as an event of the profiler."""
        self._patched.clear()
        with torch.profiler.record_function(executor.fn.__name__):
            return self._stock_call(executor, *args, **kwargs)
