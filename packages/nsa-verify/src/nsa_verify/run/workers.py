"""Run jobs in several worker processes.

One process uses one core: on a GPU most of the time goes into compilation, on the CPU into the
float64 truth. A crash, and the CUDA context that it corrupts, affects only its own worker. Jobs are
assigned one at a time, so the job of a crashed worker is known.
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

from nsa_core.dispatch.trial import describe_exit
from nsa_core.dtypes import dtype_name
from nsa_core.errors import BackendUnavailable, NSAError
from nsa_core.util.interruption import Interruption, signals_blocked_in_children
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding
from nsa_verify.run.schedule import Schedule
from nsa_verify.run.suite import Job, JobResult, judge_one, shared_truths

_Task = tuple[int, int]  # (job index, combination index)
_spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA


@dataclasses.dataclass
class _Worker:
    number: int  # key in the schedule; a replacement keeps it
    process: SpawnProcess
    task: _Task
    started: bool = False


def spread(
    combinations: Sequence[Combination], todo: Sequence[Job], processes: int, stop: Interruption
) -> Generator[JobResult]:
    """Run every job on every combination, in any order.

    A worker runs a job on all combinations in turn, because it caches their truths. Once ``stop``
    is set, no new task starts. A worker that dies becomes a failed finding. It is replaced unless
    it died before it started.

    Raises:
        InvalidInput: A job raised it.
        BackendUnavailable: A job raised it, or every worker died before the last job.
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
                    message: JobResult | NSAError | None = connection.recv()
                except (EOFError, OSError):
                    del pool.workers[connection]
                    why = _exit_reason(worker)
                    # Without a replacement, the job also fails on the remaining combinations.
                    for combination in range(
                        worker.task[1], worker.task[1] + 1 if worker.started else len(combinations)
                    ):
                        yield _lost_result(worker, combination, todo, why)
                    if worker.started and not stop.received:
                        pool.start(worker.number, worker.task)
                    continue
                worker.started = True
                if isinstance(message, NSAError):
                    raise message
                if message is not None:
                    yield message
                    pool.assign_next(connection, stop)
        if not stop.received and pool.next_task(processes):
            raise BackendUnavailable(
                f"no process is left to judge in: the last one {why}; set processes=1 (--jobs 1)"
            )
    finally:
        pool.end()


class _Pool:
    """The worker processes, by their pipes."""

    def __init__(self, combinations: Sequence[Combination], todo: Sequence[Job]) -> None:
        self._arguments = (combinations, todo)
        self._schedule = Schedule(todo)
        self._processes: list[SpawnProcess] = []
        self.workers: dict[Connection, _Worker] = {}

    def next_task(self, number: int, task: _Task | None = None) -> _Task | None:
        """Return the task of worker ``number`` after ``task``, or None if no task is left."""
        if task and task[1] + 1 < len(self._arguments[0]):
            return task[0], task[1] + 1
        job = self._schedule.take(number)
        return None if job is None else (job, 0)

    def start(self, number: int, after: _Task | None = None) -> None:
        """Start a worker for the task after ``after``, if a task is left."""
        task = self.next_task(number, after)
        if task is None:
            return
        parent_end, worker_end = _spawn.Pipe()
        process = _spawn.Process(target=_work, args=(worker_end, *self._arguments), daemon=True)
        # Starting the first process would start the resource tracker and unblock the signals.
        resource_tracker.ensure_running()
        with signals_blocked_in_children():
            process.start()
        worker_end.close()
        self._processes.append(process)
        self.workers[parent_end] = _Worker(number, process, task)
        _send(parent_end, task)

    def assign_next(self, connection: Connection, stop: Interruption) -> None:
        """Send the worker its next task, or let it exit."""
        worker = self.workers[connection]
        task = None if stop.received else self.next_task(worker.number, worker.task)
        if task is None:
            del self.workers[connection]
            connection.close()
        else:
            worker.task = task
            _send(connection, task)

    def end(self) -> None:
        """Kill every worker."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _send(connection: Connection, task: _Task) -> None:
    with contextlib.suppress(OSError):  # a worker that died is detected by the next receive
        connection.send(task)


def _exit_reason(worker: _Worker) -> str:
    """Describe how a worker ended."""
    worker.process.join(10)  # its pipe closes before it exits
    if worker.process.exitcode is None:
        worker.process.kill()
        worker.process.join()
    status = worker.process.exitcode or 0
    return describe_exit(status, "in this check" if worker.started else "while it started")


def _lost_result(worker: _Worker, combination: int, todo: Sequence[Job], why: str) -> JobResult:
    """Return the failed result of a task whose worker died."""
    index = worker.task[0]
    detail = why if why.startswith("killed") else f"{why}; its messages are on stderr"
    job = todo[index]
    finding = Finding(
        job.name, "", job.case.name, dtype_name(job.dtype), "run", False, detail=detail
    )
    return JobResult(index, combination, [finding], 0.0)


def _work(connection: Connection, combinations: Sequence[Combination], todo: Sequence[Job]) -> None:
    """Run tasks from the pipe until it closes; an unexpected error ends the process."""
    torch.set_num_threads(1)
    for combination in combinations[:1]:
        torch.zeros(1, device=combination.device)  # fails on a GPU that accepts no more processes
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
