"""Faults that the hand-written cases of quick do not have, and the generated ones must find."""

from __future__ import annotations

import pytest

from generated_faults import FAULTS, Fault
from nsa_core.contract import DTYPES, SLOTS
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding
from nsa_verify.generated.checks import judge_generated
from nsa_verify.generated.levels import generated_cases


def first_failure(combination: Combination, slot: str) -> Finding | None:
    """Return the first failed finding of the generated quick cases of ``slot``."""
    for case in generated_cases("quick", DTYPES, slots=[slot]):
        for finding in judge_generated(combination, case):
            if finding.ok is False:
                return finding
    return None


@pytest.mark.slow  # the commands of verify run these cases too
@pytest.mark.parametrize("slot", SLOTS)
def test_sdpa_passes_every_generated_case(slot: str) -> None:
    combination = Combination({slot: "sdpa"})
    for case in generated_cases("quick", DTYPES, slots=[slot]):
        findings = judge_generated(combination, case)
        assert findings
        assert [f for f in findings if f.ok is not True] == []


@pytest.mark.parametrize(
    "fault",
    # The default run plants every twelfth fault, the slow run all of them.
    [f if i % 12 == 0 else pytest.param(f, marks=pytest.mark.slow) for i, f in enumerate(FAULTS)],
    ids=lambda fault: fault.name,
)
def test_planted_fault_is_found(fault: Fault) -> None:
    finding = first_failure(fault.combination(), fault.slot)
    assert finding is not None, f"{fault.name}: no generated case of quick fails"
    assert finding.quantity != "run", finding.detail
