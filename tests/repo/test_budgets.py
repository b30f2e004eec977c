"""House rules: numbers of parameters, environment variables, except clauses, docstrings."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize

from nsa_cli.app import app

PARAMETERS = 12
OTHER_SKIPS = 20  # places with "fmt: skip" that are neither kernel signatures, calls nor launches
PUBLIC = {"nsa_attention"}  # exempt from PARAMETERS
VARIABLES = {"NSA_PLUGINS", "NSA_DISABLE_PLUGINS", "NSA_CHECK"}
CORE = "packages/nsa-core/src/nsa_core/"
PLAN = CORE + "plan/"
# Files that run third-party code, and may catch Exception. All other files name the errors.
MAY_CATCH_ALL = {PLAN + name for name in ("choosing.py", "loading.py", "plan.py")}
MAY_CATCH_ALL |= {PLAN + "plugin_calls.py", CORE + "torch_ops/slot_op.py"}
MAY_CATCH_ALL |= {CORE + name for name in ("util/child.py", "util/text.py")}
MAY_CATCH_ALL |= {CORE + "parallel/agreement.py"}  # it raises the error after a collective
VERIFY, BENCH = "packages/nsa-verify/src/nsa_verify/", "packages/nsa-bench/src/nsa_bench/"
MAY_CATCH_ALL |= {VERIFY + name for name in ("run/contexts.py", "run/suite.py")}
MAY_CATCH_ALL |= {VERIFY + "isolation/call_guard.py"}
MAY_CATCH_ALL |= {"packages/nsa-cli/src/nsa_cli/trial_imports.py"}
MAY_CATCH_ALL |= {
    BENCH + name
    for name in (
        *("gate.py", "remote.py", "rivals.py", "timing.py"),
        "parallel/worker.py",
    )
}
# tokenizers raises plain Exception
MAY_CATCH_ALL |= {"packages/nsa-models/src/nsa_models/lm/tokens.py"}
# a platform convention for the cache directory, not a setting of ours
PLATFORM = {"XDG_CACHE_HOME", "TORCHELASTIC_RUN_ID"}


@functools.cache  # `repo` keeps the trees
def functions(tree: ast.AST) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]:
    """Return all functions, at any depth of the statements."""
    found, rest = [], [tree]
    while rest:
        node = rest.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(node)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            rest += getattr(node, field, [])
    return tuple(found)


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def fmt_skips(text: str, tree: ast.Module) -> list[tuple[int, str]]:
    """Return (line, place) of each "fmt: skip" comment.

    The place is "signature" (of a kernel, with its decorators), "call" (inside a kernel), "launch"
    or "other".
    """
    if "fmt: skip" not in text:
        return []
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = [t.start[0] for t in tokens if t.type == tokenize.COMMENT and "fmt: skip" in t.string]
    kernels = [function for function in functions(tree) if is_kernel(function)]
    ending: dict[int, ast.stmt] = {}  # the innermost statement that ends in a line
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for node in sorted(statements, key=lambda node: node.lineno):
        ending[node.end_lineno or 0] = node
    return [(line, _place(line, ending.get(line), kernels)) for line in lines]


def _place(
    line: int,
    statement: ast.stmt | None,
    kernels: list[ast.FunctionDef | ast.AsyncFunctionDef],
) -> str:
    for kernel in kernels:
        first = min(node.lineno for node in (kernel, *kernel.decorator_list))
        if first <= line < kernel.body[0].lineno:
            return "signature"
    if statement is None:
        return "other"
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    if any(kernel.lineno < line <= (kernel.end_lineno or 0) for kernel in kernels):
        return "call" if calls else "other"
    launches = [
        call
        for call in calls
        if isinstance(call.func, ast.Subscript) or ast.unparse(call.func) in ("Launch", "launch")
    ]
    return "launch" if launches else "other"


def test_few_places_besides_kernels_and_launches_skip_the_formatter(repo):
    places = [
        (place, f"{name}:{line}")
        for name, tree in repo.python().items()
        for line, place in fmt_skips(repo.text(name), tree)
    ]
    others = [where for place, where in places if place == "other"]
    assert len(others) <= OTHER_SKIPS, ", ".join(others)
    assert {place for place, _ in places} >= {"signature", "call", "launch"}


SKIPPING = '''
@triton.jit(
    do_not_specialize=["n"],
)  # fmt: skip
def kernel(
    X, n,
):  # fmt: skip
    """A kernel."""
    x = load(
        X, n,
    )  # fmt: skip
    y = (x,
        x)  # fmt: skip


def host(
    x, n,
):  # fmt: skip
    if n:
        kernel[(1,)](
            x, n,
        )  # fmt: skip
    launches = [
        Launch(kernel, x) for _ in range(n)
    ]  # fmt: skip
    return tuple(
        launches,
    )  # fmt: skip
'''


def test_places_that_skip_the_formatter_are_told_apart():
    places = [place for _, place in fmt_skips(SKIPPING, ast.parse(SKIPPING))]
    kernel, host = ["signature", "signature", "call", "other"], ["other", "launch", "launch"]
    assert places == [*kernel, *host, "other"]


def count_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def test_functions_have_few_parameters(repo):
    """Kernels, typer commands and the functions in PUBLIC may have more than PARAMETERS."""
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    registered = [
        info
        for group in groups
        for info in (*group.registered_commands, group.registered_callback)
        if info
    ]
    commands = {info.callback.__name__ for info in registered}
    errors, seen = [], set()
    for name, tree in repo.python().items():
        for function in functions(tree):
            count = count_parameters(function)
            if count <= PARAMETERS or is_kernel(function):
                continue
            if function.name in PUBLIC:
                seen.add(function.name)
            elif not (name.startswith("packages/nsa-cli/") and function.name in commands):
                errors.append(f"{name}:{function.lineno} {function.name}: {count} parameters")
    assert not errors, "\n".join(errors)
    assert seen == PUBLIC


def string_value(node: ast.AST | None, names: dict[str, str]) -> str | None:
    """Return the string of a literal, or of the constant that ``node`` names."""
    value = node.value if isinstance(node, ast.Constant) else names.get(getattr(node, "id", ""))
    return value if isinstance(value, str) else None


def environment_reads(tree: ast.Module) -> list[tuple[int, str | None]]:
    """Return (line, variable) of each read of the environment; None if the name is not constant."""
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    constants = {
        ast.unparse(target): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
    }
    reads: list[tuple[int, str | None]] = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Attribute, ast.Name)) or ast.unparse(node) not in (
            "os.environ",
            "os.getenv",
        ):
            continue
        inner = parents[node]
        if isinstance(inner, ast.Attribute) and inner.attr == "setdefault":
            continue  # sets a variable for another library
        outer = parents[inner] if isinstance(inner, ast.Attribute) else inner
        key: ast.AST | None = None
        if isinstance(outer, ast.Call) and outer.args and outer.args[0] is not node:
            key = outer.args[0]
        elif isinstance(outer, ast.Subscript):
            key = outer.slice
        elif isinstance(outer, ast.Compare):
            key = outer.left
        reads += [
            (node.lineno, name)
            for name in passed_by_callers(key, node, parents, tree)
            or [string_value(key, constants)]
        ]
    return reads


def passed_by_callers(
    key: ast.AST | None, node: ast.AST, parents: dict[ast.AST, ast.AST], tree: ast.Module
) -> list[str | None]:
    """Return the values that callers in the file pass as ``key``.

    The list is empty unless ``key`` is the first parameter of the function around ``node``.
    """
    while node in parents and not isinstance(node, ast.FunctionDef):
        node = parents[node]
    if not isinstance(node, ast.FunctionDef) or not isinstance(key, ast.Name):
        return []
    if not node.args.args or node.args.args[0].arg != key.id:
        return []
    calls = [
        call
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == node.name
    ]
    return [string_value(call.args[0] if call.args else None, {}) for call in calls]


def test_only_three_environment_variables_are_read(repo):
    errors, seen = [], set()
    for name, tree in repo.python("packages").items():
        if not re.search("environ|getenv", repo.text(name)):
            continue  # walking every tree takes seconds
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and {"environ", "getenv"} & {alias.name for alias in node.names}
            ):
                errors.append(
                    f"{name}:{node.lineno} imports environ or getenv from os; use os.environ, which"
                    " this test detects"
                )
        for line, variable in environment_reads(tree):
            seen.add(variable)
            if variable not in VARIABLES | PLATFORM:
                errors.append(f"{name}:{line} reads {variable}")
    assert not errors, "\n".join(errors)
    assert seen >= VARIABLES, f"documented, but never read: {VARIABLES - seen}"


def test_environment_variables_are_documented_in_one_table(repo):
    rows = [
        line.split("|")[1].strip(" `")
        for line in repo.text("docs/reference/environment.md").splitlines()
        if "| `" in line
    ]
    assert set(rows) == VARIABLES
    assert len(rows) == len(VARIABLES)


def test_except_exception_is_used_only_around_foreign_code(repo):
    errors = []
    for name, tree in repo.python("packages").items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                caught = "BaseException" if node.type is None else ast.unparse(node.type)
                blanket = {"Exception", "BaseException"} & set(re.findall(r"\w+", caught))
                if blanket and name not in MAY_CATCH_ALL:
                    errors.append(f"{name}:{node.lineno} except {caught}")
    assert not errors, "\n".join(errors)


def public_definitions(body: list[ast.stmt], prefix: str) -> list[tuple[str, ast.AST]]:
    """Return (dotted name, node) of the public classes and functions in a module or class body."""
    definitions: list[tuple[str, ast.AST]] = []
    for node in body:
        if not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ) or node.name.startswith("_"):
            continue
        if any(ast.unparse(d).endswith((".setter", "overload")) for d in node.decorator_list):
            continue
        definitions.append((f"{prefix}.{node.name}", node))
        if isinstance(node, ast.ClassDef):
            definitions += public_definitions(node.body, f"{prefix}.{node.name}")
    return definitions


def test_public_modules_classes_and_functions_have_docstrings(repo):
    missing = []
    for name, tree in repo.modules().items():
        if any(part.startswith("_") for part in name.split(".")):
            continue
        for dotted, node in [(name, tree), *public_definitions(tree.body, name)]:
            if not ast.get_docstring(node):  # type: ignore[arg-type]
                missing.append(dotted)
    assert not missing, "no docstring: " + ", ".join(missing)
