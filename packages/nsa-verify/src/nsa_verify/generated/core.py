"""Judge a generated case of nsa_attention, which runs all slots.

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
from nsa_verify.generated.bias import MIN_ROWS, without_bias
from nsa_verify.generated.case import GeneratedCase
from nsa_verify.generated.data import Problem
from nsa_verify.generated.verdicts import judge_blocks, rows_that_see
from nsa_verify.judge.core import judge_core
from nsa_verify.problems.findings import Finding, judged, same_bits
from nsa_verify.problems.slot_runs import SlotRun


def core_findings(
    generated: GeneratedCase, problem: Problem, plan: Plan, deterministic: bool
) -> Iterator[Finding]:
    """Judge the output, the selected blocks and all gradients, and compare a second run.

    Args:
        generated: The case.
        problem: Its tensors.
        plan: The plan of the calls.
        deterministic: Whether the kernels declare equal bits of two runs.
    """
    check, slot, dtype = generated.check_name, generated.slot, getattr(torch, generated.dtype)
    nonnegative = generated.gates != "negative"
    blocks = problem.inputs.get("blocks")
    call: dict[str, Any] = {"blocks": blocks, "nonnegative": nonnegative}
    run = CoreRun(plan, generated.config, problem, problem.inputs, **call)
    outputs = _outputs(run, problem)
    yield from _judged(generated, run, problem, outputs)
    if blocks is None and generated.rows:
        inputs = {"q": run.inputs["q"], "k_cmp": run.inputs["k_cmp"], "lse": run.lse[0]}
        selected = SlotRun(inputs, {"blocks": run.inputs["blocks"]}, None)
        yield judge_blocks(check, generated, selected, problem)
    call |= {"recompute": generated.recompute == "on", "frozen": generated.frozen}
    second = _outputs(CoreRun(plan, generated.config, problem, problem.inputs, **call), problem)
    label = " recomputed" * (generated.recompute == "on")
    label += f" with {'+'.join(generated.frozen)} frozen" * bool(generated.frozen)
    label = label or " of a second run"
    # Without a gradient of every input, the backwards of the slots replace a fused backward.
    other_kernels = bool(generated.frozen) and nonnegative and "backward" in plan.fused
    if deterministic and not other_kernels:
        case = generated.as_case()
        for name, output in second.items():
            yield same_bits(check, slot, case, dtype, name + label, output, outputs[name])
    else:
        yield from _judged(generated, run, problem, second, label)


def _outputs(run: CoreRun, problem: Problem) -> dict[str, torch.Tensor]:
    """Return o and the gradients, computed while new memory holds NaN."""
    assert problem.do is not None
    with poisoned_memory():
        return {"o": run.o.detach(), **run.gradients(problem.do)}


def _judged(
    generated: GeneratedCase,
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
        generated.config.geometry,
        generated.config.softmax_scale,
        cu_seqlens=problem.cu_seqlens,
    )
    named = {name + label: verdict for name, verdict in verdicts.items()}
    dtype = getattr(torch, generated.dtype)
    few = rows_that_see(2, generated) < MIN_ROWS
    for finding in judged(generated.check_name, generated.slot, generated.as_case(), dtype, named):
        yield without_bias(finding) if few else finding
