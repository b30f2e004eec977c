"""Measure the figures of one GPU, and render the tables of README.md and the docs from them.

    python benchmarks/figures.py list
    python benchmarks/figures.py run [--gpu h200] [--only PIECE ...] [--minutes 10]
    python benchmarks/figures.py collect [--gpu h200]
    python benchmarks/figures.py render [--gpu h200] [--check]

``run`` needs a machine with the GPU, with python, torch, triton and the packages of this
repository, but no network and no nox. It runs the pieces of figure_pieces.py in order and writes
result files to build/figures/<gpu>, which keeps the checkout clean. A piece with a result of the
same source and command is skipped. An interrupted piece starts again. ``run`` does not start a
piece that is expected to exceed ``--minutes``, and terminates a piece that does. Repeat the command
until it exits with 0.

``collect`` copies the new results to benchmarks/results/<gpu>. ``render`` writes every table
between `<!-- figures:NAME -->` and `<!-- /figures -->`.

Exit codes: 0 all requested pieces are done; 1 pieces are left, a piece failed, or a page differs
from the result files; 2 wrong usage, a dirty checkout, installed packages that differ from the
checkout, or no FlashAttention-4 on a GPU that it supports; 130 after Ctrl-C;
141 the reader closed the output.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
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

import torch
from figure_kernels import KERNELS
from figure_learning import LEARNING
from figure_parallel import PARALLEL
from figure_pieces import PIECES, PUBLISHED, Piece
from figure_recipes import RECIPES
from figure_tables import TABLES as OTHER_TABLES
from figure_tables import Results
from figure_training import TRAINING

from nsa_backend_fa2 import flash4
from nsa_bench.provenance import blob_id, command_output, tree_id

ROOT = Path(__file__).resolve().parents[1]
TABLES = OTHER_TABLES | TRAINING | LEARNING | PARALLEL | KERNELS | RECIPES
PAGES = ("README.md", "benchmarks/README.md", "docs/**/*.md", "tests/verify/report_rows/*.md")
MARKED = re.compile(r"(<!-- figures:([\w-]+) -->)(.*?)(<!-- /figures -->)", re.DOTALL)
CUT = ("time limit was reached", "not begun: time limit")  # reasons of cells without a time


class Refused(Exception):
    """The command cannot run; the message states the reason."""


@dataclasses.dataclass(frozen=True)
class Source:
    """The measured source.

    Attributes:
        commit: The checkout's commit; None outside a checkout.
        clean: Whether packages/ and benchmarks/ equal the commit; result files do not count.
        trees: Git's tree id of each package's source.
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
        """Return the folder of the repository's result files."""
        return self.root / "benchmarks" / "results" / self.gpu

    @property
    def fresh(self) -> Path:
        """Return the folder of the result files that ``run`` writes."""
        return self.root / "build" / "figures" / self.gpu

    @functools.cached_property
    def source(self) -> Source:
        """Return the current source."""
        git = ("git", "-C", str(self.root))
        commit = command_output(*git, "rev-parse", "HEAD")
        excluded = (":(exclude)benchmarks/results", ":(exclude)*.md")
        changes = command_output(
            *git, "status", "--porcelain", "--", "packages", "benchmarks", *excluded
        )
        folders = sorted(self.root.glob("packages/*/src/nsa_*"))
        trees = {folder.name: tree_id(folder) for folder in folders if folder.is_dir()}
        trees = {name: tree for name, tree in trees.items() if not name.endswith(".egg-info")}
        return Source(commit, commit is not None and changes == "", trees)

    def refuse_unknown_source(self) -> None:
        """Refuse a source that no commit describes.

        Raises:
            Refused: The checkout is dirty, or the installed packages differ from it.
        """
        if self.allow_dirty:
            return
        if self.source.commit is None:
            raise Refused("this file is not in a git checkout; --allow-dirty runs anyway")
        if not self.source.clean:
            raise Refused(
                "packages/ or benchmarks/ differ from the commit; commit the changes first, or"
                " run with --allow-dirty"
            )
        for name, tree in self.source.trees.items():
            spec = importlib.util.find_spec(name)
            locations = list(spec.submodule_search_locations or ()) if spec else []
            if not locations or tree_id(Path(locations[0])) != tree:
                raise Refused(
                    f"the installed {name} is not that of the checkout; install the packages"
                    " again, or run with --allow-dirty"
                )

    def refuse_missing_flash4(self) -> None:
        """Refuse a GPU of FlashAttention-4 if it does not load: the tables compare with it.

        Raises:
            Refused: The package flash-attn-4 does not load.
        """
        reason = flash4.source().reason
        supported = torch.cuda.is_available() and (
            flash4.OLDEST_GPU <= torch.cuda.get_device_capability() <= flash4.NEWEST_GPU
        )
        if reason and supported and not self.allow_dirty:
            raise Refused(f"{reason}; or run with --allow-dirty")

    def stamp(self, piece: Piece) -> dict[str, Any]:
        """Return the source and command of a piece, which a result must match to count as done."""
        script = shlex.split(piece.command)[1]
        folder = (self.root / script).parent if script.endswith(".py") else None
        scripts = {
            path.name: blob_id(path)
            for path in sorted(folder.glob("*.py") if folder else ())
            if not path.name.startswith("figure")  # these do not affect measurements
        }
        return {
            "piece": piece.name,
            "command": piece.command,
            "trees": self.source.trees,
            "scripts": scripts,
        }

    def state(self, piece: Piece) -> str:
        """Return "done", "other source" or "missing"."""
        state = "missing"
        for folder in (self.fresh, self.results):
            file = piece.inside(folder)
            record = read_stamp(file)
            if record is None:
                state = "other source" if file.exists() else state
                continue
            matches = all(record.get(key) == value for key, value in self.stamp(piece).items())
            if matches and (record.get("clean") or self.allow_dirty):
                return "done"
            state = "other source"
        return state

    def named(self, names: Sequence[str] | None) -> list[Piece]:
        """Return the named pieces, or all of one GPU if no name is given, in order.

        Raises:
            Refused: A name is unknown.
        """
        unknown = sorted(set(names or ()) - {piece.name for piece in self.pieces})
        if unknown:
            known = ", ".join(piece.name for piece in self.pieces)
            raise Refused(f"no piece is named {', '.join(unknown)}; the pieces are {known}")
        if not names:
            return [piece for piece in self.pieces if piece.gpus == 1]
        return [piece for piece in self.pieces if piece.name in names]

    def run(self, names: Sequence[str] | None, minutes: float) -> int:
        """Run the pieces that have no result of this source; return the exit code."""
        deadline = time.monotonic() + 60 * minutes
        selected = self.named(names)
        self.refuse_unknown_source()
        self.refuse_missing_flash4()
        pending = [piece for piece in selected if self.state(piece) != "done"]
        for piece in selected:
            if piece not in pending:
                print(f"{piece.name}: done before", flush=True)
        failed: list[str] = []
        while pending:
            piece = self.prerequisite(pending[0])
            remaining = (deadline - time.monotonic()) / 60
            if piece.minutes > remaining:
                print(
                    f"{piece.name}: not started, it takes about {piece.minutes:g} minutes and"
                    f" {max(0.0, remaining):.1f} of {minutes:g} are left"
                )
                break
            if self.run_piece(piece, 60 * remaining):
                pending = [other for other in pending if other != piece]
            else:
                failed.append(piece.name)
                pending = [
                    other for other in pending if other != piece and other.needs != piece.name
                ]
        unfinished = [piece.name for piece in selected if self.state(piece) != "done"]
        if failed:
            print(f"failed: {', '.join(failed)}")
        if unfinished:
            print(f"{len(unfinished)} of {len(selected)} pieces are left: {', '.join(unfinished)}")
            return 1
        print(f"all {len(selected)} pieces are done; next: python benchmarks/figures.py collect")
        return 0

    def prerequisite(self, piece: Piece) -> Piece:
        """Return ``piece``, or the piece that makes its input files if they are missing."""
        maker = next((other for other in self.pieces if other.name == piece.needs), None)
        if maker is not None and not all((self.root / path).exists() for path in maker.makes):
            return maker
        return piece

    def run_piece(self, piece: Piece, seconds: float) -> bool:
        """Run one piece; return whether it wrote a complete result file."""
        file = piece.inside(self.fresh)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial_file = file.with_name(f"part-{file.name}")
        partial_file.unlink(missing_ok=True)
        for path in piece.makes:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        words = shlex.split(piece.command.format(file=partial_file))
        start = {"nsa": [sys.executable, "-m", "nsa_cli"], "python": [sys.executable]}[words[0]]
        print(f"{piece.name}: {shlex.join(words)}", flush=True)
        started = time.monotonic()
        child = subprocess.Popen([*start, *words[1:]], cwd=self.root)
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = _terminate(child)
            print(f"{piece.name}: terminated, the time is over", flush=True)
        except KeyboardInterrupt:
            _terminate(child)
            partial_file.unlink(missing_ok=True)
            raise
        elapsed = (time.monotonic() - started) / 60
        missing = [path for path in piece.makes if not (self.root / path).exists()]
        problem = f"exit code {code}" if code else incomplete(partial_file)
        problem = problem or (f"it did not write {', '.join(missing)}" if missing else "")
        if problem:
            print(f"{piece.name}: no result after {elapsed:.1f} minutes: {problem}", flush=True)
            partial_file.unlink(missing_ok=True)
            return False
        text = partial_file.read_text(encoding="utf-8")
        stamp = self.stamp(piece)
        stamp |= {"commit": self.source.commit, "clean": self.source.clean}
        partial_file.write_text(stamped(text, stamp), encoding="utf-8")
        os.replace(partial_file, file)
        cut = sum(text.count(reason) for reason in CUT)
        note = f", {cut} cells skipped by the time limit" if cut else ""
        print(f"{piece.name}: {elapsed:.1f} minutes{note}", flush=True)
        return True

    def show(self) -> int:
        """Print the pieces and their states; return the exit code."""
        rows = [("piece", "minutes", "state", "file", "topic")]
        rows += [(p.name, f"{p.minutes:g}", self.state(p), p.file, p.topic) for p in self.pieces]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        for row in rows:
            print("  ".join([*(cell.ljust(w) for cell, w in zip(row, widths)), row[4]]))
        return 0

    def collect(self) -> int:
        """Copy new results to the repository; return the exit code.

        Raises:
            Refused: A result was measured on a dirty checkout.
        """
        new = [piece for piece in self.pieces if piece.inside(self.fresh).exists()]
        records = {piece: read_stamp(piece.inside(self.fresh)) or {} for piece in new}
        dirty = [piece.name for piece, record in records.items() if not record.get("clean")]
        if dirty and not self.allow_dirty:
            raise Refused(
                f"{', '.join(dirty)}: measured on a dirty checkout; --allow-dirty collects anyway"
            )
        for piece, record in records.items():
            target = piece.inside(self.results)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(piece.inside(self.fresh), target)
            print(f"{target.parent.name}/{target.name}: measured at commit {record.get('commit')}")
        print(f"{len(new)} files copied; next: python benchmarks/figures.py render")
        return 0

    def render(self, check: bool) -> int:
        """Write the tables, or only list the pages that differ; return the exit code.

        Raises:
            Refused: A page has an unknown marker.
        """
        results, different = Results(self.results), []
        for path in sorted(path for pattern in PAGES for path in self.root.glob(pattern)):
            old = path.read_text(encoding="utf-8")
            new, tables = rendered(old, results)
            if new == old:
                continue
            different.append(path)
            name = path.relative_to(self.root).as_posix()
            print(f"{name}: {', '.join(tables)}" + (" differ" if check else " written"))
            if not check:
                path.write_text(new, encoding="utf-8")
        if check and different:
            print("run python benchmarks/figures.py render to update these pages")
        return int(check and bool(different))


def rendered(text: str, results: Results) -> tuple[str, list[str]]:
    """Return a page with up-to-date tables, and the names of the tables that changed.

    Raises:
        Refused: A marker names an unknown table.
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
    """Insert ``stamp`` as the first field of a result file's text; the layout is unchanged."""
    return text.replace("{", '{\n "figures": ' + json.dumps(stamp) + ",", 1)


def read_stamp(path: Path) -> dict[str, Any] | None:
    """Return the stamp of a result file; None without a file or a stamp."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    stamp = document.get("figures") if isinstance(document, dict) else None
    return stamp if isinstance(stamp, dict) else None


def incomplete(path: Path) -> str:
    """Return why a result file is incomplete; "" if it is complete."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    if not isinstance(document, dict):
        return "the file does not contain a JSON object"
    return "the run was interrupted" if document.get("interrupted") else ""


def _terminate(child: subprocess.Popen[bytes]) -> int:
    child.send_signal(signal.SIGTERM)
    try:
        return child.wait(15) or 143
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait() or 137


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    main_parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = main_parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list", help="list the pieces and their states")
    run = verbs.add_parser("run", help="measure the pieces without a result of this source")
    collect = verbs.add_parser("collect", help="copy new results to benchmarks/results")
    render = verbs.add_parser("render", help="write the tables of README.md and the docs")
    for verb in (listing, run, collect, render):
        verb.add_argument("--gpu", default=PUBLISHED, help=f"results folder (default: {PUBLISHED})")
        verb.add_argument("--allow-dirty", action="store_true", help="accept a dirty checkout")
    run.add_argument("--only", nargs="+", metavar="PIECE", help="run only these pieces")
    run.add_argument("--minutes", type=float, default=10.0, help="time for this call (default: 10)")
    render.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    return main_parser


def main(
    arguments: Sequence[str] | None = None, root: Path = ROOT, pieces: Sequence[Piece] = PIECES
) -> int:
    """Run the command line; return the exit code."""
    options = parser().parse_args(arguments)
    figures = Figures(options.gpu, root, pieces, options.allow_dirty)
    try:
        if options.verb == "list":
            code = figures.show()
        elif options.verb == "run":
            code = figures.run(options.only, options.minutes)
        elif options.verb == "collect":
            code = figures.collect()
        else:
            code = figures.render(options.check)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again
        return 141
    except Refused as error:
        print(f"figures.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
