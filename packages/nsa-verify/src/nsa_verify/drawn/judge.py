"""Judge what a line describes on a combination of backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported
from nsa_verify.drawn.caches.history import History, PoolHistory
from nsa_verify.drawn.caches.judge import history_findings
from nsa_verify.drawn.caches.pool_judge import pool_findings
from nsa_verify.drawn.case import SlotCase
from nsa_verify.drawn.judge_case import case_findings
from nsa_verify.drawn.judge_step import block_step_findings, step_findings
from nsa_verify.drawn.line import Drawn
from nsa_verify.drawn.step import BlockStep, DecodeStep
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding

# Each plans at once. That of cases runs the kernels later, when its findings are read.
_FINDINGS: Mapping[type[Drawn], Callable[[Combination, Any], Iterable[Finding]]] = {
    SlotCase: case_findings,
    DecodeStep: step_findings,
    BlockStep: block_step_findings,
    History: history_findings,
    PoolHistory: pool_findings,
}


def judge(combination: Combination, drawn: Drawn) -> list[Finding]:
    """Judge a case, a decode step or a history; the case of a finding is the line.

    What the combination refuses gives one finding with ok None; a kernel that raises, or refuses
    what its probe accepted, gives a failed one.

    Raises:
        InvalidInput: It is wrong for every backend.
        BackendUnavailable: A backend cannot run on this machine.
    """
    planned = False
    try:
        findings = _FINDINGS[type(drawn)](combination, drawn)
        planned = True
        return list(findings)
    except InvalidInput:
        raise
    except NSAError as fault:
        if isinstance(fault, Unsupported) and not planned:
            return [
                drawn.findings.finding(
                    drawn.slot, "plan", None, detail=" ".join(str(fault).split())
                )
            ]
        if isinstance(fault, BackendUnavailable) and not planned:
            raise
        # A kernel raised, or broke a rule.
        return [drawn.findings.finding(drawn.slot, "run", False, detail=str(fault))]
