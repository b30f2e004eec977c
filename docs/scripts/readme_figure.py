"""Draw the chart of README.md and docs/index.md: time against length, NSA and dense attention.

    python docs/scripts/readme_figure.py docs/images

The left panel has the kernels for the published GPU. Its times at 8k, 32k and 64k tokens are those
of README.md's table, from core_64_4_128.json. Those at 2k, 4k and 16k are from
backends_64_4_128.json, of the same kind of GPU. The right panel has the kernels for an A100, run on
a newer GPU by benchmarks/rehearse.py; if it was not measured, the chart has the left panel only.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys

from nsa_bench.crossover import crossovers
from nsa_bench.render.plots import LengthPanel, render_length_panels
from nsa_bench.result import Result, read_result

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from figure_a100 import DENSE, core_file  # noqa: E402
from figure_pieces import PUBLISHED  # noqa: E402

RESULTS = BENCHMARKS / "results" / PUBLISHED
SHAPE = "64/4/128"
SUBJECTS = ("auto", "dense flash-attn 4", "dense cudnn", "dense flash")
HEADING = "Forward + backward: 64 heads, 4 kv heads of 128, bfloat16"


def measured() -> Result:
    """Return the cells of core_64_4_128.json, and of backends_64_4_128.json at other lengths."""
    core = read_result(RESULTS / "core_64_4_128.json")
    timed = {m.length for m in core.measurements}
    others = [
        m
        for m in read_result(RESULTS / "backends_64_4_128.json").measurements
        if m.length not in timed
    ]
    return dataclasses.replace(core, measurements=[*others, *core.measurements])


def rehearsed(results: pathlib.Path = RESULTS) -> Result | None:
    """Return NSA and dense FlashAttention-2 with the code for the A100; None if not measured.

    Other dense kernels run code for the newer GPU, so the crossover is that of these two.
    """
    file = core_file(results, SHAPE)
    if file is None:
        return None
    result = read_result(file)
    cells = [m for m in result.measurements if (m.shape, m.phase) == (SHAPE, "both")]
    dense = next(
        (s for s in DENSE if any(m.subject == s and m.performance for m in cells)), "dense flash"
    )
    cells = [m for m in cells if m.subject in ("auto", dense)]
    return dataclasses.replace(result, measurements=cells, crossovers=crossovers(cells))


def gpu(result: Result) -> str:
    """Return the name of the GPU without the vendor: H100."""
    return str(result.environment["device"]).removeprefix("NVIDIA ").split()[0]


def chart(results: pathlib.Path = RESULTS) -> bytes:
    """Return the chart as SVG.

    Args:
        results: The folder whose neighbours have the results of the A100 path.
    """
    own, older = measured(), rehearsed(results)
    name = gpu(own)
    title = f"Kernels for the {name}, on one {name}"
    timed = {m.subject for m in own.measurements if m.performance}
    subjects = tuple(subject for subject in SUBJECTS if subject in timed)
    panels = [LengthPanel(own, SHAPE, subjects=subjects, title=title)]
    if older is not None:
        (dense,) = {m.subject for m in older.measurements} - {"auto"}
        note = (
            f"{dense} is FlashAttention-2. Compare only the two lines: bandwidth, L2 and matrix"
            f" rate are those of the {gpu(older)}, not of an A100."
        )
        title = f"Kernels compiled for the A100, on one {gpu(older)}"
        panels.append(LengthPanel(older, SHAPE, title=title, note=note))
    return render_length_panels(panels, "svg", heading=HEADING)


def main() -> None:
    """Write lengths.svg into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    (parser.parse_args().folder / "lengths.svg").write_bytes(chart())


if __name__ == "__main__":
    main()
