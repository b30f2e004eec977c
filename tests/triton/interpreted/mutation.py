"""Mutants of the package's jit functions, and whether recorded tiny launches detect them.

A mutant is one change of a function's syntax tree. A launch that runs the function kills the mutant
if it leaves another result in memory, breaks a rule of the strict interpreter, does not end, or
takes another number of operations. The last condition guards clamps that only save work.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import importlib
import json
import pkgutil
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from triton.runtime.interpreter import InterpretedFunction

import nsa_backend_triton
from launches import PREFIX, InterpretedLaunch

# Processor time after which a launch counts as endless: seconds, plus a multiple of its own time.
TIMEOUT_S, TIMEOUT_FACTOR = (
    0.5,
    5,
)
SAME_FUNCTION_WEIGHT = 8  # weight of a launch's kills of mutants of the same function
EQUIVALENT_LAUNCHES = 3  # smallest launches on which equivalent mutants must survive
EQUIVALENT: dict[str, str] = json.loads(
    Path(__file__).with_name("equivalent_mutants.json").read_text()
)
ANY = ("result", "work")
_SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.GtE: ast.Gt,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_RENAMES = {"maximum": "minimum", "minimum": "maximum", "max": "min", "sum": "max", "exp2": "exp"}
_NO_LOGIC = {
    "num_stages",
    "input_precision",
    "out_dtype",
    "loop_unroll_factor",
    "flatten",
    "warp_specialize",
    "pack",
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mutant.

    ``key`` identifies it across edits elsewhere: module, function, the text before and after, and a
    number if several are equal.
    """

    key: str
    module: str
    function: str
    _tree: ast.FunctionDef
    _change: tuple[Any, str, Any]  # node, its field, the field's new value

    def source(self) -> str:
        """Return the mutant's source."""
        node, field, value = self._change
        healthy = getattr(node, field)
        setattr(node, field, value)
        try:
            return ast.unparse(self._tree)
        finally:
            setattr(node, field, healthy)

    @property
    def name(self) -> str:
        """The mutated function, as "folder.module.function"."""
        return self.key.partition(":")[0]


def modules() -> list[ModuleType]:
    """Return the package's modules except the plugin and the strict interpreter."""
    skipped = ("strict", "plugin")
    names = [
        info.name
        for info in pkgutil.walk_packages(nsa_backend_triton.__path__, PREFIX)
        if not info.name.removeprefix(PREFIX).startswith(skipped)
    ]
    return [importlib.import_module(name) for name in names]


@functools.cache
def functions() -> dict[str, tuple[ModuleType, ast.FunctionDef]]:
    """Return "folder.module.function" -> (module, syntax tree) for every jit function."""
    by_name = {}
    for module in modules():
        for node in ast.parse(Path(module.__file__ or "").read_text()).body:
            if isinstance(node, ast.FunctionDef) and isinstance(
                vars(module).get(node.name), InterpretedFunction
            ):
                by_name[f"{module.__name__.removeprefix(PREFIX)}.{node.name}"] = (module, node)
    return by_name


def mutants(name: str) -> list[Mutant]:
    """Return every mutant of the function called ``name``."""
    module, function = functions()[name]
    mutants: list[Mutant] = []
    repeats: dict[str, int] = {}
    for node, target, field, value in list(_sites(function)):
        before, healthy = ast.unparse(node), getattr(target, field)
        setattr(target, field, value)
        text = f"{name}: {before} -> {ast.unparse(node)}"
        repeats[text] = repeats.get(text, 0) + 1
        key = text + (f" #{repeats[text]}" if repeats[text] > 1 else "")
        setattr(target, field, healthy)
        change = (target, field, value)
        mutants.append(Mutant(key, module.__name__, function.name, function, change))
    return mutants


# a mutation: the node that it is named after, the node that changes, its field, the new value
Site = tuple[ast.AST, Any, str, Any]


def _sites(function: ast.FunctionDef) -> Iterator[Site]:
    """Yield every mutation of ``function``, statement by statement."""
    body = [
        n
        for n in function.body
        if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    ]
    ignored = {
        id(inner)
        for statement in body
        for node in ast.walk(statement)
        for part in _without_logic(node)
        for inner in ast.walk(part)
    }
    for statement in body:
        for node in ast.walk(statement):
            if id(node) not in ignored:
                yield from _changes(node)


def _without_logic(node: ast.AST) -> list[ast.AST]:
    """Return the parts of ``node`` that affect compilation but not the result."""
    if isinstance(node, ast.keyword) and node.arg in _NO_LOGIC:
        return [node]
    if isinstance(node, ast.AnnAssign):
        return [node.annotation]
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (
        "static_assert",
        "device_assert",
        "multiple_of",
        "max_contiguous",
    ):
        return [node]
    return []


def _changes(node: ast.AST) -> Iterator[Site]:
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in _SWAPS:
        yield node, node, "op", _SWAPS[type(node.op)]()
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        yield node, node, "ops", [_SWAPS[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node, node, "value", node.value + 1
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node, node, "op", ast.UAdd()
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in _RENAMES:
            yield node, node.func, "attr", _RENAMES[node.func.attr]
        if node.func.attr == "where":
            yield node, node, "args", [node.args[0], node.args[2], node.args[1]]
        if any(keyword.arg == "mask" for keyword in node.keywords):
            yield (
                node,
                node,
                "keywords",
                [keyword for keyword in node.keywords if keyword.arg != "mask"],
            )


def reached(ran: set[str]) -> set[str]:
    """Add the functions that a function in ``ran`` passes on, for example to a scan.

    Such calls are not recorded.
    """
    names = set(ran)
    for name, (module, node) in functions().items():
        if name in ran:
            called = {id(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
            passed = {
                n.id for n in ast.walk(node) if isinstance(n, ast.Name) and id(n) not in called
            }
            values = [vars(module).get(n) for n in passed]
            kernels = [v.fn for v in values if isinstance(v, InterpretedFunction)]
            names |= {f"{fn.__module__.removeprefix(PREFIX)}.{fn.__name__}" for fn in kernels}
    return {name for name in names if name in functions()}


class _Timeout(BaseException):
    """The mutant does not end."""


def _alarm(*_: object) -> None:
    raise _Timeout


def killer(
    mutant: Mutant, launches: Sequence[InterpretedLaunch], folder: Path, by: Collection[str] = ANY
) -> InterpretedLaunch | None:
    """Return the first launch that kills ``mutant``, by its result or by its work."""
    with _in_place(mutant, folder):
        signal.signal(signal.SIGPROF, _alarm)
        try:
            for launch in launches:
                signal.setitimer(signal.ITIMER_PROF, TIMEOUT_S + TIMEOUT_FACTOR * launch.seconds)
                try:
                    if launch.differs() in by:
                        return launch
                except (_Timeout, Exception):  # noqa: BLE001  a mutant may raise anything
                    return launch
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def survivors(
    mutants: Iterable[Mutant],
    launches: Sequence[InterpretedLaunch],
    folder: Path,
    by: Collection[str] = ANY,
) -> list[str]:
    """Return the keys of the mutants that no launch kills.

    Quick launches and those that have killed other mutants run first.
    """
    # (function, launch) -> kills; function "": of all functions
    kills: collections.Counter[tuple[str, InterpretedLaunch]] = collections.Counter()
    alive = []
    for mutant in mutants:
        candidates = [launch for launch in launches if mutant.name in launch.ran]
        weight = {
            launch: 1 + kills["", launch] + SAME_FUNCTION_WEIGHT * kills[mutant.name, launch]
            for launch in candidates
        }
        candidates = sorted(candidates, key=lambda launch: launch.seconds / weight[launch])
        killed_by = killer(mutant, candidates, folder, by)
        if killed_by is None:
            alive.append(mutant.key)
        else:
            kills.update([("", killed_by), (mutant.name, killed_by)])
    return alive


def unproved(name: str, launches: Sequence[InterpretedLaunch], folder: Path) -> list[str]:
    """Return mutants that survive without being listed as equivalent, or are listed and die."""
    of_function = mutants(name)
    alive = survivors([m for m in of_function if m.key not in EQUIVALENT], launches, folder)
    listed = [m for m in of_function if m.key in EQUIVALENT]
    smallest = [launch for launch in launches if name in launch.ran][:EQUIVALENT_LAUNCHES]
    dead = {m.key for m in listed} - set(survivors(listed, smallest, folder))
    print(
        f"{name}: {len(of_function)} mutants, {len(listed)} equivalent, alive {alive}, listed and"
        f" dead {sorted(dead)}"
    )
    return alive + sorted(dead)


@contextlib.contextmanager
def _in_place(mutant: Mutant, folder: Path) -> Iterator[None]:
    """Replace the function by the mutant in every module of the package, inside the block."""
    module = sys.modules[mutant.module]
    healthy = vars(module)[mutant.function]
    file = folder / f"mutant_{abs(hash(mutant.key))}.py"
    file.write_text(f"from __future__ import annotations\n\n{mutant.source()}\n")
    exec(compile(file.read_text(), str(file), "exec"), vars(module))
    changed = vars(module)[mutant.function]
    places = [(m, n) for m in modules() for n, value in vars(m).items() if value is healthy]
    for place, name in places:
        setattr(place, name, changed)
    try:
        yield
    finally:
        setattr(module, mutant.function, healthy)
        for place, name in places:
            setattr(place, name, healthy)
