"""The list of planted faults and mutants, each with the check that finds it first.

killers.json has one entry per fault: suite -> fault -> killer. The tests that plant the faults
compare what they see with the list, so that a change of the checks, of the cases or of the judge
that moves a fault to another check is seen. tests/verify/test_killers.py compares the list with
the faults in the sources, so that no fault disappears.

To record the list of a suite anew, delete the suite from killers.json and run its tests, slow ones
included, in one process with RECORD_KILLERS=1. The semantic mutants have a list of their own,
semantic/scores.json.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from nsa_verify.problems.findings import Finding

FILE = Path(__file__).with_suffix(".json")
RECORD = os.environ.get("RECORD_KILLERS") == "1"


@functools.cache
def load() -> dict[str, dict[str, str]]:
    """Return suite -> fault -> killer."""
    killers: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return killers


def killer(finding: Finding) -> str:
    """Return the check and the slot of ``finding``: its case and its numbers may change."""
    return f"{finding.check}, {finding.slot}" if finding.slot else finding.check


def expect(suite: str, fault: str, killed_by: str) -> None:
    """Assert that the list says the same of ``fault``; when recording, write it instead."""
    if RECORD:
        load.cache_clear()  # several files are recorded side by side
    killers = load()
    if RECORD:
        killers.setdefault(suite, {})[fault] = killed_by
        FILE.write_text(json.dumps(killers, indent=1, sort_keys=True) + "\n")
    recorded = killers.get(suite, {}).get(fault)
    assert recorded is not None, f"{FILE.name} has no fault {fault!r} in {suite!r}"
    assert killed_by == recorded, (
        f"{suite}: {fault!r} is found by {killed_by!r}, but {FILE.name} says {recorded!r}"
    )
