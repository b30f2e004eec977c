"""Imports follow the layers of the architecture without cycles; the oracle is independent."""

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
    "nsa_core.dtypes",
    "nsa_core.fold",
    "nsa_core.flash",
    "nsa_core.dryrun",
}
FOR_ORACLE = {
    "nsa_core.hugging_face",
    "nsa_core.rope_scaling",
    "nsa_core.util.text",
    "nsa_core.config",
    "nsa_core.errors",
    "nsa_core.layout",
    "nsa_core.limits",
}
PACKAGES = (
    "nsa_core",
    "nsa_verify",
    "nsa_bench",
    "nsa_models",
    "nsa_cli",
    "nsa_backend_sdpa",
    "nsa_backend_triton",
    "nsa_backend_fa2",
    "nsa_vllm",
)


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """The modules of ours that each module imports anywhere, including for type checking."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def package_of(module: str) -> str:
    return module.split(".")[0]


def test_packages_import_only_lower_layers(repo):
    """The contracts of [tool.importlinter] in pyproject.toml hold.

    They are checked in a separate process, because import-linter configures logging and disables
    our logger.
    """
    code = "import sys; from importlinter.cli import lint_imports; "
    code += "sys.exit(lint_imports(config_filename='pyproject.toml', no_cache=True))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=repo.root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_import_contracts_name_every_package(repo):
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


def test_backends_import_only_the_permitted_modules(imports):
    errors = [
        f"{module} imports {target}"
        for module, targets in imports.items()
        if module.startswith("nsa_backend")
        for target in targets
        if package_of(target) != package_of(module) and target not in FOR_BACKENDS
    ]
    assert not errors, "\n".join(errors)


def test_the_oracle_imports_no_code_that_it_judges(imports):
    queue = [module for module in imports if f"{module}.".startswith("nsa_verify.oracle.")]
    assert queue
    reached = set(queue)
    while queue:
        new = imports[queue.pop()] - reached
        reached |= new
        queue += new
    outside = {module for module in reached if not f"{module}.".startswith("nsa_verify.oracle.")}
    assert outside <= FOR_ORACLE | {"nsa_core", "nsa_verify"}, outside


def loaded_by(statements: str) -> set[str]:
    """Return the modules that are loaded after ``statements`` in a new interpreter."""
    code = f"import json, sys\n{statements}\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_contract_and_all_plugins_import_without_torch():
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
        f"nsa_core.{name}" for name in ("contract", "config", "layout", "errors", "plan.registry")
    ]
    assert "torch" not in loaded_by(
        "\n".join(f"import {name}" for name in ["nsa_core", *core, *plugins])
    )


@pytest.mark.slow
def test_public_names_and_the_layer_import_without_torch_dynamo():
    """Importing torch._dynamo takes as long as importing torch. One process imports torch once."""
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


def test_constant_result_sets_the_attributes_of_assume_constant_result():
    import torch

    from nsa_core.plan.default_plan import constant_result

    assert (
        vars(constant_result(lambda: 0))
        == vars(torch.compiler.assume_constant_result(lambda: 0))
        != {}
    )
