"""Data moves one way: nsa_cli -> nsa_core <- nsa_backend_*; and the truth leans on nothing it judges."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import subprocess
import sys

FROM_CORE = {"nsa_core.contract", "nsa_core.layout", "nsa_core.packing", "nsa_core.dryrun"}
JUDGED = {
    f"nsa_core.{name}"
    for name in ("ops", "module", "attention", "compress", "packing", "gating", "rope", "registry", "plan", "stats")
}


def imports(module: str, tree: ast.Module, modules: set[str], package: bool) -> set[str]:
    """Every module that ``module`` imports, at its top or inside a function, submodules named by `from` included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + package]
                base = ".".join([*parts, base] if base else parts)
            named = {f"{base}.{alias.name}" for alias in node.names}
            found |= named & modules or {base}
    return found


def imported(repo) -> dict[str, set[str]]:
    modules = repo.modules()
    packages = {name.rsplit(".", 1)[0] for name in modules} | {n for n in modules if "." not in n}
    return {name: imports(name, tree, set(modules), name in packages) for name, tree in modules.items()}


def root(module: str) -> str:
    return module.split(".")[0]


def test_core_imports_no_backend_and_not_the_command_line(repo):
    wrong = [
        f"{name} imports {target}"
        for name, targets in imported(repo).items()
        if root(name) == "nsa_core"
        for target in targets
        if target.startswith(("nsa_backend", "nsa_cli"))
    ]
    assert not wrong, "\n".join(wrong)


def test_backends_import_the_contract_and_nothing_else_of_ours(repo):
    wrong = [
        f"{name} imports {target}"
        for name, targets in imported(repo).items()
        if name.startswith("nsa_backend")
        for target in targets
        if target.startswith("nsa_") and root(target) != root(name) and target not in FROM_CORE
    ]
    assert not wrong, "\n".join(wrong)


def test_command_line_imports_no_backend(repo):
    wrong = [
        f"{name} imports {target}"
        for name, targets in imported(repo).items()
        if root(name) == "nsa_cli"
        for target in targets
        if target.startswith("nsa_backend")
    ]
    assert not wrong, "\n".join(wrong)


def test_oracle_reaches_nothing_it_judges(repo):
    graph = imported(repo)
    todo = [name for name in graph if name == "nsa_verify.oracle" or name.startswith("nsa_verify.oracle.")]
    assert todo
    reached = set(todo)
    while todo:
        for target in graph.get(todo.pop(), set()):
            if target.startswith("nsa_") and target not in reached and target != "nsa_core":
                reached.add(target)
                todo.append(target)
    assert not reached & JUDGED, reached & JUDGED
    assert not [name for name in reached if name.startswith(("nsa_backend", "nsa_cli"))]


def loaded_by(statements: str) -> set[str]:
    """Modules present after ``statements`` ran in a fresh interpreter."""
    code = f"import json, sys\n{statements}\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_contract_and_every_plugin_import_without_torch():
    points = importlib.metadata.entry_points(group="nsa.backends")
    plugins = sorted({p.value.split(":")[0] for p in points if p.dist and p.dist.name.startswith("nsa-backend-")})
    assert plugins == ["nsa_backend_fa2.plugin", "nsa_backend_sdpa.plugin", "nsa_backend_triton.plugin"]
    core = [f"nsa_core.{name}" for name in ("contract", "config", "layout", "errors", "registry")]
    assert "torch" not in loaded_by("\n".join(f"import {name}" for name in ["nsa_core", *core, *plugins]))


def test_command_line_imports_without_torch():
    assert "torch" not in loaded_by("import nsa_cli.app")


def test_a_layer_imports_without_the_compiler():
    """torch._dynamo takes as long again as torch itself; only who compiles should wait for it."""
    rooms = ("module", "attention", "verify.suite", "bench.run")
    assert "torch._dynamo" not in loaded_by("\n".join(f"import nsa_core.{name}" for name in rooms))


def test_a_result_is_marked_constant_as_torch_marks_it():
    import torch

    from nsa_core.dispatch.default_plan import constant_result

    assert vars(constant_result(lambda: 0)) == vars(torch.compiler.assume_constant_result(lambda: 0)) != {}


def test_public_names_of_core_resolve():
    loaded_by("import nsa_core\nfor name in nsa_core.__all__: getattr(nsa_core, name)")
