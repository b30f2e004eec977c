"""Draw the chart of README.md and docs/index.md: time against length, NSA and dense attention.

    python docs/scripts/readme_figure.py docs/images

backends.json has 2k to 32k tokens of the paper's shape in one run; it ran out of memory at 64k,
because it timed every backend. The times at 64k are those of core.json, of the same GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

from nsa_bench.render.plots import render_lengths
from nsa_bench.result import Result, read_result

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/results/h200"
SHAPE, LONGEST = "64/4/128", 65536
SUBJECTS = ("auto", "dense cudnn", "dense flash-attn")
TITLE = "Forward + backward on one H200: 64 heads, 4 kv heads of 128, bfloat16"


def measured() -> Result:
    """Return the cells of backends.json with those of core.json at 64k tokens."""
    result = read_result(RESULTS / "backends.json")
    longest = [
        m
        for m in read_result(RESULTS / "core.json").measurements
        if m.shape == SHAPE and m.length == LONGEST
    ]
    shorter = [m for m in result.measurements if m.length < LONGEST]
    return dataclasses.replace(result, measurements=[*shorter, *longest])


def main() -> None:
    """Write lengths.svg into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    chart = render_lengths(measured(), "svg", shape=SHAPE, subjects=SUBJECTS, title=TITLE)
    (parser.parse_args().folder / "lengths.svg").write_bytes(chart)


if __name__ == "__main__":
    main()
