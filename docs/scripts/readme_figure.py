"""Draw the chart of README.md and docs/index.md: time against length, NSA and dense attention.

    python docs/scripts/readme_figure.py docs/images

The times at 8k, 32k and 64k tokens are those of README.md's table, from core_64_4_128.json. Those
at 2k, 4k and 16k are from backends.json, of the same kind of GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

from nsa_bench.render.plots import render_lengths
from nsa_bench.result import Result, read_result

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks/results/h100"
SHAPE = "64/4/128"
SUBJECTS = ("auto", "dense cudnn", "dense flash")
TITLE = "Forward + backward on one H100: 64 heads, 4 kv heads of 128, bfloat16"


def measured() -> Result:
    """Return the cells of core_64_4_128.json, and those of backends.json at other lengths."""
    core = read_result(RESULTS / "core_64_4_128.json")
    timed = {m.length for m in core.measurements}
    others = [
        m
        for m in read_result(RESULTS / "backends.json").measurements
        if m.shape == SHAPE and m.length not in timed
    ]
    return dataclasses.replace(core, measurements=[*others, *core.measurements])


def main() -> None:
    """Write lengths.svg into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    chart = render_lengths(measured(), "svg", shape=SHAPE, subjects=SUBJECTS, title=TITLE)
    (parser.parse_args().folder / "lengths.svg").write_bytes(chart)


if __name__ == "__main__":
    main()
