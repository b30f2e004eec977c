"""The documents that `nsa backends list` and `show` print, as JSON or as tables. Torch only where
probes run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsa_cli import output
from nsa_core.contract import SLOTS, Reason
from nsa_core.dispatch.loading import BackendEntry, installed
from nsa_core.dispatch.registry import Registry, disabled_reason
from nsa_core.errors import BackendUnavailable

if TYPE_CHECKING:
    from nsa_core.dispatch.probing import Candidate

SCHEMA_VERSION = 1


def unprobed() -> dict[str, Any]:
    """What the metadata of the installed distributions says; nothing is loaded."""
    rows = []
    for plugin in installed():
        reason = disabled_reason(plugin, output.safe_mode())
        rows.append(
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "entry_point": plugin.value,
                "first_party": plugin.first_party,
                "status": "disabled" if reason else "not loaded",
                "reason": _reason_row(reason),
                "summary": "",
                "slots": None,
            }
        )
    return {"schema_version": SCHEMA_VERSION, "probed": False, "request": None, "backends": rows}


def probed(
    registry: Registry | None = None, phase: str = "prefill"
) -> tuple[Registry, dict[str, Any]]:
    """Every backend and what it says to an ordinary request of ``phase`` on this machine."""
    registry = output.find_backends() if registry is None else registry
    summary, answers = _ask(registry, phase)
    rows = [_row(entry, answers) for entry in registry.entries]
    return registry, {
        "schema_version": SCHEMA_VERSION,
        "probed": True,
        "request": summary,
        "backends": rows,
    }


def _ask(registry: Registry, phase: str) -> tuple[str, dict[tuple[str, str], Candidate]]:
    """The request in a line, and the answers by (backend, slot)."""
    import torch

    from nsa_core.config import NSAConfig
    from nsa_core.dispatch.candidates import find_candidates
    from nsa_core.dispatch.options import PlanOptions
    from nsa_core.dispatch.plan import describe_request

    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    options = PlanOptions(device=device, dtype=dtype, phase=phase)
    candidates = find_candidates(NSAConfig(768, 12, 2), options, registry=registry)
    answers = {
        (c.backend, slot): c
        for slot, of_slot in candidates.by_slot.items()
        for c in of_slot
        if c.status == "ready"
    }
    return describe_request(candidates.requests["cmp"]), answers


def add_details(document: dict[str, Any], registry: Registry) -> None:
    """Put into each row of ``document`` what its backend says of itself on this machine."""
    from nsa_core.dispatch.probing import details

    entries = {(entry.name, entry.distribution): entry for entry in registry.entries}
    for row in document["backends"]:
        row["details"] = details(entries[row["name"], row["distribution"]])


def _reason_row(reason: Reason | None) -> dict[str, str] | None:
    return (
        None
        if reason is None
        else {"code": reason.code, "message": reason.message, "hint": reason.hint}
    )


def _row(entry: BackendEntry, answers: dict[tuple[str, str], Candidate]) -> dict[str, Any]:
    spec = entry.spec
    slots = {slot: _slot_row(entry, slot, answers.get((entry.name, slot))) for slot in SLOTS}
    # A backend that loaded and yet refuses in every slot it offers is of no use on this machine.
    usable = spec is None or any(slots[slot]["accepted"] for slot in spec.slots)
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "entry_point": entry.entry_point,
        "first_party": entry.first_party,
        "status": entry.status if usable else "unavailable",
        "reason": _reason_row(entry.reason),
        "summary": spec.summary if spec else "",
        "api_version": list(spec.api_version) if spec else None,
        "slots": slots,
    }


def _slot_row(entry: BackendEntry, slot: str, answer: Candidate | None) -> dict[str, Any]:
    offered = entry.spec.slots.get(slot) if entry.spec else None
    reasons = list(answer.reasons) if answer else [entry.reason] if entry.reason else []
    return {
        "forward": offered is not None,
        "backward": offered is not None and offered.backward is not None,
        "decode": (
            offered is not None and (offered.decode is not None or slot == "combine")
        ),  # whose forward serves
        "accepted": answer is not None and answer.accepted,
        "deterministic": offered.deterministic if offered else None,
        "reads_boundaries": offered.reads_boundaries if offered else None,
        "workspace": offered is not None and offered.workspace is not None,
        "priority": entry.spec.priority_of(slot) if entry.spec and offered else None,
        "rank": answer.rank if answer else None,
        "reasons": [_reason_row(reason) for reason in reasons],
    }


def _offer(slot: dict[str, Any]) -> str:
    if not slot["forward"]:
        return "-"
    offered = "+".join(name for name in ("forward", "backward", "decode") if slot[name])
    return offered if slot["accepted"] else f"({offered})"


def _said(row: dict[str, Any]) -> list[tuple[str, str]]:
    """(reason, hint) in words: the backend's own, or those of its slots that refuse, equal ones
    together.
    """
    if row["reason"]:
        return [(output.one_line(row["reason"]["message"]), output.one_line(row["reason"]["hint"]))]
    slots: dict[tuple[str, str], list[str]] = {}
    for name, slot in (row["slots"] or {}).items():
        for reason in slot["reasons"] if slot["forward"] else []:
            slots.setdefault(
                (output.one_line(reason["message"]), output.one_line(reason["hint"])), []
            ).append(name)
    return [(f"{', '.join(names)}: {message}", hint) for (message, hint), names in slots.items()]


_STYLES = {"ready": "green", "broken": "red", "incompatible": "red"}


def print_list(document: dict[str, Any]) -> None:
    """One row per backend; what a slot offers stands in parentheses where it refuses the request on
    this machine.
    """
    from rich.text import Text

    slots = SLOTS if document["probed"] else ()
    made = output.plain_table(
        "backend", "version", "distribution", "status", *slots, "reason", "hint"
    )
    for row in document["backends"]:
        title = [output.one_line(row[key]) for key in ("name", "version", "distribution")]
        offers = [_offer(row["slots"][slot]) for slot in slots]
        for message, hint in _said(row) or [("", "")]:
            made.add_row(
                *title,
                Text(row["status"], _STYLES.get(row["status"], "yellow")),
                *offers,
                message,
                hint,
            )
            title, offers = [""] * 3, [""] * len(offers)
    console = output.console()
    console.print(made)
    if document["probed"]:
        console.print(f"asked: {document['request']}; (offers in parentheses) refuse this")


def print_details(document: dict[str, Any]) -> None:
    """Every field of every row, one to a line."""
    console = output.console()
    for row in document["backends"]:
        for key in (
            "name",
            "version",
            "distribution",
            "entry_point",
            "first_party",
            "status",
            "summary",
        ):
            console.print(f"{key:13} {output.one_line(row[key])}")
        if row["reason"]:
            for key in ("message", "hint"):
                console.print(
                    f"{'reason' if key == 'message' else key:13}"
                    f" {output.one_line(row['reason'][key])}"
                )
            continue
        for line in row["details"]:
            console.print(f"{'detail':13} {line}")
        console.print(f"{'contract':13} {'.'.join(map(str, row['api_version']))}")
        columns = (
            "deterministic",
            "workspace",
            "priority",
            *(["rank"] if _ranks(row) else []),
            "reads_boundaries",
        )
        made = output.plain_table("slot", "offers", *columns, "refuses, because")
        for name, slot in row["slots"].items():
            said = "; ".join(output.one_line(reason["message"]) for reason in slot["reasons"])
            stated = [
                str(slot[key]) if slot["forward"] and slot[key] is not None else "-"
                for key in columns
            ]
            made.add_row(name, _offer(slot), *stated, said)
        console.print(made)
        console.print(f"{'asked':13} {document['request']}")
        if _ranks(row):
            console.print(f"{'rank':13} counts for this request, in place of the stated priority")


def _ranks(row: dict[str, Any]) -> bool:
    """Whether the backend ranks the request that was asked."""
    return any(slot["rank"] is not None for slot in row["slots"].values())


def complain(document: dict[str, Any]) -> None:
    """Say that nothing can work.

    Raises:
        BackendUnavailable: always, marked as such.
    """
    found = "none is ready" if document["backends"] else "none is installed"
    error = BackendUnavailable(f"no backend can be used, {found}; pip install nsa-backend-sdpa")
    error.nothing_usable = True
    raise error
