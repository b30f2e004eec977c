"""Compute the tables of the A100 path: the code for sm_80, run on a newer GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from figure_pieces import PIECES
from figure_tables import PENDING, Results, digits, short_device, table, tokens

from nsa_bench.result import Measurement, read_result

# Subjects of the core, and their titles. The dense kernels have a column if they were measured.
DENSE = {
    "dense flash-attn": "dense, flash-attn",
    "dense flash": "dense, FlashAttention-2 of PyTorch",
}
OWN = {"triton": "triton", "auto": "auto"}
RIVALS = {"sfnsa NSA": "sfnsa", "xunhao NSA": "xunhao"}


def core_file(folder: Path, shape: str) -> Path | None:
    """Return the result of the core at ``shape``; None if it was not measured.

    Args:
        folder: The folder of a GPU's own results; the file is in a folder beside it.
        shape: Hq/G/D.
    """
    name = f"a100-core-{shape.replace('/', '-')}"
    (piece,) = (piece for piece in PIECES if piece.name == name)
    return piece.nearest(folder)


def core(results: Results) -> str:
    """Tabulate forward + backward of NSA, dense FlashAttention-2 and rivals, by length and GPU."""
    pieces = [piece for piece in PIECES if piece.name.startswith("a100-core-")]
    files = [
        file
        for piece in pieces
        for file in sorted(results.folder.parent.glob(f"*_as_{piece.rehearses}/{piece.file}"))
    ]
    read = [(result, _gpu(result.environment["device"])) for result in map(read_result, files)]
    measured = [(m, gpu) for result, gpu in read for m in result.measurements if m.phase == "both"]
    dense = {
        s: DENSE[s] for s in DENSE if any(m.subject == s and m.performance for m, _ in measured)
    }
    subjects = OWN | dense | RIVALS
    columns = ["heads", "inputs", "tokens", "GPU", *subjects.values()]
    times: dict[tuple[str, str, int, str], dict[str, str]] = {}  # row -> subject -> ms
    for m, gpu in measured:
        row = times.setdefault((m.shape, m.inputs, m.length, gpu), {})
        if m.performance:
            row[m.subject] = digits(m.performance.median_ms)
    rows = [
        [shape, inputs, tokens(length), gpu, *(cells.get(s, "-") for s in subjects)]
        for (shape, inputs, length, gpu), cells in sorted(times.items())
    ]
    return table(columns, rows or [[PENDING, *"-" * (len(columns) - 1)]])


def _gpu(device: str) -> str:
    """Return the name of the GPU that ran another GPU's code: H200."""
    return short_device(device.partition(" rehearsing ")[0])


def decode(results: Results) -> str:
    """Tabulate the step of decoding with the code for sm_80 and with that of the same GPU."""
    columns = ["heads", "sequences x tokens", "code for the A100", "code for the GPU", "ratio"]
    (piece,) = (p for p in PIECES if p.name == "a100-decode")
    file = piece.nearest(results.folder)
    if file is None:
        return table(columns, [[PENDING, *"-" * (len(columns) - 1)]])
    gpu = file.parent.with_name(file.parent.name.removesuffix("_as_sm80"))
    own = _steps(gpu / "decode.json")
    rows = []
    for problem, ms in _steps(file).items():
        shape, batch, length = problem
        other = own.get(problem)
        ratio = ["-", "-"] if other is None else [digits(other), f"{ms / other:.2f}x"]
        rows.append([shape, f"{batch} x {tokens(length)}", digits(ms), *ratio])
    return table(columns, rows)


def _steps(file: Path) -> dict[tuple[str, int, int], float]:
    """Return the ms of the step that `auto` chooses, by (shape, sequences, tokens)."""
    measured: list[Measurement] = read_result(file).measurements if file.exists() else []
    return {
        (m.shape, m.batch, m.length): m.performance.median_ms
        for m in measured
        if m.subject == "auto" and m.performance
    }


A100: dict[str, Callable[[Results], str]] = {"a100": core, "a100-decode": decode}
