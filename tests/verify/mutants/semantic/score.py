"""Find the check of `nsa verify` that kills each semantic mutant."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from nsa_core.contract import SLOTS, import_named
from nsa_core.dtypes import dtype_name
from nsa_core.plan.registry import discover
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.run import suite
from semantic.model import (
    FUNCTIONS,
    SemanticMutant,
    View,
    faulty_spec,
    healthy_spec,
    view_of,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclasses.dataclass(frozen=True)
class Kill:
    """The first failed finding of a mutant.

    Attributes:
        job: Name of the check.
        case: Name of the job's case.
        dtype: Name of the job's dtype; that of a shrunk finding may differ.
        finding: The finding.
        tried: Number of jobs in which the mutant's fault could act, this one included.
        seconds: CPU time of these jobs.
    """

    job: str
    case: str
    dtype: str
    finding: Finding
    tried: int
    seconds: float


@dataclasses.dataclass
class Score:
    """The result of a preset on a set of mutants.

    Attributes:
        kills: The kill of each killed mutant, by name.
        survivors: The other mutants, with the number of jobs in which their fault could act.
        seconds_of_check: CPU time of the healthy backend in each check.
        seconds: CPU time of the healthy backend in all checks that ran.
    """

    kills: dict[str, Kill] = dataclasses.field(default_factory=dict)
    survivors: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds_of_check: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def kills_of_check(self) -> dict[str, int]:
        """Return the number of kills of each check, the most first."""
        checks = [kill.job for kill in self.kills.values()]
        return {name: checks.count(name) for name in sorted(set(checks), key=checks.count)[::-1]}


def default_jobs(preset: str) -> list[suite.Job]:
    """Return the jobs of a preset in all dtypes, as `nsa verify` runs them on this backend."""
    return suite.jobs(preset, DTYPES)


def combination_of(mutant: SemanticMutant) -> Combination:
    """Return the combination that runs the mutant's backend in every slot."""
    registry = discover().with_backend(faulty_spec(mutant))
    return Combination(dict.fromkeys(SLOTS, mutant.backend), registry=registry)


class Spy:
    """A healthy backend that records which mutants' faults could act in its calls.

    A mutant whose fault cannot act in a job computes what the healthy backend computes there, so
    the job need not run on it.
    """

    def __init__(self, mutants: Iterable[SemanticMutant]) -> None:
        self.waiting = {mutant.name: mutant for mutant in mutants}
        self.acted: set[str] = set()
        spec, slots = healthy_spec(), {}
        for slot, functions in spec.slots.items():
            paths = {}
            for phase in ("forward", "backward", "decode"):
                if path := getattr(functions, phase):
                    setattr(FUNCTIONS, f"spy_{slot}_{phase}", self._wrap(slot, phase, path))
                    paths[phase] = f"{FUNCTIONS.__name__}:spy_{slot}_{phase}"
            slots[slot] = dataclasses.replace(functions, **paths)
        name = f"spy_{id(self)}"  # operators stay defined for the life of the process
        spec = dataclasses.replace(spec, name=name, slots=slots)
        self.combination = Combination(
            dict.fromkeys(SLOTS, name), registry=discover().with_backend(spec)
        )

    def _wrap(self, slot: str, phase: str, path: str) -> Callable[..., Any]:
        healthy = import_named(path)

        def function(*tensors: Any, call: Any) -> Any:
            view = view_of(slot, phase, healthy, tensors, call)
            self._record(view)
            return healthy(*tensors, call=call)

        return function

    def _record(self, view: View) -> None:
        for mutant in self.waiting.values():
            if (
                (mutant.slot, mutant.phase) == (view.slot, view.phase)
                and mutant.name not in self.acted
                and mutant.acts(view)
            ):
                self.acted.add(mutant.name)


def failure(job: suite.Job, combination: Combination) -> Finding | None:
    """Return the first failed finding of ``job``, or None."""
    return next((f for f in job.run(combination) if f.ok is False), None)


def score(mutants: Sequence[SemanticMutant], todo: Sequence[suite.Job]) -> Score:
    """Run ``todo`` on ``mutants`` until the first failure of each."""
    result, spy = Score(), Spy(mutants)
    tried = dict.fromkeys(spy.waiting, 0)
    spent = dict.fromkeys(spy.waiting, 0.0)
    combinations: dict[str, Combination] = {}
    for job in todo:
        if not spy.waiting:
            break
        spy.acted.clear()
        # The spy and the mutants share the truths of one job; all truths would take gigabytes.
        with suite.shared_truths([spy.combination, spy.combination]):
            started = time.process_time()
            healthy = failure(job, spy.combination)
            assert healthy is None, f"the healthy backend fails: {healthy}"
            elapsed = time.process_time() - started
            result.seconds_of_check[job.name] = result.seconds_of_check.get(job.name, 0) + elapsed
            result.seconds += elapsed
            for name in [n for n in spy.waiting if n in spy.acted]:
                combination = combinations.setdefault(name, combination_of(spy.waiting[name]))
                started = time.process_time()
                finding = failure(job, combination)
                spent[name] += time.process_time() - started
                tried[name] += 1
                if finding is not None:
                    result.kills[name] = Kill(
                        job.name,
                        job.case.name,
                        dtype_name(job.dtype),
                        finding,
                        tried[name],
                        spent[name],
                    )
                    del spy.waiting[name], combinations[name]
    result.survivors = {name: tried[name] for name in spy.waiting}
    return result
