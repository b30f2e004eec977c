"""Find the sizes from which the core is faster with cmp on FlashAttention-4; write the rank of fa2.

    nsa bench --shape 64/4/128 --length 8k..64k --phase forward,both --combo auto \
        --combo cmp=fa2 --json a.json
    python benchmarks/kernels/flash4_ranks.py a.json [b.json ...] [--write]

Needs results of an H100 or H200 with flash-attn-4, measured while `auto` ran cmp elsewhere: with
null in flash4_rank.json. Prints each ratio of two times of one file, cmp=fa2 / auto, and the least
size from which every ratio is at most 1. `--write` writes these sizes to flash4_rank.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import nsa_backend_fa2
from nsa_bench.result import Measurement, Series, read_result

PHASES = {"forward": "forward", "training": "both"}  # key of the rank file -> phase of nsa bench
RANK_FILE = Path(nsa_backend_fa2.__file__).with_name("flash4_rank.json")


@dataclasses.dataclass(frozen=True)
class Row:
    """One pair of times.

    Attributes:
        name: Heads and length.
        size: Tokens x columns of a head.
        ratio: Time with cmp=fa2 / time of auto.
    """

    name: str
    size: int
    ratio: float


def size_of(m: Measurement) -> int:
    """Return the size of a measured problem as the rank counts it: tokens x columns of a head."""
    return m.length * int(m.shape.split("/")[2])


def rows_of(measurements: list[Measurement], phase: str) -> list[Row]:
    """Return a row per problem of one file that was timed both ways."""
    times: dict[tuple[Series, int], dict[str, Measurement]] = {}
    for m in measurements:
        if m.kind == "combo" and m.phase == phase and m.performance is not None:
            times.setdefault((m.series, m.length), {})[m.subject] = m
    rows = []
    for by_subject in times.values():
        new = next((m for name, m in by_subject.items() if "cmp=fa2" in name), None)
        if new is not None and "auto" in by_subject:
            old = by_subject["auto"].performance
            assert old is not None
            assert new.performance is not None
            ratio = new.performance.median_ms / old.median_ms
            rows.append(Row(f"{new.shape} {new.length}", size_of(new), ratio))
    return rows


def least_size(rows: list[Row]) -> int | None:
    """Return the size from which no row is slower, rounded down to two digits; None: none is."""
    slower = max((row.size for row in rows if row.ratio > 1), default=0)
    least = min((row.size for row in rows if row.size > slower), default=None)
    if least is None:
        return None
    unit = 10 ** (len(str(least)) - 2)
    return least // unit * unit


def main(argv: list[str] | None = None) -> None:
    """Print the ratios and the sizes; write the sizes if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+", type=Path, help="results of nsa bench")
    parser.add_argument("--write", action="store_true", help=f"write {RANK_FILE.name}")
    arguments = parser.parse_args(argv)
    files = [read_result(file).measurements for file in arguments.results]
    least = {}
    for key, phase in PHASES.items():
        rows = [row for measurements in files for row in rows_of(measurements, phase)]
        rows.sort(key=lambda row: row.size)
        for row in rows:
            print(f"{key:8} {row.name:18} {row.size:.2e} {row.ratio:.3f}")
        least[key] = least_size(rows)
        print(f"{key:8} from a size of {least[key]} on")
    if arguments.write:
        RANK_FILE.write_text(json.dumps(least, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
