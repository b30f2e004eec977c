"""The table and the one-line summary of `nsa verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsa_core.util.interruption import exit_code

if TYPE_CHECKING:
    from rich.table import Table


def table(findings: list[dict[str, Any]], so_far: bool = False) -> Table:
    """Worst error per check and slot, in parts of its budget: 1.00 is the limit that no correct
    kernel reaches.

    ``so_far``: of a run that was interrupted, in which no verdict but a failure is final.
    """
    from rich.table import Table
    from rich.text import Text

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for finding in findings:
        groups.setdefault((finding["check"], finding["slot"]), []).append(finding)
    made = Table(
        "check",
        "slot",
        "compared",
        title="Worst error in parts of its budget (row, elem, bias; a dash: equal bits demanded)",
        title_justify="left",
    )
    for name in ("row", "elem", "bias"):
        made.add_column(name, justify="right")
    made.add_column("verdict")
    for (check, slot), group in groups.items():
        counted = [f for f in group if f["ok"] is not None]
        worst = [_worst(counted, name) for name in ("row", "elem", "bias")]
        made.add_row(
            check, slot or "all", str(len(counted)), *worst, Text(*_verdict(group, counted, so_far))
        )
    return made


def _worst(findings: list[dict[str, Any]], name: str) -> str:
    values = [f[name] for f in findings if f[name] is not None]
    return f"{max(values):.2f}" if values else "-"


def _verdict(
    group: list[dict[str, Any]], counted: list[dict[str, Any]], so_far: bool
) -> tuple[str, str]:
    failed = sum(f["ok"] is False for f in counted)
    if failed:
        return f"{failed} FAILED", "bold red"
    skipped = len(group) - len(counted)
    if not counted:
        return f"not run: {group[0]['detail'].splitlines()[0]}", "yellow"
    words = ("ok so far", "yellow") if so_far else ("ok", "green")
    return (words[0] + (f", {skipped} not applicable" if skipped else ""), words[1])


def reads_table(report: dict[str, Any]) -> Table | str:
    """Tokens a step reads per kv head, counted by experiment beside those predicted, and their
    bytes.
    """
    from rich.table import Table
    from rich.text import Text

    if not report["reads"]:
        return f"reads: not counted: {report['reads_refused'].splitlines()[0]}"
    made = Table(
        "tokens",
        "branch",
        "kv head",
        title="Cached tokens that reach a step's output: a changed row of the cache changes it",
        title_justify="left",
    )
    columns = ("predicted", "by value", "by key", "bytes once", "read again", "shared by heads")
    for name in columns:
        made.add_column(name, justify="right")
    made.add_column("verdict")
    keys = (
        "predicted",
        "counted_values",
        "counted_keys",
        "distinct_bytes",
        "again_bytes",
        "shared_bytes",
    )
    sums: dict[tuple[int, int], int] = {}
    for row in report["reads"]:
        verdict = Text("ok", "green") if row["ok"] else Text(row["detail"], "bold red")
        made.add_row(
            str(row["length"]),
            row["branch"],
            str(row["kv_head"]),
            *(str(row[key]) for key in keys),
            verdict,
        )
        where = (row["length"], row["kv_head"])
        sums[where] = sums.get(where, 0) + max(row["counted_values"], row["counted_keys"])
    for length, bound in report["reads_bounds"].items():
        counted = max(count for (tokens, _), count in sums.items() if tokens == int(length))
        made.add_row(
            length, "all", "each", "", str(counted), "", "", "", "", f"the paper's Table 4: {bound}"
        )
    return made


def summary(report: dict[str, Any]) -> tuple[str, int]:
    """One line and the exit code."""
    findings = report["findings"]
    counted = [row["ok"] for row in report.get("reads", [])]
    failed = sum(f["ok"] is False for f in findings) + counted.count(False)
    passed = sum(f["ok"] is True for f in findings) + counted.count(True)
    who = ", ".join(f"{slot} {name}" for slot, name in report["backends"].items())
    device = report["device"] + (", triton interpreted" if report["interpreted"] else "")
    where = f"{device}, {'/'.join(report['dtypes'])}, text {report['text']['name']}"
    line = f"{passed} checks passed, {failed} failed in {report['seconds']:.0f} s: {who} ({where})"
    if cut := cut_short([report]):
        return f"{cut[0]}; {line}", cut[1]
    if not passed and not failed:
        return f"nothing could be checked: {who} ({where})", 3
    return line, 1 if failed else 0


def cut_short(reports: list[dict[str, Any]]) -> tuple[str, int] | None:
    """How many checks of these reports a signal left, and the exit code that tells of it; None
    where none is left.
    """
    cuts = [report["interrupted"] for report in reports if report.get("interrupted")]
    if not cuts:
        return None
    left, every = sum(c["checks_left"] for c in cuts), cuts[0]["checks"] * len(reports)
    return f"INTERRUPTED by {cuts[0]['signal']}, {left} of {every} checks left", exit_code(
        cuts[0]["signal"]
    )


def failures(report: dict[str, Any]) -> list[str]:
    """A line for each of the first 20 red findings."""
    return [
        f"FAILED {', '.join(f[k] for k in ('check', 'slot', 'case', 'dtype', 'quantity'))}:"
        f" {f['detail']}"
        for f in report["findings"]
        if f["ok"] is False
    ][:20]


def combinations(reports: list[dict[str, Any]]) -> Table:
    """A row per combination: who served each slot, how many checks passed and failed, and the worst
    error.
    """
    from rich.table import Table

    slots = list(reports[0]["backends"])
    made = Table(*slots, "passed", "failed", "worst row", "seconds")
    for report in reports:
        findings = report["findings"]
        counts = [str(sum(f["ok"] is ok for f in findings)) for ok in (True, False)]
        names = [report["backends"][slot].split()[0] for slot in slots]
        made.add_row(*names, *counts, _worst(findings, "row"), f"{report['seconds']:.1f}")
    return made
