"""Properties of the device of a call: the interpreter, the architecture, its multiprocessors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction


@functools.cache
def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors.

    They do if TRITON_INTERPRET=1 was set when triton was imported.
    """
    # Triton reads the variable when it defines its own functions. Importing its interpreter instead
    # would need numpy.
    return not isinstance(tl.max, JITFunction)


_described: list[int] = []


@contextlib.contextmanager
def described(architecture: int) -> Iterator[None]:
    """Treat tensors on the meta device as if on a GPU of ``architecture`` inside the block."""
    _described.append(architecture)
    try:
        yield
    finally:
        _described.pop()


def architecture(device: torch.device) -> int:
    """Return the compute capability of ``device``, 90 for sm_90; 0 in the interpreter."""
    if device.type == "meta" and _described:
        return _described[-1]
    return _capability(device)


@functools.cache
def _capability(device: torch.device) -> int:
    if interpreted():
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# The largest GPU of each architecture (A100, A40, Orin, L40S, H200, B200, B300, RTX PRO 6000, GB10)
# has this many: an upper bound for a GPU that is described, but not present.
_MULTIPROCESSORS = {
    80: 108,
    86: 84,
    87: 16,
    89: 142,
    90: 132,
    100: 148,
    103: 160,
    120: 188,
    121: 48,
}


def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of ``device``; 3 in the interpreter.

    For the meta device, that of the current GPU if it has the described architecture, otherwise
    that of the largest GPU of this architecture.
    """
    if device.type == "cuda":
        return _count(device)
    described = architecture(device)
    if described and torch.cuda.is_available():
        current = torch.device("cuda", torch.cuda.current_device())
        if _capability(current) == described:
            return _count(current)
    return _MULTIPROCESSORS.get(described, max(_MULTIPROCESSORS.values())) if described else 3


def _count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
