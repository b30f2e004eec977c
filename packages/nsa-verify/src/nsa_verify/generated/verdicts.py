"""Judge the results of a generated case by the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from nsa_verify.generated.bias import MIN_ROWS, without_bias
from nsa_verify.generated.case import GeneratedCase
from nsa_verify.generated.data import Problem
from nsa_verify.judge.selection import MAX_REGRET, judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.cases import Case
from nsa_verify.problems.findings import Finding, judged, same_bits
from nsa_verify.problems.slot_runs import SlotRun


def judge_run(
    check: str, generated: GeneratedCase, case: Case, run: SlotRun, problem: Problem
) -> Iterator[Finding]:
    """Judge every output of ``run``."""
    slot, dtype = generated.kernel, getattr(torch, generated.dtype)
    sizes = (generated.config.geometry, generated.config.softmax_scale)
    if slot == "select":
        yield judge_blocks(check, generated, run, problem)
        return
    verdicts = judge_slot(slot, run.inputs, run.outputs, *sizes, do=run.do, **documents_of(problem))
    for finding in judged(check, generated.slot, case, dtype, verdicts):
        # A row that sees one key has the probability 1, and no gradient of q or k.
        few = rows_that_see(2 if finding.quantity in ("dq", "dk") else 1, generated) < MIN_ROWS
        equal_roundings = finding.quantity.startswith("dv") and _scores_equal(generated)
        yield without_bias(finding) if few or equal_roundings else finding


def judge_second_run(
    check: str,
    generated: GeneratedCase,
    case: Case,
    first: SlotRun,
    second: SlotRun,
    problem: Problem,
    *,
    equal: bool,
) -> Iterator[Finding]:
    """Compare a second run with the first, or judge it; frozen inputs have no gradient.

    Args:
        check: Name of the check.
        generated: The case.
        case: The case for findings.
        first: The first run.
        second: The second run.
        problem: The tensors of the case.
        equal: Whether the bits of both must be equal.
    """
    label = f"with {'+'.join(generated.frozen)} frozen" if generated.frozen else "of a second run"
    if not equal:
        for finding in judge_run(check, generated, case, second, problem):
            yield dataclasses.replace(finding, quantity=f"{finding.quantity} {label}")
        return
    dtype = getattr(torch, generated.dtype)
    for name, output in second.outputs.items():
        yield same_bits(
            check, generated.slot, case, dtype, f"{name} {label}", output, first.outputs[name]
        )


def _scores_equal(generated: GeneratedCase) -> bool:
    """Return whether all scores of a row are equal.

    So are the roundings of its probabilities: a window of 5 gives 1/5 to each key, which fp16
    rounds down by nearly half a unit. dv of a correct kernel is too small by that part.
    """
    return generated.scale == 0 or generated.scores == "zero"


def rows_that_see(keys: int, generated: GeneratedCase) -> int:
    """Return the rows of a head that see ``keys`` keys: of all documents, or of one sequence."""
    hidden = keys - 1
    if generated.slot in ("cmp", "core"):
        hidden = generated.l - 1 + (keys - 1) * generated.d
    spans = generated.query_spans if generated.packed else generated.query_spans[:1]
    rows = sum(max(0, end - begin - max(0, hidden - position)) for begin, end, position in spans)
    # Two of the five kinds of lists for block_attention have few blocks or none.
    return rows * 3 // 5 if generated.slot == "block_attention" else rows


def documents_of(problem: Problem) -> dict[str, Any]:
    """Return the arguments of the oracle and the judges that place the rows of ``problem``."""
    return {"cu_seqlens": problem.cu_seqlens, "first_query": problem.first_query}


def judge_blocks(check: str, generated: GeneratedCase, run: SlotRun, problem: Problem) -> Finding:
    """Judge the blocks of select.

    The limit of 0.1 % on exchanged sets is for thousands of sets with random scores. In a case with
    fewer, one set with a regret within its limit passes. If all logits are 0, the scores of many
    blocks are equal but for rounding, and every set with such a regret passes.
    """
    inputs: dict[str, Any] = dict(run.inputs)
    verdict = judge_selection(
        **inputs,
        blocks=run.outputs["blocks"],
        geometry=generated.config.geometry,
        scale=generated.config.softmax_scale,
        **documents_of(problem),
    )
    exchanged = verdict.flip_rate * generated.rows
    legal = verdict.regret <= MAX_REGRET and (_scores_equal(generated) or exchanged < 1.5)
    detail = verdict.why or f"regret {verdict.regret:.2g}"
    return Finding(
        check,
        generated.slot,
        generated.text(),
        generated.dtype,
        "blocks",
        verdict.ok or legal,
        verdict.regret / MAX_REGRET,
        detail=detail,
    )
