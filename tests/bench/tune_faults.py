"""Backends of the slot win for `nsa tune` that end their process, each in another place."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from nsa_backend_sdpa import win
from nsa_core.contract import Request

TIMED = 48  # tokens of the timed calls; the gate has others


def crash(*tensors: torch.Tensor, call: Any) -> Any:
    """End the process."""
    os._exit(3)


def crash_while_timed(q: torch.Tensor, *tensors: torch.Tensor, call: Any) -> Any:
    """End the process in a timed call only."""
    if q.shape[1] == TIMED:
        os._exit(4)
    return win.forward(q, *tensors, call=call)


def hang_while_timed(q: torch.Tensor, *tensors: torch.Tensor, call: Any) -> Any:
    """Hang in a timed call only."""
    if q.shape[1] == TIMED:
        time.sleep(600)
    return win.forward(q, *tensors, call=call)


def accept(request: Request) -> list[Any]:
    """Accept every request."""
    return []


def end_probe(request: Request) -> list[Any]:
    """End the process."""
    os._exit(5)
