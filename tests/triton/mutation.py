"""Mutants of the package's jit functions, shared helpers included, and whether a few tiny problems tell them apart.

A mutant is one change of a function's syntax tree. It is killed when a problem that runs the function gives another
result in fp64, breaks a rule of the strict interpreter, or does not end.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import pkgutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from triton.runtime.interpreter import InterpretedFunction

import decode_problems
import nsa_backend_triton
from kernel_cases import BASE, SLOTS, point, under_test
from nsa_core.verify.cases import Case
from nsa_core.verify.interpreter import strict

LIMIT_S = 10  # of processor time a mutant: a loop that no longer ends
_SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.GtE: ast.Gt, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_RENAMES = {"maximum": "minimum", "minimum": "maximum", "max": "min", "sum": "max", "exp2": "exp"}
_NO_LOGIC = {"num_stages", "input_precision", "out_dtype", "loop_unroll_factor", "flatten", "warp_specialize"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``key`` names it across edits elsewhere: module, function, the text before and after, and which of equal ones."""

    key: str
    module: str
    function: str
    source: str


def modules() -> list[ModuleType]:
    """The package's modules that import without a GPU's own compiler."""
    skipped = {"offline", "plugin"}
    names = [info.name for info in pkgutil.iter_modules(nsa_backend_triton.__path__) if info.name not in skipped]
    return [importlib.import_module(f"nsa_backend_triton.{name}") for name in names]


@functools.cache
def functions() -> dict[str, tuple[ModuleType, ast.FunctionDef]]:
    """ "module.function" -> where it is and its syntax tree, for every jit function of the package."""
    found = {}
    for module in modules():
        for node in ast.parse(Path(module.__file__ or "").read_text()).body:
            if isinstance(node, ast.FunctionDef) and isinstance(vars(module).get(node.name), InterpretedFunction):
                found[f"{module.__name__.rpartition('.')[2]}.{node.name}"] = (module, node)
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
        made.append(Mutant(key, module.__name__, function.name, ast.unparse(function)))
        setattr(target, field, healthy)
    return made


Site = tuple[ast.AST, Any, str, Any]  # what is mutated, and by setting which field of which node to what


def _sites(function: ast.FunctionDef) -> Iterator[Site]:
    """Every mutation of ``function``, in the order of its text."""
    body = [n for n in function.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
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
            yield node, node, "keywords", [keyword for keyword in node.keywords if keyword.arg != "mask"]


_TINY = {"head_dim": 4, "v_head_dim": 3, "compress_block_size": 4, "compress_stride": 2, "window_size": 5}


def _tiny(name: str, *lengths: int, batch: int = 1, packed: bool = False, **fields: Any) -> Case:
    return Case(name, dataclasses.replace(BASE, **{**_TINY, **fields}), lengths, batch=batch, packed=packed)


TINY = (
    _tiny("dense", 19, batch=2, n_heads=6, n_kv_heads=2, window_size=7),
    _tiny("packed", 2, 0, 37, packed=True, n_heads=4, n_kv_heads=2),
    _tiny("choice", 70, n_heads=2, n_kv_heads=1, num_selected_blocks=3, init_blocks=1),
    _tiny("nothing forced", 55, n_heads=3, n_kv_heads=1, local_blocks=0, compress_stride=4),
)


@dataclasses.dataclass
class Problem:
    """One slot on one tiny case, its inputs between NaNs, and what the healthy kernels make of it."""

    slot: str
    case: Case
    deterministic: bool

    def __post_init__(self) -> None:
        self.subject = under_test(self.slot)
        self.asked = point(self.case, "float64", self.deterministic)
        self.data, inputs = self.subject.data(self.asked)
        self.inputs = {n: t if n in ("blocks", "lse") else between_nans(t) for n, t in inputs.items()}
        self.ran: set[str] = set()
        started = time.process_time()
        with _calls(self.ran):
            self.expected = self.run()
        self.seconds = time.process_time() - started
        self.ran |= _named_by(self.ran)

    def run(self) -> dict[str, torch.Tensor]:
        """Outputs and gradients."""
        do = between_nans(self.data.do) if self.subject.differentiable else None
        with strict():
            return self.subject.run(self.asked, self.inputs, do, self.data).outputs

    def differs(self) -> bool:
        """Whether the kernels, as they are now, give anything else."""
        return any(not _close(self.expected[name], found) for name, found in self.run().items())


@dataclasses.dataclass
class DecodeProblem:
    """One decode form on one tiny step, and what the healthy kernels make of it."""

    form: decode_problems.Form
    step: str
    multiprocessors: int

    def __post_init__(self) -> None:
        self.slot, self.case = self.form.__name__, decode_problems.STEPS[self.step].case
        self.ran: set[str] = set()
        started = time.process_time()
        with _calls(self.ran):
            self.expected = self.run()
        self.seconds = time.process_time() - started
        self.ran |= _named_by(self.ran)

    def run(self) -> dict[str, torch.Tensor]:
        """Outputs."""
        with strict():
            return decode_problems.run(self.form, self.step, self.multiprocessors, between_nans)

    differs = Problem.differs


def between_nans(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, rows and heads apart, NaN between them."""
    storage = tensor.new_full((*tensor.shape[:-2], tensor.shape[-2] + 1, tensor.shape[-1] + 2), torch.nan)
    return storage[..., : tensor.shape[-2], : tensor.shape[-1]].copy_(tensor)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) if not a.is_floating_point() else torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@contextlib.contextmanager
def _calls(names: set[str]) -> Iterator[None]:
    """Collect "module.function" of every jit function that runs inside."""

    def noted(stock: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            names.add(f"{self.fn.__module__.rpartition('.')[2]}.{self.fn.__name__}")
            return stock(self, *args, **kwargs)

        return call

    kinds = {"run": noted(InterpretedFunction.run), "__call__": noted(InterpretedFunction.__call__)}
    with mock.patch.multiple(InterpretedFunction, **kinds):
        yield


def _named_by(ran: set[str]) -> set[str]:
    """Functions that one of ``ran`` hands on, as to a scan, which calls them without its telling."""
    found = set()
    for name, (module, node) in functions().items():
        if name in ran:
            used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            values = [vars(module).get(n) for n in used]
            kernels = [v.fn for v in values if isinstance(v, InterpretedFunction)]
            found |= {f"{fn.__module__.rpartition('.')[2]}.{fn.__name__}" for fn in kernels}
    return {name for name in found if name in functions()}


def problems() -> list[Problem | DecodeProblem]:
    """Every slot on every tiny case, sel also in its deterministic form; decode forms on tiny steps."""
    found = [
        Problem(slot, case, deterministic)
        for case in TINY
        for slot in SLOTS
        for deterministic in ((False, True) if slot == "sel" else (False,))
    ]
    steps = [DecodeProblem(*fields) for fields in decode_problems.PROBLEMS]
    return sorted([*found, *steps], key=lambda problem: problem.seconds)


class _TooLong(BaseException):
    """The mutant does not end."""


def _alarm(*_: object) -> None:
    raise _TooLong


def killed(mutant: Mutant, asked: list[Problem | DecodeProblem], folder: Path) -> bool:
    """Whether one of ``asked`` tells ``mutant`` from the healthy function."""
    with _in_place(mutant, folder):
        signal.signal(signal.SIGPROF, _alarm)
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        try:
            return any(problem.differs() for problem in asked)
        except _TooLong:
            return True
        except Exception:  # noqa: BLE001  a mutant may do anything
            return True
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


@contextlib.contextmanager
def _in_place(mutant: Mutant, folder: Path) -> Iterator[None]:
    """Every module of the package sees the mutant instead of the function, inside the block."""
    module = sys.modules[mutant.module]
    healthy = vars(module)[mutant.function]
    file = folder / f"mutant_{abs(hash(mutant.key))}.py"
    file.write_text(f"from __future__ import annotations\n\n{mutant.source}\n")
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
