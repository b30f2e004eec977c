"""A win backend whose call on LENGTH tokens takes a minute; child processes can import it."""

from __future__ import annotations

import signal
import time

import torch

from nsa_backend_sdpa import win
from nsa_core.contract import API_VERSION, BackendSpec, SlotCall, SlotSpec

LENGTH, SECONDS = 40, 60.0


def accept(request: object) -> list[object]:
    """Accept every request."""
    return []


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, call: SlotCall):  # type: ignore[no-untyped-def]
    """Sleep for a minute on LENGTH tokens, between two operations of Python."""
    if q.shape[1] == LENGTH:
        time.sleep(SECONDS)
    return win.forward(q, k, v, call=call)


def one_operation(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, call: SlotCall):  # type: ignore[no-untyped-def]
    """Sleep for a minute on LENGTH tokens, as one operation that no signal ends."""
    if q.shape[1] == LENGTH:
        blocked = {signal.SIGALRM, signal.SIGTERM, signal.SIGINT}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        time.sleep(SECONDS)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return win.forward(q, k, v, call=call)


def spec(function: str = "forward") -> BackendSpec:
    """Return the backend "slow", with one of the functions above."""
    slots = {"win": SlotSpec(f"slow_backend:{function}", "nsa_backend_sdpa.win:backward")}
    return BackendSpec("slow", API_VERSION, slots, "slow_backend:accept", priority=-5)
