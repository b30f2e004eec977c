"""Imports follow the arrows of docs/architecture.md, form no cycle, and leave the oracle
independent.
"""

from __future__ import annotations

import graphlib
import importlib.metadata
import json
import subprocess
import sys

import grimp
import pytest

FOR_BACKENDS = {
    "nsa_core.contract",
    "nsa_core.layout",
    "nsa_core.packing",
    "nsa_core.fold",
    "nsa_core.dryrun",
}
FOR_ORACLE = {"nsa_core.config", "nsa_core.errors", "nsa_core.layout"}
PACKAGES = (
    "nsa_core",
    "nsa_verify",
    "nsa_bench",
    "nsa_models",
    "nsa_cli",
    "nsa_backend_sdpa",
    "nsa_backend_triton",
    "nsa_backend_fa2",
)


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports anywhere in its file, for type checking too."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def root(module: str) -> str:
    return module.split(".")[0]


def test_packages_import_along_the_arrows(repo):
    """The contracts of [tool.importlinter] in pyproject.toml.

    In a process of its own, because import-linter configures logging and disables our logger.
    """
    code = "import sys; from importlinter.cli import lint_imports; "
    code += "sys.exit(lint_imports(config_filename='pyproject.toml', no_cache=True))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=repo.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_is_under_the_contracts(repo):
    folders = {
        path.parent.name for path in repo.files() if path.match("packages/*/src/*/__init__.py")
    }
    assert folders == set(PACKAGES)
    for package in PACKAGES:
        assert (
            f'"{package}"'
            in repo.text("pyproject.toml").split("[tool.importlinter]")[1].split("]")[0]
        ), package


def test_modules_form_no_cycle(imports):
    graphlib.TopologicalSorter(imports).prepare()


def test_backends_import_only_what_the_contract_names(imports):
    wrong = [
        f"{module} imports {target}"
        for module, targets in imports.items()
        if module.startswith("nsa_backend")
        for target in targets
        if root(target) != root(module) and target not in FOR_BACKENDS
    ]
    assert not wrong, "\n".join(wrong)


def test_oracle_imports_nothing_it_judges(imports):
    todo = [module for module in imports if f"{module}.".startswith("nsa_verify.oracle.")]
    assert todo
    reached = set(todo)
    while todo:
        new = imports[todo.pop()] - reached
        reached |= new
        todo += new
    outside = {module for module in reached if not f"{module}.".startswith("nsa_verify.oracle.")}
    assert outside <= FOR_ORACLE | {"nsa_core", "nsa_verify"}, outside


def loaded_by(statements: str) -> set[str]:
    """Modules present after ``statements`` ran in a fresh interpreter."""
    code = f"import json, sys\n{statements}\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_contract_and_every_plugin_import_without_torch():
    points = importlib.metadata.entry_points(group="nsa.backends")
    plugins = sorted(
        {p.value.split(":")[0] for p in points if p.dist and p.dist.name.startswith("nsa-backend-")}
    )
    assert plugins == [
        "nsa_backend_fa2.plugin",
        "nsa_backend_sdpa.plugin",
        "nsa_backend_triton.plugin",
    ]
    core = [
        f"nsa_core.{name}"
        for name in ("contract", "config", "layout", "errors", "dispatch.registry")
    ]
    assert "torch" not in loaded_by(
        "\n".join(f"import {name}" for name in ["nsa_core", *core, *plugins])
    )


def test_command_line_imports_without_torch():
    assert "torch" not in loaded_by("import nsa_cli.app")


def test_public_names_resolve_and_a_layer_imports_without_the_compiler():
    """torch._dynamo takes as long to import as torch itself; one process, to import torch once."""
    modules = (
        "nsa_core.layer.module",
        "nsa_core.layer.attention",
        "nsa_verify.run.suite",
        "nsa_bench.run",
    )
    names = "import nsa_core\nfor name in nsa_core.__all__: getattr(nsa_core, name)\n"
    loaded = loaded_by(names + "\n".join(f"import {name}" for name in modules))
    assert "torch" in loaded
    assert "torch._dynamo" not in loaded


def test_a_result_is_marked_constant_as_torch_marks_it():
    import torch

    from nsa_core.dispatch.default_plan import constant_result

    assert (
        vars(constant_result(lambda: 0))
        == vars(torch.compiler.assume_constant_result(lambda: 0))
        != {}
    )
