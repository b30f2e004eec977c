"""Compare decode forms with the oracle on a step of sequences of different lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding, Findings
from nsa_verify.problems.step_data import StepData, packed, step_data
from nsa_verify.problems.step_runs import Results, decode_plan, run_step
from nsa_verify.problems.steps import Step


def decode_parity(
    combination: Combination,
    step: Step,
    dtype: torch.dtype,
    reorder: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Iterator[Finding]:
    """Check that every decode form equals the oracle, and that padding rows are empty.

    Memory outside the sequences holds NaN, so this check includes the poison check of prefill.

    Args:
        combination: Combination to judge.
        step: The step.
        dtype: Dtype of q, k and v.
        reorder: Changes the blocks that sel receives; None passes on those of select.
    """
    data = step_data(step, dtype, combination.device)
    plan = decode_plan(combination, step, dtype)
    results = run_step(plan, data, ("cmp", "select", "win"))
    yield from judge_step(step, dtype, data, results, ("cmp", "select", "win"))
    if reorder is not None:
        results["select"] = (reorder(results["select"][0]),)
    results = run_step(plan, data, ("sel",), results)
    yield from judge_step(step, dtype, data, results, ("sel",))


def judge_step(
    step: Step,
    dtype: torch.dtype,
    data: StepData,
    results: Results,
    slots: Sequence[str],
    check: str = "decode",
) -> Iterator[Finding]:
    """Judge ``slots`` of ``results``.

    ``results`` must also hold the inputs that these slots received: the lse of cmp for select, and
    the blocks of select for sel. ``check`` is the name of the check in the findings.
    """
    findings = Findings(check, step.case, dtype)
    yield from _judge_padding(findings, step, results, slots)
    p, config = packed(step, data), step.case.config
    sizes = (config.geometry, config.softmax_scale)
    common: dict[str, Any] = {"cu_seqlens": p.cu_seqlens, "rows": p.rows}
    t = p.tensors
    inputs = {
        "cmp": {"q": t["q"], "k_cmp": t["k_cmp"], "v_cmp": t["v_cmp"]},
        "sel": {"q": t["q"], "k": t["k_sel"], "v": t["v_sel"]},
        "win": {"q": t["q"], "k": t["k_win"], "v": t["v_win"]},
    }
    if "select" in results:
        inputs["sel"]["blocks"] = blocks = p.scatter(p.pick(results["select"][0]))
    for slot in slots:
        if slot == "select":
            lse = p.scatter(p.pick(results["cmp"][1].transpose(1, 2))).T.contiguous()
            selection = judge_selection(
                t["q"], t["k_cmp"], lse, blocks, *sizes, **common, exchanges=step.exchanges
            )
            yield findings.selected(slot, selection, p.describe(selection.where[:1]))
            continue
        o, lse = results[slot]
        o, lse = (p.scatter(p.pick(x)) for x in (o, lse.transpose(1, 2)))
        outputs = {"o": o, "lse": lse.T.contiguous()}
        verdicts = judge_slot(slot, inputs[slot], outputs, *sizes, **common)
        places = {n: p.describe(v.where[1:]) for n, v in verdicts.items() if v.why}
        for name, place in places.items():
            verdicts[name] = dataclasses.replace(verdicts[name], why=verdicts[name].why + place)
        yield from findings.judged(slot, verdicts)


def _judge_padding(
    findings: Findings, step: Step, results: Results, slots: Sequence[str]
) -> Iterator[Finding]:
    """Check that padding rows hold o = 0, lse = -inf and blocks = -1."""
    for b, new in enumerate(step.new):
        for slot in slots if new < step.rows else ():
            if slot == "select":
                padding = results[slot][0][b, new:]
                yield findings.filled(slot, "blocks of padding", padding, -1)
                continue
            o, lse = results[slot]
            yield findings.filled(slot, "o of padding", o[b, new:], 0)
            yield findings.filled(slot, "lse of padding", lse[b, :, new:], -torch.inf)
