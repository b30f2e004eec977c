"""Kernels of the slot win that break a rule; the number of tokens chooses the rule."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy.random  # NumPy loads it on first use, and only a loaded one has a state to watch
import torch

from nsa_backend_sdpa import win
from nsa_core.errors import BackendUnavailable, InvalidInput, Unsupported
from nsa_verify.isolation import gpu_context

FIRST_LENGTH = 17  # tokens of the case of the first behaviour


class OwnError(BaseException):
    """An exception that is no Exception."""


def _raise(error: BaseException) -> Callable[..., Any]:
    def behave(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: Any) -> Any:
        raise error

    return behave


def _do(action: Callable[[], object]) -> Callable[..., Any]:
    def behave(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: Any) -> Any:
        action()
        return results

    return behave


def _changes_input(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: Any) -> Any:
    with torch.no_grad():
        k[..., 0] += 1.0
    return results


def _changes_input_bytes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: Any) -> Any:
    k.detach().numpy()[..., 0] += 1.0  # PyTorch does not see it, as in a compiled kernel
    return results


def _hangs() -> None:
    # A lock that is never released also ignores signals.
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


# name -> (behaviour, part of the reason that the failed row must give)
ERRORS = {
    "healthy": (_do(lambda: None), ""),
    "SystemExit": (_raise(SystemExit(0)), "it raised SystemExit: 0"),
    "GeneratorExit": (_raise(GeneratorExit()), "it raised GeneratorExit"),
    "StopIteration": (_raise(StopIteration()), "StopIteration"),
    "own BaseException": (_raise(OwnError("own")), "it raised OwnError: own"),
    "Unsupported": (_raise(Unsupported("not here")), "it raised Unsupported: not here"),
    "InvalidInput": (_raise(InvalidInput("bad")), "it raised InvalidInput: bad"),
    "BackendUnavailable": (_raise(BackendUnavailable("no")), "it raised BackendUnavailable: no"),
    "out of memory": (_raise(torch.OutOfMemoryError("full")), "OutOfMemoryError: full"),
    "none": (lambda q, k, v, results: None, "it returned NoneType, expected tensors"),
    "one tensor": (lambda q, k, v, results: results[0], "it returned 1 tensor, expected 2"),
    "wrong shape": (lambda q, k, v, results: (results[0][:, 1:], results[1]), "result 0 is"),
    "wrong dtype": (lambda q, k, v, results: (results[0].double(), results[1]), "float64"),
    "wrong device": (lambda q, k, v, results: (results[0].to("meta"), results[1]), "on meta"),
    "returns an input": (lambda q, k, v, results: (q, results[1]), "shares memory with an input"),
    "results share memory": (
        lambda q, k, v, results: (
            results[0],
            results[0].view(-1)[: results[1].numel()].view(results[1].shape),
        ),
        "results 0 and 1 share memory",
    ),
    "changes an input": (_changes_input, "it changed argument 2 in place, ("),
    "changes the bytes of an input": (_changes_input_bytes, "it changed argument 2 in place, ("),
    "seed": (_do(lambda: torch.manual_seed(3)), "it changed PyTorch's random state"),
    "draws": (_do(lambda: torch.rand(1)), "PyTorch's random state"),
    "default dtype": (_do(lambda: torch.set_default_dtype(torch.float64)), "default dtype"),
    "default device": (_do(lambda: torch.set_default_device("meta")), "default device"),
    "grad mode": (_do(lambda: torch.set_grad_enabled(not torch.is_grad_enabled())), "gradient"),
    "deterministic": (_do(lambda: torch.set_deterministic_debug_mode(2)), "deterministic"),
    "threads": (_do(lambda: torch.set_num_threads(3)), "number of threads"),
    "numpy seed": (_do(lambda: numpy.random.seed(3)), "numpy's random state"),
    "Python seed": (_do(lambda: random.seed(3)), "Python's random state"),
    "directory": (_do(lambda: os.chdir("/")), "the working directory"),
}


def _breaks_the_gpu(error: Exception | None) -> Callable[..., Any]:
    """From now on, every look at the GPU in this process finds an error; ``error`` is raised."""

    def behave(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: Any) -> Any:
        gpu_context.gpu_error = lambda: "AcceleratorError: CUDA error: misaligned address"
        if error is not None:
            raise error
        return results

    return behave


def breaks_the_gpu_and_is_unavailable(*of_check: Any) -> Any:
    """Break the GPU in a check outside of a kernel, and raise an error of nsa_core."""
    gpu_context.gpu_error = lambda: "AcceleratorError: CUDA error: misaligned address"
    raise BackendUnavailable("no")


# Only a child process survives or notices these.
IN_CHILD = {
    "KeyboardInterrupt": (_raise(KeyboardInterrupt()), "it raised KeyboardInterrupt"),
    "prints": (_do(lambda: print("hello\nfrom Python")), "output: 'from Python'"),
    "prints in C": (
        _do(lambda: ctypes.CDLL(None).puts(b"printed in C")),
        "output: 'printed in C'",
    ),
    "_exit": (_do(lambda: os._exit(0)), "ended its process with exit status 0 in this check"),
    "segfault": (_do(lambda: ctypes.string_at(0)), "SIGSEGV in this check"),
    "abort": (
        _do(lambda: (os.write(2, b"assertion failed\n"), os.abort())),
        "SIGABRT in this check; its last line of output: 'assertion failed'",
    ),
    "closes its streams": (_do(lambda: os.closerange(1, 3)), ""),
    "breaks the GPU": (
        _breaks_the_gpu(None),
        "a kernel made the GPU unusable: AcceleratorError: CUDA error: misaligned address",
    ),
    "breaks the GPU and raises": (_breaks_the_gpu(RuntimeError("no")), "RuntimeError: no"),
}
HANG = {"hang": (_do(_hangs), "did not end")}
BEHAVIOURS = ERRORS | IN_CHILD | HANG


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, call: Any) -> Any:
    """Run sdpa's window, and behave as the case of this number of tokens demands."""
    index = q.shape[1] - FIRST_LENGTH
    results = win.forward(q, k, v, call=call)
    if q.dim() != 4 or not 0 <= index < len(BEHAVIOURS):
        return results
    return [*BEHAVIOURS.values()][index][0](q, k, v, results)


def accept(request: Any) -> list[Any]:
    """Accept every request."""
    return []


def accept_elsewhere(request: Any) -> list[Any]:
    """Accept every request, but change the working directory."""
    os.chdir("/")
    return []
