"""Prints the mutation score at the end of a run, however many workers shared the mutants."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line per mutant that ran, and the score."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    mutants = [dict(r.user_properties) | {"seconds": r.duration} for r in reports if r.user_properties]
    mutants = [m for m in mutants if "mutant" in m]
    if not mutants:
        return
    killed = sum(bool(m["killed_by"]) for m in mutants)
    terminalreporter.section(f"mutation score: {killed} of {len(mutants)} killed")
    for m in sorted(mutants, key=lambda m: str(m["mutant"])):
        terminalreporter.line(f"{m['mutant']:56} {m['seconds']:5.1f} s  {m['killed_by'] or 'SURVIVED'}")
