"""Mutants of the package's jit functions, shared helpers included, and whether tiny launches tell
them apart.

A mutant is one change of a function's syntax tree. It is killed when a launch that runs the
function leaves another result in memory, breaks a rule of the strict interpreter, does not end, or
takes more or fewer operations: clamps that only save work are guarded too.
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
from launches import PACKAGE, InterpretedLaunch, name_of

# of processor time: more than this many times a launch's own is a loop without end
PATIENCE_S, PATIENCE = (
    0.5,
    5,
)
OF_ITS_OWN = 8  # times more is a launch worth that has killed mutants of the same function
LISTED_ON = 3  # launches, the smallest, on which equivalent mutants are seen to live
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
    """``key`` names it across edits elsewhere: module, function, the text before and after, and
    which of equal ones.
    """

    key: str
    module: str
    function: str
    _tree: ast.FunctionDef
    _change: tuple[Any, str, Any]  # which field of which node becomes what

    def source(self) -> str:
        """Its text."""
        node, field, value = self._change
        healthy = getattr(node, field)
        setattr(node, field, value)
        try:
            return ast.unparse(self._tree)
        finally:
            setattr(node, field, healthy)

    @property
    def name(self) -> str:
        """ "folder.module.function"."""
        return self.key.partition(":")[0]


def modules() -> list[ModuleType]:
    """The package's modules that hold kernels or launch them."""
    names = [info.name for info in pkgutil.walk_packages(nsa_backend_triton.__path__, PACKAGE)]
    skipped = tuple(PACKAGE + name for name in ("plugin", "strict", "tools"))
    return [importlib.import_module(name) for name in names if not name.startswith(skipped)]


@functools.cache
def functions() -> dict[str, tuple[ModuleType, ast.FunctionDef]]:
    """ "folder.module.function" -> where it is and its syntax tree, for every jit function of the
    package.
    """
    found = {}
    for module in modules():
        for node in ast.parse(Path(module.__file__ or "").read_text()).body:
            if isinstance(node, ast.FunctionDef) and isinstance(
                vars(module).get(node.name), InterpretedFunction
            ):
                found[f"{module.__name__.removeprefix(PACKAGE)}.{node.name}"] = (module, node)
    return found


def mutants(name: str) -> list[Mutant]:
    """Every mutant of the function called ``name``."""
    module, function = functions()[name]
    made: list[Mutant] = []
    seen: dict[str, int] = {}
    for node, target, field, value in list(_sites(function)):
        before, healthy = ast.unparse(node), getattr(target, field)
        setattr(target, field, value)
        text = f"{name}: {before} -> {ast.unparse(node)}"
        seen[text] = seen.get(text, 0) + 1
        key = text + (f" #{seen[text]}" if seen[text] > 1 else "")
        setattr(target, field, healthy)
        change = (target, field, value)
        made.append(Mutant(key, module.__name__, function.name, function, change))
    return made


# what is mutated, and by setting which field of which node to what
Site = tuple[ast.AST, Any, str, Any]


def _sites(function: ast.FunctionDef) -> Iterator[Site]:
    """Every mutation of ``function``, in the order of its text."""
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
    """Parts of ``node`` that say how to compile, not what to compute."""
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
    """``ran`` and the functions that one of them hands on, as to a scan, which calls them without
    its telling.
    """
    found = set(ran)
    for name, (module, node) in functions().items():
        if name in ran:
            used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            values = [vars(module).get(n) for n in used]
            kernels = [v for v in values if isinstance(v, InterpretedFunction)]
            found |= {name_of(kernel) for kernel in kernels}
    return {name for name in found if name in functions()}


class _TooLong(BaseException):
    """The mutant does not end."""


def _alarm(*_: object) -> None:
    raise _TooLong


def killer(
    mutant: Mutant, asked: Sequence[InterpretedLaunch], folder: Path, by: Collection[str] = ANY
) -> InterpretedLaunch | None:
    """The first of ``asked`` that tells ``mutant`` from the healthy function, by its result or by
    its work.
    """
    with _in_place(mutant, folder):
        signal.signal(signal.SIGPROF, _alarm)
        try:
            for launch in asked:
                signal.setitimer(signal.ITIMER_PROF, PATIENCE_S + PATIENCE * launch.seconds)
                try:
                    if launch.differs() in by:
                        return launch
                except (_TooLong, Exception):  # noqa: BLE001  a mutant may do anything
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
    """Keys of the mutants that no launch kills; asked first are launches that are quick, and have
    killed others.
    """
    # of a function, and of all
    kills: collections.Counter[tuple[str, InterpretedLaunch]] = collections.Counter()
    alive = []
    for mutant in mutants:
        asked = [launch for launch in launches if mutant.name in launch.ran]
        hope = {one: 1 + kills["", one] + OF_ITS_OWN * kills[mutant.name, one] for one in asked}
        found = killer(mutant, sorted(asked, key=lambda one: one.seconds / hope[one]), folder, by)
        if found is None:
            alive.append(mutant.key)
        else:
            kills.update([("", found), (mutant.name, found)])
    return alive


def unproved(name: str, launches: Sequence[InterpretedLaunch], folder: Path) -> list[str]:
    """Mutants of ``name`` that live and are not listed as equivalent, or are listed and die."""
    made = mutants(name)
    alive = survivors([m for m in made if m.key not in EQUIVALENT], launches, folder)
    listed = [m for m in made if m.key in EQUIVALENT]
    few = [launch for launch in launches if name in launch.ran][:LISTED_ON]
    dead = {m.key for m in listed} - set(survivors(listed, few, folder))
    print(
        f"{name}: {len(made)} mutants, {len(listed)} equivalent, alive {alive}, listed and dead"
        f" {sorted(dead)}"
    )
    return alive + sorted(dead)


@contextlib.contextmanager
def _in_place(mutant: Mutant, folder: Path) -> Iterator[None]:
    """Every module of the package sees the mutant instead of the function, inside the block."""
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
