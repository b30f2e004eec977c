"""The status and the sentence that each of four commands gives to every backend."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from nsa_cli import trial_imports
from nsa_cli.trial_imports import TrialResult

TORCH = {
    "version": "2.13.0",
    "cuda": None,
    "hip": None,
    "gpus": [],
    "built_for": [],
    "cuda_available": False,
}


def try_all_here(bodies: Sequence[str], limit_s: float, **torch_facts: Any) -> list[TrialResult]:
    """Run the probes of `nsa doctor` in this process, so that they see what a test has changed.

    The import tests of the libraries are replaced: they need a process of their own.
    """
    results = []
    for body in bodies:
        facts: dict[str, Any] = {"error": "not tried"}
        if body == trial_imports.TORCH:
            facts = {**TORCH, **torch_facts}
        elif "typical_candidates" in body:
            namespace: dict[str, Any] = {}
            exec(body, namespace)
            facts = namespace["facts"]
        results.append(TrialResult(facts, None))
    return results


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
