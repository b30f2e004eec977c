"""Recorded kernel launches that run again one by one, with their memory before and after.

A launch is a far smaller problem than the slot call that made it, and a difference shows where it
arises. Scratch that belongs to one program is not compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_backend_triton.strict.interpreter import strict

PREFIX = "nsa_backend_triton."
SCRATCH = {"SCORES"}  # parameters that are not compared: select_forward's rows of one program


@dataclasses.dataclass(eq=False)
class InterpretedLaunch:
    """One launch of the jit function ``name`` ("folder.module.function") in the case ``label``.

    Attributes:
        args: The arguments before the launch; no replay writes to them.
        ran: Names of the jit functions that the launch called.
        seconds: Processor time of the launch.
        expected: Parameter -> memory after the launch.
        operations: Tensor operations of the launch.
    """

    label: str
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ran: set[str] = dataclasses.field(default_factory=set)
    seconds: float = 0.0
    expected: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    operations: int = 0

    def identity(self) -> tuple[object, ...]:
        """Return a key that is equal for launches of one function on equal arguments."""
        leaves = tree_leaves((self.args, self.kwargs))
        return self.name, *(
            x.numpy().tobytes() if isinstance(x, Tensor) else repr(x) for x in leaves
        )

    def differs(self) -> str:
        """Run the current functions on the recorded arguments.

        Returns "result" if the memory differs, "work" if only the number of operations does,
        otherwise "".
        """
        module, _, name = self.name.rpartition(".")
        kernel = vars(sys.modules[f"{PREFIX}{module}"])[name]
        args, kwargs = _copy((self.args, self.kwargs))
        with strict() as counts:
            kernel.run(*args, warmup=False, **kwargs)
        after = _memory(kernel.arg_names, args)
        if not all(_is_close(expected, after[name]) for name, expected in self.expected.items()):
            return "result"
        return "work" if counts.operations != self.operations else ""


def _copy(arguments: Any) -> Any:
    """Copy arguments; tensors keep their layout, and those that share memory still do."""
    memory: dict[int, torch.UntypedStorage] = {}

    def copy(x: Any) -> Any:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            clone = memory.setdefault(storage._cdata, storage.clone())
            return x.new_empty(0).set_(clone, x.storage_offset(), x.size(), x.stride())
        if isinstance(x, TensorDescriptor):
            return TensorDescriptor(copy(x.base), x.shape, x.strides, x.block_shape)
        if isinstance(x, (tuple, list)):
            return type(x)(copy(y) for y in x)
        return {name: copy(y) for name, y in x.items()} if isinstance(x, dict) else x

    return copy(arguments)


def _memory(names: list[str], args: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return parameter -> its whole storage, gaps between rows included."""
    return {
        name: x.new_empty(0).set_(
            x.untyped_storage(), 0, (x.untyped_storage().nbytes() // x.itemsize,), (1,)
        )
        for name, x in zip(names, args)
        if isinstance(x, Tensor) and name not in SCRATCH
    }


def _is_close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-11, atol=1e-11, equal_nan=True)


@contextlib.contextmanager
def recorded(label: str, launches: list[InterpretedLaunch]) -> Iterator[None]:
    """Run the launches inside the block strictly and append them to ``launches``."""
    stock_run, stock_call = InterpretedFunction.run, InterpretedFunction.__call__

    def name_of(function: Any) -> str:
        return f"{function.fn.__module__.removeprefix(PREFIX)}.{function.fn.__name__}"

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(
            InterpretedLaunch(
                label,
                name_of(self),
                *_copy((args, {k: v for k, v in kwargs.items() if k != "warmup"})),
            )
        )
        launches[-1].ran.add(name_of(self))
        before, started = counts.operations, time.process_time()
        stock_run(self, *args, **kwargs)
        launches[-1].seconds = time.process_time() - started
        launches[-1].operations = counts.operations - before
        launches[-1].expected = _copy(_memory(self.arg_names, args))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches[-1].ran.add(name_of(self))
        return stock_call(self, *args, **kwargs)

    with (
        strict() as counts,
        mock.patch.multiple(InterpretedFunction, run=run, __call__=call),
        filled(),
    ):
        yield


@contextlib.contextmanager
def filled() -> Iterator[None]:
    """Fill new tensors with NaN or the largest integer, so that runs are reproducible."""
    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "empty"), (Tensor, "new_empty")):
            stack.enter_context(
                mock.patch.object(owner, name, _filled_factory(getattr(owner, name)))
            )
        yield


def _filled_factory(stock: Any) -> Any:
    def create(*args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = stock(*args, **kwargs)
        if x.device.type == "cpu":
            x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)
        return x

    return create


def apart(tensor: Tensor) -> Tensor:
    """Copy ``tensor`` with gaps between rows and heads that hold NaN, or the largest integer."""
    if tensor.dtype == torch.float8_e4m3fn:
        return apart(tensor.view(torch.uint8)).view(tensor.dtype)
    filler = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    shape = (*tensor.shape[:-2], tensor.shape[-2] + 1, tensor.shape[-1] + 2)
    storage = torch.full(shape, filler, dtype=tensor.dtype)
    return storage[..., : tensor.shape[-2], : tensor.shape[-1]].copy_(tensor)
