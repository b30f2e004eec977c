"""Kernel launches as they happened, to be run again one by one: with the memory each found, and the
memory it left.

One launch is a far smaller problem than the slot that made it, and its results are compared where
they arise. Only its scratch is not compared: what a program keeps for itself until it ends.
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

SCRATCH = {"SCORES"}  # of select_forward: its rows belong to one program


PACKAGE = "nsa_backend_triton."


def name_of(function: InterpretedFunction) -> str:
    """ "folder.module.function", inside the package."""
    return f"{function.fn.__module__.removeprefix(PACKAGE)}.{function.fn.__name__}"


@dataclasses.dataclass(eq=False)
class InterpretedLaunch:
    """One launch of the jit function ``name`` ("folder.module.function") in the case ``label``;
    ``args`` are never written.
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
        """Equal for launches of one function on the same."""
        leaves = tree_leaves((self.args, self.kwargs))
        return self.name, *(
            x.numpy().tobytes() if isinstance(x, Tensor) else repr(x) for x in leaves
        )

    def differs(self) -> str:
        """Run the functions that are now there on the memory of then: "result", "work", or "" where
        all is the same.
        """
        module, _, name = self.name.rpartition(".")
        kernel = vars(sys.modules[PACKAGE + module])[name]
        args, kwargs = _copied((self.args, self.kwargs))
        with strict() as seen:
            kernel.run(*args, warmup=False, **kwargs)
        found = _memory(kernel.arg_names, args)
        if not all(_close(expected, found[name]) for name, expected in self.expected.items()):
            return "result"
        return "work" if seen.operations != self.operations else ""


def _copied(given: Any) -> Any:
    """``given`` with tensors of their own memory, laid out and shared as it was."""
    memory: dict[int, torch.UntypedStorage] = {}

    def copy(x: Any) -> Any:
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            held = memory.setdefault(storage._cdata, storage.clone())
            return x.new_empty(0).set_(held, x.storage_offset(), x.size(), x.stride())
        if isinstance(x, TensorDescriptor):
            return dataclasses.replace(x, base=copy(x.base))
        if isinstance(x, (tuple, list)):
            return type(x)(copy(y) for y in x)
        return {name: copy(y) for name, y in x.items()} if isinstance(x, dict) else x

    return copy(given)


def _memory(names: list[str], args: tuple[Any, ...]) -> dict[str, Tensor]:
    """Name -> all of its storage, what lies between rows included."""
    return {
        name: x.new_empty(0).set_(
            x.untyped_storage(), 0, (x.untyped_storage().nbytes() // x.itemsize,), (1,)
        )
        for name, x in zip(names, args)
        if isinstance(x, Tensor) and name not in SCRATCH
    }


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=1e-11, atol=1e-11, equal_nan=True)


@contextlib.contextmanager
def recorded(label: str, found: list[InterpretedLaunch]) -> Iterator[None]:
    """Every launch inside the block runs strictly and is added to ``found``."""
    stock_run, stock_call = InterpretedFunction.run, InterpretedFunction.__call__

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(
            InterpretedLaunch(
                label,
                name_of(self),
                *_copied((args, {k: v for k, v in kwargs.items() if k != "warmup"})),
            )
        )
        found[-1].ran.add(name_of(self))
        before, started = seen.operations, time.process_time()
        stock_run(self, *args, **kwargs)
        found[-1].seconds = time.process_time() - started
        found[-1].operations = seen.operations - before
        found[-1].expected = _copied(_memory(self.arg_names, args))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[-1].ran.add(name_of(self))
        return stock_call(self, *args, **kwargs)

    with (
        strict() as seen,
        mock.patch.multiple(InterpretedFunction, run=run, __call__=call),
        filled(),
    ):
        yield


@contextlib.contextmanager
def filled() -> Iterator[None]:
    """New tensors hold NaN, or the largest integer, until somebody writes: what nobody writes is
    the same twice.
    """
    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "empty"), (Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, _filling(getattr(owner, name))))
        yield


def _filling(stock: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = stock(*args, **kwargs)
        if x.device.type == "cpu":
            x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)
        return x

    return made


def apart(tensor: Tensor) -> Tensor:
    """The same values with rows and heads apart; between them NaN, of integers the largest."""
    junk = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    shape = (*tensor.shape[:-2], tensor.shape[-2] + 1, tensor.shape[-1] + 2)
    storage = torch.full(shape, junk, dtype=tensor.dtype)
    return storage[..., : tensor.shape[-2], : tensor.shape[-1]].copy_(tensor)
