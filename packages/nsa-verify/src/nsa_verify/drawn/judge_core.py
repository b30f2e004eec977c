"""Judge a case of nsa_attention, which runs all slots.

The first run needs every gradient and keeps what its backward reads. The second run has the option
``recompute`` of the case, and its frozen inputs need no gradient: the other gradients must be the
same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nsa_core.plan.plan import Plan
from nsa_verify.checks.core import CoreRun
from nsa_verify.checks.invariants import poisoned_memory
from nsa_verify.drawn.case import SlotCase
from nsa_verify.drawn.tensors import Problem
from nsa_verify.drawn.verdicts import (
    MIN_ROWS,
    judge_blocks,
    rows_that_see,
    same_outputs,
    second_run,
    without_bias,
)
from nsa_verify.judge.core import judge_core
from nsa_verify.judge.truth_cache import caching
from nsa_verify.problems.findings import Finding
from nsa_verify.problems.slot_runs import SlotRun


def core_findings(
    case: SlotCase, problem: Problem, plan: Plan, deterministic: bool
) -> Iterator[Finding]:
    """Judge the output, the selected blocks and all gradients, and compare a second run.

    Args:
        case: The case.
        problem: Its tensors.
        plan: The plan of the calls.
        deterministic: Whether the kernels declare equal bits of two runs.
    """
    nonnegative = case.gates != "negative"
    blocks = problem.inputs.get("blocks")
    call: dict[str, Any] = {"blocks": blocks, "nonnegative": nonnegative}
    run = CoreRun(plan, case.config, problem, problem.inputs, **call)
    outputs = _outputs(run, problem)
    with caching():  # the second run needs the truths of the first
        yield from _judged(case, run, problem, outputs)
        if blocks is None and case.rows:
            inputs = {"q": run.inputs["q"], "k_cmp": run.inputs["k_cmp"], "lse": run.lse[0]}
            selected = SlotRun(inputs, {"blocks": run.inputs["blocks"]}, None)
            yield judge_blocks(case, selected, problem)
        call |= {"recompute": case.recompute, "frozen": case.frozen}
        again = CoreRun(plan, case.config, problem, problem.inputs, **call)
        second, label = _outputs(again, problem), second_run(case)
        # Without a gradient of every input, the backwards of the slots replace a fused backward.
        other_kernels = bool(case.frozen) and nonnegative and "backward" in plan.fused
        if deterministic and not other_kernels:
            yield from same_outputs(case, second, outputs, label)
        else:
            yield from _judged(case, run, problem, second, f" {label}")


def _outputs(run: CoreRun, problem: Problem) -> dict[str, torch.Tensor]:
    """Return o and the gradients, computed while new memory holds NaN."""
    assert problem.do is not None
    with poisoned_memory():
        return {"o": run.o.detach(), **run.gradients(problem.do)}


def _judged(
    case: SlotCase,
    run: CoreRun,
    problem: Problem,
    outputs: dict[str, torch.Tensor],
    label: str = "",
) -> Iterator[Finding]:
    """Judge ``outputs`` by the inputs of ``run``."""
    assert problem.do is not None
    verdicts = judge_core(
        run.inputs,
        problem.do,
        outputs,
        case.config.geometry,
        case.config.softmax_scale,
        cu_seqlens=problem.cu_seqlens,
    )
    named = {name + label: verdict for name, verdict in verdicts.items()}
    few = rows_that_see(2, case) < MIN_ROWS
    for finding in case.findings.judged(case.slot, named):
        yield without_bias(finding) if few else finding
