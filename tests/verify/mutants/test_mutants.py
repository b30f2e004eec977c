"""The checks of `nsa verify` find every planted fault and pass the original backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import killers
import pytest

from decode_faults import DECODE_MUTANTS
from faults import MUTANTS
from harness import Mutant, first_failure, killing_finding
from nsa_core.contract import SLOTS
from nsa_verify.problems.combination import Combination


@pytest.mark.slow
def test_original_backend_passes() -> None:
    """A check that always fails would kill every mutant, so the original must pass."""
    finding = first_failure(Combination(dict.fromkeys(SLOTS, "sdpa")))
    assert finding is None, finding


def test_faults_are_distinct_and_numerous() -> None:
    assert len({m.name for m in MUTANTS + DECODE_MUTANTS}) == len(MUTANTS + DECODE_MUTANTS)
    assert len(MUTANTS) >= 20
    assert len(DECODE_MUTANTS) >= 15
    assert len(MUTANTS + DECODE_MUTANTS) > 50  # the README says so
    for fault in MUTANTS + DECODE_MUTANTS:
        assert fault.source()  # its text is in the module, which may have changed


@pytest.mark.few_cases(
    "decode: page number without the block table",
    "decode: window one token short",
    "decode: cmp sees a block one token late",
    "decode: sel drops the last block",
    "decode: every row treated as a new token",
)
@pytest.mark.parametrize(
    "mutant",
    # The default run plants every third fault, the slow run all of them.
    [
        m if i % 3 == 0 else pytest.param(m, marks=pytest.mark.slow)
        for faults in (MUTANTS, DECODE_MUTANTS)
        for i, m in enumerate(faults)
    ],
    ids=lambda m: m.name,
)
def test_mutant_is_killed(
    mutant: Mutant, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    finding = killing_finding(mutant, tmp_path)
    record_property("mutant", mutant.name)
    record_property(
        "killed_by",
        f"{finding.check} {finding.slot} on {finding.case}: {finding.quantity}" if finding else "",
    )
    assert finding, f"{mutant.name} survives: {mutant.old!r} -> {mutant.new!r} in {mutant.module}"
    killers.expect("mutants of sdpa and the core", mutant.name, killers.killer(finding))
