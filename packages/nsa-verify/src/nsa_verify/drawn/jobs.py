"""The jobs of drawn cases, steps and histories, and the count of the cases a backend refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from nsa_core.contract import SLOTS
from nsa_core.dtypes import dtype_name
from nsa_verify.drawn.case import SlotCase
from nsa_verify.drawn.draw import PARTIAL, STEPS, draw
from nsa_verify.drawn.function_levels import FUNCTIONS
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.line import Drawn
from nsa_verify.drawn.parser import parse
from nsa_verify.drawn.shrink import ShrinkBudget, shrink
from nsa_verify.isolation import gpu_context
from nsa_verify.isolation.call_guard import NOT_CALLED
from nsa_verify.problems.cases import Case
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding

# Calls of a slot that are seldom drawn: without a token, a sequence, a document or a query, with
# inputs whose last axis is strided, and with wide heads or odd ones.
_EDGE_SIZES = "l=8 d=4 block=16 n=3 w=24 h=2 groups=2"
_CASE_EDGES = (
    *("tokens=0", "batch=0", "documents=0,0", "documents=61"),
    "tokens=61 batch=2 layout=strided do_layout=strided",
    *(f"tokens=21 dk={width} dv={width}" for width in (65, 96, 320)),
)
_PARTIAL_EDGES = ("tokens=5 first_query=3 queries=0", "documents=3,5 first_query=3 queries=0")
_STEP_EDGES = ("lengths=21,40 new=1,1 dk=320 dv=320",)
# Edges of pages that random histories seldom reach.
PAGE_EDGES = (
    # Two sequences share a page that the first token of their next compression block is in.
    "cache dtype=float64 batch=2 page_size=4 step=5,0 reorder=0,0 step=1,1",
    # A prefill ends with a page, and the padding after it has no page.
    "cache dtype=float64 batch=2 page_size=4 step=8,4",
)
# The sequences of a fork share a page of cmp, which each of them goes on writing.
POOL_EDGES = ("nsa_decode dtype=float64 batch=2 page_size=4 cmp_page=4 step=7,0 fork=0,1 step=1,1",)
_HISTORY_SECONDS = 20.0  # for shrinking; a history takes longer than a case
_Job = TypeVar("_Job")
_NewJob = Callable[[str, Any, Any, torch.dtype], _Job]  # of a name, a check, a case and a dtype


@dataclasses.dataclass(frozen=True)
class OnDrawn:
    """Adapter that runs a drawn case, step or history as a check of a case.

    Attributes:
        drawn: What the line describes.
        budget: Time for shrinking that all of a kind share.
        if_declared: Leave a case with first_query out where no backend declares such queries.
    """

    drawn: Drawn
    budget: ShrinkBudget
    if_declared: bool = False

    def __call__(
        self, combination: Combination, case: Case, dtype: torch.dtype
    ) -> Iterator[Finding]:
        """Judge it; a failing one is shrunk first. ``case`` and ``dtype`` are its own.

        On a GPU that is unusable in this process, every smaller case would fail too.
        """
        drawn = self.drawn
        partial = isinstance(drawn, SlotCase) and drawn.partial and drawn.kernel
        if self.if_declared and partial and not combination.declares_partial(partial):
            return
        findings = judge(combination, drawn)
        slots = _failed_slots(findings)
        if slots and self.budget.seconds > 0 and not gpu_context.gpu_error():
            # A failure of another slot would be another fault.
            smallest = shrink(
                drawn,
                lambda smaller: bool(slots & _failed_slots(judge(combination, smaller))),
                self.budget,
            )
            findings = findings if smallest == drawn else judge(combination, smallest)
        yield from findings


def _failed_slots(findings: list[Finding]) -> set[str]:
    """Return the slots with a failure that a smaller case may have; a call left out has none."""
    return {f.slot for f in findings if f.ok is False and NOT_CALLED not in f.detail}


def case_edges(slot: str, dtype: str = "float32") -> list[Drawn]:
    """Return the calls of ``slot`` that are seldom drawn; combine takes whole sequences."""
    edges = _CASE_EDGES + (_PARTIAL_EDGES if slot != "combine" else ())
    return [parse(f"{slot} dtype={dtype} {_EDGE_SIZES} {edge}") for edge in edges]


def step_edges(dtype: str = "float32") -> list[Any]:
    """Return the decode steps that are not drawn."""
    return [parse(f"decode dtype={dtype} {_EDGE_SIZES} {edge}") for edge in _STEP_EDGES]


def case_jobs(
    preset: str, dtypes: Sequence[torch.dtype], seed: int, count: int | None, job: _NewJob[_Job]
) -> list[_Job]:
    """Return one job per drawn case.

    Args:
        preset: "quick", "full" or "interpreter". The slow interpreter has those of functions alone
            unless ``count`` asks for the others.
        dtypes: Dtypes of the cases.
        seed: Seed of the design.
        count: Cases of each slot, and as many with first_query; None takes the whole designs.
        job: Creates a job from its name, check, case and dtype.
    """
    only_functions = preset == "interpreter" and count is None
    kinds = FUNCTIONS if only_functions else (*FUNCTIONS, *SLOTS, *PARTIAL)
    names = [dtype_name(dtype) for dtype in dtypes]
    budgets = {kind: ShrinkBudget() for kind in (*FUNCTIONS, *SLOTS)}
    cases = [
        (f"{case.kind} {case.seed}" if case.partial else f"case {case.seed}", case)
        for kind in kinds
        for case in draw(kind, preset, names, seed=seed, count=count)
    ]
    if names and count is None and not only_functions:
        edges = [case for slot in SLOTS for case in case_edges(slot, names[0])]
        cases += [(f"edge {number}", case) for number, case in enumerate(edges)]
    return [job_of(x, name, job, budgets[x.kind], if_declared=True) for name, x in cases]


def step_jobs(
    preset: str, dtypes: Sequence[torch.dtype], seed: int, job: _NewJob[_Job]
) -> list[_Job]:
    """Return one job per drawn decode step, then one per history; arguments as in case_jobs."""
    names = [dtype_name(dtype) for dtype in dtypes]
    steps = [step for kind in STEPS for step in draw(kind, preset, names, seed=seed)]
    histories = [
        history
        for kind in ("cache", "nsa_decode")
        for history in draw(kind, preset, names, seed=seed)
    ]
    edges = [parse(line) for line in PAGE_EDGES + POOL_EDGES] if histories else []
    wide = step_edges(names[0]) if histories else []
    jobs = []
    for label, seconds, drawn in (
        ("generated", ShrinkBudget().seconds, steps),
        ("step edge", ShrinkBudget().seconds, wide),
        ("history of a page edge", _HISTORY_SECONDS, edges),
        ("history", _HISTORY_SECONDS, histories),
    ):
        budget = ShrinkBudget(seconds)
        jobs += [job_of(x, f"{label} {i}", job, budget) for i, x in enumerate(drawn)]
    return jobs


def job_of(
    drawn: Drawn,
    name: str,
    job: _NewJob[_Job],
    budget: ShrinkBudget,
    *,
    if_declared: bool = False,
) -> _Job:
    """Return the job called ``name``, made by ``job`` as in :func:`case_jobs`."""
    check = OnDrawn(drawn, budget, if_declared)
    return job(drawn.check_name, check, drawn.case(name), drawn.torch_dtype)


@dataclasses.dataclass(frozen=True)
class GeneratedCount:
    """The generated cases of one slot.

    Attributes:
        cases: Number of cases that ran or were refused.
        refused: Number of cases that the probe refused.
        reasons: The distinct reasons of the refusals, most frequent first.
    """

    cases: int
    refused: int
    reasons: list[str]


def count_cases(findings: Sequence[Finding]) -> Mapping[str, GeneratedCount]:
    """Count the generated cases of each slot, and those that the backend refused."""
    cases: dict[str, set[str]] = {}
    refusals: dict[str, list[str]] = {}
    for finding in findings:
        if finding.check != f"generated {finding.slot}":
            continue
        cases.setdefault(finding.slot, set()).add(finding.case)
        if finding.ok is None:
            refusals.setdefault(finding.slot, []).append(finding.detail)
    return {
        slot: GeneratedCount(
            len(names),
            len(refusals.get(slot, ())),
            sorted(set(refusals.get(slot, ())), key=lambda r: -refusals[slot].count(r)),
        )
        for slot, names in cases.items()
    }
