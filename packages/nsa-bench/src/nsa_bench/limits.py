"""Limits of a call: it ends when it has taken too long, or when the run's time is over.

A call of many short operations ends in this process: a timer raises TimeUp in the main thread
between two of them. One long operation cannot be ended like that; nsa_bench.child_call runs such
calls in a child process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from nsa_bench.timing import LATE, NO_MEMORY, NOT_MEASURED, TimeUp
from nsa_core.util.interruption import alarm_in

COMPILE_S = 30.0  # extra time of the first call on a GPU, which compiles kernels
# A call that began before the end of the run's time may take this much longer, in seconds.
LAST_CALL_S = 0.5
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
GRACE_S = 1.0  # after a signal, a call may take this long to end by itself, in seconds


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of every call of a run.

    Attributes:
        deadline: Value of time.monotonic() at which the run's time is over.
        max_call_s: Longest duration of a call, in seconds.
        first_call_s: Longest duration of a first call, which may compile kernels.
        too_slow: The reason of a call that was ended because it took too long.
    """

    deadline: float = float("inf")
    max_call_s: float = float("inf")
    first_call_s: float = float("inf")
    too_slow: str = ""

    @classmethod
    def of_run(cls, deadline: float, max_call_s: float, device: str) -> Limits:
        """Return the limits of a run on ``device``."""
        first = max_call_s + COMPILE_S * device.startswith("cuda")
        too_slow = f"{NOT_MEASURED}: a call took longer than --max-call {max_call_s:g} s"
        return cls(deadline, max_call_s, first, too_slow)

    def first_call(self) -> contextlib.AbstractContextManager[None]:
        """Raise TimeUp in the block after ``first_call_s``, or soon after the deadline."""
        return _ends_in(self.first_call_s, self.too_slow, self.deadline + LAST_CALL_S)

    def until_deadline(self) -> contextlib.AbstractContextManager[None]:
        """Raise TimeUp in the block at the deadline."""
        return _ends_in(float("inf"), "", self.deadline)


def lacks_memory(needed: int, device: str) -> str:
    """Return why a call cannot fit the memory of ``device``; "" if it may.

    An allocation that fails has its own reason; but where the system promises more memory than it
    has, the process would be killed.

    Args:
        needed: Bytes that the call needs at least.
        device: "cpu", "cuda" or "cuda:N".
    """
    total = _memory_bytes(device)
    if needed <= total:
        return ""
    needs, has = (f"{count / 2**30:,.1f} GiB" for count in (needed, total))
    return f"{NO_MEMORY}: a call needs at least {needs}, and {device} has {has}"


@functools.cache
def _memory_bytes(device: str) -> int:
    """Return the memory of a GPU, or that of the machine or of its control group."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = []
    with contextlib.suppress(AttributeError):  # Windows
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
        limits.append(int(_GROUP_LIMIT.read_text()))
    return min(limits, default=sys.maxsize)


@contextlib.contextmanager
def _ends_in(seconds: float, reason: str, deadline: float) -> Iterator[None]:
    """Raise TimeUp after ``seconds`` for ``reason``, or at ``deadline`` for LATE.

    Outside the main thread, and inside another such block, the block has no limit.
    """
    seconds, reason = min((seconds, reason), (deadline - time.monotonic(), LATE))
    if seconds <= 0:
        raise TimeUp(reason)
    is_main = threading.current_thread() is threading.main_thread()
    is_free = hasattr(signal, "SIGALRM") and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    if seconds == float("inf") or not (is_main and is_free):
        yield
        return
    with alarm_in(seconds, TimeUp(reason)):
        yield
