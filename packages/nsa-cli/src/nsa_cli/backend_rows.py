"""Build and print the output of `nsa backends list` and `show`, as JSON or as tables.

Torch is imported only to probe the backends.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from nsa_cli import output
from nsa_core.contract import SLOTS
from nsa_core.plan.gpus import GPU
from nsa_core.plan.loading import FIRST_PARTY, BackendEntry, installed
from nsa_core.plan.registry import Registry, disabled_reason
from nsa_core.plan.standing import Standing, standings, typical_candidates

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_core.plan.candidates import Candidate, Candidates

SCHEMA_VERSION = 1
_LONGEST_SENTENCE = 200  # characters; `show` prints all of a longer one


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
                "entry_point": plugin.entry_point,
                "first_party": plugin.first_party,
                "status": "disabled" if reason else "not loaded",
                "sentence": output.one_line(reason.message) if reason else "",
                "reason": dataclasses.asdict(reason) if reason else None,
                "summary": "",
                "slots": None,
            }
        )
    return {"schema_version": SCHEMA_VERSION, "probed": False, "request": None, "backends": rows}


def list_and_probe(
    registry: Registry, phase: str = "prefill", gpu: GPU | None = None
) -> dict[str, Any]:
    """Return all backends with their answers to a typical request of ``phase``.

    The request is for this machine, or for the simulated ``gpu``.
    """
    from nsa_core.plan.candidates import describe_request

    candidates = typical_candidates(registry, phase, gpu)
    standing = standings(candidates)
    return {
        "schema_version": SCHEMA_VERSION,
        "probed": True,
        "request": describe_request(candidates.requests["cmp"]),
        "device": candidates.requests["cmp"].device,
        "simulated": simulated_row(candidates, gpu),
        "backends": [
            _row(entry, candidates, standing[entry.name, entry.distribution])
            for entry in registry.entries
        ],
    }


def simulated_row(candidates: Candidates, gpu: GPU | None) -> dict[str, Any] | None:
    """Return the simulated GPU as a JSON object, with what its answers assume.

    "assumed" has, for each backend, what this machine lacks for it.
    """
    if gpu is None:
        return None
    present = output.versions(*FIRST_PARTY)
    lacking = {name: "not installed" for name in FIRST_PARTY if name not in present}
    for name, reasons in candidates.assumed.items():
        lacking[name] = "; ".join(sorted(output.one_line(reason.message) for reason in reasons))
    return {
        "gpu": gpu.name,
        "title": gpu.title,
        "capability": list(gpu.capability),
        "assumed": lacking,
    }


def add_details(document: dict[str, Any], registry: Registry) -> None:
    """Add to each row of ``document`` the details that its backend reports on this machine."""
    from nsa_core.plan.candidates import details

    entries = {(entry.name, entry.distribution): entry for entry in registry.entries}
    for row in document["backends"]:
        row["details"] = details(entries[row["name"], row["distribution"]])


def _row(entry: BackendEntry, candidates: Candidates, standing: Standing) -> dict[str, Any]:
    spec = entry.spec
    of_entry = candidates.of(entry)
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "entry_point": entry.entry_point,
        "first_party": entry.first_party,
        "status": standing.status,
        "sentence": standing.sentence,
        "reason": dataclasses.asdict(entry.reason) if entry.reason else None,
        "summary": spec.summary if spec else "",
        "api_version": list(spec.api_version) if spec else None,
        "slots": {slot: _slot_row(entry, slot, of_entry.get(slot)) for slot in SLOTS},
        "fused": {n: {"workspace": n in spec.fused_workspace} for n in spec.fused} if spec else {},
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
        "rank_reason": candidate.rank_reason if candidate else "",
        "reasons": [dataclasses.asdict(reason) for reason in reasons],
    }


def _both(console: Console) -> str:
    """Return the mark of a slot with forward and backward that the output can encode."""
    try:
        "✓".encode(console.encoding)
    except (LookupError, UnicodeEncodeError):
        return "+"
    return "✓"


def _mark(slot: dict[str, Any], both: str) -> str:
    """Return the forms that a slot offers, in parentheses if it refuses the request."""
    if not slot["forward"]:
        return "-"
    mark = (both if slot["backward"] else "F") + "D" * slot["decode"]
    return mark if slot["accepted"] else f"({mark})"


def _legend(both: str) -> str:
    return f"{both} forward and backward, F forward only, D decodes, () unsupported, - not offered"


def print_list(document: dict[str, Any]) -> None:
    """Print one row per backend, then the reasons for refusal, the request and a legend."""
    console = output.console()
    probed, both = document["probed"], _both(console)
    columns = ["name", "version", "status", *(SLOTS if probed else ["distribution"])]
    rows = [
        [
            *(output.one_line(row[key]) for key in ("name", "version", "status")),
            *(
                [_mark(row["slots"][slot], both) for slot in SLOTS]
                if probed
                else [output.one_line(row["distribution"])]
            ),
        ]
        for row in document["backends"]
    ]
    output.print_table(console, columns, rows, gap=1)
    names: dict[str, list[str]] = {}  # sentence -> the backends that refuse a slot they offer
    for row in document["backends"]:
        offered = [slot for slot in (row["slots"] or {}).values() if slot["forward"]]
        if row["sentence"] and not (offered and all(slot["accepted"] for slot in offered)):
            sentence = output.shorten(row["sentence"], _LONGEST_SENTENCE)
            names.setdefault(sentence, []).append(output.one_line(row["name"]))
    for sentence, of_sentence in names.items():
        output.print_text(console, f"{', '.join(dict.fromkeys(of_sentence))}: {sentence}")
    if not probed:
        return
    # The block sizes are the defaults; `show` prints them.
    sizes, *rest = document["request"].split(", ")
    heads = [size for size in sizes.split() if size.partition("=")[0] in ("Hq", "G", "Dk", "Dv")]
    _print_request(console, document, ", ".join([" ".join(heads), *rest]))
    output.print_text(console, _legend(both))
    output.print_text(console, "more: nsa backends show NAME, nsa backends explain")


def _print_request(console: Console, document: dict[str, Any], request: str) -> None:
    """Print the request, and the GPU that is simulated or the fact that there is none."""
    output.print_text(console, f"request: {request}")
    if document["simulated"]:
        print_simulated(console, document["simulated"])
    elif document["device"] == "cpu":
        text = "no CUDA GPU is usable: the answers are for the CPU; --gpu a100 simulates one"
        output.print_text(console, text)


def print_simulated(console: Console, simulated: dict[str, Any]) -> None:
    """Print the GPU that is simulated, and what the answers assume beyond this machine."""
    title = f"simulated: {simulated['title']}, not this machine"
    output.print_text(console, title, "bold yellow")
    for name, lacking in simulated["assumed"].items():
        text = f"assumes a full installation; missing here, for {name}: {lacking}"
        output.print_text(console, text)


def print_details(document: dict[str, Any]) -> None:
    """Print every field of every row, one per line."""
    console = output.console()
    for row in document["backends"]:
        _print_fields(console, row, document["simulated"] is not None)
        if row["reason"]:
            continue
        both = _both(console)
        ranks = any(slot["rank"] is not None for slot in row["slots"].values())
        keys = ["deterministic", "workspace", "priority", *["rank"] * ranks, "reads_boundaries"]
        cells = [
            [
                name,
                _mark(slot, both),
                *(_cell(slot[key]) if slot["forward"] else "-" for key in keys),
            ]
            for name, slot in row["slots"].items()
        ]
        console.print()
        output.print_table(console, ["slot", "offers", *keys], cells)
        output.print_text(console, _legend(both))
        if ranks:
            output.print_text(console, "rank: replaces the stated priority for this request")
        if row["fused"]:
            cells = [[name, _cell(form["workspace"])] for name, form in row["fused"].items()]
            console.print()
            output.print_table(console, ["fused", "workspace"], cells)
        slots: dict[tuple[str, ...], list[str]] = {}
        for name, slot in row["slots"].items():
            for reason in slot["reasons"] if slot["forward"] else []:
                slots.setdefault(reason_lines(reason), []).append(name)
        if slots:
            console.print()
            output.print_text(console, "not supported")
        for (message, *hint), names in slots.items():
            for line in (f"{', '.join(names)}: {message}", *hint):
                output.print_text(console, f"  {line}")
        console.print()
        _print_request(console, document, document["request"])


def _print_fields(console: Console, row: dict[str, Any], simulated: bool) -> None:
    keys = ("name", "version", "distribution", "entry_point", "first_party", "summary")
    fields = [(key, output.one_line(_cell(row[key]))) for key in keys if row[key] != ""]
    fields.append(("status", f"{row['status']}: {row['sentence']}"))
    if row["reason"]:
        fields.append(("hint", output.one_line(row["reason"]["hint"])))
    else:
        fields += [("detail" + " here" * simulated, line) for line in row["details"]]
        fields.append(("contract", ".".join(map(str, row["api_version"]))))
    for key, value in fields:
        output.print_text(console, f"{key:13} {value}", indent=" " * 14)


def _cell(value: object) -> str:
    """Return a value as text: "-" for None, "yes" or "no" for a bool."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return str(value)


def reason_lines(reason: dict[str, Any], bullet: str = "") -> tuple[str, ...]:
    """Return the message of a reason, after a bullet, and its hint."""
    message, hint = output.one_line(reason["message"]), output.one_line(reason["hint"])
    return (bullet + message, f"  hint: {hint}") if hint else (bullet + message,)
