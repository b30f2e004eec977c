"""Run a function of a backend: record the call, set its state, convert errors, check its results.

Slot operators, the fused backward and decode forms all call backends through :func:`run_backend`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nsa_core.errors import NSAError
from nsa_core.torch_ops.call_wrapper import Where, call_function
from nsa_core.torch_ops.torch_state import backend_state
from nsa_core.util.text import describe_error

TensorSpec = tuple[tuple[Any, ...], torch.dtype]  # shape and dtype


@dataclasses.dataclass(frozen=True)
class DispatchRecord:
    """One call of a backend's function; ``direction`` is forward, backward or decode."""

    backend: str
    slot: str
    direction: str


_traces: list[list[DispatchRecord]] = []


@contextlib.contextmanager
def record_dispatch() -> Iterator[list[DispatchRecord]]:
    """Record every backend call inside the block, from any thread, in order."""
    trace: list[DispatchRecord] = []
    _traces.append(trace)
    try:
        yield trace
    finally:
        _traces[:] = [t for t in _traces if t is not trace]


def in_layout(tensors: Iterable[torch.Tensor], blocks: int | None = None) -> list[torch.Tensor]:
    """Return ``tensors`` with the strides that the contract promises: stride(-1) == 1.

    Args:
        tensors: The tensors of a call.
        blocks: Position of the block indices, which become contiguous; None: there are none.
    """
    # Most tensors are contiguous, and this test takes a quarter of the time of stride(-1).
    arranged = [t if t.is_contiguous() or t.stride(-1) == 1 else t.contiguous() for t in tensors]
    if blocks is not None:
        arranged[blocks] = arranged[blocks].contiguous()
    return arranged


def run_backend(
    where: Where,
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    specs: Sequence[TensorSpec],
    device: torch.device,
    options: Mapping[str, Any],
) -> list[torch.Tensor]:
    """Call a backend's function on ``device`` with autocast off, and check its results.

    Shape inference gives compiled code contiguous results, so others are copied.

    Args:
        where: The backend, the slot and the direction.
        function: The function.
        tensors: Its positional arguments.
        specs: Shape and dtype of each result that the contract requires.
        device: Where the results must be; it becomes the current device.
        options: Its keyword arguments.

    Returns:
        The results.

    Raises:
        NSAError: The function raised, or the number, shapes, dtypes or devices of its results are
            wrong. NSAError and torch.OutOfMemoryError pass unchanged.
    """
    backend, slot, direction = where
    for trace in _traces:
        trace.append(DispatchRecord(*where))
    with backend_state(device):
        try:
            results = call_function(where, function, tensors, options)
            results = [results] if isinstance(results, torch.Tensor) else list(results or ())
            if len(results) == len(specs):
                for result, (shape, dtype) in zip(results, specs):
                    if result.shape != shape or result.dtype != dtype or result.device != device:
                        break
                else:
                    if slot == "append":  # it may return q itself: no copy at every step
                        return results
                    return [result.contiguous() for result in results]
            raise NSAError(_wrong_results(where, results, specs, device))
        except (NSAError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            text = f"backend {backend!r}, slot {slot!r}, {direction}: {describe_error(error)}"
            raise NSAError(text) from error


def _wrong_results(
    where: Where,
    results: Sequence[torch.Tensor],
    specs: Sequence[TensorSpec],
    device: torch.device,
) -> str:
    """Return a sentence with all that is wrong with ``results``."""
    problems = []
    if len(results) != len(specs):
        noun = "tensor" if len(results) == 1 else "tensors"
        problems.append(f"it returned {len(results)} {noun}, expected {len(specs)}")
    for index, (result, (shape, dtype)) in enumerate(zip(results, specs)):
        if result.shape != shape or result.dtype != dtype or result.device != device:
            actual = f"{tuple(result.shape)} {result.dtype} on {result.device}"
            problems.append(
                f"result {index} is {actual}, expected {tuple(shape)} {dtype} on {device}"
            )
    backend, slot, direction = where
    return f"backend {backend!r}, slot {slot!r}, {direction}: " + "; ".join(problems)
