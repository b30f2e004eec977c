"""Make the figures of one GPU, and render the tables of README.md and the docs from them.

    python benchmarks/figures.py list
    python benchmarks/figures.py run [--gpu h200] [--only PIECE ...] [--minutes 10]
    python benchmarks/figures.py collect [--gpu h200]
    python benchmarks/figures.py render [--gpu h200] [--check]

``run`` works on a machine with the GPU. It needs python, torch, triton and the packages of this
repository, no network and no nox. It runs the pieces of figure_pieces.py in their order and writes
result files to build/figures/<gpu>, so that the checkout stays clean meanwhile. A piece that has a
result of the same source and command is skipped. A piece that was interrupted starts again. ``run``
starts no piece whose expected time is longer than the rest of ``--minutes``, and ends a piece that
is still running when they are over; repeat the command until it exits with 0.

``collect`` copies the new results to benchmarks/results/<gpu>. ``render`` writes every table
between `<!-- figures:NAME -->` and `<!-- /figures -->`.

Exit codes: 0 everything asked for is done; 1 pieces are left, a piece failed, or a page differs
from the result files; 2 wrong usage, a dirty checkout, or installed packages that are not the
checkout's; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figure_pieces import PIECES, Piece
from figure_tables import TABLES, Results

from nsa_bench.provenance import printed, tree_id

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "benchmarks/README.md", "docs/*.md")
MARKED = re.compile(r"(<!-- figures:([\w-]+) -->)(.*?)(<!-- /figures -->)", re.DOTALL)
OURS = ("figures.py", "figure_pieces.py", "figure_tables.py")  # a change of these measures the same
CUT = ("time limit was reached", "not begun: time limit")  # reasons of cells without a figure


class Refused(Exception):
    """Nothing is done; the message says why."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The source that figures are made of.

    Attributes:
        commit: The checkout's commit, None outside a checkout.
        clean: Whether packages/ and benchmarks/ are those of the commit; result files do not count.
        trees: What git calls the tree of each package's source.
    """

    commit: str | None
    clean: bool
    trees: dict[str, str | None]


@dataclasses.dataclass
class Figures:
    """The pieces and result files of one GPU in one checkout."""

    gpu: str
    root: Path = ROOT
    pieces: Sequence[Piece] = PIECES
    allow_dirty: bool = False

    @property
    def results(self) -> Path:
        """The result files of the repository."""
        return self.root / "benchmarks" / "results" / self.gpu

    @property
    def fresh(self) -> Path:
        """The result files that ``run`` writes."""
        return self.root / "build" / "figures" / self.gpu

    @functools.cached_property
    def source(self) -> Source:
        """The source as it is now."""
        git = ("git", "-C", str(self.root))
        commit = printed(*git, "rev-parse", "HEAD")
        left_out = (":(exclude)benchmarks/results", ":(exclude)*.md")
        changes = printed(*git, "status", "--porcelain", "--", "packages", "benchmarks", *left_out)
        folders = sorted(self.root.glob("packages/*/src/nsa_*"))
        trees = {folder.name: tree_id(folder) for folder in folders if folder.is_dir()}
        trees = {name: tree for name, tree in trees.items() if not name.endswith(".egg-info")}
        return Source(commit, commit is not None and changes == "", trees)

    def refuse_unknown_source(self) -> None:
        """Refuse a source that no commit describes.

        Raises:
            Refused: the checkout is dirty, or other packages are installed than its own.
        """
        if self.allow_dirty:
            return
        if self.source.commit is None:
            raise Refused("there is no git checkout around this file; --allow-dirty runs anyway")
        if not self.source.clean:
            raise Refused(
                "packages/ or benchmarks/ differ from the commit; commit the changes first, or"
                " run with --allow-dirty"
            )
        for name, tree in self.source.trees.items():
            spec = importlib.util.find_spec(name)
            places = list(spec.submodule_search_locations or ()) if spec else []
            if not places or tree_id(Path(places[0])) != tree:
                raise Refused(
                    f"the installed {name} is not that of the checkout; install the packages"
                    " again, or run with --allow-dirty"
                )

    def stamp(self, piece: Piece) -> dict[str, Any]:
        """The record of ``piece`` in its result file: what a result must share to count as done."""
        script = shlex.split(piece.command)[1]
        folder = (self.root / script).parent if script.endswith(".py") else None
        scripts = {
            path.name: tree_id_of_file(path)
            for path in sorted(folder.glob("*.py") if folder else ())
            if path.name not in OURS
        }
        return {
            "piece": piece.name,
            "command": piece.command,
            "trees": self.source.trees,
            "scripts": scripts,
        }

    def state(self, piece: Piece) -> str:
        """ "done", "other source" or "missing"."""
        found = "missing"
        for folder in (self.fresh, self.results):
            record = read_stamp(folder / piece.file)
            if record is None:
                found = "other source" if (folder / piece.file).exists() else found
                continue
            same = all(record.get(key) == value for key, value in self.stamp(piece).items())
            if same and (record.get("clean") or self.allow_dirty):
                return "done"
            found = "other source"
        return found

    def named(self, names: Sequence[str] | None) -> list[Piece]:
        """The pieces asked for, in their own order.

        Raises:
            Refused: a name is unknown.
        """
        unknown = sorted(set(names or ()) - {piece.name for piece in self.pieces})
        if unknown:
            known = ", ".join(piece.name for piece in self.pieces)
            raise Refused(f"no piece is named {', '.join(unknown)}; the pieces are {known}")
        return [piece for piece in self.pieces if not names or piece.name in names]

    def run(self, names: Sequence[str] | None, minutes: float) -> int:
        """Run the pieces that have no result of this source."""
        until = time.monotonic() + 60 * minutes
        wanted = self.named(names)
        self.refuse_unknown_source()
        left = [piece for piece in wanted if self.state(piece) != "done"]
        for piece in wanted:
            if piece not in left:
                print(f"{piece.name}: done before", flush=True)
        failed: list[str] = []
        while left:
            piece = self.first_of(left[0])
            remaining = (until - time.monotonic()) / 60
            if piece.minutes > remaining:
                print(
                    f"{piece.name}: not started, it takes about {piece.minutes:g} minutes and"
                    f" {max(0.0, remaining):.1f} of {minutes:g} are left"
                )
                break
            if self.run_piece(piece, 60 * remaining):
                left = [other for other in left if other != piece]
            else:
                failed.append(piece.name)
                left = [o for o in left if o != piece and o.needs != piece.name]
        names_left = [piece.name for piece in wanted if self.state(piece) != "done"]
        if failed:
            print(f"failed: {', '.join(failed)}")
        if names_left:
            print(f"{len(names_left)} of {len(wanted)} pieces are left: {', '.join(names_left)}")
            return 1
        print(f"all {len(wanted)} pieces are done; next: python benchmarks/figures.py collect")
        return 0

    def first_of(self, piece: Piece) -> Piece:
        """The piece that makes the files which ``piece`` needs, if they are not there; else
        ``piece``.
        """
        maker = next((other for other in self.pieces if other.name == piece.needs), None)
        if maker is not None and not all((self.root / path).exists() for path in maker.makes):
            return maker
        return piece

    def run_piece(self, piece: Piece, seconds: float) -> bool:
        """Run one piece; whether it has left a complete result file."""
        self.fresh.mkdir(parents=True, exist_ok=True)
        part = self.fresh / f"part-{piece.file}"
        part.unlink(missing_ok=True)
        for path in piece.makes:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        words = shlex.split(piece.command.format(file=part))
        start = {"nsa": [sys.executable, "-m", "nsa_cli"], "python": [sys.executable]}[words[0]]
        print(f"{piece.name}: {shlex.join(words)}", flush=True)
        began = time.monotonic()
        child = subprocess.Popen([*start, *words[1:]], cwd=self.root)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = _end(child)
            print(f"{piece.name}: ended, the time is over", flush=True)
        except KeyboardInterrupt:
            _end(child)
            part.unlink(missing_ok=True)
            raise
        took = (time.monotonic() - began) / 60
        absent = [path for path in piece.makes if not (self.root / path).exists()]
        problem = f"exit code {code}" if code else incomplete(part)
        problem = problem or (f"it did not write {', '.join(absent)}" if absent else "")
        if problem:
            print(f"{piece.name}: no result after {took:.1f} minutes: {problem}", flush=True)
            part.unlink(missing_ok=True)
            return False
        text = part.read_text(encoding="utf-8")
        stamp = self.stamp(piece)
        stamp |= {"commit": self.source.commit, "clean": self.source.clean}
        part.write_text(stamped(text, stamp), encoding="utf-8")
        os.replace(part, self.fresh / piece.file)
        cut = sum(text.count(reason) for reason in CUT)
        note = f", {cut} cells left out by the time limit" if cut else ""
        print(f"{piece.name}: {took:.1f} minutes{note}", flush=True)
        return True

    def show(self) -> int:
        """Print the pieces."""
        rows = [("piece", "minutes", "state", "file", "topic")]
        rows += [(p.name, f"{p.minutes:g}", self.state(p), p.file, p.topic) for p in self.pieces]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        for row in rows:
            print("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[4]]))
        return 0

    def collect(self) -> int:
        """Copy new results to the repository's.

        Raises:
            Refused: a result is of a dirty checkout.
        """
        new = [piece for piece in self.pieces if (self.fresh / piece.file).exists()]
        records = {piece: read_stamp(self.fresh / piece.file) or {} for piece in new}
        dirty = [piece.name for piece, record in records.items() if not record.get("clean")]
        if dirty and not self.allow_dirty:
            raise Refused(
                f"{', '.join(dirty)}: measured on a dirty checkout; --allow-dirty collects anyway"
            )
        self.results.mkdir(parents=True, exist_ok=True)
        for piece, record in records.items():
            shutil.copyfile(self.fresh / piece.file, self.results / piece.file)
            print(f"{piece.file}: of {record.get('commit')}")
        print(f"{len(new)} files; next: python benchmarks/figures.py render")
        return 0

    def render(self, check: bool) -> int:
        """Write the tables, or print the pages that differ from the result files.

        Raises:
            Refused: a page has an unknown marker.
        """
        results, differ = Results(self.results), []
        for path in sorted(path for pattern in PAGES for path in self.root.glob(pattern)):
            old = path.read_text(encoding="utf-8")
            new, tables = rendered(old, results)
            if new == old:
                continue
            differ.append(path)
            name = path.relative_to(self.root).as_posix()
            print(f"{name}: {', '.join(tables)}" + (" differ" if check else " written"))
            if not check:
                path.write_text(new, encoding="utf-8")
        if check and differ:
            print("python benchmarks/figures.py render writes what the result files say")
        return int(check and bool(differ))


def rendered(text: str, results: Results) -> tuple[str, list[str]]:
    """A page with every table as the result files have it, and the names of those that changed.

    Raises:
        Refused: a marker names no table.
    """
    changed = []

    def fill(match: re.Match[str]) -> str:
        opening, name, old, closing = match.groups()
        if name not in TABLES:
            raise Refused(f"figures:{name} is no table; the tables are {', '.join(TABLES)}")
        new = TABLES[name](results)
        new = f"\n\n{new}\n\n" if new.startswith("|") else new
        if new != old:
            changed.append(name)
        return opening + new + closing

    return MARKED.sub(fill, text), changed


def stamped(text: str, stamp: dict[str, Any]) -> str:
    """A result file's text with ``stamp`` as its first field; the rest keeps its layout."""
    return text.replace("{", '{\n "figures": ' + json.dumps(stamp) + ",", 1)


def read_stamp(path: Path) -> dict[str, Any] | None:
    """The stamp in a result file; None where there is no file or no stamp."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    stamp = document.get("figures") if isinstance(document, dict) else None
    return stamp if isinstance(stamp, dict) else None


def incomplete(path: Path) -> str:
    """Why a result file is none; "" for a complete one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if not isinstance(document, dict):
        return "the file holds no object"
    return "the run was interrupted" if document.get("interrupted") else ""


def tree_id_of_file(path: Path) -> str:
    """What git calls the file's content."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _end(child: subprocess.Popen[bytes]) -> int:
    child.send_signal(signal.SIGTERM)
    try:
        return child.wait(15) or 143
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait() or 137


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = made.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="the pieces and their state")
    run = verbs.add_parser("run", help="measure the pieces that have no result of this source")
    collect = verbs.add_parser("collect", help="copy new results to benchmarks/results")
    render = verbs.add_parser("render", help="write the tables of README.md and the docs")
    for verb in (listing, run, collect, render):
        verb.add_argument("--gpu", default="h200", help="folder of the results (default: h200)")
        verb.add_argument("--allow-dirty", action="store_true", help="accept a dirty checkout")
    run.add_argument("--only", nargs="+", metavar="PIECE", help="these pieces alone")
    run.add_argument("--minutes", type=float, default=10.0, help="time for this call (default: 10)")
    render.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    return made


def main(
    arguments: Sequence[str] | None = None, root: Path = ROOT, pieces: Sequence[Piece] = PIECES
) -> int:
    """Run the command line; the exit code."""
    given = parser().parse_args(arguments)
    figures = Figures(given.gpu, root, pieces, given.allow_dirty)
    try:
        if given.verb == "list":
            return figures.show()
        if given.verb == "run":
            return figures.run(given.only, given.minutes)
        if given.verb == "collect":
            return figures.collect()
        return figures.render(given.check)
    except Refused as error:
        print(f"figures.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
