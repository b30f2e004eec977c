"""Build and print the output of `nsa backends list` and `show`, as JSON or as tables.

Torch is imported only to probe the backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nsa_cli import output
from nsa_core.contract import SLOTS, Reason
from nsa_core.errors import BackendUnavailable
from nsa_core.plan.gpus import GPU
from nsa_core.plan.loading import BackendEntry, installed
from nsa_core.plan.registry import Registry, disabled_reason
from nsa_core.plan.standing import (
    Standing,
    reason_text,
    standings,
    typical_candidates,
)

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_core.plan.candidates import Candidate, Candidates

SCHEMA_VERSION = 1
_LONGEST_SENTENCE = 200  # characters; `show` prints all of a longer one
_WIDEST_LIST = 120  # columns of the list on a wide terminal, and in a pipe


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
                "reason": reason_row(reason),
                "summary": "",
                "slots": None,
            }
        )
    return {"schema_version": SCHEMA_VERSION, "probed": False, "request": None, "backends": rows}


def list_and_probe(
    registry: Registry | None = None, phase: str = "prefill", gpu: GPU | None = None
) -> tuple[Registry, dict[str, Any]]:
    """Return all backends with their answers to a typical request of ``phase``.

    The request is for this machine, or for the simulated ``gpu``.
    """
    from nsa_core.plan.candidates import describe_request

    registry = output.find_backends() if registry is None else registry
    candidates = typical_candidates(registry, phase, gpu)
    standing = standings(candidates, gpu)
    rows = [
        _row(entry, candidates, standing[entry.name, entry.distribution])
        for entry in registry.entries
    ]
    return registry, {
        "schema_version": SCHEMA_VERSION,
        "probed": True,
        "request": describe_request(candidates.requests["cmp"]),
        "device": candidates.requests["cmp"].device,
        "simulated": simulated_row(gpu),
        "backends": rows,
    }


def simulated_row(gpu: GPU | None) -> dict[str, Any] | None:
    """Return the simulated GPU as a JSON object, with the software of this machine."""
    if gpu is None:
        return None
    from importlib.metadata import PackageNotFoundError, version

    software: dict[str, str | None] = {}
    for name in ("torch", "triton", "flash-attn"):
        try:
            software[name] = version(name)
        except PackageNotFoundError:
            software[name] = None
    return {
        "gpu": gpu.name,
        "title": gpu.title,
        "capability": list(gpu.capability),
        "software_here": software,
    }


def add_details(document: dict[str, Any], registry: Registry) -> None:
    """Add to each row of ``document`` the details that its backend reports on this machine."""
    from nsa_core.plan.candidates import details

    entries = {(entry.name, entry.distribution): entry for entry in registry.entries}
    for row in document["backends"]:
        row["details"] = details(entries[row["name"], row["distribution"]])


def reason_row(reason: Reason | None) -> dict[str, str] | None:
    """Return a reason as a JSON object."""
    return (
        None
        if reason is None
        else {"code": reason.code, "message": reason.message, "hint": reason.hint}
    )


def _row(entry: BackendEntry, candidates: Candidates, standing: Standing) -> dict[str, Any]:
    spec = entry.spec
    of_entry, here = candidates.of(entry), standing.here
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "entry_point": entry.entry_point,
        "first_party": entry.first_party,
        "status": standing.status,
        "sentence": standing.sentence,
        "reason": reason_row(entry.reason),
        "summary": spec.summary if spec else "",
        "api_version": list(spec.api_version) if spec else None,
        "slots": {slot: _slot_row(entry, slot, of_entry.get(slot), here) for slot in SLOTS},
        "fused": {n: {"workspace": n in spec.fused_workspace} for n in spec.fused} if spec else {},
    }


def _slot_row(
    entry: BackendEntry, slot: str, candidate: Candidate | None, here: frozenset[Reason]
) -> dict[str, Any]:
    spec = entry.spec.slots.get(slot) if entry.spec else None
    reasons = list(candidate.reasons) if candidate else [entry.reason] if entry.reason else []
    # Decode steps use the forward of combine.
    decodes = spec is not None and (spec.decode is not None or slot == "combine")
    rows = [
        {"code": r.code, "message": r.message, "hint": r.hint, "here": r in here} for r in reasons
    ]
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
        "reasons": rows,
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
    return f"{both} forward and backward, F forward only, D decodes, () refuses, - not offered"


def print_list(document: dict[str, Any]) -> None:
    """Print one row per backend, then the request and a legend."""
    console = output.console()
    # A narrower line is easier to read than one of 200 columns.
    console.width = min(console.width, _WIDEST_LIST)
    if not document["probed"]:
        rows = [
            [
                output.one_line(row[key])
                for key in ("name", "version", "distribution", "status", "sentence")
            ]
            for row in document["backends"]
        ]
        titles = ["name", "version", "distribution", "status", "in short"]
        output.print_rows(console, [titles, *rows], styled=3)
        return
    both = _both(console)
    rows = [
        [
            output.one_line(row["name"]),
            output.one_line(row["version"]),
            row["status"],
            *(_mark(row["slots"][slot], both) for slot in SLOTS),
            output.shorten(row["sentence"], _LONGEST_SENTENCE),
        ]
        for row in document["backends"]
    ]
    gaps = (2, 2, 2, 1, 1, 1, 1, 2)
    table = [["name", "version", "status", *SLOTS, "in short"], *rows]
    used = sum(max(map(len, column)) for column in list(zip(*table))[:-1]) + sum(gaps)
    below: list[tuple[str, str]] = []
    if used + max(len(row[-1]) for row in table) > console.width:
        # The reasons do not fit beside the marks: they follow below the table.
        below = _reasons_below(document)
        table = [[*row[:-1], ""] for row in table]
    output.print_rows(console, table, gaps, styled=2)
    for names, sentence in below:
        output.print_text(console, f"{names}: {sentence}")
    # The block sizes are the defaults; `show` prints them.
    sizes, *rest = document["request"].split(", ")
    heads = [size for size in sizes.split() if size.partition("=")[0] in ("Hq", "G", "Dk", "Dv")]
    _print_request(console, document, ", ".join([" ".join(heads), *rest]))
    output.print_text(console, _legend(both))
    output.print_text(console, "more: nsa backends show NAME, nsa backends explain")


def _reasons_below(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (names, sentence) of the backends that do not run every slot they offer."""
    names: dict[str, list[str]] = {}
    for row in document["backends"]:
        slots = [slot for slot in row["slots"].values() if slot["forward"]]
        if not slots or not all(slot["accepted"] for slot in slots):
            sentence = output.shorten(row["sentence"], _LONGEST_SENTENCE)
            names.setdefault(sentence, []).append(output.one_line(row["name"]))
    return [(", ".join(of_sentence), sentence) for sentence, of_sentence in names.items()]


def _print_request(console: Console, document: dict[str, Any], request: str) -> None:
    """Print the request, and the GPU that is simulated or the fact that there is none."""
    output.print_text(console, f"request: {request}")
    if document["simulated"]:
        print_simulated(console, document["simulated"])
    elif document["device"] == "cpu":
        text = "no CUDA GPU is usable: the answers are for the CPU; --gpu a100 simulates one"
        output.print_text(console, text)


def print_simulated(console: Console, simulated: dict[str, Any]) -> None:
    """Print the GPU that is simulated, and the software, which is that of this machine."""
    title = f"simulated: {simulated['title']}, not this machine"
    output.print_text(console, title, "bold yellow")
    software = ", ".join(
        f"{name} {version}" if version else f"no {name}"
        for name, version in simulated["software_here"].items()
    )
    output.print_text(console, f"software of this machine: {software}")


def print_details(document: dict[str, Any]) -> None:
    """Print every field of every row, one per line."""
    console = output.console()
    for row in document["backends"]:
        _print_fields(console, row, document["simulated"] is not None)
        if row["reason"]:
            continue
        both = _both(console)
        ranks = any(slot["rank"] is not None for slot in row["slots"].values())
        columns = (
            "deterministic",
            "workspace",
            "priority",
            *(["rank"] if ranks else []),
            "reads_boundaries",
        )
        cells = [("slot", "offers", *columns)]
        for name, slot in row["slots"].items():
            values = [_cell(slot[key]) if slot["forward"] else "-" for key in columns]
            cells.append((name, _mark(slot, both), *values))
        console.print()
        output.print_rows(console, [(*row, "") for row in cells])
        output.print_text(console, _legend(both))
        if ranks:
            output.print_text(console, "rank: replaces the stated priority for this request")
        if row["fused"]:
            cells = [(name, _cell(form["workspace"]), "") for name, form in row["fused"].items()]
            console.print()
            output.print_rows(console, [("fused", "workspace", ""), *cells])
        if reasons := _reasons(row):
            console.print()
            output.print_text(console, "reasons for refusal")
            print_reasons(console, reasons)
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


def _reasons(row: dict[str, Any]) -> list[tuple[list[str], str, str]]:
    """Return (slots, message, hint) of each reason against the request; equal ones are shared."""
    slots: dict[tuple[str, str], list[str]] = {}
    for name, slot in row["slots"].items():
        for reason in slot["reasons"] if slot["forward"] else []:
            slots.setdefault(reason_lines(reason), []).append(name)
    return [(names, message, hint) for (message, hint), names in slots.items()]


def reason_lines(reason: dict[str, Any]) -> tuple[str, str]:
    """Return message and hint of a reason in JSON form, with a mark if it is of this machine."""
    message = reason_text(reason["message"], bool(reason.get("here")))
    return message, output.one_line(reason["hint"])


def print_reasons(
    console: Console, reasons: Iterable[tuple[Sequence[str], str, str]], indent: int = 2
) -> None:
    """Print each (slots, message, hint), the hint indented below the message."""
    for slots, message, hint in reasons:
        title = f"{', '.join(slots)}: " if slots else "- "
        output.print_text(console, " " * indent + title + message)
        if hint:
            output.print_text(console, " " * (indent + 2) + f"hint: {hint}")


def raise_nothing_usable(document: dict[str, Any]) -> None:
    """Raise the error that no backend can be used.

    Raises:
        BackendUnavailable: Always, with ``nothing_usable`` set.
    """
    state = "none is ready" if document["backends"] else "none is installed"
    error = BackendUnavailable(f"no backend can be used, {state}; pip install nsa-backend-sdpa")
    error.nothing_usable = True
    raise error
