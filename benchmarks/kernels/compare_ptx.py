"""Compare the compiled code of the kernels before and after a source change.

    python benchmarks/kernels/compare_ptx.py write before.json [--only REGEX] [--jobs 2]
    ... change the source ...
    python benchmarks/kernels/compare_ptx.py write after.json [--only REGEX] [--jobs 2]
    python benchmarks/kernels/compare_ptx.py compare before.json after.json

``write`` compiles the rows of tests/triton/tools/compile_table.py and stores, for each row, the
PTX without debug information and names, and the registers, spills and shared memory that ptxas
reports. It needs no GPU. ``--only`` selects rows whose title matches, such as "span_.*sm_90".
Renamed variables and moved functions do not change the PTX. Changed signatures do; in that case
compare the figures, and the bits of the results on a GPU.

Exit codes of ``compare``: 0 all PTX is equal; 1 a row differs, is missing or is new.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "triton" / "tools"))

import compile_table
import offline

_DEBUG_LINE = re.compile(r"^\s*(\.loc|\.file|//).*$", re.MULTILINE)
_DEBUG_SECTIONS = re.compile(r"^\s*\.section\s+\.debug.*\Z", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"//.*$", re.MULTILINE)
_DEBUG_LABEL = re.compile(r"\$L__(tmp|func_|info)\w*:?")


def without_names(ptx: str, kernel: str) -> str:
    """Return ``ptx`` without debug information, comments and the kernel's name."""
    text = _COMMENT.sub("", _DEBUG_LINE.sub("", _DEBUG_SECTIONS.sub("", ptx)))
    text = _DEBUG_LABEL.sub("", text).replace(kernel, "KERNEL").replace(", debug", "")
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def measure(index: int, only: str) -> tuple[str, dict[str, Any]]:
    """Compile one of the rows that ``only`` selects; return its title and figures."""
    row = selected_rows(only)[index]
    ptx = offline.compile_launch(row.launch).asm["ptx"]
    figures = dataclasses.asdict(offline.cost(row.launch))
    return row.title, {**figures, "ptx": without_names(ptx, row.launch.name)}


def selected_rows(only: str) -> list[compile_table.Row]:
    """Return the rows of the compile table whose title matches ``only``."""
    return [row for row in compile_table.rows() if re.search(only, row.title)]


def write(path: Path, only: str, jobs: int) -> int:
    """Compile the selected rows and write them to ``path``."""
    count = len(selected_rows(only))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        rows: dict[str, list[dict[str, Any]]] = {}
        tasks = [(index, only) for index in range(count)]
        for title, figures in pool.starmap(measure, tasks, chunksize=4):
            rows.setdefault(title, []).append(figures)
    path.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{count} rows written to {path}")
    return 0


def compare(before: Path, after: Path) -> int:
    """Print the rows that differ between two files; return the exit code."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    equal, different = 0, 0
    for title in [*old, *(title for title in new if title not in old)]:
        for a, b in _pairs(old.get(title, []), new.get(title, [])):
            if a is not None and b is not None and a["ptx"] == b["ptx"]:
                equal += 1
                continue
            different += 1
            print(f"{title}: {_difference(a, b)}")
    print(f"{equal} rows have equal PTX, {different} differ")
    return int(different > 0)


def _pairs(old: list[Any], new: list[Any]) -> list[tuple[Any, Any]]:
    """Pair the rows of one title in both files; a title may have several rows."""
    count = max(len(old), len(new))
    return [(_item(old, i), _item(new, i)) for i in range(count)]


def _item(rows: list[Any], index: int) -> Any:
    return rows[index] if index < len(rows) else None


def _difference(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    """Describe how a row differs."""
    if old is None or new is None:
        return "only in the new file" if old is None else "only in the old file"
    changes = [
        f"{name} {old[name]} -> {new[name]}"
        for name in old
        if name != "ptx" and old[name] != new[name]
    ]
    return ", ".join(changes) or "different PTX, equal figures"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="compile the rows and store them")
    writing.add_argument("file", type=Path)
    writing.add_argument("--only", default="", help="a regular expression over row titles")
    writing.add_argument("--jobs", type=int, default=2, help="processes that compile")
    comparing = commands.add_parser("compare", help="show the rows that differ")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "write":
        return write(options.file, options.only, options.jobs)
    return compare(options.before, options.after)


if __name__ == "__main__":
    sys.exit(main())
