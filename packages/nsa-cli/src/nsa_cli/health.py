"""Collect the environment report of `nsa doctor`.

Child processes import torch, triton and flash-attn first, because any of them may be broken. Once
torch has been imported there, this process imports it too, to ask the backends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import platform
import re
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from nsa_cli import output
from nsa_core.contract import SLOTS
from nsa_core.errors import NSAError
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.plugin_calls import FAULTS
from nsa_core.plan.registry import Registry
from nsa_core.plan.standing import (
    Standing,
    standing_of,
    standings,
    typical_candidates,
)
from nsa_core.util.child import Child, ChildEnded

Facts = dict[str, Any]
Problem = dict[str, str]
SCHEMA_VERSION = 1


def inspect_environment(limit_s: float) -> Facts:
    """Return the document that `nsa doctor --json` prints.

    Its field ``works`` is true if torch imports and a backend runs a small attention.

    Args:
        limit_s: Seconds after which a child process that imports a library is ended.
    """
    imports = [
        LibraryImport("torch", "torch", torch_facts),
        LibraryImport("triton", "triton", triton_facts),
        LibraryImport("flash-attn", "flash_attn", flash_attn_facts),
    ]
    registry = output.find_backends()
    torch, triton, flash = (library.facts(limit_s) for library in imports)
    problems = _torch_problems(torch) + _optional_problems(triton, flash, bool(torch.get("gpus")))
    problems += _backend_problems(registry)
    attention: Facts = {}
    if torch["status"] == "ok":
        _import_torch_for_plugins(registry, limit_s)
        standing, faults = ask_backends(registry)
        problems += faults
        if registry.ready():
            attention, failure = _attention(imports[0].child, registry, limit_s)
            problems += failure
    else:
        unknown = Standing("unavailable", "torch cannot be imported")
        standing = {
            (entry.name, entry.distribution): unknown if entry.spec else standing_of(entry, {})
            for entry in registry.entries
        }
    return {
        "schema_version": SCHEMA_VERSION,
        "works": bool(attention) and all(run["finite"] for run in attention.values()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": output.versions(*output.OUR_PACKAGES),
        "torch": torch,
        "driver": driver_version(),
        "triton": triton,
        "flash_attn": flash,
        "backends": [_backend(e, standing[e.name, e.distribution]) for e in registry.entries],
        "attention": attention,
        "variables": {
            "NSA_PLUGINS": os.environ.get("NSA_PLUGINS"),
            "NSA_DISABLE_PLUGINS": os.environ.get("NSA_DISABLE_PLUGINS"),
            "NSA_CHECK": os.environ.get("NSA_CHECK"),
        },
        "troubles": problems,
    }


class LibraryImport:
    """An import of a library in a child process, which starts at once.

    Args:
        distribution: The distribution of the library.
        module: Its module.
        facts: Imports it and returns facts about it.
    """

    def __init__(self, distribution: str, module: str, facts: Callable[[], Facts]) -> None:
        self.distribution, self.module = distribution, module
        self.version = output.installed_version(distribution)
        self.child: Child | None = None
        if self.version or importlib.util.find_spec(module):
            self.child = Child()
            self.child.send(facts)

    def facts(self, limit_s: float) -> Facts:
        """Return the facts, with the status of the library: ok, missing or broken.

        A broken library has the field "ended" if its import ended the child or took too long.
        """
        if self.child is None:
            error = f"No module named {self.module!r}"
            return {"version": None, "status": "missing", "error": error}
        try:
            facts = self.child.receive(limit_s, "during the import test")
        except ChildEnded as ended:
            how = "hung" if ended.hung else "crashed"
            return self._broken(f"{ended.how} (reinstall it)") | {"ended": how}
        except NSAError as error:
            return self._broken(str(error))
        return {"version": self.version, **facts, "status": "ok", "error": ""}

    def _broken(self, error: str) -> Facts:
        return {"version": self.version, "status": "broken", "error": error}


def torch_facts() -> Facts:
    """Return the version of torch and its GPUs."""
    import torch

    facts: Facts = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpus": [],
        "built_for": torch.cuda.get_arch_list() if torch.version.cuda else [],
        "cuda_available": torch.cuda.is_available(),
    }
    for index in range(torch.cuda.device_count() if facts["cuda_available"] else 0):
        p = torch.cuda.get_device_properties(index)
        capability = [p.major, p.minor]
        facts["gpus"].append(
            {"name": p.name, "capability": capability, "memory_bytes": p.total_memory}
        )
    if facts["gpus"]:
        x = torch.ones(8, 8, device="cuda")
        facts["computes"] = float((x @ x).sum().item()) == 512.0
    return facts


def triton_facts() -> Facts:
    """Return the version of triton."""
    import triton

    return {"version": triton.__version__}


def flash_attn_facts() -> Facts:
    """Return the version of flash-attn."""
    version = importlib.import_module("flash_attn").__version__
    importlib.import_module("flash_attn_2_cuda")  # fails without the libraries of CUDA
    return {"version": version}


def attention_facts(registry: Registry) -> Facts:
    """Run a small attention on each device; return whether it is finite, and its backends."""
    import torch

    from nsa_core import NSAConfig, nsa_attention
    from nsa_core.plan.plan import resolve

    config, facts = NSAConfig(64, 4, 2, num_selected_blocks=3), {}
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        plan = resolve(config, device=device, dtype=dtype, needs_grad=True, registry=registry)
        options: Facts = {"device": device, "dtype": dtype, "requires_grad": True}
        q, k, v = (torch.randn(1, 200, heads, 16, **options) for heads in (4, 2, 2))
        gates = torch.rand(1, 200, 4, 3, device=device)
        o = nsa_attention(q, k, v, gates, config=config, plan=plan)
        o.float().sum().backward()  # type: ignore[no-untyped-call]
        tensors = (o, q.grad, k.grad, v.grad)
        finite = all(x is not None and bool(x.isfinite().all()) for x in tensors)
        chosen = {slot: choice.backend for slot, choice in plan.choices.items()}
        facts[device] = {"finite": finite, "backends": chosen}
    return facts


def _attention(
    child: Child | None, registry: Registry, limit_s: float
) -> tuple[Facts, list[Problem]]:
    """Let ``child``, which has imported torch, run a small attention."""
    assert child is not None  # torch was imported in it
    # A third-party backend may end the process: without it, this project's own show what works.
    own = tuple(entry for entry in registry.ready() if entry.child is None)
    hint = "nsa backends explain; nsa verify"
    try:
        facts: Facts = child.call(
            attention_facts,
            Registry(own or registry.ready()),
            limit_s=limit_s,
            doing="in a small attention",
        )
    except NSAError as error:
        summary = str(error).splitlines()[0]  # the hint prints the reasons of each candidate
        return {}, [_problem("attention", summary, hint)]
    text = "the output of a small attention on {} is not finite"
    not_finite = [device for device, run in facts.items() if not run["finite"]]
    return facts, [_problem("attention", text.format(device), hint) for device in not_finite]


def _import_torch() -> None:
    import torch  # noqa: F401


def _import_torch_for_plugins(registry: Registry, limit_s: float) -> None:
    """Import torch in the processes of plugins, so that the time limit of a probe excludes it."""
    children = [entry.child for entry in registry.ready() if entry.child is not None]
    for child in children:
        child.send(_import_torch)
    for child in children:
        with contextlib.suppress(NSAError):  # the probe meets the error again
            child.receive(limit_s, "while it imported torch")


def ask_backends(registry: Registry) -> tuple[dict[tuple[str, str], Standing], list[Problem]]:
    """Probe the backends for each device; return the standings, and a problem for each fault."""
    from nsa_core.plan.candidates import find_candidates
    from nsa_core.plan.options import PlanOptions

    typical = typical_candidates(registry)
    on_cpu = find_candidates(typical.config, PlanOptions(device="cpu"), registry=registry)
    faults = {
        candidate.backend: str(reason)
        for candidates in (on_cpu, typical)
        for of_slot in candidates.by_slot.values()
        for candidate in of_slot
        for reason in candidate.reasons
        if reason.code in FAULTS
    }
    problems = []
    for name, fault in faults.items():
        hint = f"pip uninstall {registry.get(name).distribution}, or set NSA_DISABLE_PLUGINS={name}"
        problems.append(_problem(f"probe of backend {name}", fault, hint))
    return standings(typical), problems


def _backend(entry: BackendEntry, standing: Standing) -> Facts:
    reason = entry.reason
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "status": standing.status,
        "sentence": standing.sentence,
        "slots": [slot for slot in SLOTS if entry.spec and slot in entry.spec.slots],
        "reason": dataclasses.asdict(reason) if reason else None,
    }


def _problem(subject: str, message: str, hint: str) -> Problem:
    return {"what": subject, "message": message, "hint": hint}


def _torch_problems(torch: Facts) -> list[Problem]:
    if torch["status"] == "missing":
        return [_problem("torch", "torch is not installed", "pip install torch")]
    if torch["status"] == "broken":
        hint = "pip install --force-reinstall torch"
        if torch.get("ended") == "hung":
            wait = "nsa doctor --limit 300  # for a busy machine or a slow disk"
            hint = f"{wait}; if that does not help, {hint}"
        return [_problem("torch", torch["error"], hint)]
    problems = []
    required = next(r for r in map(Requirement, requires("nsa-core") or []) if r.name == "torch")
    try:
        compatible = required.specifier.contains(Version(torch["version"]), prereleases=True)
    except InvalidVersion:
        compatible = True  # a custom build with its own version scheme
    if not compatible:
        text = f"torch {torch['version']} is too old, nsa-core needs torch{required.specifier}"
        problems.append(_problem("torch", text, f'pip install "torch{required.specifier}"'))
    return problems + _cuda_problems(torch)


def _cuda_problems(torch: Facts) -> list[Problem]:
    problems = []
    if has_nvidia_device() and not torch["cuda"] and not torch["hip"]:
        text = "this machine has an NVIDIA GPU, but the installed torch is built for the CPU only"
        hint = "pip install --force-reinstall torch, from an index with CUDA builds"
        problems.append(_problem("cuda", text, hint))
    elif torch["cuda"] and not torch["cuda_available"] and has_nvidia_device():
        text = (
            f"torch is built for CUDA {torch['cuda']} and finds no usable GPU (driver"
            f" {driver_version()})"
        )
        hint = "nvidia-smi  # the usual cause is a driver too old for this CUDA"
        problems.append(_problem("cuda", text, hint))
    for gpu in torch["gpus"]:
        major, minor = gpu["capability"]
        if torch["built_for"] and not any(_runs(arch, major, minor) for arch in torch["built_for"]):
            text = (
                f"{gpu['name']} is sm_{major}{minor}, and this torch is built for"
                f" {', '.join(torch['built_for'])}"
            )
            problems.append(_problem("cuda", text, "install a torch built for this GPU"))
    if torch["gpus"] and not torch.get("computes"):
        text = "a matrix product on the GPU is wrong"
        problems.append(_problem("cuda", text, "nvidia-smi -q -d ECC"))
    return problems


def _runs(arch: str, major: int, minor: int) -> bool:
    """Return whether code built for ``arch`` runs on a GPU of capability (major, minor).

    Binary code (sm_XY) runs on the same major and the same or a later minor; PTX (compute_XY) runs
    on the same or any later GPU.
    """
    digits = re.sub(r"\D", "", arch)
    if len(digits) < 2:
        return True
    built = (int(digits[:-1]), int(digits[-1]))
    return built <= (major, minor) and (arch.startswith("compute") or built[0] == major)


def _optional_problems(triton: Facts, flash: Facts, gpu: bool) -> list[Problem]:
    problems = []
    for name, library in (("triton", triton), ("flash-attn", flash)):
        # flash-attn does not import without CUDA libraries, which matters only with a GPU.
        if library["status"] == "broken" and (gpu or "ended" in library):
            hint = f"pip uninstall -y {name}; pip install --no-build-isolation {name}"
            problems.append(_problem(name, library["error"], hint))
    if gpu and triton["status"] == "missing":
        text = "this machine has a GPU, but triton is not installed"
        problems.append(_problem("triton", text, "pip install triton"))
    return problems


def _backend_problems(registry: Registry) -> list[Problem]:
    problems = []
    if not registry.ready():
        hint = "pip install nsa-backend-sdpa"
        problems.append(_problem("backends", "no backend can be used", hint))
    for entry in registry.entries:
        if entry.status in ("broken", "incompatible") and entry.reason:
            subject = f"backend {entry.name} {entry.version} ({entry.distribution})"
            hint = entry.reason.hint or f"pip uninstall {entry.distribution}"
            problems.append(_problem(subject, entry.reason.message, hint))
    return problems


def driver_version() -> str | None:
    """Return the NVIDIA driver version that the kernel module reports; None without a driver."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version"):
        with contextlib.suppress(OSError):
            text = Path(path).read_text(encoding="utf-8", errors="replace")
            if number := re.search(r"(?<!\S)\d[^\s]*\.\S*", text):
                return number[0]
    return None


def has_nvidia_device() -> bool:
    """Return whether a device node of an NVIDIA GPU exists."""
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/nvidiactl")
