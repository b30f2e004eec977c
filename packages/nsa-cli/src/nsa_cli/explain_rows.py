"""Build and print the output of `nsa backends explain`, as JSON or as a table."""

from __future__ import annotations

import dataclasses
from typing import Any

from nsa_cli import output
from nsa_cli.backend_rows import print_simulated, reason_lines, simulated_row
from nsa_core.errors import NSAError
from nsa_core.plan.candidates import Candidate, Candidates, describe_request
from nsa_core.plan.choosing import with_import_failures
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
    if plan:
        by_slot = {slot: choice.candidates for slot, choice in plan.choices.items()}
    else:
        by_slot = with_import_failures(candidates)
    request = dataclasses.asdict(candidates.requests["cmp"])
    del request["slot"]
    by_backend = standings(candidates)
    return {
        "schema_version": SCHEMA_VERSION,
        "request": {**request, "summary": describe_request(candidates.requests["cmp"])},
        "slots": {
            slot: {
                "asked": candidates.chosen_by_name[slot],
                "chosen": plan.choices[slot].backend if plan else None,
                "tuned": None if candidates.chosen_by_name[slot] else candidates.tuned.get(slot),
                "candidates": [_candidate_row(candidate) for candidate in of_slot],
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
            for entry in candidates.registry.entries
        ],
        "simulated": simulated_row(candidates, gpu),
        "error": None if isinstance(outcome, Plan) else _error_row(outcome),
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
        "rank_reason": candidate.rank_reason,
        "reasons": [dataclasses.asdict(reason) for reason in candidate.reasons],
    }


def print_explained(document: dict[str, Any]) -> None:
    """Print the request, the backend that runs each slot and why, then all candidates.

    Slots with the same candidates share one list.
    """
    console = output.console()
    output.print_text(console, f"request: {document['request']['summary']}")
    if document["simulated"]:
        print_simulated(console, document["simulated"])
    if not document["error"]:
        console.print()
        output.print_table(console, ("slot", "runs on", "because"), _chosen(document), gap=2)
        if document["causal_up_to"] is not None:
            output.print_text(console, f"sel, {describe_causal(document['causal_up_to'])}")
        rows = document["slots"].values()
        if not any(row["tuned"] for row in rows):
            choice = any(sum(c["accepted"] for c in row["candidates"]) > 1 for row in rows)
            why = "the order is the built-in one" if choice else "each slot has only one backend"
            output.print_text(console, f"no measurement of nsa tune is used: {why}")
    slots_by_list: dict[tuple[str, ...], list[str]] = {}
    for slot, row in document["slots"].items():
        slots_by_list.setdefault(_answers(document, row), []).append(slot)
    for lines, slots in slots_by_list.items():
        console.print()
        for line in (f"candidates for {', '.join(slots)}, in the order of auto", *lines):
            output.print_text(console, line)


def _chosen(document: dict[str, Any]) -> list[list[str]]:
    """Return a row for each slot and each fused form: its backend, and why this one runs."""
    rows = []
    for slot, row in document["slots"].items():
        candidate = next(c for c in row["candidates"] if c["backend"] == row["chosen"])
        why = candidate["rank_reason"] or "highest rank"
        if row["asked"]:
            why = "chosen by name"
        elif row["tuned"]:
            why = f"nsa tune: {row['tuned']}"
        title = f"{candidate['backend']} {candidate['version']}"
        rows.append([slot, output.one_line(title), output.one_line(why)])
    fused = document["fused"].items()
    return rows + [[name, output.one_line(backend), "fused form"] for name, backend in fused]


def _answers(document: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """Return a line for each candidate of a slot, followed by its reasons against the request."""
    statuses = {
        (entry["name"], entry["version"]): entry["status"] for entry in document["backends"]
    }
    lines: list[str] = []
    for candidate in row["candidates"]:
        name, version = candidate["backend"], candidate["version"]
        status = statuses[name, version]
        reasons = ["    " + line for r in candidate["reasons"] for line in reason_lines(r, "- ")]
        if candidate["accepted"]:
            verdict = "accepted"
        elif [reason["code"] for reason in candidate["reasons"]] == ["slot_not_offered"]:
            verdict, reasons = "does not offer this slot", []
        else:
            verdict = "not supported" if status == "ready" else status
        lines += [f"  {output.one_line(f'{name} {version}')}: {verdict}", *reasons]
    return tuple(lines or ["  no backend is installed: pip install nsa-backend-sdpa"])
