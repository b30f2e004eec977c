"""Jobs judged by several processes at once.

On a GPU most of a run is compilers, one after the other, and on the CPU most of it is the float64
truth: a process makes use of one core. A crash, and what it leaves of CUDA, stays with the process
that had it; jobs are handed out one by one, so that there is no doubt which that was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from collections.abc import Generator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from nsa_core.dispatch.trial import fate
from nsa_core.dtypes import dtype_name
from nsa_core.errors import BackendUnavailable, NSAError
from nsa_core.util.interruption import Interruption, kept_from_children
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding
from nsa_verify.run.schedule import Schedule
from nsa_verify.run.suite import Job, Judged, judge_one, shared_truths

_Task = tuple[int, int]  # a job and a combination
_spawning = multiprocessing.get_context("spawn")  # a fork cannot use CUDA


@dataclasses.dataclass
class _Worker:
    number: int  # its successor's, too: jobs are handed out by number
    process: SpawnProcess
    task: _Task
    started: bool = False


def spread(
    combinations: Sequence[Combination], todo: Sequence[Job], processes: int, stop: Interruption
) -> Generator[Judged]:
    """Run every job on every combination, in any order.

    One process runs a job on all combinations in a row, because it remembers their truths.

    Once ``stop`` has come nothing new begins. A process that dies is a red finding, and has a
    successor unless it died before it began.

    Raises:
        InvalidInput, BackendUnavailable: as a job raises them.
        BackendUnavailable: no process is left, and jobs are.
    """
    pool = _Pool(combinations, todo)
    why = ""
    try:
        for number in range(processes):
            pool.start(number)
        while pool.workers:
            for connection in wait(list(pool.workers)):
                assert isinstance(connection, Connection)
                worker = pool.workers[connection]
                try:
                    said: Judged | NSAError | None = connection.recv()
                except (EOFError, OSError):
                    del pool.workers[connection]
                    why = _end_of(worker)
                    # Without a successor nobody runs the job on the combinations behind this one,
                    # either.
                    for combination in range(
                        worker.task[1], worker.task[1] + 1 if worker.started else len(combinations)
                    ):
                        yield _lost(worker, combination, todo, why)
                    if worker.started and not stop.came:
                        pool.start(worker.number, worker.task)
                    continue
                worker.started = True
                if isinstance(said, NSAError):
                    raise said
                if said is not None:
                    yield said
                    pool.go_on(connection, stop)
        if not stop.came and pool.following(processes):
            raise BackendUnavailable(
                f"no process is left to judge in: the last one {why}; judge in this one alone"
            )
    finally:
        pool.end()


class _Pool:
    """The processes that judge, each behind its pipe."""

    def __init__(self, combinations: Sequence[Combination], todo: Sequence[Job]) -> None:
        self._given = (combinations, todo)
        self._schedule = Schedule(todo)
        self._processes: list[SpawnProcess] = []
        self.workers: dict[Connection, _Worker] = {}

    def following(self, number: int, task: _Task | None = None) -> _Task | None:
        """What worker ``number`` does after ``task``; None: nothing is left."""
        if task and task[1] + 1 < len(self._given[0]):
            return task[0], task[1] + 1
        job = self._schedule.take(number)
        return None if job is None else (job, 0)

    def start(self, number: int, after: _Task | None = None) -> None:
        """Start a process for what follows ``after``, if anything does."""
        task = self.following(number, after)
        if task is None:
            return
        ours, theirs = _spawning.Pipe()
        process = _spawning.Process(target=_work, args=(theirs, *self._given), daemon=True)
        # starting the first process would, and unblock the signals
        resource_tracker.ensure_running()
        with kept_from_children():
            process.start()
        theirs.close()
        self._processes.append(process)
        self.workers[ours] = _Worker(number, process, task)
        _hand(ours, task)

    def go_on(self, connection: Connection, stop: Interruption) -> None:
        """Hand the worker its next job, or let it leave."""
        worker = self.workers[connection]
        task = None if stop.came else self.following(worker.number, worker.task)
        if task is None:
            del self.workers[connection]
            connection.close()
        else:
            worker.task = task
            _hand(connection, task)

    def end(self) -> None:
        """End every process, whatever it does."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _hand(connection: Connection, task: _Task) -> None:
    with contextlib.suppress(OSError):  # it died meanwhile, which its end of the pipe tells next
        connection.send(task)


def _end_of(worker: _Worker) -> str:
    worker.process.join(10)  # its pipe closes first
    if worker.process.exitcode is None:
        worker.process.kill()
        worker.process.join()
    status = worker.process.exitcode or 0
    return fate(status, "in this check" if worker.started else "while it started")


def _lost(worker: _Worker, combination: int, todo: Sequence[Job], why: str) -> Judged:
    job = worker.task[0]
    detail = why if why.startswith("killed") else f"{why}; what it said is on stderr"
    lost = todo[job]
    finding = Finding(
        lost.name, "", lost.case.name, dtype_name(lost.dtype), "run", False, detail=detail
    )
    return Judged(job, combination, [finding], 0.0)


def _work(connection: Connection, combinations: Sequence[Combination], todo: Sequence[Job]) -> None:
    """Body of a process: judge what comes until nobody sends; errors that no job expects end it,
    with a traceback.
    """
    torch.set_num_threads(1)
    for combination in combinations[:1]:
        torch.zeros(1, device=combination.device)  # a GPU that takes no more processes refuses here
    with (
        shared_truths(combinations),
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
    ):
        connection.send(None)
        while True:
            task: _Task = connection.recv()
            try:
                connection.send(judge_one(combinations, todo, task))
            except NSAError as error:
                connection.send(error)
