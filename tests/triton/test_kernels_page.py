"""packages/nsa-backend-triton/KERNELS.md names every kernel, and only things that exist.

The tests read source files only; they need neither triton nor torch.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "packages" / "nsa-backend-triton"
SOURCE = PACKAGE / "src" / "nsa_backend_triton"
TESTS = ROOT / "tests" / "triton" / "interpreted"
PAGE = (PACKAGE / "KERNELS.md").read_text()
TABLE = json.loads((ROOT / "tests/triton/tools/compile_table.json").read_text())
KERNELS = {row["kernel"] for row in TABLE["rows"]}
# Files that the commands write.
WRITTEN = {"before.json", "after.json"}


def functions(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def jit_functions() -> dict[str, ast.FunctionDef]:
    return {
        name: node
        for path in SOURCE.glob("*/*.py")
        for name, node in functions(path).items()
        if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


JIT = jit_functions()


def names(cell: str) -> list[str]:
    """Return the identifiers in backticks."""
    return re.findall(r"`(\w+)`", cell)


def table_rows(page: str, columns: int) -> Iterator[list[str]]:
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == columns and "`" in line:
            yield cells


def missing_kernels(page: str) -> set[str]:
    """Return the compiled kernels that no row of an equation names."""
    return KERNELS - {name for row in table_rows(page, 4) for name in names(row[1])}


def unknown_names(page: str) -> list[str]:
    """Return the kernels, launchers and files of the page that do not exist."""
    unknown = []
    for _, kernels, launchers, tests in table_rows(page, 4):
        unknown += [name for name in names(kernels) if name not in KERNELS]
        listed_launchers = re.findall(r"`([\w/]+\.py): ([\w, ]+)`", launchers)
        unknown += [] if listed_launchers else [f"no launcher of {kernels}"]
        for file, listed in listed_launchers:
            defined = functions(SOURCE / file) if (SOURCE / file).is_file() else {}
            unknown += [f"{file}: {name}" for name in listed.split(", ") if name not in defined]
        listed_tests = re.findall(r"`(\w+\.py)`", tests)
        unknown += [name for name in listed_tests if not (TESTS / name).is_file()] or (
            [] if listed_tests else [f"no test of {kernels}"]
        )
    for path in re.findall(r"(?<![\w/.])[\w./-]+\.(?:py|json|md)\b", page):
        if path not in WRITTEN and not any(
            (folder / path).is_file() for folder in (ROOT, PACKAGE, SOURCE, SOURCE / "tuned", TESTS)
        ):
            unknown.append(path)
    return unknown


def vocabulary(page: str) -> set[str]:
    section = page.split("\n## Vocabulary\n")[1].split("\n## ")[0]
    return set(names(section))


def tuned_settings() -> set[str]:
    return {
        setting
        for path in (SOURCE / "tuned").glob("*.json")
        for rows in json.loads(path.read_text()).values()
        for _, settings in rows
        for setting in settings
    }


def constexprs(function: ast.FunctionDef) -> set[str]:
    return {
        argument.arg
        for argument in function.args.args
        if argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)
    }


def test_page_names_every_kernel_of_the_compile_table():
    assert not missing_kernels(PAGE)


def test_page_names_only_kernels_launchers_and_files_that_exist():
    assert len(list(table_rows(PAGE, 4))) >= 20
    assert not unknown_names(PAGE)


def test_vocabulary_has_every_shared_constexpr_and_tuned_setting():
    listed = [name for kernel in KERNELS for name in constexprs(JIT[kernel])]
    shared = {name for name in listed if listed.count(name) > 1}
    assert len(shared) > 20
    missing = (shared | tuned_settings()) - vocabulary(PAGE)
    assert not missing, sorted(missing)


def test_first_columns_of_the_vocabulary_exist():
    """Each is a parameter of a jit function, or a tuned setting."""
    parameters = {a.arg for node in JIT.values() for a in node.args.args} | tuned_settings()
    section = PAGE.split("\n## Vocabulary\n")[1].split("\n## ")[0]
    first = [
        name for columns in (2, 3) for row in table_rows(section, columns) for name in names(row[0])
    ]
    assert len(first) > 80
    unknown = set(first) - parameters
    assert not unknown, sorted(unknown)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("`span_dq`", "`span_qd`"),
        ("`span/forward.py: forward`", "`span/forward.py: forwards`"),
        ("span/geometry.py", "span/geometries.py"),
        ("interpreted_slots.py", "interpreted_slot.py"),
        ("benchmarks/kernels/compare_ptx.py", "benchmarks/compare_ptx.py"),
    ],
)
def test_a_wrong_name_is_detected(old: str, new: str):
    assert old in PAGE
    assert unknown_names(PAGE.replace(old, new))


def test_a_missing_kernel_is_detected():
    assert missing_kernels(PAGE.replace("`span_starts`", "")) == {"span_starts"}
