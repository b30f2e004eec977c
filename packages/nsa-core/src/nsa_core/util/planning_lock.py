"""The lock of planning: one thread at a time loads plugins, defines operators and sets state.

A fork waits until the thread that plans has released the lock. Otherwise the child would inherit
locks that no thread releases: this one, and those of Python's imports, on which the child would
hang when it imports the same module.
"""

from __future__ import annotations

import os
import threading

WAIT_S = 10.0  # a plugin that takes longer hangs; only its own modules then hang in the child


class PlanningLock:
    """A lock that its thread may take again, and that survives a fork."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._fork = threading.local()  # several threads may fork at a time
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._after_in_parent,
                after_in_child=self._after_in_child,
            )

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def _before_fork(self) -> None:
        self._fork.waited = self._lock.acquire(timeout=WAIT_S)

    def _after_in_parent(self) -> None:
        if self._fork.waited:
            self._lock.release()

    def _after_in_child(self) -> None:
        if self._fork.waited:
            self._lock.release()
        else:  # its thread does not exist here
            self._lock = threading.RLock()


planning_lock = PlanningLock()
