"""Build and print the output of `nsa backends explain`, as JSON or as a table."""

from __future__ import annotations

import dataclasses
from typing import Any

from nsa_cli import output
from nsa_cli.backend_rows import print_simulated, reason_lines, reason_rows, simulated_row
from nsa_core.contract import Reason
from nsa_core.errors import NSAError
from nsa_core.plan.candidates import Candidate, Candidates, describe_request
from nsa_core.plan.gpus import GPU
from nsa_core.plan.plan import Plan, describe_causal
from nsa_core.plan.standing import standings

SCHEMA_VERSION = 1


def explained(
    candidates: Candidates, outcome: Plan | NSAError, gpu: GPU | None = None
) -> dict[str, Any]:
    """Return the plan for a request: per slot the named, the chosen and all other backends.

    Args:
        candidates: The candidates for the request.
        outcome: The plan of these candidates, or the error that planning raised.
        gpu: The GPU that the candidates are for, if it is simulated.
    """
    plan = outcome if isinstance(outcome, Plan) else None
    by_slot = dict(candidates.by_slot)
    if plan:
        by_slot = {slot: choice.candidates for slot, choice in plan.choices.items()}
    request = dataclasses.asdict(candidates.requests["cmp"])
    del request["slot"]
    by_backend = standings(candidates, gpu)
    entries = candidates.registry.entries
    here = {e.name: by_backend[e.name, e.distribution].here for e in entries if e.spec}
    return {
        "schema_version": SCHEMA_VERSION,
        "request": {**request, "summary": describe_request(candidates.requests["cmp"])},
        "slots": {
            slot: {
                "asked": candidates.chosen_by_name[slot],
                "chosen": plan.choices[slot].backend if plan else None,
                "tuned": None if candidates.chosen_by_name[slot] else candidates.tuned.get(slot),
                "candidates": [
                    _candidate_row(candidate, here.get(candidate.backend, frozenset()))
                    for candidate in of_slot
                ],
            }
            for slot, of_slot in by_slot.items()
        },
        "causal_up_to": plan.causal_up_to if plan else None,
        "fused": {name: form.backend for name, form in plan.fused.items()} if plan else {},
        "backends": [
            {
                "name": entry.name,
                "distribution": entry.distribution,
                "version": entry.version,
                "status": by_backend[entry.name, entry.distribution].status,
                "sentence": by_backend[entry.name, entry.distribution].sentence,
            }
            for entry in entries
        ],
        "simulated": simulated_row(gpu),
        "error": None if isinstance(outcome, Plan) else _error_row(outcome),
    }


def _error_row(error: NSAError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "nothing_usable": bool(getattr(error, "nothing_usable", False)),
    }


def _candidate_row(candidate: Candidate, here: frozenset[Reason]) -> dict[str, Any]:
    return {
        "backend": candidate.backend,
        "version": candidate.version,
        "status": candidate.status,
        "accepted": candidate.accepted,
        "rank_reason": candidate.rank_reason,
        "reasons": reason_rows(candidate.reasons, here),
    }


def print_explained(document: dict[str, Any]) -> None:
    """Print the request, then the candidates of each slot; `*` marks the chosen one.

    Slots with the same candidates share one list. Fused forms follow the slots.
    """
    console = output.console()
    output.print_text(console, f"request: {document['request']['summary']}")
    if document["simulated"]:
        print_simulated(console, document["simulated"])
    slots_by_list: dict[tuple[str, ...], list[str]] = {}
    for slot, row in document["slots"].items():
        slots_by_list.setdefault(_answers(document, row), []).append(slot)
    for name, backend in document["fused"].items():
        slots_by_list.setdefault((f"  * {output.one_line(backend)}: fused",), []).append(name)
    for lines, slots in slots_by_list.items():
        notes = [note for slot in slots for note in _notes(document, slot)]
        console.print()
        for line in (", ".join(slots), *lines, *notes):
            output.print_text(console, line)
    if not document["error"]:
        console.print()
        output.print_text(console, "* chosen; the others in the order in which auto takes them")


def _answers(document: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """Return a line for each candidate of a slot, followed by its reasons against the request."""
    statuses = {
        (entry["name"], entry["version"]): entry["status"] for entry in document["backends"]
    }
    lines: list[str] = []
    for candidate in row["candidates"]:
        name, version = candidate["backend"], candidate["version"]
        status = statuses[name, version]
        reasons = [f"      {line}" for r in candidate["reasons"] for line in _listed(r)]
        if candidate["accepted"]:
            verdict = "accepted" + ", chosen by name" * (name == row["chosen"] == row["asked"])
        elif [reason["code"] for reason in candidate["reasons"]] == ["slot_not_offered"]:
            verdict, reasons = "does not offer this slot", []
        else:
            verdict = "refused" if status == "ready" else status
        mark = "*" if name == row["chosen"] else " "
        lines += [f"  {mark} {output.one_line(f'{name} {version}')}: {verdict}", *reasons]
    return tuple(lines or ["    no backend is installed: pip install nsa-backend-sdpa"])


def _listed(reason: dict[str, Any]) -> list[str]:
    message, *hint = reason_lines(reason)
    return [f"- {message}", *hint]


def _notes(document: dict[str, Any], slot: str) -> list[str]:
    """Return sentences about the choice of a slot: why, and when another kernel runs."""
    row, notes = document["slots"].get(slot, {}), []
    if row.get("tuned"):
        notes.append(f"  {slot} was tuned: {row['tuned']}")
    elif row and not row["asked"]:
        chosen = [c for c in row["candidates"] if c["backend"] == row["chosen"]]
        whys = [f"{c['backend']}, {c['rank_reason']}" for c in chosen if c["rank_reason"]]
        notes += [f"  {slot}: {output.one_line(why)}" for why in whys]
    if slot == "sel" and document["causal_up_to"] is not None:
        notes.append(f"  {slot}, {describe_causal(document['causal_up_to'])}")
    return notes
