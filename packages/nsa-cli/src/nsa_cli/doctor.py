"""`nsa doctor`: report this machine's environment, its problems and their fixes."""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from nsa_cli import output
from nsa_cli.choices import Force, Json
from nsa_core.errors import InvalidInput

_OPTIONAL = {
    "triton": "optional: the backend triton uses it on a GPU",
    "flash-attn": "optional: the backend fa2 uses it on a GPU",
}


def doctor(
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Print a block for a bug report, without paths and user names."
        ),
    ] = False,
    json: Json = None,
    limit: Annotated[
        float, typer.Option(help="Time limit in seconds for importing each library.", min=1.0)
    ] = 60.0,
    force: Force = False,
) -> None:
    """Check Python, torch, CUDA, the driver, GPUs, triton, flash-attn and every plugin.

    Prints a command to type for each problem. Each library and each third-party plugin loads in a
    child process with a time limit, so that a crash or a hang becomes a line of the report. Exit
    code 4 if no attention can run in this environment; 0 with --report.
    """
    from nsa_cli import health

    if json and report:
        raise InvalidInput("--json and --report print one document each; leave one of them out")
    output.check_writable("--json", json, force)
    document = health.inspect_environment(limit)
    if output.prints_json(document, json, force):
        pass
    elif report:
        print_block(document)
    else:
        _print_screen(document)
    raise typer.Exit(0 if document["works"] or report else output.BROKEN)


def _rows(document: dict[str, Any]) -> list[list[str]]:
    """Return the rows [component, state, detail] of `nsa doctor`."""
    torch = document["torch"]
    platform = document["platform"].replace("-", " ")  # a line may break at spaces only
    rows = [["python", document["python"], f"{platform}, {document['cpus']} CPUs"]]
    rows += [["nsa", version, names] for version, names in _grouped(document["packages"].items())]
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
            kind = f"CUDA {build}" if library.get("cuda") else f"ROCm {build}"
            detail = f"built for {kind if build else 'the CPU only'}"
        rows.append([name, state, detail])
    rows.append(["driver", document["driver"] or "none", ""])
    for index, gpu in enumerate(torch.get("gpus", [])):
        capability = "".join(map(str, gpu["capability"]))
        size = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        rows.append([f"gpu {index}", f"sm_{capability}", f"{gpu['name']}, {size}"])
    if torch["status"] != "ok":
        rows.append(["gpu", "unknown", "torch cannot be imported"])
    elif not torch.get("gpus"):
        rows.append(["gpu", "none", "attention runs on the CPU"])
    for backend in document["backends"]:
        # The row "nsa" has the versions of this project's own distributions.
        own = backend["distribution"] in document["packages"]
        origin = "" if own else f"; from {backend['distribution']} {backend['version']}"
        rows.append([f"backend {backend['name']}", backend["status"], backend["sentence"] + origin])
    for device, run in document["attention"].items():
        chosen = "; ".join(f"{name}: {slots}" for name, slots in _grouped(run["backends"].items()))
        rows.append([f"runs on {device}", "yes" if run["finite"] else "wrong", chosen])
    variables = document["variables"].items()
    rows += [[name, "", repr(value)] for name, value in variables if value is not None]
    if unset := ", ".join(name for name, value in variables if value is None):
        rows.append(["not set", "", unset])
    return [[output.one_line(cell) for cell in row] for row in rows]


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return each value of the (name, value) pairs with its names, joined by commas."""
    names: dict[str, list[str]] = {}
    for name, value in pairs:
        names.setdefault(value, []).append(name)
    return [(value, ", ".join(of_value)) for value, of_value in names.items()]


def _print_screen(document: dict[str, Any]) -> None:
    """Print the table, then each problem with a command to type, then the verdict."""
    console = output.console()
    columns = ("component", "state", "detail")
    output.print_table(console, columns, _rows(document), wrapped=("detail",))
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
