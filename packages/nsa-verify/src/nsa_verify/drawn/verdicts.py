"""Judge the results of a case by the oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from nsa_verify.drawn.case import EXCHANGES, SlotCase
from nsa_verify.drawn.tensors import Problem
from nsa_verify.judge.selection import MAX_REGRET, judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.findings import Finding
from nsa_verify.problems.slot_runs import SlotRun

# The bias is a rule for many rows. With fewer, the error of one row decides it, and that may be
# parallel to the row: the gradient of a query that sees two keys is a multiple of their difference.
MIN_ROWS = 12


def without_bias(finding: Finding) -> Finding:
    """Return ``finding``, passed and without its bias if only that exceeds the limit."""
    if finding.ok is not False or finding.row is None or finding.elem is None:
        return finding
    within = finding.row <= 1 and finding.elem <= 1  # not of NaN
    if finding.bias is None or finding.quantity == "lse" or not within:
        return finding
    return dataclasses.replace(finding, ok=True, bias=None, detail="")


def judge_run(case: SlotCase, run: SlotRun, problem: Problem) -> Iterator[Finding]:
    """Judge every output of ``run``."""
    if case.kind == "select":
        yield judge_blocks(case, run, problem)
        return
    sizes = (case.config.geometry, case.config.softmax_scale)
    verdicts = judge_slot(
        case.kernel, run.inputs, run.outputs, *sizes, do=run.do, **problem.placement
    )
    for finding in case.findings.judged(case.slot, verdicts):
        # A row that sees one key has the probability 1, and no gradient of q or k.
        few = rows_that_see(2 if finding.quantity in ("dq", "dk") else 1, case) < MIN_ROWS
        equal_roundings = finding.quantity.startswith("dv") and _scores_equal(case)
        yield without_bias(finding) if few or equal_roundings else finding


def same_outputs(
    case: SlotCase, outputs: dict[str, Any], expected: dict[str, Any], label: str
) -> Iterator[Finding]:
    """Compare the bits of the outputs of two runs; frozen inputs have no gradient in the second."""
    for name, output in outputs.items():
        yield case.findings.same_bits(case.slot, f"{name} {label}", output, expected[name])


def second_run(case: SlotCase) -> str:
    """Return what a second run of ``case`` differs in, for names of quantities."""
    changes = ["recomputed"] * case.recompute
    changes += [f"with {'+'.join(case.frozen)} frozen"] * bool(case.frozen)
    return " ".join(changes) or "of a second run"


def _scores_equal(case: SlotCase) -> bool:
    """Return whether all scores of a row are equal.

    So are the roundings of its probabilities: a window of 5 gives 1/5 to each key, which fp16
    rounds down by nearly half a unit. dv of a correct kernel is too small by that part.
    """
    return case.scale == 0 or case.scores == "zero"


def rows_that_see(keys: int, case: SlotCase) -> int:
    """Return the rows of a head that see ``keys`` keys: of all documents, or of one sequence."""
    hidden = keys - 1
    if case.kind in ("cmp", "core"):
        hidden = case.l - 1 + (keys - 1) * case.d
    spans = case.query_spans if case.packed else case.query_spans[:1]
    rows = sum(max(0, end - begin - max(0, hidden - position)) for begin, end, position in spans)
    # Two of the five kinds of lists for block_attention have few blocks or none.
    return rows * 3 // 5 if case.kind == "block_attention" else rows


def judge_blocks(case: SlotCase, run: SlotRun, problem: Problem) -> Finding:
    """Judge the blocks of select.

    If all logits are 0, the scores of many blocks are equal but for rounding, and every set with a
    regret within its limit passes.
    """
    inputs: dict[str, Any] = dict(run.inputs)
    verdict = judge_selection(
        **inputs,
        blocks=run.outputs["blocks"],
        geometry=case.config.geometry,
        scale=case.config.softmax_scale,
        **problem.placement,
        exchanges=math.inf if _scores_equal(case) else EXCHANGES,
    )
    detail = verdict.why or f"regret {verdict.regret:.2g}"
    row = verdict.regret / MAX_REGRET
    return case.findings.finding(case.slot, "blocks", verdict.ok, row, detail)
