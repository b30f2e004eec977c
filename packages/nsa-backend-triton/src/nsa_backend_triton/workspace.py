"""Peak memory of each slot and of the fused backward, counted in a dry run of the host code.

Kernels keep their tiles in registers and shared memory, so all memory of a slot is tensors that its
host code allocates: outputs, intermediate results between two kernels, gradients. The dry run
allocates them on the meta device, launches nothing, and counts the bytes that are alive, inputs
excepted. Outputs of the forward stay alive while the backward of a slot runs; the fused backward
frees those of the branches. For a packed request ``batch`` counts documents. A decode request has
one token per sequence and a cache of ``seq_len`` tokens.
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

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from nsa_backend_triton.core import backward as core
from nsa_backend_triton.decode import forms
from nsa_backend_triton.host import device
from nsa_backend_triton.meta_inputs import (
    STEP_INPUTS,
    core_inputs,
    slot_module,
    step_inputs,
)
from nsa_core.contract import Request
from nsa_core.dryrun import PeakBytes, call_slot, slot_inputs

_dry = contextvars.ContextVar("dry", default=False)
# Two threads that patch and restore by turns would leave a patch behind.
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def _no_launches() -> Iterator[None]:
    """Skip launches of this thread inside the block; other threads launch as usual."""

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


@contextlib.contextmanager
def _dry_run(request: Request) -> Iterator[PeakBytes]:
    """Count the bytes that the block allocates on the meta device, for the GPU of ``request``."""
    major, minor = request.capability or (0, 0)
    with (
        _one_at_a_time,
        device.described(10 * major + minor),
        _no_launches(),
        PeakBytes() as counted,
    ):
        yield counted


@functools.lru_cache(maxsize=256)
def peak(request: Request) -> int:
    """Return the peak bytes of ``request.slot`` beyond its inputs.

    The backward is included if the request needs gradients.
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
    do, given, call = slot_inputs(request)
    if not given[1].numel():
        return 0  # no query sees a key: the core does not call the slot
    with _dry_run(request) as counted:
        call_slot(slot_module(request.slot), request, do, given, call)
    total: int = counted.peak
    return total


def _step_peak(request: Request) -> int:
    tensors, call = step_inputs(request)
    form = getattr(forms, request.slot)
    with _dry_run(request) as counted:
        out = form(*(tensors[name] for name in STEP_INPUTS[request.slot]), call=call)
        del out
    total: int = counted.peak
    return total


@functools.lru_cache(maxsize=256)
def core_backward(request: Request) -> int:
    """Return the peak bytes of the fused backward beyond do and the tensors of ``core.Tensors``.

    o_cmp, o_sel and o_win count until they are freed. The slot of the request is ignored. A call
    that a CUDA graph captures may take more, because its kernels run beside each other.
    """
    if not (request.seq_len and request.batch):
        return 0
    do, tensors, outputs, call = core_inputs(request)
    if not (tensors.k_cmp.numel() and tensors.blocks.numel()):
        return 0  # no compressed token, or no blocks: the core runs the slots
    with _dry_run(request) as counted:
        outputs = [torch.empty_like(output) for output in outputs]
        gradients = core.backward(do, *tensors, outputs=outputs, call=call)
        del gradients
    total: int = counted.peak
    return total


cmp = select = sel = win = combine = peak
