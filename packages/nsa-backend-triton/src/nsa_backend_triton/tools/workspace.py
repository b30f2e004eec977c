"""Peak bytes of each slot beyond its inputs, counted in a dry run: the host code runs, on tensors
without data.

Kernels keep their tiles in registers and shared memory, so every byte that a slot takes is a tensor
that its host code makes: outputs, what lies between two kernels, gradients. The dry run makes them
on the meta device, launches nothing, and counts what is alive. Forward's outputs stay alive while
backward runs. Packed: ``batch`` counts documents. Decode: one token a sequence, over a cache of
``seq_len``.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import triton.language as tl
from triton.runtime.jit import JITFunction

from nsa_backend_triton.decode import forms
from nsa_backend_triton.host import sequences
from nsa_backend_triton.tools.meta_inputs import STEP_INPUTS, inputs, slot_module, step_inputs
from nsa_core.contract import Request
from nsa_core.dryrun import PeakBytes

_dry = contextvars.ContextVar("dry", default=False)
# two threads that patch and restore in turn would leave a patch behind
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def _no_launches() -> Iterator[None]:
    """Launches by this thread do nothing inside the block; those of other threads are what they
    were.
    """

    def skipping(stock: Any) -> Any:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            return None if _dry.get() else stock(kernel, *args, **kwargs)

        return run

    token = _dry.set(True)
    try:
        with contextlib.ExitStack() as stack:
            for kind in {
                JITFunction,
                type(tl.max),
            }:  # under TRITON_INTERPRET=1 the latter is InterpretedFunction
                stack.enter_context(mock.patch.object(kind, "run", skipping(kind.run)))
            yield
    finally:
        _dry.reset(token)


@functools.lru_cache(maxsize=256)
def peak(request: Request) -> int:
    """Bytes that ``request.slot`` holds at most beyond its inputs, backward included where it is
    asked for.
    """
    if not (request.seq_len and request.batch):
        return 0
    if request.phase == "decode" and request.slot != "combine":
        return _step_peak(request)
    request = (
        dataclasses.replace(request, phase="prefill", seq_len=1)
        if request.phase == "decode"
        else request
    )
    do, given, call = inputs(request)
    if not given[1].numel():
        return 0  # no key that anyone could see: the core makes no call
    module = slot_module(request.slot)
    major, minor = request.capability or (0, 0)
    with (
        _one_at_a_time,
        sequences.described(10 * major + minor),
        _no_launches(),
        PeakBytes() as counted,
    ):
        out = module.forward(*given, call=call)
        if request.needs_grad and request.slot != "select":
            kept = module.backward(
                do, *given, *(out if request.slot != "combine" else ()), call=call
            )
            del kept
        del out
    total: int = counted.peak
    return total


def _step_peak(request: Request) -> int:
    tensors, call = step_inputs(request)
    form = getattr(forms, request.slot)
    major, minor = request.capability or (0, 0)
    with (
        _one_at_a_time,
        sequences.described(10 * major + minor),
        _no_launches(),
        PeakBytes() as counted,
    ):
        out = form(*(tensors[name] for name in STEP_INPUTS[request.slot]), call=call)
        del out
    total: int = counted.peak
    return total


cmp = select = sel = win = combine = peak
