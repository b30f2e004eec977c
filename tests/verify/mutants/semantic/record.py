"""The recorded scores of the semantic mutants, and the sentence of the documentation.

`python tests/verify/mutants/semantic/record.py` scores all mutants and writes both. It takes some
minutes, and the time of `nsa verify --preset full` if a mutant survives that. With the argument
`quick` it leaves out the full preset.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
FILE = FOLDER / "scores.json"
PAGE = FOLDER.parents[3] / "docs" / "explanation" / "verification.md"
BEGIN, END = "<!-- begin: semantic mutants -->", "<!-- end: semantic mutants -->"


def load() -> dict[str, Any]:
    """Return the recorded scores."""
    scores: dict[str, Any] = json.loads(FILE.read_text())
    return scores


def sentence(scores: dict[str, Any]) -> str:
    """Return what the documentation says about ``scores``."""
    mutants = scores["mutants"]
    quick = [m for m in mutants.values() if m["preset"] == "quick"]
    full = [m for m in mutants.values() if m["preset"]]
    text = f"`nsa verify --preset quick` finds {len(quick)} of {len(mutants)}"
    return text + (f", `--preset full` {len(full)}.\n" if scores["full"] else ".\n")


def section() -> str:
    """Return the section of the documentation."""
    return PAGE.read_text().partition(BEGIN + "\n")[2].partition(END)[0]


def write(scores: dict[str, Any]) -> None:
    """Write ``scores`` and the section of the documentation."""
    FILE.write_text(json.dumps(scores, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN + "\n")
    PAGE.write_text(before + BEGIN + "\n" + sentence(scores) + END + rest.partition(END)[2])


def measure(full_too: bool) -> dict[str, Any]:
    """Score every mutant with the quick preset, and, if asked, its survivors with the full one."""
    from semantic.catalog import ALL
    from semantic.score import Score, default_jobs, score

    quick = score(ALL, default_jobs("quick"))
    rest = [m for m in ALL if m.name in quick.survivors]
    # Generated cases take a tenth of the time of the others, and the run ends with the last kill.
    todo = sorted(default_jobs("full"), key=lambda job: not job.name.startswith("generated"))
    full = score(rest, todo) if full_too else Score()
    mutants = {}
    for mutant in ALL:
        preset = "quick" if mutant.name in quick.kills else "full"
        kill = {**full.kills, **quick.kills}.get(mutant.name)
        mutants[mutant.name] = {
            "preset": preset if kill else "",
            "check": kill.job if kill else "",
            "case": kill.case if kill else "",
            "dtype": kill.dtype if kill else "",
        }
    seconds = {name: round(value, 1) for name, value in quick.seconds_of_check.items()}
    return {"mutants": mutants, "seconds_of_check": seconds, "full": full_too}


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER.parent))
    write(measure(full_too="quick" not in sys.argv))
