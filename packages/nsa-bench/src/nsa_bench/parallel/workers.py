"""The workers of all ranks, as seen from the main process of one rank.

A rank that runs out of memory inside a call leaves the others waiting in a collective, on a GPU
without an error for many minutes. So no main process uses the GPU or NCCL: the main processes
only talk to each other over gloo, and each has a worker that computes. As soon as one worker fails,
or at a limit, all main processes end their workers and start new ones.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from nsa_bench.parallel.settings import ParallelSettings
from nsa_bench.parallel.worker import OUT_OF_MEMORY, Answer, Setup, serve
from nsa_bench.timing import FAILED, INTERRUPTED, LATE, NOT_MEASURED
from nsa_core.plan.trial import describe_exit
from nsa_core.util.interruption import Interruption
from nsa_verify.isolation import children

_POLL_S = 0.02
# A task may take this much longer than its cell limit: a worker starts, joins the others and
# compiles kernels, and the last call ends.
START_S = {"cuda": 150.0, "cpu": 60.0}
_GRACE_S = 3.0  # after another rank failed, a worker may take this long to answer by itself
_LAST_S = 2.0  # a task that began before the end of the run's time may take this much longer


class Workers:
    """Runs tasks on the workers of all ranks; every rank makes the same calls.

    Args:
        settings: The settings of the run.
        stop: Reports an interruption of this process.
        deadline: Value of time.monotonic() on rank 0 at which the run's time is over.
    """

    def __init__(self, settings: ParallelSettings, stop: Interruption, deadline: float) -> None:
        self.settings, self.rank = settings, dist.get_rank()
        self._stop, self._deadline = stop, deadline
        self._process: Any = None
        self._connection: Any = None
        self._tasks = self._generation = 0
        children.preload([serve.__module__])  # while the ranks find each other
        port = [0]
        if self.rank == 0:
            self._store = TCPStore("localhost", 0, None, True, wait_for_workers=False)
            port = [self._store.port]
        dist.broadcast_object_list(port)
        (self._port,) = port
        if self.rank != 0:
            self._store = TCPStore("localhost", self._port, None, False)

    def run(self, task: Any, *, only: int | None = None) -> list[Answer]:
        """Run a task on all workers, or on that of rank ``only``; return the answers of all ranks.

        A rank that does not take part has an empty answer. If a rank fails, all workers end.
        """
        return self.run_each([task if only in (None, r) else None for r in self._ranks])

    def run_each(self, tasks: list[Any]) -> list[Answer]:
        """Run a task on each rank, or None; return the answers of all ranks."""
        self._tasks += 1
        state: list[Any] = [*self._limit(), self._stop.received]
        dist.broadcast_object_list(state)
        limit_s, too_long, interrupted = state
        if interrupted or limit_s <= 0:
            reason = INTERRUPTED if interrupted else LATE
            return [Answer(reason=reason)] * self.settings.ranks
        task = tasks[self.rank]
        alone = sum(t is not None for t in tasks) == 1
        answer = Answer() if task is None else self._answer(task, limit_s, too_long, alone)
        answers: list[Any] = [None] * self.settings.ranks
        dist.all_gather_object(answers, answer)
        if any(a.reason for a in answers):
            self.end()
        return answers

    def end(self) -> None:
        """End the worker of this rank at once; the next task starts another one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = None
        self._generation += 1

    @property
    def _ranks(self) -> range:
        return range(self.settings.ranks)

    def _limit(self) -> tuple[float, str]:
        """Return the seconds that a task may take, and the reason if it takes longer."""
        left = self._deadline - time.monotonic()
        most = self.settings.cell_limit_s + START_S[self.settings.device]
        if left + _LAST_S < most:
            return (left + _LAST_S if left > 0 else 0.0), LATE
        return most, f"{NOT_MEASURED}: it took longer than {most:g} s"

    def _start(self) -> None:
        self._connection, child_end = children.processes.Pipe()
        name = f"workers-{self._generation}"
        setup = Setup(self.rank, self.settings, self._port, name)
        self._process = children.start(serve, child_end, setup)
        child_end.close()

    def _answer(self, task: Any, limit_s: float, too_long: str, alone: bool) -> Answer:
        """Return the answer of this rank's worker; tell the other ranks if it fails."""
        end, key = time.monotonic() + limit_s, f"failed-{self._tasks}"
        if self._process is None:
            self._start()
        try:
            self._connection.send(task)
            answer = self._wait(end, too_long, key)
        except (EOFError, OSError):
            status = children.end_status(self._process)
            answer = Answer(reason=f"{FAILED}: {describe_exit(status, 'in a worker')}")
        if answer.reason and not alone:
            self._store.set(key, str(self.rank))
        return answer

    def _wait(self, end: float, too_long: str, key: str) -> Answer:
        while not self._connection.poll(_POLL_S):
            if self._stop.received:
                return self._ended(INTERRUPTED)
            if time.monotonic() > end:
                return self._ended(too_long)
            if self._store.check([key]):
                if self._connection.poll(_GRACE_S):
                    break
                rank = self._store.get(key).decode()
                return dataclasses.replace(self._ended(f"rank {rank} failed"), follows=True)
        answer: Answer = self._connection.recv()
        return answer

    def _ended(self, reason: str) -> Answer:
        self._process.kill()
        return Answer(reason=reason)


def reason_of(answers: list[Answer]) -> str:
    """Return why a task has no result, with the ranks that failed; empty if all succeeded.

    A rank whose memory ran out is the cause of all other failures.
    """
    failed = {rank: a for rank, a in enumerate(answers) if a.reason}
    causes = (
        {r: a for r, a in failed.items() if a.reason == OUT_OF_MEMORY}
        or {r: a for r, a in failed.items() if not a.follows}
        or failed
    )
    ranks: dict[str, list[int]] = {}
    for rank, answer in causes.items():
        ranks.setdefault(answer.reason, []).append(rank)
    return "; ".join(
        reason
        if len(where) == len(answers) or reason.startswith(NOT_MEASURED)
        else f"{reason} on rank {', '.join(map(str, where))}"
        for reason, where in ranks.items()
    )


def control_group(limit_s: float) -> None:
    """Connect the main processes that torchrun started, over gloo.

    Args:
        limit_s: Longest time that a rank waits for another one, in seconds.
    """
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=limit_s))
