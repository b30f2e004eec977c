"""Compute the tables and values of README.md and the docs from result files.

Each function in ``TABLES`` takes the :class:`Results` of one GPU and returns a Markdown table, or
one line of text for a value inside a sentence.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from figure_pieces import BACKEND_SHAPES, PIECES, SHAPES, nearest

from nsa_bench.crossover import crossing
from nsa_bench.result import Measurement, Result, read_result
from nsa_bench.timing import spread_of_repeats

ABSENT = "not measured"
PENDING = "not measured yet"  # the result file does not exist
PROBLEMS = tuple(itertools.product(SHAPES, ("random", "real")))
BRANCHES = ("compress", "cmp", "select", "sel", "win", "combine")


class Results:
    """The result files of one GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cache  # noqa: B019  an instance lives as long as the program
    def bench(self, file: str | Path) -> Result:
        """Return a result of ``nsa bench``."""
        return read_result(self.folder / file)

    def of_pieces(self, prefix: str) -> list[Result]:
        """Return the results of pieces by the beginning of their names, of this or another GPU."""
        pieces = [piece for piece in PIECES if piece.name.startswith(prefix)]
        return [self.bench(file) for piece in pieces if (file := piece.nearest(self.folder))]

    def document(self, name: str, rehearses: str = "") -> dict[str, Any] | None:
        """Return a result file of this GPU, or of another one; None if there is none.

        Args:
            name: Name of the file.
            rehearses: As in :func:`figure_pieces.nearest`.
        """
        file = nearest(self.folder, name, rehearses)
        if file is None:
            return None
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return document

    @functools.cache  # noqa: B019
    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a result of ``train.py`` or of a kernel benchmark."""
        rows: list[dict[str, Any]] = json.loads((self.folder / name).read_text())["rows"]
        return rows

    def backends(self) -> list[Result]:
        """Return the results of NSA, dense kernels and other libraries by length, a shape each."""
        return [self.bench(f"backends_{s.replace('/', '_')}.json") for s in BACKEND_SHAPES]

    def rivals(self) -> list[Measurement]:
        """Return the measurements of NSA and of other libraries in one run; [] without a file."""
        name = "rivals.json"
        return self.bench(name).measurements if (self.folder / name).exists() else []

    def core(self, shape: str) -> list[Measurement]:
        """Return the measurements of the core at ``shape``."""
        return self.bench(f"core_{shape.replace('/', '_')}.json").measurements

    def core_cell(self, shape: str, inputs: str, length: int) -> Measurement | None:
        """Return the forward + backward of NSA in one cell; None if it has no time."""
        return next(
            (
                m
                for m in self.core(shape)
                if (m.kind, m.inputs, m.phase, m.length) == ("combo", inputs, "both", length)
                and m.performance is not None
            ),
            None,
        )

    def train(self, file: str, **facts: Any) -> dict[str, Any]:
        """Return the only row of ``file`` whose fields equal ``facts``."""
        (row,) = (r for r in self.rows(file) if all(r.get(k) == v for k, v in facts.items()))
        return row


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; without rows, its only row says that nothing is measured yet."""
    cells = [*rows] or [[PENDING, *["-"] * (len(columns) - 1)]]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def digits(value: float) -> str:
    """Format with three significant digits and trailing zeros: 0.0228, 1.20, 12.0, 441."""
    places = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{places}f}"


def fixed(places: int) -> Callable[[float], str]:
    """Return a function that formats with ``places`` decimals."""
    return lambda value: f"{value:.{places}f}"


def tokens(count: int) -> str:
    """Format 2048 as 2k, and 512 as 512."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def short_device(device: str) -> str:
    """Return the name of a GPU without the vendor and the memory type: H100 80GB."""
    return device.removeprefix("NVIDIA ").partition(" HBM")[0]


def gpu(results: Results) -> str:
    """Return the GPU of the results."""
    return short_device(results.bench("core_64_4_128.json").environment["device"])


def core(results: Results) -> str:
    """Tabulate forward + backward of NSA and of dense attention, by shape and inputs."""
    lengths = _core_lengths(results)
    columns = ["heads", "inputs", *(f"{tokens(n)} tokens" for n in lengths), "faster from"]
    rows = []
    for shape, inputs in PROBLEMS:
        cells = [results.core_cell(shape, inputs, n) for n in lengths]
        ratios = _ratios(results, shape, inputs)
        length, _ = crossing(ratios)
        rows.append([shape, inputs, *map(_beside_dense, cells), _from(length, ratios)])
    return table(columns, rows)


def _core_lengths(results: Results) -> list[int]:
    return sorted({m.length for shape in SHAPES for m in results.core(shape)})


def _beside_dense(cell: Measurement | None) -> str:
    if cell is None or cell.performance is None:
        return ABSENT
    own, ratio = cell.performance.median_ms, cell.ratio_to_dense
    if ratio is None:
        return digits(own)
    return f"{digits(own)} / {digits(own * ratio)} ({ratio:.1f}x)"


def _from(length: int | None, ratios: Sequence[tuple[int, float]]) -> str:
    if length is None:
        return "-"
    return f"{length / 1024:.1f}k" if length > ratios[0][0] else f"{tokens(length)} or less"


def core_memory(results: Results) -> str:
    """Tabulate the memory of NSA and of the fastest dense kernel on random inputs.

    Memory is linear in the length: the shortest and the longest one show all.
    """
    rows = []
    lengths = _core_lengths(results)
    for shape, length in itertools.product(SHAPES, (lengths[0], lengths[-1])):
        cell = results.core_cell(shape, "random", length)
        dense = _fastest_dense(results, cell) if cell else None
        if cell and dense:
            memory = [f"{(m.peak_memory_bytes or 0) / 2**20:,.0f}" for m in (cell, dense)]
            rows.append([shape, tokens(length), *memory])
    return table(["heads", "tokens", "NSA, MiB", "dense, MiB"], rows)


def _fastest_dense(results: Results, cell: Measurement) -> Measurement | None:
    """Return the fastest dense kernel that the run of ``cell`` timed beside it."""
    dense = [
        m
        for m in results.core(cell.shape)
        if m.kind == "dense"
        and (m.series, m.length) == (cell.series, cell.length)
        and m.performance is not None
    ]
    return min(
        dense, key=lambda m: m.performance.median_ms if m.performance else math.inf, default=None
    )


def _ratios(results: Results, shape: str, inputs: str) -> list[tuple[int, float]]:
    """Return (length, NSA time / fastest dense time), with CUDA graphs."""
    cells = [results.core_cell(shape, inputs, n) for n in _core_lengths(results)]
    return sorted((c.length, 1 / c.ratio_to_dense) for c in cells if c and c.ratio_to_dense)


def _crossovers(phase: str, eager: bool = False) -> Callable[[Results], str]:
    """Return a function that states the crossover lengths of the shapes of Results.backends."""

    def render(results: Results) -> str:
        lengths = {
            c.shape: c.eager_length if eager else c.length
            for result in results.backends()
            for c in result.crossovers
            if (c.subject, c.phase) == ("auto", phase)
        }
        known = sorted((length, shape) for shape, length in lengths.items() if length is not None)
        if not known:
            return ABSENT
        ends = dict.fromkeys((known[0], known[-1]))
        return " to ".join(f"{length / 1024:.1f}k ({shape})" for length, shape in ends)

    return render


def core_memory_ratio(results: Results) -> str:
    """Return the range of NSA's memory over dense memory, of all shapes and lengths."""
    ratios = [
        (cell.peak_memory_bytes or 0) / (dense.peak_memory_bytes or 1)
        for shape, length in itertools.product(SHAPES, _core_lengths(results))
        if (cell := results.core_cell(shape, "random", length))
        and (dense := _fastest_dense(results, cell))
    ]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def _compared(subject: str) -> Callable[[Results], str]:
    """Return a function that states the ms of a subject at 64/4/128 and 16k, in one run."""

    def render(results: Results) -> str:
        cells = [m for m in results.rivals() if (m.phase, m.length) == ("both", 16384)]
        performance = next((m.performance for m in cells if m.subject == subject), None)
        return f"{digits(performance.median_ms)} ms" if performance else ABSENT

    return render


def core_kernels(results: Results) -> str:
    """Tabulate each kernel of the core alone, forward / backward, at 32k tokens of real inputs."""
    passes = {
        (m.shape, m.phase): m
        for m in results.bench("core_parts.json").measurements
        if (m.kind, m.inputs) == ("combo", "real")
    }
    rows = []
    for shape in SHAPES:
        cells = [passes.get((shape, phase)) for phase in ("forward", "backward")]
        rows.append([shape, *(" / ".join(_part_ms(c, name) for c in cells) for name in BRANCHES)])
    return table(["heads", *BRANCHES], rows)


def _part_ms(cell: Measurement | None, name: str) -> str:
    part = cell.parts.get(name) if cell is not None else None
    return digits(part.performance.median_ms) if part and part.performance else "-"


# Subject of a measurement -> its name in the table of NSA, dense attention and other libraries.
SUBJECTS = {
    "auto": "NSA, `auto`",
    "sdpa": "NSA, `sdpa`",
    "dense flash-attn 4": "dense, FlashAttention-4",
    "dense cudnn": "dense, cuDNN",
    "dense flash-attn": "dense, FlashAttention-2",
    "sfnsa NSA": "NSA, sfnsa",
    "xunhao NSA": "NSA, xunhao",
    "fla NSA, l=d=64": "NSA, fla, l=d=64",
}


def backends(results: Results) -> str:
    """Tabulate forward + backward of NSA, of dense kernels and of other libraries, by length."""
    measurements = [m for result in results.backends() for m in result.measurements]
    measurements += [m for m in results.rivals() if m.subject.startswith("fla")]
    times = {
        (m.shape, m.subject, m.length): digits(m.performance.median_ms)
        for m in measurements
        if m.phase == "both" and m.performance
    }
    lengths = [1024 * n for n in (2, 8, 16, 32, 64)]
    rows = [
        [shape, name, *(times.get((shape, subject, n), "-") for n in lengths)]
        for shape, (subject, name) in itertools.product(BACKEND_SHAPES, SUBJECTS.items())
    ]
    rows = [row for row in rows if {*row[2:]} != {"-"}]
    return table(["heads", "kernels", *(tokens(n) for n in lengths)], rows)


def sel_rivals(results: Results) -> str:
    """Tabulate the forward of sel and of cuDNN's selection attention."""
    name = "sel_rivals.json"
    rows = [
        [r["shape"], tokens(r["tokens"]), *map(digits, (r["triton_ms"], r["cudnn_ms"]))]
        for r in (results.rows(name) if (results.folder / name).exists() else ())
    ]
    return table(["heads", "tokens", "sel, ms", "cuDNN, ms"], rows)


def decode(results: Results) -> str:
    """Tabulate the time of an attention step and of a layer's step."""
    measurements = results.bench("decode.json").measurements
    small = results.bench("decode_small.json").measurements
    measurements = [m for m in measurements if m.shape != "8/2/32"]
    measurements += [m for m in small if m.length == 2048]
    problems = dict.fromkeys((m.shape, m.batch, m.length) for m in measurements)
    rows = []
    for shape, batch, length in problems:
        cells = {
            m.subject: m.performance
            for m in measurements
            if (m.shape, m.batch, m.length) == (shape, batch, length)
        }
        names = ("auto", "auto, eager", "auto, layer step", "auto, layer step, eager")
        dense = [p.median_ms for name, p in cells.items() if name.startswith("dense") and p]
        performances = [cells.get(name) for name in names]
        rows.append(
            [
                shape,
                f"{batch} x {tokens(length)}",
                *(digits(p.median_ms) if p else "-" for p in performances),
                digits(min(dense)) if dense else "-",
            ]
        )
    columns = ["heads", "sequences x tokens", "attention, graph", "attention, eager"]
    return table([*columns, "layer, graph", "layer, eager", "dense attention"], rows)


def _steps(subject: str, form: Callable[[float], str], *lengths: int) -> Callable[[Results], str]:
    """Return a function that lists the ms of a step at the reports' shape, by length."""

    def render(results: Results) -> str:
        measurements = results.bench("decode_small.json").measurements
        times = {m.length: m.performance for m in measurements if m.subject == subject}
        return ", ".join(form(p.median_ms) for n in lengths if (p := times[n]))

    return render


def _spread(subject: str) -> Callable[[Results], str]:
    """Return a function for the coefficient of variation of five repeats, at 512 tokens."""

    def render(results: Results) -> str:
        measurements = results.bench("decode_small.json").measurements
        (times,) = (m.performance for m in measurements if (m.subject, m.length) == (subject, 512))
        spread = None if times is None else spread_of_repeats(times)
        return ABSENT if spread is None else f"{100 * spread:.1f} %"

    return render


def _shares(subject: str) -> Callable[[Results], str]:
    """Return a function that lists the sums of the slots' shares of a step, by length."""

    def render(results: Results) -> str:
        result = results.bench("decode_small.json")
        shares = [result.shares(m) for m in result.measurements if m.subject == subject]
        return ", ".join(f"{100 * sum(each.values()):.1f}" for each in shares)

    return render


_ALL = (512, 1024, 2048)


def quantized_error(results: Results) -> str:
    """Tabulate the mean error of o over layers, the changed blocks, and the loss, by pages."""
    document = json.loads((results.folder.parent / "quantized_error.json").read_text())
    table_rows = []
    for name, loss in document["losses"].items():
        layers = [row for row in document["rows"] if row["format"] == name]
        means = [sum(x[key] for x in layers) / len(layers) for key in ("error", "blocks") if layers]
        percent = [f"{100 * x:.1f}%" for x in means] or ["0", "0"]
        table_rows.append([name, *percent, f"{loss:.3f}"])
    return table(["pages", "error of o", "other blocks", "loss"], table_rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "gpu": gpu,
    "core": core,
    "core-memory": core_memory,
    "core-memory-ratio": core_memory_ratio,
    "core-crossover": _crossovers("both"),
    "core-crossover-eager": _crossovers("both", eager=True),
    "core-crossover-forward": _crossovers("forward"),
    "compared-nsa": _compared("auto"),
    "compared-flash4": _compared("dense flash-attn 4"),
    "compared-fla": _compared("fla NSA, l=d=64"),
    "compared-sfnsa": _compared("sfnsa NSA"),
    "core-kernels": core_kernels,
    "backends": backends,
    "sel-rivals": sel_rivals,
    "decode": decode,
    "quantized-error": quantized_error,
    "row-7-step-graph": _steps("auto", fixed(3), *_ALL),
    "row-7-step-eager": _steps("auto, eager", fixed(3), *_ALL),
    "row-7-layer-graph": _steps("auto, layer step", fixed(3), *_ALL),
    "row-7-layer-eager": _steps("auto, layer step, eager", fixed(2), *_ALL),
    "row-8-graph": _spread("auto"),
    "row-8-eager": _spread("auto, eager"),
    "row-9-sdpa": _shares("sdpa"),
    "row-9-triton": _shares("auto, slots one by one"),
}
