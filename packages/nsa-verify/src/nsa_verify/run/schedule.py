"""Group jobs by the kernels that they launch, so that one worker compiles each kernel."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Hashable, Sequence

from nsa_verify.drawn.jobs import OnDrawn
from nsa_verify.drawn.step import Sequences
from nsa_verify.run.suite import Job, OnStep


class Schedule:
    """The assignment of jobs to workers.

    A worker takes the jobs of its own group first, then the largest group without a worker, then
    the last job of another worker's group.
    """

    def __init__(self, todo: Sequence[Job]) -> None:
        groups: dict[Hashable, deque[int]] = {}
        for index, job in enumerate(todo):
            groups.setdefault(_kernel_key(job), deque()).append(index)
        # Largest first: a large group that starts last would keep one worker busy alone.
        self._unassigned = deque(
            sorted(groups.values(), key=lambda group: -sum(_work(todo[i]) for i in group))
        )
        self._assigned: dict[int, deque[int]] = {}

    def take(self, worker: int) -> int | None:
        """Return the index of the next job of ``worker``, or None if no job is left."""
        own = self._assigned.get(worker)
        if not own and self._unassigned:
            own = self._assigned[worker] = self._unassigned.popleft()
        if own:
            return own.popleft()
        # The first jobs of a group compile its kernels, so its last jobs find them on disk.
        longest = max(self._assigned.values(), key=len, default=None)
        return longest.pop() if longest else None


def _kernel_key(job: Job) -> Hashable:
    """Return a key that is equal for jobs with (almost) the same kernel constants."""
    config = dataclasses.replace(
        job.case.config, init_blocks=0, local_blocks=0, num_selected_blocks=1
    )
    drawn = job.check.drawn if isinstance(job.check, OnDrawn) else None
    return config, job.dtype, isinstance(job.check, OnStep) or isinstance(drawn, Sequences)


# Milliseconds of a check on the CPU: of any case, and per thousand elements of q and o.
_MILLISECONDS = {
    "parity": (80, 0.85),
    "any blocks": (30, 4.9),
    "ties": (19, 4.6),
    "run to run": (115, 2.4),
    "nan storage": (36, 8.7),
    "coverage": (35, 5.9),
    "core gradients": (23, 6.5),
    "causality": (30, 1.0),
    "composition": (37, 0.35),
    "dispatch": (37, 1.6),
    "layer": (300, 0),
    "generated core": (88, 2.1),
    "generated block_attention": (58, 0.28),
    "generated cmp": (26, 0.33),
    "generated select": (27, 0.12),
    "generated sel": (65, 0.23),
    "generated win": (44, 0.46),
    "generated combine": (5, 0.41),
    "partial queries": (29, 0.03),
    "decode": (46, 0.06),
    "decode reads": (20, 2.0),
    "decode ties": (15, 1.6),
    "decode run to run": (40, 0),
    "generated steps": (87, 0.12),
    "block attention decode": (5, 0.13),
    "cache histories": (77, 20),
    "page histories": (200, 21),
}
_FAST = ("core ", "decode fused ")  # beginnings of names


def cost(job: Job) -> float:
    """Estimate the milliseconds of a job on the CPU, from which the time left is estimated."""
    base, of_elements = _MILLISECONDS.get(job.name, (3 if job.name.startswith(_FAST) else 25, 0))
    return base + of_elements * _work(job) / 1000


def _work(job: Job) -> int:
    """Estimate the work as the elements of q and o; wide heads also compile longer."""
    config, case = job.case.config, job.case
    tokens = (
        sum(job.check.step.lengths) if isinstance(job.check, OnStep) else case.batch * case.tokens
    )
    return tokens * config.n_heads * (config.qk_dim + config.v_dim)
