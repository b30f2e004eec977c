"""Time every kernel of two source trees in one run on one GPU, and report slower kernels.

    python benchmarks/kernels/compare_trees.py --old site_old --new site_new

``--old`` and ``--new`` are folders of installed packages, each first on the PYTHONPATH of a child
process:

    pip install --no-deps --target site_new ./packages/*

Both children prepare the same case, then time its kernels alternately: old, new, new, old, and so
on. The children use only names that every version of nsa_core has.

The rows are forward and backward of each slot, and decode steps: a layer's step of one token and of
four tokens, and the kernels of append, gates and the fused step inside it. A time is the median
over the rounds. A round is the median of several replays of a CUDA graph, or of several calls if
the call cannot be captured. Times of kernels inside a step are means over ten profiled steps. The
spread is the interquartile range of the rounds over their median, the larger one of the two trees.
A row is slower if new / old exceeds 1.03 and the excess is more than twice the spread.

``--json`` writes the rows and their source: the machine, the versions, and git's tree id of each
package. A commit has the same files if ``git rev-parse COMMIT:packages/nsa-core/src/nsa_core``
prints the same id. ``benchmarks/rehearse.py --arch 80 --`` before the command compares the trees
with their code for the A100.

Exit codes: 0 nothing is slower; 1 a row is slower, could be timed in the old tree only, or was
skipped because of ``--minutes``, or a child ended; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tree_clocks import Case

from nsa_bench.environment import hardware
from nsa_bench.provenance import PACKAGES, tree_id

CHILD = Path(__file__).resolve().with_name("tree_clocks.py")
THRESHOLD = 1.03  # new / old above which a row may be slower


CASES = (
    Case("64/4/128", 8192),
    Case("64/4/128", 32768),
    Case("32/8/128", 32768),
    Case("12/2/64", 32768),
    Case("12/2/64", 65536),
    Case("64/4/192/128", 32768),
    Case("32/32/64", 16384),
    Case("40/8/128", 16384),
    Case("28/4/128", 32768),
    Case("64/4/128", 32768, 16),
    Case("12/2/64", 8192, 8),
    Case("8/2/32", 2048, 1),
)
TINY = (Case("4/2/8", 96, small=True), Case("4/2/8", 48, 2, small=True))


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel in both trees.

    Attributes:
        name: Case and kernel.
        old_ms: Median of the rounds of the old tree; None if ``reason`` is set.
        new_ms: The same for the new tree.
        spread: The larger interquartile range over the median.
        verdict: "slower", "faster", "same", "missing" (could be timed in the old tree only) or
            "not timed".
        reason: Why the times are missing.
    """

    name: str
    old_ms: float | None
    new_ms: float | None
    spread: float
    verdict: str
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Return new over old; above 1 the new tree is slower."""
        return self.new_ms / self.old_ms if self.old_ms and self.new_ms else None


def judged(name: str, old: Sequence[float], new: Sequence[float]) -> Row:
    """Return the row of a kernel from the times of its rounds."""
    medians = statistics.median(old), statistics.median(new)
    noise = max(spread(old), spread(new))
    ratio, verdict = medians[1] / medians[0], "same"
    if max(ratio, 1 / ratio) > THRESHOLD and max(ratio, 1 / ratio) - 1 > 2 * noise:
        verdict = "slower" if ratio > 1 else "faster"
    return Row(name, *medians, noise, verdict)


def spread(times: Sequence[float]) -> float:
    """Return the interquartile range over the median."""
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return (third - first) / statistics.median(times)


def lines(rows: Sequence[Row]) -> list[str]:
    """Format the table."""
    cells = [("kernel", "old ms", "new ms", "new/old", "spread", "verdict")]
    for row in rows:
        times = [f"{ms:.4f}" if ms is not None else "-" for ms in (row.old_ms, row.new_ms)]
        ratio = f"{row.ratio:.3f}" if row.ratio else "-"
        verdict = f"{row.verdict}: {row.reason}" if row.reason else row.verdict
        cells.append((row.name, *times, ratio, f"{row.spread:.1%}", verdict))
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    formatted = []
    for row in cells:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:5], widths[1:]))
        formatted.append("  ".join([row[0].ljust(widths[0]), *numbers, row[5]]))
    return formatted


class Tree(Protocol):
    """A source tree whose kernels can be timed."""

    def begin(self, case: Case) -> None:
        """Start to prepare a case."""

    def names(self) -> dict[str, str]:
        """Wait for the prepared case; return the reason why a kernel cannot run, or "", by name."""

    def ms(self, name: str) -> float:
        """Time a kernel of the case once, in ms."""


def compare(
    old: Tree, new: Tree, cases: Sequence[Case], rounds: int, until: float
) -> Iterator[Row | Case]:
    """Yield one row per kernel, or the case itself if ``until`` has passed before it starts."""
    for case in cases:
        if time.monotonic() > until:
            yield case
            continue
        for tree in (old, new):
            tree.begin(case)
        reasons = old.names(), new.names()
        for name in dict.fromkeys((*reasons[0], *reasons[1])):
            row_name = f"{case} {name}"
            problems = [
                side_reasons.get(name, "the tree has no such kernel") for side_reasons in reasons
            ]
            if any(problems):
                side = "old" if problems[0] else "new"
                verdict = "not timed" if problems[0] else "missing"
                yield Row(
                    row_name, None, None, 0.0, verdict, f"{side}: {problems[0] or problems[1]}"
                )
                continue
            times: tuple[list[float], list[float]] = ([], [])
            for round_number in range(rounds):
                for side in ((0, 1), (1, 0))[round_number % 2]:
                    times[side].append((old, new)[side].ms(name))
            yield judged(row_name, *times)


class ChildError(RuntimeError):
    """A child ended, or its tree is not usable."""


class Child:
    """A source tree in a child process."""

    def __init__(self, label: str, folder: Path, device: str, backend: str) -> None:
        self.label, self.folder = label, folder
        words = [sys.executable, str(CHILD), device, backend]
        # The rest of the path stays: rehearse.py has a folder on it that patches every process.
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    def hello(self) -> str:
        """Return the file from which the child imports nsa_core.

        Raises:
            ChildError: The child finds nsa_core or the package of the backend outside the folder.
        """
        files: dict[str, str] = self._read()
        for package, file in files.items():
            if not Path(file).is_relative_to(self.folder):
                raise ChildError(
                    f"--{self.label} {self.folder} holds no {package}; install it there"
                )
        return files["nsa_core"]

    def begin(self, case: Case) -> None:
        """Start to prepare a case."""
        self._write({"case": dataclasses.asdict(case)})

    def names(self) -> dict[str, str]:
        """Wait until the case is prepared."""
        return dict(self._read())

    def ms(self, name: str) -> float:
        """Time a kernel of the case."""
        self._write({"name": name})
        return float(self._read())

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the next read reports that the child has ended
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ChildError(f"the child of --{self.label} ended with code {self.process.wait()}")
        message = json.loads(line)
        if "error" in message:
            raise ChildError(f"--{self.label}: {message['error']}")
        return message["answer"]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    main_parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    main_parser.add_argument("--old", type=Path, required=True, help="folder of installed packages")
    main_parser.add_argument("--new", type=Path, required=True, help="folder of installed packages")
    main_parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    main_parser.add_argument("--backend", default="triton")
    main_parser.add_argument(
        "--shapes", default="all", help="all, tiny, or comma-separated heads such as 12/2/64"
    )
    main_parser.add_argument("--rounds", type=int, default=7, help="samples per kernel and tree")
    main_parser.add_argument(
        "--minutes", type=float, default=6.0, help="time after which no case starts"
    )
    main_parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return main_parser


def cases_of(text: str) -> list[Case]:
    """Return the cases that ``--shapes`` names.

    Raises:
        ValueError: No case has this shape.
    """
    if text in ("all", "tiny"):
        return [*(CASES if text == "all" else TINY)]
    known = list(dict.fromkeys(case.shape for case in CASES))
    unknown = [shape for shape in text.split(",") if shape not in known]
    if unknown:
        raise ValueError(f"--shapes: expected all, tiny or {', '.join(known)}; got {unknown[0]!r}")
    return [case for case in CASES if case.shape in text.split(",")]


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    """Return when, where and with which command and sources the rows were measured."""
    folders = {"old": options.old, "new": options.new}
    words = ["python", "benchmarks/kernels/compare_trees.py"]
    words += ["--old", options.old.name, "--new", options.new.name, "--device", options.device]
    words += ["--backend", options.backend, "--shapes", options.shapes]
    words += ["--rounds", str(options.rounds), "--minutes", f"{options.minutes:g}"]
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(words),
        "machine": hardware(options.device),
        "versions": versions,
        "sources": {label: {"source_trees": trees_of(path)} for label, path in folders.items()},
    }


def trees_of(folder: Path) -> dict[str, str]:
    """Return git's tree id of each package in a folder of installed packages."""
    return {name: tree for name in PACKAGES if (tree := tree_id(folder / name))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two trees; return the exit code."""
    main_parser = parser()
    options = main_parser.parse_args(arguments)
    try:
        cases = cases_of(options.shapes)
    except ValueError as error:
        main_parser.error(str(error))
    if not 1 <= options.rounds <= 20:  # each step appends a token, and tree_clocks.ROOM limits them
        main_parser.error(f"--rounds: expected 1 to 20, got {options.rounds}")
    deadline = time.monotonic() + 60 * options.minutes
    folders = {"old": options.old.absolute(), "new": options.new.absolute()}
    for label, folder in folders.items():
        if not folder.is_dir():
            main_parser.error(f"--{label}: {folder} is not a folder")
    children = [
        Child(label, folder, options.device, options.backend) for label, folder in folders.items()
    ]
    rows: list[Row] = []
    skipped: list[Case] = []
    try:
        for child in children:
            print(f"{child.label}: {child.hello()}", file=sys.stderr)
        for item in compare(*children, cases, options.rounds, deadline):
            if isinstance(item, Case):
                skipped.append(item)
                continue
            rows.append(item)
            print(f"{item.name}: {item.verdict}", file=sys.stderr, flush=True)
    except ChildError as error:
        print(f"compare_trees.py: {error}", file=sys.stderr)
        return 1
    finally:
        for child in children:
            child.end()
    if options.json is not None:
        document = {"kind": "compare-trees", "schema_version": 1, **provenance(options)}
        document["rows"] = [dataclasses.asdict(row) for row in rows]
        document["left_out"] = [str(case) for case in skipped]
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return report(rows, skipped)


def report(rows: Sequence[Row], skipped: Sequence[Case]) -> int:
    """Print the table and the slower kernels; return the exit code."""
    print("\n".join(lines(rows)))
    failing = [row.name for row in rows if row.verdict in ("slower", "missing")]
    if skipped:
        print(f"left out by --minutes: {', '.join(map(str, skipped))}")
    print(f"slower or missing: {', '.join(failing)}" if failing else "nothing is slower")
    return int(bool(failing or skipped))


if __name__ == "__main__":
    sys.exit(main())
