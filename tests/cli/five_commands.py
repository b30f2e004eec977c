"""The status and the sentence that each of four commands gives to every backend."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

TORCH = {
    "version": "2.13.0",
    "cuda": None,
    "hip": None,
    "gpus": [],
    "built_for": [],
    "cuda_available": False,
}


class NotImported:
    """Replaces the imports of `nsa doctor`, which need a process of their own: torch is fine."""

    child = None

    def __init__(self, distribution: str, module: str, facts: Any) -> None:
        self.module = module

    def facts(self, limit_s: float) -> dict[str, Any]:
        if self.module == "torch":
            return {**TORCH, "status": "ok", "error": ""}
        return {"version": None, "status": "broken", "error": "not tried"}


# Attributes of nsa_cli.health with which `nsa doctor` starts no child process.
WITHOUT_CHILDREN = {"LibraryImport": NotImported, "_attention": lambda *arguments: ({}, [])}


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
