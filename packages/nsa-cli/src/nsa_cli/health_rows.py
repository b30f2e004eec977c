"""Print the environment report of `nsa doctor`."""

from __future__ import annotations

import getpass
import re
from typing import Any

from nsa_cli import output

_LONGEST_STATE = 24  # characters; a longer state, such as a version, moves to the detail

_OPTIONAL = {
    "triton": "optional: the backend triton uses it on a GPU",
    "flash-attn": "optional: the backend fa2 uses it on a GPU",
}


def _rows(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the rows (component, state, detail) of `nsa doctor`."""
    torch = document["torch"]
    platform = document["platform"].replace("-", " ")  # a line may break at spaces only
    rows = [("python", document["python"], f"{platform}, {document['cpus']} CPUs")]
    names_of: dict[str, list[str]] = {}
    for name, installed in document["packages"].items():
        names_of.setdefault(installed, []).append(name)
    rows += [("nsa", installed, ", ".join(names)) for installed, names in names_of.items()]
    for name, library in (
        ("torch", torch),
        ("triton", document["triton"]),
        ("flash-attn", document["flash_attn"]),
    ):
        state = str(library["version"] or "") if library["status"] == "ok" else library["status"]
        details = {"broken": library["error"], "missing": _OPTIONAL.get(name, "")}
        detail = details.get(library["status"], "")
        if name == "torch" and library["status"] == "ok":
            build = library.get("cuda") or library.get("hip")
            detail = f"built for {'CUDA' if library.get('cuda') else 'ROCm'} {build}"
            detail = detail if build else "built for the CPU only"
        rows.append((name, state, detail))
    rows.append(("driver", document["driver"] or "none", ""))
    for index, gpu in enumerate(torch.get("gpus", [])):
        size = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        rows.append(
            (f"gpu {index}", f"sm_{''.join(map(str, gpu['capability']))}", f"{gpu['name']}, {size}")
        )
    if torch["status"] != "ok":
        rows.append(("gpu", "unknown", "torch cannot be imported"))
    elif not torch.get("gpus"):
        rows.append(("gpu", "none", "attention runs on the CPU"))
    for backend in document["backends"]:
        # The row "nsa" has the versions of this project's own distributions.
        own = backend["distribution"] in document["packages"]
        origin = "" if own else f"; from {backend['distribution']} {backend['version']}"
        rows.append((f"backend {backend['name']}", backend["status"], backend["sentence"] + origin))
    for device, run in document["attention"].items():
        slots_of: dict[str, list[str]] = {}
        for slot, name in run["backends"].items():
            slots_of.setdefault(name, []).append(slot)
        chosen = "; ".join(f"{name}: {', '.join(slots)}" for name, slots in slots_of.items())
        rows.append((f"runs on {device}", "yes" if run["finite"] else "wrong", chosen))
    unset = [name for name, value in document["variables"].items() if value is None]
    for name, value in document["variables"].items():
        if value is not None:
            rows.append((name, "", repr(value)))
    if unset:
        rows.append(("not set", "", ", ".join(unset)))
    return [_short_state(*(output.one_line(cell) for cell in row)) for row in rows]


def _short_state(component: str, state: str, detail: str) -> tuple[str, str, str]:
    """Return a row whose state fits its column."""
    if len(state) <= _LONGEST_STATE:
        return component, state, detail
    return component, "", f"{state}, {detail}" if detail else state


def print_screen(document: dict[str, Any]) -> None:
    """Print the table, then each problem with a command to type, then the verdict."""
    console = output.console()
    output.print_rows(console, [("component", "state", "detail"), *_rows(document)], styled=1)
    for problem in document["troubles"]:
        console.print()
        output.print_text(console, _problem(problem), "red")
        output.print_text(console, f"  type: {output.one_line(problem['hint'])}")
    console.print()
    if not document["works"]:
        verdict, style = "no attention can run in this environment", "bold red"
    else:
        count = len(document["troubles"])
        noun = "problem" if count == 1 else "problems"
        verdict, style = f"this environment works, {count or 'no'} {noun}", "bold green"
    output.print_text(console, verdict, style)


def print_block(document: dict[str, Any]) -> None:
    """Print a Markdown block for a bug report, without directories and without the user's name."""
    lines = [
        f"{component}: {state}" + (f" ({detail})" if state and detail else detail)
        for component, state, detail in _rows(document)
    ]
    lines += map(_problem, document["troubles"])
    console = output.console()
    for line in ("```", *map(anonymize, lines), "```"):
        output.print_text(console, line)


def _problem(problem: dict[str, str]) -> str:
    return f"PROBLEM {output.one_line(problem['what'])}: {output.one_line(problem['message'])}"


def anonymize(line: str) -> str:
    """Return ``line`` with absolute paths cut to their last part and the user's name replaced."""
    line = re.sub(r"""(?<![\w.:/])(?:[A-Za-z]:)?[/\\](?:[^/\\\s'":;,]+[/\\])*""", ".../", line)
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        return line
    return re.sub(rf"\b{re.escape(user)}\b", "USER", line) if len(user) > 2 else line
