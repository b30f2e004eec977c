"""Plant one fault in a copy of a backend or in a module of nsa_core, and run the verify checks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch

from nsa_core.contract import API_VERSION, SLOTS, BackendSpec
from nsa_core.plan.registry import discover
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.run import suite

BACKEND = "nsa_backend_sdpa"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault in the source of a module.

    Attributes:
        name: Description of the fault.
        module: Module name, such as "nsa_backend_sdpa.win" or "nsa_core.layer.rope".
        old: Source text that occurs exactly once in ``module``.
        new: Faulty replacement of ``old``.
        phase: Phase whose checks must find the fault.
    """

    name: str
    module: str
    old: str
    new: str
    phase: str = "prefill"

    def source(self) -> str:
        """Return the source of the module with the fault."""
        text = Path(importlib.import_module(self.module).__file__ or "").read_text()
        count = text.count(self.old)
        assert count == 1, (
            f"{self.name}: {self.old!r} occurs {count} times in {self.module}, expected once"
        )
        return text.replace(self.old, self.new)


def first_failure(combination: Combination, phase: str = "both") -> Finding | None:
    """Return the first failed finding of the quick checks in float32, or None if all pass."""
    todo = suite.jobs("quick", [torch.float32], phase=phase)
    findings = (finding for job in todo for finding in job.run(combination))
    return next((finding for finding in findings if finding.ok is False), None)


def killing_finding(mutant: Mutant, scratch: Path) -> Finding | None:
    """Return the finding that kills ``mutant``, or None if it survives."""
    if mutant.module.startswith(BACKEND):
        return first_failure(_faulty_copy(mutant, scratch), mutant.phase)
    with faulty_module(mutant):
        return first_failure(Combination(dict.fromkeys(SLOTS, "sdpa")), mutant.phase)


def _faulty_copy(mutant: Mutant, scratch: Path) -> Combination:
    """Copy the backend to ``scratch`` with the fault, and return it as a combination."""
    name = "mutant_" + "".join(c if c.isalnum() else "_" for c in mutant.name.lower())
    original = Path(importlib.import_module(BACKEND).__file__ or "").parent
    copy = scratch / name
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
    relative = Path(*mutant.module.split(".")[1:]).with_suffix(".py")
    (copy / relative).write_text(mutant.source())
    for file in copy.rglob("*.py"):
        file.write_text(file.read_text().replace(BACKEND, name))
    sys.path.insert(0, str(scratch))
    try:
        importlib.invalidate_caches()
        plugin = importlib.import_module(f"{name}.plugin")
        for file in copy.rglob("*.py"):
            importlib.import_module(
                ".".join(file.relative_to(scratch).with_suffix("").parts).removesuffix(".__init__")
            )
    finally:
        sys.path.remove(str(scratch))
    spec = plugin.nsa_register_backends()
    assert isinstance(spec, BackendSpec)
    assert spec.api_version[0] == API_VERSION[0]
    registry = discover().with_backend(dataclasses.replace(spec, name=name))
    return Combination(dict.fromkeys(SLOTS, name), registry=registry)


@contextlib.contextmanager
def faulty_module(mutant: Mutant) -> Iterator[None]:
    """Replace the objects of a module by their faulty versions inside the block.

    This rebinds names in all nsa modules, and the bases of their classes.
    """
    module = importlib.import_module(mutant.module)
    faulty = ModuleType(mutant.module)
    faulty.__dict__.update(__file__=module.__file__, __package__=module.__package__)
    registered = sys.modules[mutant.module]
    sys.modules[mutant.module] = faulty  # dataclasses look up their module by name
    library = torch.library  # the operators of the module are registered already
    try:
        with mock.patch.object(library, "Library"), mock.patch.object(library, "register_fake"):
            exec(compile(mutant.source(), str(module.__file__), "exec"), faulty.__dict__)
    finally:
        sys.modules[mutant.module] = registered
    pairs = {
        id(old): getattr(faulty, name)
        for name, old in vars(module).items()
        if getattr(old, "__module__", None) == mutant.module and hasattr(faulty, name)
    }
    originals: list[tuple[object, str, object]] = []
    for other in [m for n, m in list(sys.modules.items()) if n.startswith("nsa_")]:
        for name, value in list(vars(other).items()):
            if id(value) in pairs:
                originals.append((other, name, value))
                setattr(other, name, pairs[id(value)])
            elif isinstance(value, type) and any(id(base) in pairs for base in value.__bases__):
                originals.append((value, "__bases__", value.__bases__))
                value.__bases__ = tuple(pairs.get(id(base), base) for base in value.__bases__)
    try:
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)
