"""The jobs of `nsa verify` and of the mutation tests: checks on cases, and their order."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported
from nsa_core.util.interruption import is_ctrl_c
from nsa_core.util.text import describe_error
from nsa_verify.checks import (
    core,
    decode_compress,
    decode_fused,
    decode_invariants,
    invariants,
    layer,
    reads,
)
from nsa_verify.checks import slots as checks
from nsa_verify.checks.decode_parity import decode_parity
from nsa_verify.drawn import jobs as drawn
from nsa_verify.drawn.line import Drawn
from nsa_verify.drawn.shrink import ShrinkBudget
from nsa_verify.isolation import gpu_context
from nsa_verify.isolation.call_guard import guarded_calls
from nsa_verify.judge.truth_cache import caching
from nsa_verify.problems.cases import PRESETS, Case
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding, Findings
from nsa_verify.problems.steps import STEPS, Step
from nsa_verify.run.contexts import judging

Check = Callable[[Combination, Case, torch.dtype], Iterator[Finding]]


@dataclasses.dataclass(frozen=True)
class Job:
    """One check on one case in one dtype.

    Attributes:
        name: Name of the check in reports.
        check: The check.
        case: The case.
        dtype: Dtype of q, k and v.
    """

    name: str
    check: Check
    case: Case
    dtype: torch.dtype

    def run(self, combination: Combination) -> list[Finding]:
        """Run the check on ``combination``.

        A request that no backend of the combination accepts gives one finding with ok None. A
        kernel that raises, or breaks a rule of the contract, gives one failed finding.

        Raises:
            InvalidInput: The request is wrong for every backend.
            BackendUnavailable: A backend cannot run on this machine.
        """
        try:
            with guarded_calls():
                return list(self.check(combination, self.case, self.dtype))
        except Unsupported as refusal:
            return [self._findings.finding("", "plan", None, detail=str(refusal))]
        except (BackendUnavailable, InvalidInput):
            raise
        except NSAError as fault:  # a kernel raised, or broke a rule of the contract
            return [self.failure(str(fault))]
        except Exception as fault:  # noqa: BLE001  PyTorch or the judge stumbled over its results
            return [self.failure(describe_error(fault))]

    def failure(self, detail: str) -> Finding:
        """Return the finding of a check that could not be completed.

        That of a drawn case, step or history names its line, which repeats it alone.
        """
        finding = self._findings.finding("", "run", False, detail=detail)
        if isinstance(self.check, drawn.OnDrawn):
            drawn_line = self.check.drawn
            return dataclasses.replace(finding, case=str(drawn_line), slot=drawn_line.slot)
        return finding

    @property
    def _findings(self) -> Findings:
        return Findings(self.name, self.case, self.dtype)


@dataclasses.dataclass(frozen=True)
class _CheckSize:
    """A check, and the largest case on which it runs in each preset.

    Sizes are (tokens x query heads); the tokens of a decode step are those in the cache. Quick runs
    the check in the first ``dtypes`` dtypes.
    """

    name: str
    check: Callable[..., Iterator[Finding]]  # a Check, or a StepCheck
    quick: int
    full: int
    interpreter: int = 1 << 6
    dtypes: int = 4


_CHECKS = (
    _CheckSize("parity", checks.parity, 1 << 20, 1 << 20, 1 << 20),
    _CheckSize("ties", checks.ties, 1 << 10, 1 << 13),
    _CheckSize("any blocks", checks.any_blocks, 1 << 10, 1 << 13),
    _CheckSize("composition", core.composition, 1 << 13, 1 << 15),
    _CheckSize("core gradients", core.core_gradients, 1 << 9, 1 << 14, dtypes=2),
    _CheckSize("causality", invariants.causality, 1 << 11, 1 << 14, dtypes=2),
    _CheckSize("coverage", checks.coverage, 1 << 9, 1 << 13, dtypes=2),
    _CheckSize("poison", invariants.finite_poison, 1 << 11, 1 << 14),
    _CheckSize("nan storage", invariants.nan_storage, 1 << 9, 1 << 13, dtypes=2),
    _CheckSize("run to run", invariants.run_to_run, 1 << 11, 1 << 14, 0, dtypes=2),
    _CheckSize("core poison", core.finite_poison, 1 << 11, 1 << 14),
    _CheckSize("core nan storage", core.nan_storage, 1 << 9, 1 << 13),
    _CheckSize("core run to run", core.run_to_run, 1 << 11, 1 << 14, 0),
    _CheckSize("dispatch", invariants.dispatch, 1 << 9, 1 << 10, dtypes=2),
)

# Cases above a size run the checks of _FIRST, and the others, in so many of the first dtypes. They
# take most of the time, and generated cases cover every dtype.
_LARGE = {"quick": (1 << 10, 2, 1), "full": (1 << 13, 4, 2), "interpreter": (1 << 20, 4, 4)}

# Most faults fail one of these checks, so they run first.
_FIRST = ("parity", "ties", "any blocks", "decode", "decode ties")

StepCheck = Callable[[Combination, Step, torch.dtype], Iterator[Finding]]


@dataclasses.dataclass(frozen=True)
class OnStep:
    """Adapter that runs a check of a decode step as a check of a case."""

    check: StepCheck
    step: Step

    def __call__(
        self, combination: Combination, case: Case, dtype: torch.dtype
    ) -> Iterator[Finding]:
        """Run the check on the step; ``case`` is the case of the step."""
        return self.check(combination, self.step, dtype)


_STEP_CHECKS = (
    _CheckSize("decode", decode_parity, 1 << 20, 1 << 20, 1 << 9),
    _CheckSize("decode ties", decode_invariants.ties, 1 << 10, 1 << 13, 1 << 9),
    _CheckSize("decode fused step", decode_fused.fused_step, 1 << 20, 1 << 20, 1 << 9),
    _CheckSize("decode fused append", decode_fused.fused_append, 1 << 10, 1 << 13, 1 << 9),
    _CheckSize("decode fused gates", decode_fused.fused_gates, 1 << 10, 1 << 13, 1 << 9),
    _CheckSize("decode fused compress", decode_compress.fused_compress, 1 << 10, 1 << 13, 1 << 8),
    _CheckSize("decode run to run", decode_invariants.run_to_run, 1 << 11, 1 << 16, 0),
    _CheckSize("decode page order", decode_invariants.page_order, 1 << 11, 1 << 16, 1 << 8),
    _CheckSize("decode replay", decode_invariants.replayed, 1 << 11, 1 << 16, 1 << 8),
    _CheckSize("decode reads", reads.reads, 1 << 11, 1 << 11, 0),
    _CheckSize("decode dispatch", decode_invariants.dispatch, 1 << 10, 1 << 10, 1 << 8, dtypes=2),
)


def jobs(
    preset: str,
    dtypes: Sequence[torch.dtype],
    *,
    seed: int = 0,
    phase: str = "both",
    cases_per_slot: int | None = None,
) -> list[Job]:
    """List the jobs of a preset: prefill before decode, and small cases before large ones.

    Args:
        preset: "quick", "full", or "interpreter" (for kernels in triton's interpreter, without the
            layer check).
        dtypes: Dtypes of the slot checks. The layer check runs in float64.
        seed: Seed of every case.
        phase: "prefill", "decode" or "both".
        cases_per_slot: Drawn cases of each slot; None takes the whole design of the preset.
    """
    listed: list[Job] = []
    if phase != "decode":
        cases = [dataclasses.replace(c, seed=seed) for c in PRESETS[preset]()]
        listed += layer.jobs_for(preset, seed, Job) if preset != "interpreter" else []
        listed += _jobs(preset, dtypes, _CHECKS, [(c.batch * c.tokens, c, None) for c in cases])
        listed += drawn.case_jobs(preset, dtypes, seed, cases_per_slot, Job)
    if phase != "prefill":
        steps = [
            dataclasses.replace(s, case=dataclasses.replace(s.case, seed=seed))
            for s in STEPS[preset]()
        ]
        listed += _jobs(preset, dtypes, _STEP_CHECKS, [(sum(s.lengths), s.case, s) for s in steps])
        listed += drawn.step_jobs(preset, dtypes, seed, Job)
    return listed


def job_of_line(line: Drawn) -> Job:
    """Return the job of what a line describes, which does not shrink."""
    return drawn.job_of(line, "given line", Job, ShrinkBudget(0))


def _jobs(
    preset: str,
    dtypes: Sequence[torch.dtype],
    checks: Sequence[_CheckSize],
    problems: Sequence[tuple[int, Case, Step | None]],  # tokens, case, decode step
) -> list[Job]:
    large, *counts = _LARGE[preset]
    sized = [(tokens * case.config.n_heads, case, step) for tokens, case, step in problems]
    return [
        Job(entry.name, entry.check if step is None else OnStep(entry.check, step), case, dtype)
        for first in (True, False)
        for size, case, step in sorted(sized, key=lambda problem: problem[0])
        for dtype in dtypes
        for entry in checks
        if size <= getattr(entry, preset)
        and (entry.name in _FIRST) == first
        and (preset != "quick" or dtype in dtypes[: entry.dtypes])
        # The slow interpreter compares bits in the first dtype only.
        and (preset != "interpreter" or first or dtype == dtypes[0])
        and (size <= large or dtype in dtypes[: counts[not first]])
    ]


@dataclasses.dataclass(frozen=True)
class JobResult:
    """The result of one job on one combination.

    Attributes:
        job: Index of the job.
        combination: Index of the combination.
        findings: Findings of the job.
        seconds: Elapsed time.
        peak_bytes: Peak GPU memory of the process so far.
        gpu_lost: Whether the GPU is unusable in the process from now on.
    """

    job: int
    combination: int
    findings: list[Finding]
    seconds: float
    peak_bytes: int = 0
    gpu_lost: bool = False


def judge_one(
    combinations: Sequence[Combination], todo: Sequence[Job], task: tuple[int, int]
) -> JobResult:
    """Run the job on the combination of ``task`` = (job index, combination index)."""
    started = time.perf_counter()
    try:
        # The context is entered again for each job, so that jobs are independent.
        with judging(combinations[task[1]]):
            findings = todo[task[0]].run(combinations[task[1]])
    except NSAError:
        raise
    except BaseException as fault:
        if is_ctrl_c(fault):
            raise
        findings = [todo[task[0]].failure(describe_error(fault))]
    if (error := gpu_context.gpu_error()) and all(f.ok is not False for f in findings):
        findings.append(todo[task[0]].failure(f"a kernel made the GPU unusable: {error}"))
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    seconds = time.perf_counter() - started
    return JobResult(*task, findings, seconds, peak, gpu_lost=bool(error))


def shared_truths(combinations: Sequence[Combination]) -> contextlib.AbstractContextManager[None]:
    """Cache truths if several combinations use them; for one, hashing costs more than it saves."""
    return caching() if len(combinations) > 1 else contextlib.nullcontext()
