"""What the files say: nothing of one machine, and no reference that leads nowhere."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pathlib
import re

import pytest

# Written in halves, so that this file does not find itself.
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


def found_in(text: str) -> list[str]:
    return [
        f"line {n}: {word}"
        for n, line in enumerate(text.splitlines(), 1)
        for word in FORBIDDEN
        if word in line
    ]


def test_no_machine_paths_registry_hosts_or_notes_to_ourselves(repo):
    wrong = []
    for path in repo.files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        wrong += [f"{repo.name(path)} {hit}" for hit in found_in(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("word", FORBIDDEN)
def test_the_search_finds_what_it_looks_for(word):
    assert found_in(f"first\nsee {word}x") == [f"line 2: {word}"]


def documents(repo) -> list[pathlib.Path]:
    return [path for path in repo.files() if path.suffix == ".md"]


def resolve(dotted: str) -> bool:
    """Whether ``dotted`` names a module, or something inside one: a function, a class, a field, a
    method.
    """
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            target: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if not dotted.startswith(str(error.name)):
                raise
            continue
        for part in parts[cut:]:
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


def test_documents_name_things_that_exist(repo):
    wrong, checked = [], 0
    for path in documents(repo):
        for dotted in re.findall(
            r"`(nsa_(?:core|cli|verify|bench|models|backend_\w+?)(?:\.\w+)+)(?:\([^`]*\))?`",
            path.read_text(),
        ):
            checked += 1
            if not resolve(dotted):
                wrong.append(f"{repo.name(path)}: {dotted}")
    assert not wrong, "\n".join(wrong)
    assert checked > 30


def functions_in(path: pathlib.Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_documents_name_tests_that_exist(repo):
    wrong, checked = [], 0
    for path in documents(repo):
        for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", path.read_text()):
            checked += 1
            if not (repo.root / file).is_file() or (
                test and test not in functions_in(repo.root / file)
            ):
                wrong.append(f"{repo.name(path)}: {file} {test}")
    assert not wrong, "\n".join(wrong)
    assert checked > 10


def test_links_between_documents_lead_somewhere(repo):
    wrong = []
    for path in documents(repo):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            if not (path.parent / link).exists():
                wrong.append(f"{repo.name(path)}: {link}")
    assert not wrong, "\n".join(wrong)


def test_architecture_names_every_room(repo):
    """Every package, every folder, and every module of nsa_core that stands in no folder."""
    page, modules = repo.text("docs/architecture.md"), repo.modules()
    folders = {name.rsplit(".", 1)[0] for name in modules if "." in name}
    of_core = {name for name in modules if name.count(".") == 1 and name.startswith("nsa_core.")}
    rooms = {room for room in folders | of_core if room.count(".") < 2}
    assert len(rooms) > 25
    missing = sorted(room for room in rooms if f"`{room}`" not in page)
    assert not missing, f"docs/architecture.md has no row for {missing}"


def test_architecture_walks_through_at_most_eight_files(repo):
    section = repo.text("docs/architecture.md").split("## One tensor")[1].split("\n## ")[0]
    files = re.findall(r"(?m)^\| \d \| `([\w/]+\.py)` \|", section)
    assert 5 < len(files) <= 8
    bases = ("packages/nsa-core/src/nsa_core", "packages/nsa-backend-triton/src/nsa_backend_triton")
    wrong = [f for f in files if not any((repo.root / base / f).is_file() for base in bases)]
    assert not wrong
