"""Jobs grouped by the kernels that they launch, so that one worker compiles them."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable, Sequence

from nsa_verify.run.suite import Job, OnStep


class Schedule:
    """Which job each worker takes next.

    A worker takes the jobs of its own group first, then the largest group that nobody has begun,
    then the last job of another worker's group.
    """

    def __init__(self, todo: Sequence[Job]) -> None:
        groups: dict[Hashable, deque[int]] = {}
        for index, job in enumerate(todo):
            groups.setdefault(_kernels(job), deque()).append(index)
        # The largest first: what begins last ends last, alone.
        self._fresh = deque(
            sorted(groups.values(), key=lambda group: -sum(_work(todo[i]) for i in group))
        )
        self._taken: dict[int, deque[int]] = {}

    def take(self, worker: int) -> int | None:
        """The index of the next job of ``worker``; None: none is left."""
        own = self._taken.get(worker)
        if not own and self._fresh:
            own = self._taken[worker] = self._fresh.popleft()
        if own:
            return own.popleft()
        # The first jobs of a group compile; its last ones find most kernels on disk by now.
        most = max(self._taken.values(), key=len, default=None)
        return most.pop() if most else None


def _kernels(job: Job) -> Hashable:
    """Equal for jobs whose kernels have, all but a few, the same constants."""
    config = dataclasses.replace(
        job.case.config, init_blocks=0, local_blocks=0, num_selected_blocks=1
    )
    return config, job.dtype, isinstance(job.check, OnStep)


def _work(job: Job) -> int:
    """Elements of q and o: more of them judge longer, and wider heads compile longer."""
    config, case = job.case.config, job.case
    tokens = (
        sum(job.check.step.lengths) if isinstance(job.check, OnStep) else case.batch * case.tokens
    )
    return tokens * config.n_heads * (config.qk_dim + config.v_dim)
