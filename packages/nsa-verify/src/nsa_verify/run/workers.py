"""Run jobs in this process, or in child processes, for each of which a thread waits.

One process uses one core: on a GPU most of the time goes into compilation, on the CPU into the
float64 truth. A crash ends only its own child, and a child in which a kernel has made the GPU
unusable is replaced. The combinations of a third-party backend run in children of their own, each
job with a time limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
from collections import Counter
from collections.abc import Generator, Sequence

import torch

from nsa_core.dtypes import dtype_name
from nsa_core.errors import BackendUnavailable, NSAError
from nsa_core.util.child import Child, ChildEnded, preload
from nsa_core.util.global_state import take_reports
from nsa_core.util.interruption import Interruption
from nsa_verify.isolation import gpu_context
from nsa_verify.isolation.call_guard import refuse_calls
from nsa_verify.problems.combination import Combination
from nsa_verify.run import PRELOADED
from nsa_verify.run.schedule import Schedule
from nsa_verify.run.suite import Job, JobResult, judge_one, shared_truths

_SILENCE_S = 0.5  # a worker whose child is ended answers sooner
_Task = tuple[int, int]  # (job index, combination index)
MAX_HANGS = 3  # a function that hung in so many jobs of a worker is not called again


class _CannotStart(Exception):
    """A child could not start; the message says why."""


@dataclasses.dataclass(frozen=True)
class _Run:
    """The arguments of :func:`run_tasks`, which all workers share."""

    combinations: Sequence[Combination]
    todo: Sequence[Job]
    stop: Interruption
    job_limit_s: float

    def failed(self, task: _Task, why: str, gpu_lost: bool = False) -> JobResult:
        """Return the failed result of a task that did not end."""
        return JobResult(*task, [self.todo[task[0]].failure(why)], 0.0, gpu_lost=gpu_lost)


def run_tasks(
    combinations: Sequence[Combination],
    todo: Sequence[Job],
    *,
    processes: int,
    stop: Interruption,
    job_limit_s: float = float("inf"),
) -> Generator[JobResult]:
    """Run every job on every combination, in any order.

    A worker runs a job on all combinations in turn, because it caches their truths. Once ``stop``
    is set, no task starts, and those in child processes end. A child that dies, or whose job
    exceeds its limit, becomes a failed finding, and is replaced unless it died before it started.

    Args:
        combinations: Combinations to judge.
        todo: Jobs to run.
        processes: Number of workers. A single one runs in this process.
        stop: Reports an interruption.
        job_limit_s: Seconds after which a job with a third-party backend counts as hanging.

    Raises:
        InvalidInput: A job raised it.
        BackendUnavailable: A job raised it, or no child process can start.
    """
    run = _Run([c.for_child() for c in combinations], todo, stop, job_limit_s)
    plugins = [c.plugins() for c in combinations]
    if processes > 1 or any(plugins):
        preload(*PRELOADED)
    if processes > 1:
        yield from _in_threads(run, plugins, processes)
        return
    worker = _Worker(run, plugins, in_this_process=True)
    with contextlib.closing(worker), shared_truths(combinations):
        for task in itertools.product(range(len(todo)), range(len(combinations))):
            try:
                result = worker.judge(task)
            except _CannotStart as error:
                raise BackendUnavailable(f"no process can start: {error}") from None
            yield result
            if stop.received:
                return


def _in_threads(
    run: _Run, plugins: Sequence[tuple[str, ...]], processes: int
) -> Generator[JobResult]:
    """Run the tasks in ``processes`` threads, each with child processes of its own."""
    schedule, lock = Schedule(run.todo), threading.Lock()
    results: queue.SimpleQueue[JobResult | NSAError | None] = queue.SimpleQueue()
    workers = [_Worker(run, plugins) for _ in range(processes)]
    is_closed = threading.Event()
    why = ""  # no child process can start

    def take(number: int) -> int | None:
        with lock:
            return schedule.take(number)

    def work(number: int) -> None:
        nonlocal why
        worker = workers[number]
        try:
            while not worker.why and (job := take(number)) is not None:
                for task in [(job, index) for index in range(len(run.combinations))]:
                    if run.stop.received or is_closed.is_set():
                        return
                    try:
                        results.put(worker.judge(task))
                    except _CannotStart as error:
                        worker.why = why = str(error)
                        results.put(run.failed(task, why))
        except NSAError as error:
            results.put(error)
        finally:
            worker.close()  # here too: the other call misses a child that is starting
            results.put(None)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(processes)]
    for thread in threads:
        thread.start()
    left = processes
    try:
        while left:
            try:
                result = results.get(timeout=_SILENCE_S)
            except queue.Empty:
                if run.stop.received:  # the others wait for a child that starts
                    return
                continue
            if isinstance(result, NSAError):
                raise result
            if result is None:
                left -= 1
            else:
                yield result
        if why and not run.stop.received and take(processes) is not None:
            raise BackendUnavailable(f"no process can start: {why}; set processes=1 (--jobs 1)")
    finally:
        is_closed.set()
        for worker in workers:
            worker.close()
        for thread in threads if not run.stop.received else ():
            thread.join()


class _Worker:
    """Judges one task at a time; each set of third-party backends has a child process.

    Args:
        run: The combinations and jobs.
        plugins: The third-party backends of each combination.
        in_this_process: Judge the other combinations in this process.
    """

    def __init__(
        self, run: _Run, plugins: Sequence[tuple[str, ...]], in_this_process: bool = False
    ) -> None:
        self._run, self._plugins, self._in_this_process = run, plugins, in_this_process
        self._children: dict[tuple[str, ...], Child] = {}
        self._hangs: Counter[tuple[str, ...]] = Counter()
        self._culprit: Job | None = None  # it made the GPU unusable in this process
        self.why = ""  # why its child process could not start

    def judge(self, task: _Task) -> JobResult:
        """Run a task.

        Raises:
            _CannotStart: A child process cannot start; not tried again.
            NSAError: A job without a third-party backend raised it.
        """
        plugins = self._plugins[task[1]]
        if not plugins and self._in_this_process:
            return self._judge_here(task)
        limit_s = self._run.job_limit_s if plugins else float("inf")
        child = self._children.get(plugins) or self._start(plugins)
        try:
            result: JobResult = child.call(
                _judge, task, limit_s=limit_s, doing="in this check", stop=self._run.stop
            )
        except ChildEnded as ended:
            del self._children[plugins]
            if ended.hung and ended.where:
                self._hangs[ended.where] += 1
            return self._run.failed(task, str(ended))
        if result.gpu_lost:
            # A new child may need the memory of this one, which might hang while it exits.
            self._children.pop(plugins).end()
        return result

    def close(self) -> None:
        """End the child processes."""
        for child in [*self._children.values()]:
            child.end()

    def _start(self, plugins: tuple[str, ...]) -> Child:
        if self.why:
            raise _CannotStart(self.why)
        names = " or ".join(map(repr, plugins))
        child = self._children[plugins] = Child(f"backend {names}" if plugins else "")
        why = f"it did not end within {self._run.job_limit_s:g} s in {MAX_HANGS} checks"
        refused = {where: why for where, count in self._hangs.items() if count >= MAX_HANGS}
        try:
            call = (_set_up, self._run, bool(plugins), refused)
            child.call(*call, doing="while it started", stop=self._run.stop)
        except NSAError as error:
            del self._children[plugins]
            raise _CannotStart(str(error)) from None
        return child

    def _judge_here(self, task: _Task) -> JobResult:
        if self._culprit is None:
            result = judge_one(self._run.combinations, self._run.todo, task)
            self._culprit = self._run.todo[task[0]] if result.gpu_lost else None
            return result
        job = self._culprit
        return self._run.failed(
            task,
            f"not run: the check {job.name}, {job.case.name}, {dtype_name(job.dtype)}, made the"
            " GPU unusable in this process; set processes=2 (--jobs 2)",
        )


_in_child: list[tuple[_Run, bool]] = []  # of a child process: its run, and whether it is isolated
_truths = contextlib.ExitStack()


def _set_up(run: _Run, isolated: bool, refused: dict[tuple[str, ...], str]) -> None:
    """Prepare a child process; ``isolated``: every error of a job is a failed finding."""
    torch.set_num_threads(1)
    torch.zeros(1, device=run.combinations[0].device)  # a GPU may accept no more processes
    refuse_calls(refused)
    _truths.enter_context(shared_truths(run.combinations))
    _in_child.append((run, isolated))


def _judge(task: _Task) -> JobResult:
    """Run a task in a child process."""
    ((run, isolated),) = _in_child
    take_reports()
    try:
        result = judge_one(run.combinations, run.todo, task)
    except NSAError as error:
        if not isolated:
            raise
        why = f"{type(error).__name__}: {error}"
        return run.failed(task, why, gpu_lost=bool(gpu_context.gpu_error()))
    for report in take_reports():
        result.findings.append(run.todo[task[0]].failure(report))
    return result
