"""A page shows how to install the libraries that its blocks use, before it uses them."""

from __future__ import annotations

import ast
import importlib.metadata
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from test_release import PACKAGES, metadata, project, requirements

PAGES = pathlib.Path(__file__).resolve().parents[2] / "docs" / "how-to"
FILES_OF_A_PACKAGE = "write-a-backend"  # a page whose blocks do not run
# Imports and commands of a block -> the distribution that they need beyond our packages
NEEDS = {
    "accelerate": "accelerate",
    "hf": "huggingface-hub",
    "lm-eval": "lm-eval",
    "lm_eval": "lm-eval",
    "nsa convert": "transformers",
    "nsa_models.hf": "transformers",
    "peft": "peft",
    "tokenizers": "tokenizers",
    "transformers": "transformers",
    "transformers.Trainer": "accelerate",
}


def installed_by(repo, words: list[str]) -> set[str]:
    """Return the distributions that `pip install WORDS` installs, with all that they require."""
    pending, done = [Requirement(word) for word in words], set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in done:
                continue
            done.add((name, extra))
            if name in PACKAGES:  # their installed metadata may be older than the checkout
                pending += requirements(metadata(project(repo, name)))[extra]
                continue
            lines = map(Requirement, importlib.metadata.requires(name) or [])
            pending += [r for r in lines if not r.marker or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in done}


def uses(language: str, code: str) -> set[str]:
    """Return what a Python block imports, or the lines of a shell block."""
    if language in ("sh", "bash"):
        return set(code.splitlines())
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)) if language == "python" else ():
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def needs(name: str) -> set[str]:
    """Return the distributions that an import or a shell command needs."""
    return {
        distribution
        for prefix, distribution in NEEDS.items()
        if name == prefix or name.startswith((f"{prefix}.", f"{prefix} "))
    }


def missing(repo, page: str) -> list[str]:
    """Return what the blocks of a page use and no `pip install` before them installs."""
    words: list[str] = list(PACKAGES)  # start/install.md installs them, without extras
    errors: list[str] = []
    for language, code in re.findall(r"(?ms)^```(\w+)\n(.*?)^```", page):
        if language in ("sh", "bash"):
            for packages in re.findall(r"(?m)^pip install (.+)$", code):
                words += [word.strip("'") for word in packages.split()]
        wanted = {name: needs(name) for name in uses(language, code)}
        available = installed_by(repo, words) if any(wanted.values()) else set()
        errors += [
            f"{name} needs {', '.join(absent)}"
            for name, distributions in wanted.items()
            if (absent := distributions - available)
        ]
    return errors


def pages() -> Iterator[object]:
    """Return the pages; what the page of the harness installs is in the environment of `full`."""
    for path in sorted(PAGES.glob("*.md")):
        if path.stem != FILES_OF_A_PACKAGE:
            marks = [pytest.mark.slow] if path.stem == "inspect" else []
            yield pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", pages())
def test_a_page_installs_what_it_uses(path, repo):
    page = path.read_text(encoding="utf-8")
    assert missing(repo, page) == []
    modules = {
        name.split(".")[0]
        for language, code in re.findall(r"(?ms)^```(python)\n(.*?)^```", page)
        for name in uses(language, code)
    }
    known = {*sys.stdlib_module_names, "torch", *(p.replace("-", "_") for p in PACKAGES)}
    assert modules - known <= NEEDS.keys(), "add the libraries to NEEDS"


@pytest.mark.parametrize(
    ("page", "errors"),
    [
        ("```python\nfrom nsa_models.hf import convert\n```", ["nsa_models.hf.convert needs tran"]),
        ("```sh\nlm-eval ls tasks\n```", ["lm-eval ls tasks needs lm-eval"]),
        ("```python\nimport peft\n```\n```sh\npip install peft\n```", ["peft needs peft"]),
        ("```sh\npip install peft\n```\n```python\nimport peft, transformers\n```", []),
        ("```sh\npip install 'nsa-cli[hf]'\nnsa convert x\n```", []),
    ],
)
def test_missing_installs_are_found(page, errors, repo):
    found = missing(repo, f"{page}\n")
    assert len(found) == len(errors)
    assert all(text.startswith(error) for text, error in zip(found, errors))
