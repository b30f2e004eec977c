"""The tables and the one-line summary of `nsa verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsa_core.util.interruption import exit_code

if TYPE_CHECKING:
    from rich.table import Table


def findings_table(findings: list[dict[str, Any]], interrupted: bool = False) -> Table:
    """Return a table of the worst error per check and slot, as a fraction of its limit.

    A correct kernel stays below 1.00. In an ``interrupted`` run only failures are final, so a
    passing row reads "ok so far".
    """
    from rich.table import Table
    from rich.text import Text

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for finding in findings:
        groups.setdefault((finding["check"], finding["slot"]), []).append(finding)
    table = Table(
        "check",
        "slot",
        "compared",
        title=(
            "Worst error as a fraction of its limit (row, elem, bias; a dash: equal bits required)"
        ),
        title_justify="left",
    )
    for name in ("row", "elem", "bias"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for (check, slot), group in groups.items():
        judged = [finding for finding in group if finding["ok"] is not None]
        worst = [_worst(judged, name) for name in ("row", "elem", "bias")]
        verdict = Text(*_verdict(group, judged, interrupted))
        table.add_row(check, slot or "all", str(len(judged)), *worst, verdict)
    return table


def _worst(findings: list[dict[str, Any]], name: str) -> str:
    values = [f[name] for f in findings if f[name] is not None]
    return f"{max(values):.2f}" if values else "-"


def _verdict(
    group: list[dict[str, Any]], judged: list[dict[str, Any]], interrupted: bool
) -> tuple[str, str]:
    """Return the verdict on a group of findings and its style."""
    failed = sum(finding["ok"] is False for finding in judged)
    if failed:
        return f"{failed} FAILED", "bold red"
    skipped = len(group) - len(judged)
    if not judged:
        return f"not run: {group[0]['detail'].splitlines()[0]}", "yellow"
    text, style = ("ok so far", "yellow") if interrupted else ("ok", "green")
    return (text + (f", {skipped} not applicable" if skipped else ""), style)


def reads_table(report: dict[str, Any]) -> Table | str:
    """Return a table of the cached tokens that a decode step reads per kv head, and their bytes.

    The counts come from changing cached values and keys; the predicted count is shown with them. If
    nothing was counted, return a line with the reason.
    """
    from rich.table import Table
    from rich.text import Text

    if not report["reads"]:
        return f"reads: not counted: {report['reads_refused'].splitlines()[0]}"
    table = Table(
        "tokens",
        "branch",
        "kv head",
        title="Cached tokens that a decode step reads: changing one changes the step's output",
        title_justify="left",
    )
    columns = ("predicted", "by value", "by key", "bytes once", "read again", "shared by heads")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("verdict")
    keys = (
        "predicted",
        "counted_values",
        "counted_keys",
        "distinct_bytes",
        "again_bytes",
        "shared_bytes",
    )
    tokens_read: dict[tuple[int, int], int] = {}
    for row in report["reads"]:
        verdict = Text("ok", "green") if row["ok"] else Text(row["detail"], "bold red")
        table.add_row(
            str(row["length"]),
            row["branch"],
            str(row["kv_head"]),
            *(str(row[key]) for key in keys),
            verdict,
        )
        place = (row["length"], row["kv_head"])
        count = max(row["counted_values"], row["counted_keys"])
        tokens_read[place] = tokens_read.get(place, 0) + count
    for length, bound in report["reads_bounds"].items():
        largest = max(count for (tokens, _), count in tokens_read.items() if tokens == int(length))
        table.add_row(
            length, "all", "each", "", str(largest), "", "", "", "", f"the paper's Table 4: {bound}"
        )
    return table


def summary(report: dict[str, Any]) -> tuple[str, int]:
    """Return a line about the whole report, and the exit code of the command."""
    findings = report["findings"]
    reads_ok = [row["ok"] for row in report.get("reads", [])]
    failed = sum(f["ok"] is False for f in findings) + reads_ok.count(False)
    passed = sum(f["ok"] is True for f in findings) + reads_ok.count(True)
    backends = ", ".join(f"{slot} {name}" for slot, name in report["backends"].items())
    device = report["device"] + (", triton interpreted" if report["interpreted"] else "")
    setting = f"{device}, {'/'.join(report['dtypes'])}, text {report['text']['name']}"
    seconds = f"{report['seconds']:.0f} s"
    line = f"{passed} checks passed, {failed} failed in {seconds}: {backends} ({setting})"
    if interrupted := interruption_summary([report]):
        return f"{interrupted[0]}; {line}", interrupted[1]
    if not passed and not failed:
        return f"no check applies to this combination: {backends} ({setting})", 3
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
    return f"INTERRUPTED by {signal}, {left} of {total} checks left", exit_code(signal)


def failures(report: dict[str, Any]) -> list[str]:
    """Return a line for each of the first 20 failed findings."""
    keys = ("check", "slot", "case", "dtype", "quantity")
    return [
        f"FAILED {', '.join(finding[key] for key in keys)}: {finding['detail']}"
        for finding in report["findings"]
        if finding["ok"] is False
    ][:20]


def combinations_table(reports: list[dict[str, Any]]) -> Table:
    """Return a table of backends, passed and failed checks and worst error per combination."""
    from rich.table import Table

    slots = list(reports[0]["backends"])
    table = Table(*slots, "passed", "failed", "worst row", "seconds")
    for report in reports:
        findings = report["findings"]
        counts = [str(sum(f["ok"] is ok for f in findings)) for ok in (True, False)]
        names = [report["backends"][slot].split()[0] for slot in slots]
        table.add_row(*names, *counts, _worst(findings, "row"), f"{report['seconds']:.1f}")
    return table
