"""Files hold no machine paths or internal notes, and documents name things that exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pathlib
import re

import pytest

# Split, so that this file does not contain the words.
FORBIDDEN = [
    *("/" + folder + "/" for folder in ("work", "farm", "root", "tmp", "home", "Users", "opt")),
    *(
        ".".join(host)
        for host in (("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch"))
    ),
    "." + "carry",
    "before" + "-stop",
    "work" + "tree",
    "work" + "place",
]


def forbidden_words(text: str) -> list[str]:
    return [
        f"line {n}: {word}"
        for n, line in enumerate(text.splitlines(), 1)
        for word in FORBIDDEN
        if word in line
    ]


def test_files_hold_no_machine_paths_registry_hosts_or_internal_notes(repo):
    errors = []
    for path in repo.files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        errors += [f"{repo.name(path)} {match}" for match in forbidden_words(text)]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("word", FORBIDDEN)
def test_each_forbidden_word_is_detected(word):
    assert forbidden_words(f"first\nsee {word}x") == [f"line 2: {word}"]


def documents(repo) -> list[pathlib.Path]:
    return [path for path in repo.files() if path.suffix == ".md"]


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
    generated = repo.root / "docs" / "reference" / "options.md"  # exists while the site is built
    errors = []
    for path in documents(repo):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            target = path.parent / link
            if not target.exists() and target.resolve() != generated:
                errors.append(f"{repo.name(path)}: {link}")
    assert not errors, "\n".join(errors)


def test_architecture_describes_every_package_and_folder(repo):
    """It names each package, each folder, and each top-level module of nsa_core."""
    page, modules = repo.text("docs/explanation/architecture.md"), repo.modules()
    folders = {name.rsplit(".", 1)[0] for name in modules if "." in name}
    core_modules = {
        name for name in modules if name.count(".") == 1 and name.startswith("nsa_core.")
    }
    described = {name for name in folders | core_modules if name.count(".") < 2}
    assert len(described) > 25
    missing = sorted(name for name in described if f"`{name}`" not in page)
    assert not missing, f"docs/explanation/architecture.md has no row for {missing}"


def test_architecture_follows_a_tensor_through_at_most_eight_files(repo):
    page = repo.text("docs/explanation/architecture.md")
    section = page.split("## One tensor")[1].split("\n## ")[0]
    files = re.findall(r"(?m)^\| \d \| `([\w/]+\.py)` \|", section)
    assert 5 < len(files) <= 8
    bases = ("packages/nsa-core/src/nsa_core", "packages/nsa-backend-triton/src/nsa_backend_triton")
    missing = [f for f in files if not any((repo.root / base / f).is_file() for base in bases)]
    assert not missing
