"""Errors of several processes that torchrun started: each is printed once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta

_TIMEOUT = timedelta(seconds=10)
_WAIT_S = 2.0  # for the other processes
_POLL_S = 0.05


def launched() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextlib.contextmanager
def ending(message: str) -> Iterator[bool]:
    """Yield whether this process prints an error: of several that end with it, the first one.

    Then the processes wait for each other, at most two seconds, so that all get this far and have
    the same exit code. torchrun sends SIGTERM to the others as soon as one ends with an error; it
    has no effect on a process that ends anyway.
    """
    if not launched():
        yield True
        return
    from torch.distributed.rendezvous import rendezvous

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    key = f"nsa-error/{hashlib.sha256(message.encode()).hexdigest()}"
    try:
        store, _, size = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
        count = store.add(key, 1)
    except (RuntimeError, ValueError):  # torchrun ended, or has no store
        yield True
        return
    yield count == 1
    until = time.monotonic() + _WAIT_S
    with contextlib.suppress(RuntimeError):
        while count < size and time.monotonic() < until:
            time.sleep(_POLL_S)
            count = store.add(key, 0)
