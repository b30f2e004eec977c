"""Build and print the output of `nsa backends list` and `show`, as JSON or as tables.

Torch is imported only to probe the backends.
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


def list_from_metadata() -> dict[str, Any]:
    """Return the backends in the metadata of the installed distributions, without loading them."""
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


def list_and_probe(
    registry: Registry | None = None, phase: str = "prefill"
) -> tuple[Registry, dict[str, Any]]:
    """Return all backends with their answers to a typical request of ``phase`` on this machine."""
    registry = output.find_backends() if registry is None else registry
    summary, candidates = _probe(registry, phase)
    rows = [_row(entry, candidates) for entry in registry.entries]
    return registry, {
        "schema_version": SCHEMA_VERSION,
        "probed": True,
        "request": summary,
        "backends": rows,
    }


def _probe(registry: Registry, phase: str) -> tuple[str, dict[tuple[str, str], Candidate]]:
    """Return the request in a line, and the candidates by (backend, slot)."""
    import torch

    from nsa_core.config import NSAConfig
    from nsa_core.dispatch.candidates import find_candidates
    from nsa_core.dispatch.options import PlanOptions
    from nsa_core.dispatch.plan import describe_request

    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", "float32")
    options = PlanOptions(device=device, dtype=dtype, phase=phase)
    candidates = find_candidates(NSAConfig(768, 12, 2), options, registry=registry)
    by_backend_and_slot = {
        (candidate.backend, slot): candidate
        for slot, of_slot in candidates.by_slot.items()
        for candidate in of_slot
        if candidate.status == "ready"
    }
    return describe_request(candidates.requests["cmp"]), by_backend_and_slot


def add_details(document: dict[str, Any], registry: Registry) -> None:
    """Add to each row of ``document`` the details that its backend reports on this machine."""
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


def _row(entry: BackendEntry, candidates: dict[tuple[str, str], Candidate]) -> dict[str, Any]:
    spec = entry.spec
    slots = {slot: _slot_row(entry, slot, candidates.get((entry.name, slot))) for slot in SLOTS}
    # A loaded backend that refuses the request in every slot is unavailable on this machine.
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


def _slot_row(entry: BackendEntry, slot: str, candidate: Candidate | None) -> dict[str, Any]:
    spec = entry.spec.slots.get(slot) if entry.spec else None
    reasons = list(candidate.reasons) if candidate else [entry.reason] if entry.reason else []
    # Decode steps use the forward of combine.
    decodes = spec is not None and (spec.decode is not None or slot == "combine")
    return {
        "forward": spec is not None,
        "backward": spec is not None and spec.backward is not None,
        "decode": decodes,
        "accepted": candidate is not None and candidate.accepted,
        "deterministic": spec.deterministic if spec else None,
        "reads_boundaries": spec.reads_boundaries if spec else None,
        "workspace": spec is not None and spec.workspace is not None,
        "priority": entry.spec.priority_of(slot) if entry.spec and spec else None,
        "rank": candidate.rank if candidate else None,
        "reasons": [_reason_row(reason) for reason in reasons],
    }


def _offer(slot: dict[str, Any]) -> str:
    """Return the forms that a slot offers, in parentheses if it refuses the request."""
    if not slot["forward"]:
        return "-"
    offered = "+".join(name for name in ("forward", "backward", "decode") if slot[name])
    return offered if slot["accepted"] else f"({offered})"


def _reasons(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the (message, hint) pairs of the backend, or of the slots that refuse the request.

    Slots with equal reasons share one pair.
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
    """Print one row per backend; parentheses mark slots that refuse the request."""
    from rich.text import Text

    slots = SLOTS if document["probed"] else ()
    table = output.plain_table(
        "backend", "version", "distribution", "status", *slots, "reason", "hint"
    )
    for row in document["backends"]:
        title = [output.one_line(row[key]) for key in ("name", "version", "distribution")]
        offers = [_offer(row["slots"][slot]) for slot in slots]
        for message, hint in _reasons(row) or [("", "")]:
            table.add_row(
                *title,
                Text(row["status"], _STYLES.get(row["status"], "yellow")),
                *offers,
                message,
                hint,
            )
            title, offers = [""] * 3, [""] * len(offers)
    console = output.console()
    console.print(table)
    if document["probed"]:
        console.print(f"request: {document['request']}; slots in parentheses refuse it")


def print_details(document: dict[str, Any]) -> None:
    """Print every field of every row, one per line."""
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
        table = output.plain_table("slot", "offers", *columns, "reasons for refusal")
        for name, slot in row["slots"].items():
            reasons = "; ".join(output.one_line(reason["message"]) for reason in slot["reasons"])
            cells = [
                str(slot[key]) if slot["forward"] and slot[key] is not None else "-"
                for key in columns
            ]
            table.add_row(name, _offer(slot), *cells, reasons)
        console.print(table)
        console.print(f"{'request':13} {document['request']}")
        if _ranks(row):
            console.print(f"{'rank':13} replaces the stated priority for this request")


def _ranks(row: dict[str, Any]) -> bool:
    """Return whether the backend ranks this request."""
    return any(slot["rank"] is not None for slot in row["slots"].values())


def raise_nothing_usable(document: dict[str, Any]) -> None:
    """Raise the error that no backend can be used.

    Raises:
        BackendUnavailable: Always, with ``nothing_usable`` set.
    """
    state = "none is ready" if document["backends"] else "none is installed"
    error = BackendUnavailable(f"no backend can be used, {state}; pip install nsa-backend-sdpa")
    error.nothing_usable = True
    raise error
