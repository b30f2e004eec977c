"""Shared by every test: what needs a CUDA GPU is skipped where there is none; the mutation score ends a run."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What ran in triton's interpreter; one line per mutant that ran, and the score, whichever workers shared them."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]
    interpreted = [value for r in reports for key, value in r.user_properties if key == "interpreted"]
    if interpreted:
        terminalreporter.section("kernels in triton's interpreter")
        for line in sorted(interpreted):
            terminalreporter.line(line)
    mutants = [dict(r.user_properties) | {"seconds": r.duration} for r in reports if r.user_properties]
    mutants = [m for m in mutants if "mutant" in m]
    if not mutants:
        return
    killed = sum(bool(m["killed_by"]) for m in mutants)
    terminalreporter.section(f"mutation score: {killed} of {len(mutants)} killed")
    for m in sorted(mutants, key=lambda m: str(m["mutant"])):
        terminalreporter.line(f"{m['mutant']:56} {m['seconds']:5.1f} s  {m['killed_by'] or 'SURVIVED'}")
