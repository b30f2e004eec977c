"""The repository as the tests of this folder read it: its files and their syntax trees."""

from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import subprocess

import pytest

SKIPPED = {".git", ".nox", ".venv", "build", "dist"}


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@dataclasses.dataclass(frozen=True)
class Repository:
    root: pathlib.Path

    def files(self) -> list[pathlib.Path]:
        """Tracked and new files, ignored ones left out; where there is no git, whatever lies
        there.
        """
        command = [
            "git",
            "-C",
            str(self.root),
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ]
        try:
            names = subprocess.run(
                command, check=True, capture_output=True, text=True
            ).stdout.split("\0")
            paths = [self.root / name for name in names if name]
        except (OSError, subprocess.CalledProcessError):
            paths = [
                p for p in self.root.rglob("*") if not SKIPPED & set(p.relative_to(self.root).parts)
            ]
        return sorted(path for path in paths if path.is_file())

    def name(self, path: pathlib.Path) -> str:
        return path.relative_to(self.root).as_posix()

    def python(self, *folders: str) -> dict[str, ast.Module]:
        """Name to syntax tree of the Python files, all of them or those under ``folders``; nobody
        changes the trees.
        """
        names = {self.name(p): p for p in self.files() if p.suffix == ".py"}
        return {
            name: parsed(path)
            for name, path in names.items()
            if not folders or name.startswith(tuple(f"{folder}/" for folder in folders))
        }

    def modules(self) -> dict[str, ast.Module]:
        """Import name to syntax tree of every module of our packages."""
        found = {}
        for name, tree in self.python("packages").items():
            inside = name.split("/src/")
            if len(inside) == 2:
                found[inside[1].removesuffix(".py").removesuffix("/__init__").replace("/", ".")] = (
                    tree
                )
        return found

    def text(self, name: str) -> str:
        return (self.root / name).read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def repo() -> Repository:
    return Repository(pathlib.Path(__file__).resolve().parents[2])
