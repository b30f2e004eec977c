"""Build and print the output of `nsa backends explain`, as JSON or as a table."""

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
    """Return a reason as a JSON object."""
    return dataclasses.asdict(reason)


def explain_candidates(candidates: Candidates) -> dict[str, Any]:
    """Return the named backend, the chosen backend and all candidates with reasons per slot."""
    chosen: dict[str, str | None] = dict.fromkeys(candidates.requests)
    by_slot, error = dict(candidates.by_slot), None
    try:
        plan = decide(candidates)
    except (Unsupported, BackendUnavailable) as refusal:
        error = _error_row(refusal)
    else:
        chosen = {slot: choice.backend for slot, choice in plan.choices.items()}
        by_slot = {slot: choice.candidates for slot, choice in plan.choices.items()}
    request = dataclasses.asdict(candidates.requests["cmp"])
    del request["slot"]
    return {
        "schema_version": SCHEMA_VERSION,
        "request": {**request, "summary": describe_request(candidates.requests["cmp"])},
        "slots": {
            slot: {
                "asked": candidates.chosen_by_name[slot],
                "chosen": chosen[slot],
                "tuned": None if candidates.chosen_by_name[slot] else candidates.tuned.get(slot),
                "candidates": [_candidate_row(candidate) for candidate in of_slot],
            }
            for slot, of_slot in by_slot.items()
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
    """Print the request, then a row per slot and candidate; `*` marks the chosen candidate."""
    from rich.text import Text

    console = output.console()
    console.print(document["request"]["summary"])
    table = output.plain_table("slot", "", "backend", "version", "verdict", "reason", "hint")
    for slot, row in document["slots"].items():
        if not row["candidates"]:
            table.add_row(
                slot,
                "",
                "-",
                "-",
                "no backend",
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
                cells = [output.one_line(reason[key]) for key in ("message", "hint")]
                table.add_row(slot, mark, *title, Text(verdict, style), *cells)
                title, mark = ["", ""], ""
    console.print(table)
    for slot, row in document["slots"].items():
        if row["tuned"]:
            console.print(f"{slot}: tuned: {row['tuned']}")


def raise_error(document: dict[str, Any]) -> None:
    """Raise the error that planning this request raises, without the reasons printed above.

    Raises:
        Unsupported: No candidate accepts the request in some slot.
        BackendUnavailable: A named backend is unavailable, or no backend is.
    """
    error = document["error"]
    if error is None:
        return
    first_line = error["message"].splitlines()[0]
    if error["kind"] == "Unsupported":
        raise Unsupported(first_line)
    unavailable = BackendUnavailable(first_line)
    unavailable.nothing_usable = error["nothing_usable"]
    raise unavailable
