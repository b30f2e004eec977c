"""Run jobs in several worker processes.

One process uses one core: on a GPU most of the time goes into compilation, on the CPU into the
float64 truth. A crash affects only its own worker, and a worker in which a kernel has made the GPU
unusable is replaced. Jobs are assigned one at a time, so the job of a crashed worker is known.
Backends of other distributions run in workers only, each job with a time limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from nsa_core.errors import BackendUnavailable, NSAError
from nsa_core.plan.trial import describe_exit
from nsa_core.util.interruption import Interruption
from nsa_verify.checks.calls import Call, calls_of
from nsa_verify.isolation import children, gpu_context
from nsa_verify.isolation.activity import last_activity, record_activity
from nsa_verify.isolation.call_guard import faults_outside_calls
from nsa_verify.isolation.captured_output import capture_output, forget_output
from nsa_verify.problems.combination import Combination
from nsa_verify.run.schedule import Schedule
from nsa_verify.run.suite import Job, JobResult, judge_one, shared_truths

_Task = tuple[int, int]  # (job index, combination index)
_POLL_S = 1.0  # a worker whose pipe a process of the kernel holds open is found after this time
MAX_TIMEOUTS = 3  # a function that hung in so many cases of a combination is not called again


@dataclasses.dataclass
class _Worker:
    number: int  # key in the schedule; a replacement keeps it
    process: Any
    task: _Task
    folder: Path  # its captured output
    started: bool = False
    deadline: float = float("inf")


def spread(
    combinations: Sequence[Combination],
    todo: Sequence[Job],
    processes: int,
    stop: Interruption,
    job_limit_s: float | None = None,
) -> Generator[JobResult]:
    """Run every job on every combination, in any order.

    A worker runs a job on all combinations in turn, because it caches their truths. Once ``stop``
    is set, the workers end. A worker that dies, or whose job exceeds its limit, becomes a failed
    finding. It is replaced unless it died before it started. A worker whose GPU has become unusable
    is replaced after its result.

    Args:
        combinations: Combinations to judge.
        todo: Jobs to run.
        processes: Number of workers.
        stop: Reports an interruption.
        job_limit_s: Seconds after which a job's worker is ended; None for jobs without a
            third-party backend, whose errors end the run.

    Raises:
        InvalidInput: A job raised it.
        BackendUnavailable: A job raised it, or every worker died before the last job.
    """
    with tempfile.TemporaryDirectory(prefix="nsa-", ignore_cleanup_errors=True) as folder:
        pool = _Pool(combinations, todo, Path(folder), job_limit_s)
        why = ""
        try:
            for number in range(processes):
                pool.start(number)
            while pool.workers and not stop.received:
                for connection in pool.events():
                    worker = pool.workers[connection]
                    try:
                        message = pool.receive(connection)
                    except (EOFError, OSError):
                        del pool.workers[connection]
                        why = pool.end_reason(worker)
                        # Without a replacement, the job also fails on the remaining combinations.
                        for combination in range(
                            worker.task[1],
                            worker.task[1] + 1 if worker.started else len(combinations),
                        ):
                            yield _failed(todo, (worker.task[0], combination), why)
                        if worker.started:
                            pool.start(worker.number, worker.task)
                        continue
                    worker.started = True
                    if isinstance(message, NSAError):
                        raise message
                    if message is not None:
                        yield message
                        if message.gpu_lost:
                            pool.replace(connection)
                            continue
                        pool.assign_next(connection)
                    worker.deadline = pool.new_deadline()
                for task, reason in pool.take_skipped():
                    yield _failed(todo, task, reason)
            if not stop.received and pool.next_task(processes):
                raise BackendUnavailable(
                    f"no process is left to judge in: the last one {why}; set processes=1 (--jobs"
                    " 1)"
                )
            for task, reason in pool.take_skipped():
                yield _failed(todo, task, reason)
        finally:
            pool.end()


class _Pool:
    """The worker processes, by their pipes."""

    def __init__(
        self,
        combinations: Sequence[Combination],
        todo: Sequence[Job],
        folder: Path,
        job_limit_s: float | None,
    ) -> None:
        self._arguments = (combinations, todo, job_limit_s is not None)
        self._schedule = Schedule(todo)
        self._processes: list[Any] = []
        self._folder, self._limit_s = folder, job_limit_s
        # combination -> function that hung, None: unknown -> the cases
        self._hung: dict[int, dict[Call | None, set[tuple[str, torch.dtype]]]] = defaultdict(dict)
        self._skipped: list[tuple[_Task, str]] = []
        self.workers: dict[Connection, _Worker] = {}
        children.preload([__name__])

    def new_deadline(self) -> float:
        """Return the time at which a job that starts now exceeds its limit."""
        return float("inf") if self._limit_s is None else time.monotonic() + self._limit_s

    def events(self) -> list[Connection]:
        """Wait for messages; return the pipes of workers with a message, or that have ended."""
        ready: list[Any] = wait(list(self.workers), timeout=_POLL_S)
        now = time.monotonic()
        ended = [
            connection
            for connection, worker in self.workers.items()
            if connection not in ready
            and (worker.process.exitcode is not None or now > worker.deadline)
        ]
        return ready + ended

    def receive(self, connection: Connection) -> JobResult | NSAError | None:
        """Return the message of a worker.

        Raises:
            EOFError, OSError: The worker has ended, or its job exceeded its limit.
        """
        if not connection.poll():
            raise EOFError
        message: JobResult | NSAError | None = connection.recv()
        return message

    def end_reason(self, worker: _Worker) -> str:
        """End a worker that died or took too long, and return the reason."""
        if self._limit_s is not None and time.monotonic() > worker.deadline:
            worker.process.kill()
            worker.process.join()
            hung = self._hung[worker.task[1]]
            cases = hung.setdefault(_hung_call(worker.folder), set())
            cases.add(self._case_of(worker.task))
            why = f"did not end within {self._limit_s:g} s"
        else:
            doing = "in this check" if worker.started else "while it started"
            why = describe_exit(children.end_status(worker.process), doing)
        return children.describe_end(why, worker.folder)

    def next_task(self, number: int, task: _Task | None = None) -> _Task | None:
        """Return the task of worker ``number`` after ``task``, or None if no task is left.

        If a function of a backend hung, other tasks that call it are skipped on that case, and on
        all cases once it hung in too many of them.
        """
        while True:
            if task and task[1] + 1 < len(self._arguments[0]):
                task = task[0], task[1] + 1
            else:
                job = self._schedule.take(number)
                if job is None:
                    return None
                task = job, 0
            reason = self._reason_to_skip(task)
            if not reason:
                return task
            self._skipped.append((task, reason))

    def _reason_to_skip(self, task: _Task) -> str:
        """Return why ``task`` is not run; "" if it is run."""
        calls = calls_of(self._arguments[1][task[0]].check)
        for call, cases in self._hung[task[1]].items():
            if call is not None and call not in calls:
                continue
            if len(cases) >= MAX_TIMEOUTS:
                which = f"checks of {MAX_TIMEOUTS} cases"
            elif self._case_of(task) in cases:
                which = "a check of this case"
            else:
                continue
            function = f" with slot {call[0]!r}, {call[1]}," if call else ""
            return f"not run: {which}{function} did not end within {self._limit_s or 0:g} s"
        return ""

    def take_skipped(self) -> list[tuple[_Task, str]]:
        """Return the tasks that were skipped since the last call, and the reason of each."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def _case_of(self, task: _Task) -> tuple[str, torch.dtype]:
        job = self._arguments[1][task[0]]
        return job.case.name, job.dtype

    def start(self, number: int, after: _Task | None = None) -> None:
        """Start a worker for the task after ``after``, if a task is left."""
        task = self.next_task(number, after)
        if task is None:
            return
        parent_end, worker_end = children.processes.Pipe()
        folder = self._folder / str(len(self._processes))
        folder.mkdir()
        process = children.start(_work, worker_end, folder, *self._arguments)
        worker_end.close()
        self._processes.append(process)
        self.workers[parent_end] = _Worker(number, process, task, folder)
        _send(parent_end, task)

    def replace(self, connection: Connection) -> None:
        """End a worker whose GPU is unusable, and start another one in its place."""
        worker = self.workers.pop(connection)
        connection.close()
        # The new worker may need the memory of this one, which might hang while it exits.
        worker.process.kill()
        worker.process.join()
        self.start(worker.number, worker.task)

    def assign_next(self, connection: Connection) -> None:
        """Send the worker its next task, or let it exit."""
        worker = self.workers[connection]
        task = self.next_task(worker.number, worker.task)
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


def _hung_call(folder: Path) -> Call | None:
    """Return the function in which the worker of ``folder`` hung; None outside of a kernel."""
    where = last_activity(folder)
    if where is None or where[2] in ("import", "plugin"):
        return None
    return where[1], "decode" if where[2] == "decode" else "prefill"


def _send(connection: Connection, task: _Task) -> None:
    with contextlib.suppress(OSError):  # a worker that died is detected by the next receive
        connection.send(task)


def _failed(todo: Sequence[Job], task: _Task, why: str) -> JobResult:
    """Return the failed result of a task that did not end."""
    return JobResult(*task, [todo[task[0]].failure(why)], 0.0)


def _work(
    connection: Connection,
    folder: Path,
    combinations: Sequence[Combination],
    todo: Sequence[Job],
    isolated: bool,
) -> None:
    """Run tasks from the pipe until it closes.

    Args:
        connection: The pipe.
        folder: Folder for the captured output.
        combinations: Combinations to judge.
        todo: All jobs.
        isolated: Whether every error is a failed finding. The parent has planned already, so that
            no error is the user's.
    """
    capture_output(folder)
    record_activity(folder)
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
            forget_output()
            faults_outside_calls()
            try:
                result = judge_one(combinations, todo, task)
            except NSAError as error:
                failed = _failed(todo, task, f"{type(error).__name__}: {error}")
                failed = dataclasses.replace(failed, gpu_lost=bool(gpu_context.gpu_error()))
                connection.send(failed if isolated else error)
                continue
            # A kernel's call is checked by its guard; the rest are probes, imports and threads.
            if (faults := faults_outside_calls()) and isolated:
                why = "a backend outside of its kernels' calls: " + "; ".join(faults)
                result.findings.append(todo[task[0]].failure(why))
            connection.send(result)
