"""House rules a reader counts on: short files, short functions, three environment variables, no blanket except."""

from __future__ import annotations

import ast
import re

FILE_LINES, FUNCTION_LINES = 300, 60
KERNEL_FILE_LINES, KERNEL_LINES = 400, 100
VARIABLES = {"NSA_PLUGINS", "NSA_DISABLE_PLUGINS", "NSA_CHECK"}
CORE = "packages/nsa-core/src/nsa_core/"
# Only where code that is not ours runs: the rest names the errors it expects.
GUARDS_PLUGINS = {CORE + name for name in ("isolate.py", "ops.py", "plan.py", "plugins.py", "survey.py", "text.py")}
GUARDS_PLUGINS |= {CORE + "bench/rivals.py", CORE + "lm/tokens.py"}  # tokenizers raises nothing narrower
PLATFORM = {"XDG_CACHE_HOME"}  # where the system keeps caches: a convention of the platform, not a switch of ours


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_files_and_functions_are_short(repo):
    wrong = []
    for name, tree in repo.python().items():
        found = functions(tree)
        lines = len(repo.text(name).splitlines())
        allowed = KERNEL_FILE_LINES if any(map(is_kernel, found)) else FILE_LINES
        if lines > allowed:
            wrong.append(f"{name}: {lines} lines, {allowed} allowed")
        for function in found:
            lines = (function.end_lineno or 0) - function.lineno + 1
            allowed = KERNEL_LINES if is_kernel(function) else FUNCTION_LINES
            if lines > allowed:
                wrong.append(f"{name}:{function.lineno} {function.name}: {lines} lines, {allowed} allowed")
    assert not wrong, "\n".join(wrong)


def text_of(node: ast.AST | None, names: dict[str, str]) -> str | None:
    """The string that ``node`` is, or that the constant it names holds."""
    value = node.value if isinstance(node, ast.Constant) else names.get(getattr(node, "id", ""))
    return value if isinstance(value, str) else None


def environment_reads(tree: ast.Module) -> list[tuple[int, str | None]]:
    """(line, name) of each read of the environment; None where nothing in the file tells it."""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    constants = {
        ast.unparse(target): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
    }
    reads: list[tuple[int, str | None]] = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Attribute, ast.Name)) or ast.unparse(node) not in ("os.environ", "os.getenv"):
            continue
        inner = parents[node]
        if isinstance(inner, ast.Attribute) and inner.attr == "setdefault":  # tells another library, reads nothing
            continue
        outer = parents[inner] if isinstance(inner, ast.Attribute) else inner
        key: ast.AST | None = None
        if isinstance(outer, ast.Call) and outer.args and outer.args[0] is not node:
            key = outer.args[0]
        elif isinstance(outer, ast.Subscript):
            key = outer.slice
        elif isinstance(outer, ast.Compare):
            key = outer.left
        reads += [(node.lineno, name) for name in given_as(key, node, parents, tree) or [text_of(key, constants)]]
    return reads


def given_as(key: ast.AST | None, node: ast.AST, parents: dict[ast.AST, ast.AST], tree: ast.Module) -> list[str | None]:
    """Where ``key`` is the first parameter of the function around ``node``: what its callers in the file pass."""
    while node in parents and not isinstance(node, ast.FunctionDef):
        node = parents[node]
    if not isinstance(node, ast.FunctionDef) or not isinstance(key, ast.Name):
        return []
    if not node.args.args or node.args.args[0].arg != key.id:
        return []
    calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and ast.unparse(c.func) == node.name]
    return [text_of(call.args[0] if call.args else None, {}) for call in calls]


# Hands the whole environment on to a child process, and reads nothing in it.
PASSES_ENVIRONMENT_ON = {CORE + "isolate.py"}


def test_only_three_environment_variables_are_read(repo):
    wrong, seen = [], set()
    for name, tree in repo.python("packages").items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and {"environ", "getenv"} & {alias.name for alias in node.names}
            ):
                wrong.append(f"{name}:{node.lineno} imports from os what this test looks for as os.environ")
        for line, variable in environment_reads(tree):
            seen.add(variable)
            if variable not in VARIABLES | PLATFORM and not (variable is None and name in PASSES_ENVIRONMENT_ON):
                wrong.append(f"{name}:{line} reads {variable}")
    assert not wrong, "\n".join(wrong)
    assert seen >= VARIABLES, f"documented but read nowhere: {VARIABLES - seen}"


def test_environment_variables_are_documented_in_one_table(repo):
    rows = [line.split("|")[1].strip(" `") for line in repo.text("docs/environment.md").splitlines() if "| `" in line]
    assert set(rows) == VARIABLES
    assert len(rows) == len(VARIABLES)


def test_except_exception_stands_only_around_plugins(repo):
    wrong = []
    for name, tree in repo.python("packages").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                caught = "BaseException" if node.type is None else ast.unparse(node.type)
                blanket = {"Exception", "BaseException"} & set(re.findall(r"\w+", caught))
                if blanket and name not in GUARDS_PLUGINS:
                    wrong.append(f"{name}:{node.lineno} except {caught}")
    assert not wrong, "\n".join(wrong)


def public(body: list[ast.stmt], prefix: str) -> list[tuple[str, ast.AST]]:
    """The public classes and functions of a module or class body, with their dotted names."""
    found: list[tuple[str, ast.AST]] = []
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if any(ast.unparse(d).endswith((".setter", "overload")) for d in node.decorator_list):
            continue
        found.append((f"{prefix}.{node.name}", node))
        if isinstance(node, ast.ClassDef):
            found += public(node.body, f"{prefix}.{node.name}")
    return found


def test_everything_public_has_a_docstring(repo):
    wrong = []
    for name, tree in repo.modules().items():
        if any(part.startswith("_") for part in name.split(".")):
            continue
        for dotted, node in [(name, tree), *public(tree.body, name)]:
            if not ast.get_docstring(node):  # type: ignore[arg-type]
                wrong.append(dotted)
    assert not wrong, "no docstring: " + ", ".join(wrong)
