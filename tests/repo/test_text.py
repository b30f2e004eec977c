"""Documents name things that exist, and the page of the architecture shows the code of today."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pathlib
import re

import pytest


def documents(repo) -> list[pathlib.Path]:
    """Return the pages but for the changelog, which names what is gone, too."""
    return [p for p in repo.files() if p.suffix == ".md" and p.name != "CHANGELOG.md"]


def resolves(dotted: str) -> bool:
    """Return whether ``dotted`` names a module, or a function, class, field or method in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            target: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not dotted.startswith(str(error.name)):
                raise
            continue
        for part in parts[length:]:
            fields = (
                [f.name for f in dataclasses.fields(target)]
                if dataclasses.is_dataclass(target)
                else []
            )
            if not hasattr(target, part) and part not in fields:
                return False
            target = getattr(target, part, None)
        return True
    return False


def test_documents_name_objects_that_exist(repo):
    errors, checked = [], 0
    for path in documents(repo):
        for dotted in re.findall(
            r"`(nsa_(?:core|cli|verify|bench|models|backend_\w+?)(?:\.\w+)+)(?:\([^`]*\))?`",
            path.read_text(),
        ):
            checked += 1
            if not resolves(dotted):
                errors.append(f"{repo.name(path)}: {dotted}")
    assert not errors, "\n".join(errors)
    assert checked > 30


def functions_in(path: pathlib.Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_documents_name_tests_that_exist(repo):
    errors, checked = [], 0
    for path in documents(repo):
        for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", path.read_text()):
            checked += 1
            if not (repo.root / file).is_file() or (
                test and test not in functions_in(repo.root / file)
            ):
                errors.append(f"{repo.name(path)}: {file} {test}")
    assert not errors, "\n".join(errors)
    assert checked > 10


def test_links_between_documents_resolve(repo):
    errors = []
    for path in documents(repo):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            if not (path.parent / link).exists():
                errors.append(f"{repo.name(path)}: {link}")
    assert not errors, "\n".join(errors)


def section(page: str, title: str) -> str:
    """Return the section of a page below the heading ``title``."""
    return page.split(f"\n## {title}")[1].split("\n## ")[0]


def test_architecture_names_every_package_and_folder(repo):
    """It names a folder as `nsa_core.plan`, or as `plan` in a line about the package."""
    page, modules = repo.text("docs/explanation/architecture.md"), repo.modules()
    folders = {tuple(name.split(".")[:2]) for name in modules if name.count(".") > 1}
    assert len(folders) > 20

    def is_named(package: str, folder: str) -> bool:
        lines = [line for line in page.splitlines() if f"`{package}`" in line]
        return f"`{package}.{folder}`" in page or any(f"`{folder}`" in line for line in lines)

    missing = [name for name in modules if "." not in name and f"`{name}`" not in page]
    missing += [".".join(folder) for folder in sorted(folders) if not is_named(*folder)]
    assert not missing, f"docs/explanation/architecture.md does not name {missing}"


@pytest.mark.parametrize(("title", "most"), [("One tensor", 9), ("One decode step", 10)])
def test_architecture_follows_a_call_through_few_files(title, most, repo):
    """Each row of the table names one file below nsa_core or nsa_backend_triton, in order."""
    rows = section(repo.text("docs/explanation/architecture.md"), title)
    numbered = re.findall(r"(?m)^\| (\d+) \| `([\w/]+\.py)` \| .+ \|$", rows)
    assert [number for number, _ in numbered] == [str(n + 1) for n in range(len(numbered))]
    files = [file for _, file in numbered]
    assert 5 < len(set(files)) == len(files) <= most
    bases = ("packages/nsa-core/src/nsa_core", "packages/nsa-backend-triton/src/nsa_backend_triton")
    missing = [f for f in files if not any((repo.root / base / f).is_file() for base in bases)]
    assert not missing
