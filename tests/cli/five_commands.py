"""The status and the sentence that each of four commands gives to every backend."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from nsa_cli import trial_imports
from nsa_cli.trial_imports import TrialResult
from nsa_core.plan.loading import BackendEntry

TORCH = {
    "version": "2.13.0",
    "cuda": None,
    "hip": None,
    "gpus": [],
    "built_for": [],
    "cuda_available": False,
}


def try_all_here(
    calls: Sequence[tuple[Any, ...]],
    plugins: Sequence[BackendEntry],
    limit_s: float,
    **torch_facts: Any,
) -> tuple[list[TrialResult], list[TrialResult]]:
    """Run the probes of `nsa doctor` in this process, so that they see what a test has changed.

    The import tests of the libraries are replaced: they need a process of their own.
    """
    facts: dict[Any, dict[str, Any]] = {trial_imports.torch_facts: {**TORCH, **torch_facts}}
    results = []
    for function, *arguments in calls:
        if function is trial_imports.probe_facts:
            facts[function] = function(*arguments)
        results.append(TrialResult(facts.get(function, {"error": "not tried"}), None))
    assert not plugins
    return results, []


def standings_by_command(
    run: Callable[..., str],
) -> dict[str, dict[str, tuple[str, str]]]:
    """Return command -> backend -> (status, sentence).

    Args:
        run: Runs `nsa` with arguments and returns its standard output.
    """
    rows = {
        "list": json.loads(run("backends", "list", "--json"))["backends"],
        "explain": json.loads(run("backends", "explain", "--json"))["backends"],
        "doctor": json.loads(run("doctor", "--json"))["backends"],
    }
    rows["show"] = [
        row
        for listed in rows["list"]
        for row in json.loads(run("backends", "show", listed["name"], "--json"))["backends"]
    ]
    result = {
        command: {row["name"]: (row["status"], row["sentence"]) for row in of_command}
        for command, of_command in rows.items()
    }
    block = run("doctor", "--report")
    pattern = r"(?m)^backend (\S+): (\w+) \((.*?)(?:; from \S+ \S+)?\)$"
    result["report"] = {
        name: (status, sentence) for name, status, sentence in re.findall(pattern, block)
    }
    return result
