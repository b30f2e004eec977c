"""Import libraries and probe backends in child processes; report the facts, or the failure."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nsa_core.contract import Reason
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.plugin_calls import PROBE_LIMIT_S
from nsa_core.plan.registry import Registry
from nsa_core.util.child import Child, ChildEnded

Facts = dict[str, Any]


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
    for device in _devices():
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        plan = resolve(config, device=device, dtype=dtype, needs_grad=True, registry=registry)
        options: dict[str, Any] = {"device": device, "dtype": dtype, "requires_grad": True}
        q, k, v = (torch.randn(1, 200, heads, 16, **options) for heads in (4, 2, 2))
        gates = torch.rand(1, 200, 4, 3, device=device)
        o = nsa_attention(q, k, v, gates, config=config, plan=plan)
        o.float().sum().backward()  # type: ignore[no-untyped-call]
        tensors = (o, q.grad, k.grad, v.grad)
        finite = all(x is not None and bool(x.isfinite().all()) for x in tensors)
        chosen = {slot: choice.backend for slot, choice in plan.choices.items()}
        facts[device] = {"finite": finite, "backends": chosen}
    return facts


def probe_facts(registry: Registry) -> Facts:
    """Probe backends; return the standing of each, and the faults of those that fail."""
    from nsa_core import NSAConfig
    from nsa_core.plan.candidates import find_candidates
    from nsa_core.plan.options import PlanOptions
    from nsa_core.plan.standing import FAULTS, standings, typical_candidates

    config, failed = NSAConfig(768, 12, 2), dict[str, str]()
    for device in _devices():
        by_slot = find_candidates(config, PlanOptions(device=device), registry=registry).by_slot
        for candidate in [c for of_slot in by_slot.values() for c in of_slot]:
            for fault in (r for r in candidate.reasons if r.code in FAULTS):
                failed[candidate.backend] = str(fault)
    typical = standings(typical_candidates(registry))
    stated = {name: [s.status, s.sentence] for (name, _), s in typical.items()}
    return {"failed": failed, "standings": stated}


def _devices() -> list[str]:
    import torch

    return ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def _import_torch() -> Facts:
    import nsa_core.plan.candidates
    import nsa_core.plan.standing  # noqa: F401

    return {}


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """The facts that one child returned, or the reason why it returned none."""

    facts: Facts
    reason: Reason | None  # set if the child crashed, hung or exited early


def try_all(
    calls: Sequence[tuple[Any, ...]], plugins: Sequence[BackendEntry], limit_s: float
) -> tuple[list[TrialResult], list[TrialResult]]:
    """Call each function in a child process of its own, and probe each plugin in its process.

    All run in parallel.

    Args:
        calls: A function that returns facts, and its arguments.
        plugins: The third-party backends.
        limit_s: Seconds after which a child that imports libraries is ended.

    Returns:
        The results of the calls, and those of :func:`probe_facts` of the plugins.
    """
    children = [Child() for _ in calls]
    for child, call in zip(children, calls):
        child.send(_facts, *call)
    imports = [(entry, entry.child) for entry in plugins if entry.child is not None]
    for _, plugin in imports:
        plugin.send(_facts, _import_torch)
    results = [_result(child, limit_s) for child in children]
    probes = []
    for entry, plugin in imports:
        result = _result(plugin, limit_s)
        if result == TrialResult({}, None):
            plugin.send(_facts, probe_facts, Registry((entry,)))
            result = _result(plugin, PROBE_LIMIT_S, "in its probe", entry.report_hint)
        probes.append(result)
    for child in children:
        child.end()
    return results, probes


def _facts(function: Callable[..., Facts], *arguments: Any) -> Facts:
    """Return the facts of a function; an exception becomes {"error": "..."}."""
    try:
        return function(*arguments)
    except ModuleNotFoundError as error:
        return {"missing": str(error.name), "error": str(error)}
    except BaseException as error:  # noqa: BLE001  a library may raise anything
        return {"error": f"{type(error).__name__}: {error}"}


def _result(
    child: Child, limit_s: float, doing: str = "during the import test", hint: str = "reinstall it"
) -> TrialResult:
    try:
        return TrialResult(child.receive(limit_s, doing), None)
    except ChildEnded as ended:
        return TrialResult({}, Reason("hangs" if ended.hung else "ended", ended.how, hint))


def driver_version() -> str | None:
    """Return the NVIDIA driver version that the kernel module reports; None without a driver."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version"):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        words = [word for word in text.split() if word[:1].isdigit() and word.count(".") >= 1]
        if words:
            return words[0]
    return None


def has_nvidia_device() -> bool:
    """Return whether a device node of an NVIDIA GPU exists."""
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/nvidiactl")
