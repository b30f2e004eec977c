"""Every seeded fault is found by the checks of `nsa verify`; the healthy backend passes the same
checks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from decode_faults import DECODE_MUTANTS
from faults import MUTANTS
from harness import Mutant, first_red, verdict_on
from nsa_core.contract import SLOTS
from nsa_verify.combination import Combination


def test_the_healthy_backend_passes() -> None:
    """Without this, a check that always fails would kill every mutant."""
    finding = first_red(Combination(dict.fromkeys(SLOTS, "sdpa")))
    assert finding is None, finding


def test_there_are_at_least_20_different_faults() -> None:
    assert len({m.name for m in MUTANTS + DECODE_MUTANTS}) == len(MUTANTS + DECODE_MUTANTS)
    assert len(MUTANTS) >= 20
    assert len(DECODE_MUTANTS) >= 15


@pytest.mark.parametrize(
    "mutant",
    # Of the decode forms' faults every third is planted in the ordinary run, and all in the slow
    # one.
    [
        *MUTANTS,
        *(
            m if i % 3 == 0 else pytest.param(m, marks=pytest.mark.slow)
            for i, m in enumerate(DECODE_MUTANTS)
        ),
    ],
    ids=lambda m: m.name,
)
def test_mutant_is_killed(
    mutant: Mutant, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    finding = verdict_on(mutant, tmp_path)
    record_property("mutant", mutant.name)
    record_property(
        "killed_by",
        f"{finding.check} {finding.slot} on {finding.case}: {finding.quantity}" if finding else "",
    )
    assert finding, f"{mutant.name} survives: {mutant.old!r} -> {mutant.new!r} in {mutant.module}"
