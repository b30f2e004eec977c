"""The tables, failures and verdict of `nsa verify`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsa_cli import output
from nsa_cli.output import shorten
from nsa_core.contract import SLOTS
from nsa_core.util.interruption import exit_code

if TYPE_CHECKING:
    from rich.console import Console

Rows = tuple[Sequence[str], list[list[str]]]  # header, cells
Finding = dict[str, Any]
_LISTED_FAILURES = 20
_LONGEST_DETAIL = 800
_NOTE = (
    "worst: largest error as a fraction of its limit; above 1.00 a kernel is wrong. A dash: equal"
    " bits or an exact choice are required."
)


def print_reports(
    reports: list[dict[str, Any]], every: bool, verbose: bool, typed: Mapping[str, object]
) -> None:
    """Print a table of checks, or of combinations, then the failures and the verdict.

    Args:
        reports: The report of one combination, or those of ``every`` combination.
        every: Print a row per combination.
        verbose: Print a row per check and slot, with each kind of error, instead of one per check.
        typed: Value of each option that decides what runs, and that the report does not have; None
            if it was not given.
    """
    console, report = output.console(), reports[0]
    findings, interrupted = report["findings"], bool(report.get("interrupted"))
    output.print_text(console, _circumstances(report) if every else _setting(report))
    console.print()
    columns, rows = (
        combinations_rows(reports) if every else checks_rows(findings, verbose, interrupted)
    )
    output.print_table(console, columns, rows, wrapped=("check", "slots"))
    console.print()
    note = _VERBOSE_NOTE if verbose else _NOTE + " --verbose: a row per slot."
    output.print_text(console, _NOTE if every else note, "dim", "")
    if not every:
        for reason, checks in _not_run(findings).items():
            output.print_text(console, f"not run: {reason} ({', '.join(checks)})", "yellow")
        for line in refusal_lines(report):
            output.print_text(console, line, "yellow")
    _print_failures(console, reports, typed)
    line, code = verdict(reports, every)
    output.print_text(console, line, "bold green" if code == 0 else "bold red")


def verdict(reports: list[dict[str, Any]], every: bool) -> tuple[str, int]:
    """Return the verdict on the report, or on those of ``every`` combination, and the exit code."""
    if not every:
        return summary(reports[0])
    codes = [summary(report)[1] for report in reports]
    passed, code = codes.count(0), 1 if 1 in codes else max(codes)
    seconds = sum(report["seconds"] for report in reports)
    line = f"{passed} of {len(reports)} combinations passed in {seconds:.0f} s"
    if interrupted := interruption_summary(reports):
        code, line = interrupted[1], f"{interrupted[0]}; {line}"
    return line, code


def _setting(report: dict[str, Any]) -> str:
    """Return the backends, device and dtypes of a report in a line."""
    slots_by_backend: dict[str, list[str]] = {}
    for slot, name in report["backends"].items():
        slots_by_backend.setdefault(name, []).append(slot)
    backends = (
        f"{next(iter(slots_by_backend))} in every slot"
        if len(slots_by_backend) == 1
        else ", ".join(f"{' '.join(slots)}: {name}" for name, slots in slots_by_backend.items())
    )
    return f"{backends}; {_circumstances(report)}"


def _circumstances(report: dict[str, Any]) -> str:
    device = report["device"] + (", triton interpreted" if report["interpreted"] else "")
    dtypes = "/".join(report["dtypes"])
    shard = f", shard {report['shard']}" if report.get("shard") else ""
    return f"{device}, {dtypes}, seed {report['seed']}{shard}"


def checks_rows(
    findings: Sequence[Finding], verbose: bool = False, interrupted: bool = False
) -> Rows:
    """Return the header and one row per check, failed checks first.

    Args:
        findings: The findings of a report.
        verbose: Return a row per check and slot, with each kind of error.
        interrupted: Only failures are final, so a passing row reads "ok so far".
    """
    rows: list[tuple[list[Finding], list[str]]] = []
    for key, group in _grouped(findings, "check", *["slot"] * verbose).items():
        names = {finding["slot"] or "all" for finding in group}
        is_whole = "all" in names or names >= set(SLOTS)
        slots = "all" if is_whole else " ".join(sorted(names, key=_slot_order))
        kinds = [[name] for name in _ERRORS] if verbose else [_ERRORS]
        worst = [
            _two_digits([f[n] for f in group for n in kind if f[n] is not None]) for kind in kinds
        ]
        row: list[str] = [key[0], slots, *_counts(group), *worst, _verdict(group, interrupted)]
        rows.append((group, row))
    rows.sort(key=lambda pair: not _failed(pair[0]))
    errors = _ERRORS if verbose else ["worst"]
    columns = ("check", "slot" if verbose else "slots", "passed", "n/a", *errors, "verdict")
    return columns, [row for _, row in rows]


def _slot_order(name: str) -> int:
    return SLOTS.index(name) if name in SLOTS else -1


_ERRORS = ("row", "elem", "bias")
_VERBOSE_NOTE = (
    "row: largest error of a row; elem: of an element; bias: systematic error. Each is a fraction"
    " of its limit; above 1.00 a kernel is wrong. A dash: equal bits or an exact"
    " choice are required."
)


def _grouped(findings: Sequence[Finding], *keys: str) -> dict[tuple[str, ...], list[Finding]]:
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault(tuple(finding[key] for key in keys), []).append(finding)
    return groups


def _failed(group: Sequence[Finding]) -> int:
    return sum(finding["ok"] is False for finding in group)


def _counts(group: Sequence[Finding]) -> list[str]:
    """Return the numbers of comparisons that passed and that do not apply."""
    return [str(sum(f["ok"] is True for f in group)), str(_not_applicable(group) or "")]


def _not_applicable(findings: Iterable[Finding]) -> int:
    return sum(finding["ok"] is None for finding in findings)


def _two_digits(errors: Sequence[float]) -> str:
    """Return the largest error with two digits; large ones as a power of ten, so that they fit."""
    if not errors:
        return "-"
    return f"{max(errors):.2f}" if max(errors) < 1000 else f"{max(errors):.1e}"


def _verdict(group: Sequence[Finding], interrupted: bool) -> str:
    if failed := _failed(group):
        return f"{failed} FAILED"
    if _not_applicable(group) == len(group):
        return "REFUSED" if any(map(_is_generated, group)) else "not run"
    return "ok so far" if interrupted else "ok"


def _not_run(findings: Sequence[Finding]) -> dict[str, list[str]]:
    """Return, for each reason, the checks of which no comparison applies."""
    checks_by_reason: dict[str, list[str]] = {}
    for (check,), group in _grouped(findings, "check").items():
        if _is_generated(group[0]):
            continue  # refusal_lines counts them
        if _not_applicable(group) == len(group):
            reason = (group[0]["detail"].splitlines() or ["no reason given"])[0]
            checks_by_reason.setdefault(shorten(reason, _LONGEST_DETAIL), []).append(check)
    return checks_by_reason


_SHOWN_REASONS = 2
_REASON_CHARACTERS = 100


def refusal_lines(report: dict[str, Any]) -> list[str]:
    """Return a line per slot whose probe refused generated cases: how many, and the reasons."""
    lines = []
    for slot, count in report.get("generated", {}).items():
        if count["refused"]:
            reasons = "; ".join(
                shorten(reason, _REASON_CHARACTERS) for reason in count["reasons"][:_SHOWN_REASONS]
            )
            total = f"{count['refused']} of {count['cases']}"
            lines.append(f"generated {slot}: {total} cases refused: {reasons}")
    return lines


def _is_generated(finding: Finding) -> bool:
    return bool(finding["check"] == f"generated {finding['slot']}")


def _print_failures(
    console: Console, reports: Sequence[dict[str, Any]], typed: Mapping[str, object]
) -> None:
    """Print the first failed findings, those of parity first, each with what reproduces it."""
    from nsa_verify.drawn.parser import is_line

    failed = [
        (report, finding)
        for report in reports
        for finding in report["findings"]
        if finding["ok"] is False
    ]
    if failed:
        console.print()
    # Parity shows the slot that is at fault; the layer fails with any of them.
    failed.sort(key=lambda pair: pair[1]["check"] != "parity")
    for report, finding in failed[:_LISTED_FAILURES]:
        combination = f" [{_choices(report)}]" if len(reports) > 1 else ""
        output.print_text(console, f"FAILED {_sentence(finding)}{combination}", "red")
    if len(failed) > _LISTED_FAILURES:
        more = len(failed) - _LISTED_FAILURES
        output.print_text(console, f"and {more} more failures; --json FILE writes all", "red")
    # A case repeats itself alone; other findings repeat with all checks of the first one.
    repeated = [pair for pair in failed if is_line(pair[1]["case"])][:_LISTED_FAILURES]
    repeated += [pair for pair in failed if not is_line(pair[1]["case"])][:1]
    for command in dict.fromkeys(_command(*pair, typed) for pair in repeated):
        # One line, to be copied whole: a break inside the quotes would be part of the case.
        console.print(f"to repeat: {command}", no_wrap=True, overflow="ignore", crop=False)


def _choices(report: dict[str, Any]) -> str:
    """Return the backend of each slot in a line: "cmp=sdpa sel=triton"."""
    return " ".join(f"{slot}={name.split()[0]}" for slot, name in report["backends"].items())


def _sentence(finding: Finding) -> str:
    keys, detail = ("check", "slot", "case", "dtype", "quantity"), finding["detail"]
    if (more := len(detail) - _LONGEST_DETAIL) > 0:  # it may be the message of a plugin
        detail = f"{detail[:_LONGEST_DETAIL]} ... ({more} more characters)"
    return f"{', '.join(finding[key] for key in keys if finding[key])}: {detail}"


def _command(report: dict[str, Any], finding: Finding, typed: Mapping[str, object]) -> str:
    """Return the command that runs the case of ``finding`` alone, or else its checks again."""
    from nsa_verify.drawn.parser import is_line

    options: dict[str, object] = {f"--{slot}": name for slot, name in report["named"].items()}
    options["--device"] = "cpu" if report["device"] == "cpu" else "cuda"
    # The request that the backends have to support depends on both.
    plan = {"--preset": ("quick", "interpreter"), "--phase": ("both",)}
    needed = {name: report[name[2:]] for name in plan if report[name[2:]] not in plan[name]}
    if is_line(finding["case"]):
        options |= {**needed, "--case": finding["case"]}
        options["--job-timeout"] = typed.get("--job-timeout")
    else:
        shard = report.get("shard")
        # A part of the checks in other dtypes has other checks.
        options["--dtype"] = ",".join(report["dtypes"]) if shard else finding["dtype"]
        options |= {**needed, "--seed": report["seed"] or None, "--shard": shard, **typed}
    words = [f"{name} {shlex.quote(str(x))}" for name, x in options.items() if x is not None]
    variables = {
        "TRITON_INTERPRET": "1" if report["interpreted"] else None,
        "NSA_PLUGINS": os.environ.get("NSA_PLUGINS"),
        "NSA_DISABLE_PLUGINS": os.environ.get("NSA_DISABLE_PLUGINS"),
        "NSA_CHECK": os.environ.get("NSA_CHECK"),
    }
    settings = [f"{name}={shlex.quote(x)}" for name, x in variables.items() if x is not None]
    return " ".join([*settings, "nsa", *output.plugin_words(), "verify", *words])


def summary(report: dict[str, Any]) -> tuple[str, int]:
    """Return the verdict on the whole report in a line, and the exit code of the command."""
    findings = report["findings"]
    failed, passed = _failed(findings), sum(f["ok"] is True for f in findings)
    noun = "check" if passed == 1 else "checks"
    line = f"{passed} {noun} passed, {failed} failed"
    if left_out := _not_applicable(findings):
        line += f", {left_out} not applicable"
    line += f" in {report['seconds']:.0f} s"
    if interrupted := interruption_summary([report]):
        return f"{interrupted[0]}; {line}", interrupted[1]
    counts = report.get("generated", {}).items()
    if refused := [slot for slot, count in counts if count["refused"] == count["cases"]]:
        line = f"NOT CHECKED: {' '.join(refused)} refused every generated case; {line}"
        return line, 1 if passed or failed else 3
    if not passed and not failed:
        return f"no check applies to this combination: {_setting(report)}", 3
    return line, 1 if failed else 0


def interruption_summary(reports: list[dict[str, Any]]) -> tuple[str, int] | None:
    """Return a line with the number of checks left by a signal, and its exit code.

    Returns None if no report was interrupted.
    """
    interruptions = [report["interrupted"] for report in reports if report.get("interrupted")]
    if not interruptions:
        return None
    left = sum(interruption["checks_left"] for interruption in interruptions)
    total = interruptions[0]["checks"] * len(reports)
    signal = interruptions[0]["signal"]
    return f"INTERRUPTED by {signal}, {left} of {total} groups of checks left", exit_code(signal)


def combinations_rows(reports: list[dict[str, Any]]) -> Rows:
    """Return the header and one row per combination, failures first."""
    slots = list(reports[0]["backends"])
    rows: list[list[str]] = []
    for report in sorted(reports, key=lambda report: not _failed(report["findings"])):
        findings = report["findings"]
        errors = [f[name] for f in findings for name in _ERRORS if f[name] is not None]
        names = [report["backends"][slot].split()[0] for slot in slots]
        verdict = _verdict(findings, bool(report.get("interrupted")))
        seconds = f"{report['seconds']:.1f}"
        rows.append([*names, *_counts(findings), _two_digits(errors), seconds, verdict])
    columns = (*slots, "passed", "n/a", "worst", "s", "verdict")
    return columns, rows
