"""Which checks run on which cases, in which order; everything `nsa verify` and the mutation suite
run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from nsa_core.dtypes import dtype_name
from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported
from nsa_core.util.interruption import NEVER, Interruption
from nsa_verify.cases import PRESETS, Case, text_case
from nsa_verify.checks import decode_fused, decode_invariants, invariants, layer, reads
from nsa_verify.checks import slots as checks
from nsa_verify.checks.decode_parity import STEPS, Step, decode_parity
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding
from nsa_verify.judge.truth_cache import remembering
from nsa_verify.run.contexts import judging

Check = Callable[[Combination, Case, torch.dtype], Iterator[Finding]]


@dataclasses.dataclass(frozen=True)
class Job:
    """One check on one case in one dtype."""

    name: str
    check: Check
    case: Case
    dtype: torch.dtype

    def run(self, combination: Combination) -> list[Finding]:
        """The job's findings; a request the combination does not take is one finding with ok
        None.
        """
        try:
            return list(self.check(combination, self.case, self.dtype))
        except Unsupported as refusal:
            return [
                Finding(
                    self.name,
                    "",
                    self.case.name,
                    dtype_name(self.dtype),
                    "plan",
                    None,
                    detail=str(refusal),
                )
            ]
        except (BackendUnavailable, InvalidInput):
            raise
        except (
            NSAError
        ) as fault:  # a kernel raised or returned what it must not: a red finding, and the next job
            return [
                Finding(
                    self.name,
                    "",
                    self.case.name,
                    dtype_name(self.dtype),
                    "run",
                    False,
                    detail=str(fault),
                )
            ]


@dataclasses.dataclass(frozen=True)
class _Worth:
    """The largest case on which a check is worth its time, in tokens (of a step: cached) x query
    heads, per preset.
    """

    name: str
    check: Callable[..., Iterator[Finding]]  # a Check, or a StepCheck
    quick: int
    full: int
    interpreter: int = 1 << 6


_CHECKS = (
    _Worth("parity", checks.parity, 1 << 20, 1 << 20, 1 << 20),
    _Worth("ties", checks.ties, 1 << 10, 1 << 13),
    _Worth("packed", checks.packed_equals_separate, 1 << 12, 1 << 13, 0),
    _Worth("any blocks", checks.any_blocks, 1 << 10, 1 << 13),
    _Worth("empty rows", checks.empty_rows, 1 << 10, 1 << 13),
    _Worth("composition", invariants.composition, 1 << 14, 1 << 15),
    _Worth("causality", invariants.causality, 1 << 11, 1 << 14),
    _Worth("coverage", checks.coverage, 1 << 9, 1 << 13),
    _Worth("poison", invariants.finite_poison, 1 << 11, 1 << 14),
    _Worth("nan storage", invariants.nan_storage, 1 << 9, 1 << 13),
    _Worth("inputs untouched", invariants.inputs_untouched, 1 << 9, 1 << 10),
    _Worth("run to run", invariants.run_to_run, 1 << 11, 1 << 14),
    _Worth("dispatch", invariants.dispatch, 1 << 9, 1 << 10),
)

_FIRST = ("parity", "ties", "any blocks", "decode", "decode ties")  # what most faults show in

StepCheck = Callable[[Combination, Step, torch.dtype], Iterator[Finding]]


@dataclasses.dataclass(frozen=True)
class OnStep:
    """A check of a step of decode, in the place of a check of a case."""

    check: StepCheck
    step: Step

    def __call__(
        self, combination: Combination, case: Case, dtype: torch.dtype
    ) -> Iterator[Finding]:
        """The check's findings on the step; ``case`` is the step's own."""
        return self.check(combination, self.step, dtype)


_STEP_CHECKS = (
    _Worth("decode", decode_parity, 1 << 20, 1 << 20, 1 << 9),
    _Worth("decode ties", decode_invariants.ties, 1 << 10, 1 << 13, 1 << 9),
    _Worth("decode fused step", decode_fused.fused_step, 1 << 20, 1 << 20, 1 << 9),
    _Worth("decode fused append", decode_fused.fused_append, 1 << 10, 1 << 13, 1 << 9),
    _Worth("decode fused gates", decode_fused.fused_gates, 1 << 10, 1 << 13, 1 << 9),
    _Worth("decode run to run", decode_invariants.run_to_run, 1 << 11, 1 << 16, 0),
    _Worth("decode page order", decode_invariants.page_order, 1 << 11, 1 << 16, 1 << 8),
    _Worth("decode replay", decode_invariants.replayed, 1 << 11, 1 << 16, 1 << 8),
    _Worth("decode inputs untouched", decode_invariants.inputs_untouched, 1 << 10, 1 << 12, 1 << 8),
    _Worth("decode reads", reads.reads, 1 << 11, 1 << 11, 0),
    _Worth("decode dispatch", decode_invariants.dispatch, 1 << 10, 1 << 10, 1 << 8),
)
PHASES = ("prefill", "decode", "both")


def jobs(
    preset: str,
    dtypes: Sequence[torch.dtype],
    *,
    text: bytes | None,
    seed: int = 0,
    phase: str = "both",
) -> list[Job]:
    """The jobs of a preset, smallest cases first, so that a fault shows early; those of prefill
    before decode's.

    Args:
        preset: "quick", "full", or "interpreter" (for kernels that run in triton's interpreter; no
            layer check).
        dtypes: what the kernels run in; the layer check is fp64 where the combination takes it.
        text: bytes for the real case; None leaves it out.
        phase: prefill, decode or both.

    Raises:
        InvalidInput: the text is empty.
    """
    made: list[Job] = []
    if phase != "decode":
        cases = [dataclasses.replace(c, seed=seed) for c in PRESETS[preset]()]
        if text is not None:
            cases.append(dataclasses.replace(text_case(text), seed=seed))
        made += layer.jobs_for(preset, seed, Job) if preset != "interpreter" else []
        made += _jobs(preset, dtypes, _CHECKS, [(c.batch * c.tokens, c, None) for c in cases])
    if phase != "prefill":
        steps = [
            dataclasses.replace(s, case=dataclasses.replace(s.case, seed=seed))
            for s in STEPS[preset]()
        ]
        made += _jobs(preset, dtypes, _STEP_CHECKS, [(sum(s.lengths), s.case, s) for s in steps])
    return made


def _jobs(
    preset: str,
    dtypes: Sequence[torch.dtype],
    checks: Sequence[_Worth],
    problems: Sequence[tuple[int, Case, Step | None]],  # tokens, the case, and its step
) -> list[Job]:
    sized = [(tokens * case.config.n_heads, case, step) for tokens, case, step in problems]
    return [
        Job(worth.name, worth.check if step is None else OnStep(worth.check, step), case, dtype)
        for against_oracle in (True, False)
        for size, case, step in sorted(sized, key=lambda problem: problem[0])
        for dtype in dtypes
        for worth in checks
        if size <= getattr(worth, preset)
        and (worth.name in _FIRST) == against_oracle
        # Where time is short, bits that must be equal are compared in the first dtype only.
        and (preset != "interpreter" or against_oracle or dtype == dtypes[0])
    ]


def run(
    combination: Combination, todo: Sequence[Job], *, stop_at_first: bool = False
) -> Iterator[tuple[Job, list[Finding]]]:
    """Run ``todo`` in order, yielding each job with its findings; ``stop_at_first`` ends after the
    first red one.
    """
    for job in todo:
        findings = job.run(combination)
        yield job, findings
        if stop_at_first and any(f.ok is False for f in findings):
            return


@dataclasses.dataclass(frozen=True)
class Judged:
    """What one job found on one combination, both by their index."""

    job: int
    combination: int
    findings: list[Finding]
    seconds: float
    peak_bytes: int = 0  # of GPU memory, in the process so far


def judge_one(
    combinations: Sequence[Combination], todo: Sequence[Job], task: tuple[int, int]
) -> Judged:
    """Run the job on the combination that ``task`` names, both by their index."""
    started = time.perf_counter()
    with judging(
        combinations[task[1]]
    ):  # anew for each job, so that no job depends on the one before
        findings = todo[task[0]].run(combinations[task[1]])
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    return Judged(*task, findings, time.perf_counter() - started, peak)


def shared_truths(combinations: Sequence[Combination]) -> contextlib.AbstractContextManager[None]:
    """Truths are remembered where several combinations ask for them; hashing costs more than it
    saves one alone.
    """
    return remembering() if len(combinations) > 1 else contextlib.nullcontext()


def run_each(
    combinations: Sequence[Combination], todo: Sequence[Job], *, stop: Interruption = NEVER
) -> Generator[Judged]:
    """Run each job on every combination before the next one, so that truths are computed once; end
    once ``stop`` came.
    """
    with shared_truths(combinations):
        for task in itertools.product(range(len(todo)), range(len(combinations))):
            yield judge_one(combinations, todo, task)
            if stop.came:
                return
