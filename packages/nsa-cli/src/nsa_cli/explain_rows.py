"""Build and print the output of `nsa backends explain`, as JSON or as a table."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from nsa_cli import output
from nsa_cli.backend_rows import print_reasons, print_simulated, reason_lines, simulated_row
from nsa_core.contract import Reason
from nsa_core.errors import BackendUnavailable, NSAError, Unsupported
from nsa_core.plan.candidates import Candidate, Candidates, describe_request
from nsa_core.plan.gpus import GPU
from nsa_core.plan.plan import decide, describe_causal
from nsa_core.plan.standing import standings

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1


def explain_candidates(candidates: Candidates, gpu: GPU | None = None) -> dict[str, Any]:
    """Return the plan for a request: per slot the named, the chosen and all other backends.

    Without an error, ``causal_up_to`` and ``fused`` have the plan's length and fused forms.

    Args:
        candidates: The candidates for the request.
        gpu: The GPU that the candidates are for, if it is simulated.
    """
    chosen: dict[str, str | None] = dict.fromkeys(candidates.requests)
    by_slot, error = dict(candidates.by_slot), None
    causal_up_to, fused = None, dict[str, str]()
    try:
        plan = decide(candidates)
    except (Unsupported, BackendUnavailable) as refusal:
        error = _error_row(refusal)
    else:
        chosen = {slot: choice.backend for slot, choice in plan.choices.items()}
        by_slot = {slot: choice.candidates for slot, choice in plan.choices.items()}
        causal_up_to = plan.causal_up_to
        fused = {name: kernel.backend for name, kernel in plan.fused.items()}
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
                "chosen": chosen[slot],
                "tuned": None if candidates.chosen_by_name[slot] else candidates.tuned.get(slot),
                "candidates": [
                    _candidate_row(candidate, here.get(candidate.backend, frozenset()))
                    for candidate in of_slot
                ],
            }
            for slot, of_slot in by_slot.items()
        },
        "causal_up_to": causal_up_to,
        "fused": fused,
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
        "error": error,
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
        "reasons": [
            {**dataclasses.asdict(reason), "here": reason in here} for reason in candidate.reasons
        ],
    }


def print_explained(document: dict[str, Any]) -> None:
    """Print the request, then the candidates of each slot; `*` marks the chosen one.

    Slots with the same candidates share one list. A backend's list of reasons is printed once, and
    so is the hint of each reason. Fused forms follow the slots.
    """
    console = output.console()
    output.print_text(console, f"request: {document['request']['summary']}")
    if document["simulated"]:
        print_simulated(console, document["simulated"])
    slots_by_list: dict[tuple[Any, ...], list[str]] = {}
    for slot, row in document["slots"].items():
        slots_by_list.setdefault(_answers(document, slot, row), []).append(slot)
    where: dict[tuple[Any, ...], str] = {}  # (backend, reasons) -> the slots they are under
    hints: set[tuple[str, str]] = set()
    for lines, slots in slots_by_list.items():
        title = ", ".join(slots)
        console.print()
        output.print_text(console, title)
        for mark, name, version, verdict, reasons in lines:
            elsewhere = where.get((name, reasons)) if reasons else None
            text = verdict + f": reasons as for {elsewhere}" * bool(elsewhere)
            _print_answer(console, document, mark, name, version, text)
            if elsewhere:
                continue
            where[name, reasons] = title
            shown = [((), text, "" if (text, hint) in hints else hint) for text, hint in reasons]
            print_reasons(console, shown, 6)
            hints |= {*reasons}
        if not lines:
            print_reasons(
                console, [((), "no backend is installed", "pip install nsa-backend-sdpa")]
            )
        for slot in slots:
            for note in _notes(document, slot):
                output.print_text(console, f"  {note}")
    _print_fused(console, document)
    console.print()
    output.print_text(console, "* chosen; the others in the order in which auto takes them")


def _print_fused(console: Console, document: dict[str, Any]) -> None:
    """Print the fused forms as the slots are; one backend has all of them."""
    if not document["fused"]:
        return
    name, *_ = document["fused"].values()
    version = next(
        candidate["version"]
        for candidate in document["slots"]["cmp"]["candidates"]
        if candidate["backend"] == name
    )
    name, version = output.one_line(name), output.one_line(version)
    console.print()
    output.print_text(console, ", ".join(document["fused"]))
    _print_answer(console, document, "*", name, version, "fused")


def _notes(document: dict[str, Any], slot: str) -> list[str]:
    """Return sentences about the choice of a slot: why, and when another kernel runs."""
    row, notes = document["slots"][slot], []
    if row["tuned"]:
        notes.append(f"{slot} was tuned: {row['tuned']}")
    elif why := _rank_reason(row):
        notes.append(f"{slot}: {why}")
    if slot == "sel" and document["causal_up_to"] is not None:
        notes.append(f"{slot}, {describe_causal(document['causal_up_to'])}")
    return notes


def _rank_reason(row: dict[str, Any]) -> str:
    """Return why `auto` prefers the chosen backend of a slot, if that backend says so."""
    chosen = [c for c in row["candidates"] if c["backend"] == row["chosen"] and not row["asked"]]
    return "".join(
        f"{c['backend']}, {output.one_line(c['rank_reason'])}" for c in chosen if c["rank_reason"]
    )


def _print_answer(
    console: Console, document: dict[str, Any], mark: str, name: str, version: str, text: str
) -> None:
    """Print the row of a candidate; names and versions of all slots are aligned."""
    widths = [
        max(len(output.one_line(row[key])) for row in document["backends"])
        for key in ("name", "version")
    ]
    start = f"  {mark} {name:{widths[0]}}  {version:{widths[1]}}  "
    output.print_text(console, start + text, indent=" " * len(start))


def _answers(document: dict[str, Any], slot: str, row: dict[str, Any]) -> tuple[Any, ...]:
    """Return (mark, name, version, verdict, reasons) of each candidate of a slot."""
    standing = {(entry["name"], entry["version"]): entry for entry in document["backends"]}
    answers = []
    for candidate in row["candidates"]:
        chosen = candidate["backend"] == row["chosen"]
        name, version = (output.one_line(candidate[key]) for key in ("backend", "version"))
        reasons = tuple(map(reason_lines, candidate["reasons"]))
        of_backend = standing[candidate["backend"], candidate["version"]]
        if candidate["accepted"]:
            verdict = "accepted" + ", chosen by name" * bool(chosen and row["asked"])
        else:
            verdict = "refused" if of_backend["status"] == "ready" else of_backend["status"]
        if [reason["code"] for reason in candidate["reasons"]] == ["slot_not_offered"]:
            verdict, reasons = "does not offer this slot", ()
        elif not candidate["accepted"] and of_backend["sentence"] not in dict(reasons):
            verdict += f": {of_backend['sentence']}" * (verdict != "refused")
        answers.append(("*" if chosen else " ", name, version, verdict, reasons))
    return tuple(answers)


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
