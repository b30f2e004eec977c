"""Every seeded fault is found by the checks of `nsa verify`; the healthy backend passes the same checks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from faults import MUTANTS

from harness import Mutant, first_red, verdict_on
from nsa_core.contract import SLOTS
from nsa_core.verify.subject import Subject

_score: dict[str, tuple[str, float]] = {}


def test_the_healthy_backend_passes() -> None:
    """Without this, a check that always fails would kill every mutant."""
    finding = first_red(Subject(dict.fromkeys(SLOTS, "sdpa")))
    assert finding is None, finding


def test_there_are_at_least_20_different_faults() -> None:
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    started = time.perf_counter()
    try:
        finding = verdict_on(mutant, tmp_path)
        killed = f"{finding.check} {finding.slot} on {finding.case}: {finding.quantity}" if finding else ""
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        killed = f"raised {type(error).__name__}"
    _score[mutant.name] = (killed, time.perf_counter() - started)
    assert killed, f"{mutant.name} survives: {mutant.old!r} -> {mutant.new!r} in {mutant.module}"


def test_zz_score(capsys: pytest.CaptureFixture[str]) -> None:
    """Print the score of the mutants this process ran."""
    dead = [name for name, (killed, _) in _score.items() if killed]
    with capsys.disabled():
        print(f"\nmutation score: {len(dead)} of {len(_score)} killed")
        for name, (killed, seconds) in _score.items():
            print(f"  {name:44} {seconds:5.1f} s  {killed or 'SURVIVED'}")
    assert len(dead) == len(_score)
