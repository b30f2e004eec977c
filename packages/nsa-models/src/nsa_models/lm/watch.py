"""Watch: notice that another process of a training ended, and end this one with its name.

A process that is killed cannot say so, and the others would wait for it in a collective: in gloo
until an error without its name, in NCCL for minutes. A thread of each process therefore counts in
the store of torchrun, and looks at the counts of the others. The thread counts while the main
thread waits, so processes that wait for each other are not noticed; the timeout of the collective
(:data:`nsa_models.lm.parallel.TIMEOUT`) ends them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from nsa_core.errors import NSAError
from nsa_core.util.text import describe_error
from nsa_models.lm.parallel import World

_EVERY_S = 0.5
# A process whose main thread keeps the lock of Python, for example while it writes a large file,
# counts late.
SILENT_S, SILENT_AFTER_ERROR_S = 25.0, 4.0
# An error that all processes meet, such as a refused option, ends each of them by itself.
COMMON_ERROR_S = 3.0
ENDED = " ended: "  # in the reason of a process that ended by itself
_LEFT, _COUNT = "nsa-watch/left", "nsa-watch/count"
_STORE_TIMEOUT = timedelta(seconds=10)

# Called with the index of a lost process, or -1 for torchrun itself, and with the reason.
End = Callable[[int, str], None]


class Watch:
    """A context with a thread that watches the processes of a training.

    The watch tells the others of an error of the block. After a signal, and after an error
    of PyTorch such as that of a collective whose other side is gone, it waits a while to see
    whether another process is lost, because torchrun ends all processes when one fails.

    Args:
        store: A store of this process's own: a call blocks other users of the same one.
        rank: Index of this process.
        size: Number of processes.
        end: Called if another process ended before its time; it ends this one.
    """

    def __init__(self, store: Store, rank: int, size: int, end: End) -> None:
        self._store, self._rank, self._size, self._end = store, rank, size, end
        self._silent_s, self._left = SILENT_S, set[int]()
        self._stopped, self._all_left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="nsa-watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            self.leave()
            self.await_end()
        elif error is not None:
            if isinstance(error, RuntimeError) and not isinstance(error, NSAError):
                self.await_end()
            self.leave(describe_error(error))
        else:
            self.leave()
        self.stop()

    def leave(self, reason: str = "") -> None:
        """Tell the others why this process ends; "" is its regular end."""
        with contextlib.suppress(RuntimeError):  # the store ended first
            self._store.set(f"{_LEFT}/{self._rank}", reason or _LEFT)

    def await_end(self) -> None:
        """Wait until a lost process ends this one; return if all others left, or go on."""
        self._silent_s = SILENT_AFTER_ERROR_S
        until = time.monotonic() + 2 * SILENT_AFTER_ERROR_S
        while not self._all_left.is_set() and time.monotonic() < until:
            # torchrun sends SIGTERM to all processes when one is lost, which may raise here.
            with contextlib.suppress(KeyboardInterrupt):
                self._all_left.wait(timeout=_EVERY_S)

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        others = [rank for rank in range(self._size) if rank != self._rank]
        counts: dict[int, str] = dict.fromkeys(others, "")
        heard = dict.fromkeys(others, time.monotonic())
        count = 0
        while not self._stopped.wait(_EVERY_S):
            count += 1
            try:
                self._store.set(f"{_COUNT}/{self._rank}", str(count))
                reasons = {rank: self._reason(rank, counts, heard) for rank in others}
            except RuntimeError:
                reasons = {-1: "torchrun, which started the processes, ended"}
            if self._stopped.is_set():
                return
            for rank, reason in reasons.items():
                if not reason:
                    continue
                if rank in self._left and self._stopped.wait(COMMON_ERROR_S):
                    return
                self._end(rank, reason)
                return
            if self._left.issuperset(others):
                self._all_left.set()
                return

    def _reason(self, rank: int, counts: dict[int, str], heard: dict[int, float]) -> str:
        """Return why a process is lost; "" if it is not."""
        name, now = f"process {rank} of {self._size}", time.monotonic()
        if self._store.check([f"{_LEFT}/{rank}"]):
            reason = self._store.get(f"{_LEFT}/{rank}").decode(errors="replace")
            self._left.add(rank)
            return "" if reason == _LEFT else f"{name}{ENDED}{reason}"
        if self._store.check([f"{_COUNT}/{rank}"]):
            count = self._store.get(f"{_COUNT}/{rank}").decode()
            if count != counts[rank]:
                counts[rank], heard[rank] = count, now
        silent = now - heard[rank]
        if silent < self._silent_s:
            return ""
        return f"{name} was killed or is stuck: nothing heard of it for {silent:.0f} s"


def watching(world: World, end: End) -> Watch:
    """Return a context in which the processes of torchrun are watched, through its store."""
    store = next(iter(rendezvous("env://", world.rank, world.size, timeout=_STORE_TIMEOUT)))[0]
    return Watch(store, world.rank, world.size, end)
