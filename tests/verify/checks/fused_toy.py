"""sdpa's slots with a fused backward, made of their backwards, in which a fault can be planted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nsa_backend_sdpa import cmp, combine, sel, win
from nsa_backend_sdpa.plugin import nsa_register_backends
from nsa_core.contract import BackendSpec, SlotCall

Gradients = list[torch.Tensor]
_faults: list[Callable[..., Any]] = []


@contextlib.contextmanager
def fault(plant: Callable[[Gradients], Any]) -> Iterator[None]:
    """Return what ``plant`` makes of dq, dk_cmp, dv_cmp, .., dgates inside the block."""
    with fault_on(lambda gradients, *_: plant(gradients)):
        yield


@contextlib.contextmanager
def fault_on(plant: Callable[[Gradients, Gradients, Gradients], Any]) -> Iterator[None]:
    """As :func:`fault`; ``plant`` also gets q, k_cmp, .., gates, and o_cmp, o_sel, o_win."""
    _faults.append(plant)
    try:
        yield
    finally:
        _faults.remove(plant)


def backward(
    do: torch.Tensor,
    *tensors: torch.Tensor,
    outputs: list[torch.Tensor],
    call: SlotCall,
    cmp_backward: Callable[..., Any] | None = None,
) -> Any:
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, blocks, *statistics = tensors
    (o_cmp, o_sel, o_win), (lse_cmp, lse_sel, lse_win) = outputs, statistics
    dgates, do_cmp, do_sel, do_win = combine.backward(do, gates, o_cmp, o_sel, o_win, call=call)
    of_cmp = (cmp_backward or functools.partial(cmp.backward, call=call))(
        do_cmp, q, k_cmp, v_cmp, o_cmp, lse_cmp
    )
    of_sel = sel.backward(do_sel, q, k_sel, v_sel, blocks, o_sel, lse_sel, call=call)
    of_win = win.backward(do_win, q, k_win, v_win, o_win, lse_win, call=call)
    del o_cmp, o_sel, o_win  # a plant may free them
    dq = of_cmp[0] + of_sel[0] + of_win[0]
    gradients = [dq, *of_cmp[1:], *of_sel[1:], *of_win[1:], dgates]
    return _faults[0](gradients, list(tensors[:8]), outputs) if _faults else gradients


def spec() -> BackendSpec:
    """Return the backend "fused-toy"."""
    sdpa = nsa_register_backends()
    return dataclasses.replace(sdpa, name="fused-toy", fused={"backward": "fused_toy:backward"})
