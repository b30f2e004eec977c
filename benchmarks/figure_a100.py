"""Compute the figures of the A100 path: the code for sm_80, run on a newer GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from figure_pieces import PIECES
from figure_tables import PENDING, Results, digits, table, tokens

from nsa_bench.result import Measurement, read_result

DENSE = ("dense flash-attn", "dense flash")
# Subjects of the core by title; a cell has the fastest one.
A100_SUBJECTS = {
    "NSA": ("auto", "triton"),
    "dense FlashAttention-2": DENSE,
    "sfnsa": ("sfnsa NSA",),
    "xunhao": ("xunhao NSA",),
}


def core_file(folder: Path, shape: str) -> Path | None:
    """Return the result of the core at ``shape``; None if it was not measured.

    Args:
        folder: The folder of a GPU's own results; the file is in a folder beside it.
        shape: Hq/G/D.
    """
    name = f"a100-core-{shape.replace('/', '-')}"
    (piece,) = (piece for piece in PIECES if piece.name == name)
    return piece.nearest(folder)


def a100_times(results: Results) -> dict[tuple[str, int], dict[str, float]]:
    """Return (heads, tokens) -> subject -> ms of forward and backward on random inputs."""
    pieces = [piece for piece in PIECES if piece.name.startswith("a100-core-")]
    files = [file for piece in pieces if (file := piece.nearest(results.folder))]
    times: dict[tuple[str, int], dict[str, float]] = {}
    for m in (m for file in files for m in read_result(file).measurements):
        if (m.phase, m.inputs) == ("both", "random") and m.performance:
            times.setdefault((m.shape, m.length), {})[m.subject] = m.performance.median_ms
    return times


def core(results: Results) -> str:
    """Tabulate forward + backward of NSA, dense FlashAttention-2 and rivals on random inputs."""
    rows = []
    for (shape, length), cells in sorted(a100_times(results).items()):
        found = [[cells[s] for s in subjects if s in cells] for subjects in A100_SUBJECTS.values()]
        rows.append([shape, tokens(length), *(digits(min(ms)) if ms else "-" for ms in found)])
    columns = ["heads", "tokens", *A100_SUBJECTS]
    return table(columns, rows or [[PENDING, *"-" * (len(columns) - 1)]])


def decode(results: Results) -> str:
    """Return the range of a decode step's time over that with the code for the same GPU."""
    (piece,) = (p for p in PIECES if p.name == "a100-decode")
    file = piece.nearest(results.folder)
    if file is None:
        return PENDING
    own = _steps(file.parent.with_name(file.parent.name.removesuffix("_as_sm80")) / "decode.json")
    ratios = [ms / own[problem] for problem, ms in _steps(file).items() if problem in own]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times" if ratios else PENDING


def _steps(file: Path) -> dict[tuple[str, int, int], float]:
    """Return the ms of the step that `auto` chooses, by (shape, sequences, tokens)."""
    measured: list[Measurement] = read_result(file).measurements if file.exists() else []
    return {
        (m.shape, m.batch, m.length): m.performance.median_ms
        for m in measured
        if m.subject == "auto" and m.performance
    }


A100: dict[str, Callable[[Results], str]] = {"a100": core, "a100-decode": decode}
