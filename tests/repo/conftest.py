"""The fixture `repo`: the files of the repository and their syntax trees."""

from __future__ import annotations

import ast
import dataclasses
import functools
import gc
import pathlib
import subprocess

import pytest

SKIPPED = {".git", ".nox", ".venv", "build", "dist"}


@functools.cache
def parse_file(path: pathlib.Path) -> ast.Module:
    """Return the syntax tree of a file.

    All trees are kept, so the garbage collector need not look at them again and again.
    """
    gc.disable()
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    gc.freeze()
    gc.enable()
    return tree


@dataclasses.dataclass(frozen=True)
class Repository:
    root: pathlib.Path

    def files(self) -> list[pathlib.Path]:
        """Return tracked and new files without ignored ones; without git, all files."""
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
        """Return the syntax trees of the Python files, by name.

        Args:
            folders: Only files below these folders; all files if empty.

        Returns:
            Cached trees, which the caller must not change.
        """
        paths = {self.name(path): path for path in self.files() if path.suffix == ".py"}
        return {
            name: parse_file(path)
            for name, path in paths.items()
            if not folders or name.startswith(tuple(f"{folder}/" for folder in folders))
        }

    def modules(self) -> dict[str, ast.Module]:
        """Return the syntax tree of each module of our packages, by import name."""
        trees = {}
        for name, tree in self.python("packages").items():
            parts = name.split("/src/")
            if len(parts) == 2:
                module = parts[1].removesuffix(".py").removesuffix("/__init__")
                trees[module.replace("/", ".")] = tree
        return trees

    def text(self, name: str) -> str:
        return (self.root / name).read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def repo() -> Repository:
    return Repository(pathlib.Path(__file__).resolve().parents[2])
