"""The document that `nsa backends explain` prints, as JSON or as a table."""

from __future__ import annotations

import dataclasses
from typing import Any

from nsa_cli import output
from nsa_core.contract import Reason
from nsa_core.dispatch.candidates import Candidates
from nsa_core.dispatch.plan import decide, describe_request
from nsa_core.dispatch.probing import Candidate
from nsa_core.errors import BackendUnavailable, NSAError, Unsupported

SCHEMA_VERSION = 1


def reason_row(reason: Reason) -> dict[str, str]:
    """A reason as JSON holds it."""
    return dataclasses.asdict(reason)


def explained(answers: Candidates) -> dict[str, Any]:
    """Per slot: what was asked, who was chosen, and every candidate with its reasons."""
    chosen: dict[str, str | None] = dict.fromkeys(answers.requests)
    candidates, error = dict(answers.by_slot), None
    try:
        plan = decide(answers)
    except (Unsupported, BackendUnavailable) as refusal:
        error = _error_row(refusal)
    else:
        chosen = {slot: choice.backend for slot, choice in plan.choices.items()}
        candidates = {slot: choice.candidates for slot, choice in plan.choices.items()}
    request = dataclasses.asdict(answers.requests["cmp"])
    del request["slot"]
    return {
        "schema_version": SCHEMA_VERSION,
        "request": {**request, "summary": describe_request(answers.requests["cmp"])},
        "slots": {
            slot: {
                "asked": answers.wanted[slot],
                "chosen": chosen[slot],
                "tuned": None if answers.wanted[slot] else answers.tuned.get(slot),
                "candidates": [_candidate_row(candidate) for candidate in of],
            }
            for slot, of in candidates.items()
        },
        "error": error,
    }


def _error_row(error: NSAError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "nothing_usable": bool(getattr(error, "nothing_usable", False)),
    }


def _candidate_row(candidate: Candidate) -> dict[str, Any]:
    return {
        "backend": candidate.backend,
        "version": candidate.version,
        "status": candidate.status,
        "accepted": candidate.accepted,
        "reasons": [reason_row(reason) for reason in candidate.reasons],
    }


def print_explained(document: dict[str, Any]) -> None:
    """The request in a line, then a row per slot and candidate; `*` marks the chosen one."""
    from rich.text import Text

    console = output.console()
    console.print(document["request"]["summary"])
    made = output.plain_table("slot", "", "backend", "version", "verdict", "reason", "hint")
    for slot, row in document["slots"].items():
        if not row["candidates"]:
            made.add_row(
                slot,
                "",
                "-",
                "-",
                "nobody",
                "no backend is installed",
                "pip install nsa-backend-sdpa",
            )
        for candidate in row["candidates"]:
            mark = "*" if candidate["backend"] == row["chosen"] else ""
            refused = "refused" if candidate["status"] == "ready" else candidate["status"]
            verdict = "accepted" if candidate["accepted"] else refused
            style = "green" if candidate["accepted"] else "yellow"
            title = [output.one_line(candidate[key]) for key in ("backend", "version")]
            for reason in candidate["reasons"] or [{"message": "", "hint": ""}]:
                said = [output.one_line(reason[key]) for key in ("message", "hint")]
                made.add_row(slot, mark, *title, Text(verdict, style), *said)
                title, mark = ["", ""], ""
    console.print(made)
    for slot, row in document["slots"].items():
        if row["tuned"]:
            console.print(f"{slot}: tuned: {row['tuned']}")


def leave(document: dict[str, Any]) -> None:
    """Raise what a plan for this request raises, in one line: the reasons are printed already."""
    error = document["error"]
    if error is None:
        return
    sentence = error["message"].splitlines()[0]
    if error["kind"] == "Unsupported":
        raise Unsupported(sentence)
    refusal = BackendUnavailable(sentence)
    refusal.nothing_usable = error["nothing_usable"]
    raise refusal
