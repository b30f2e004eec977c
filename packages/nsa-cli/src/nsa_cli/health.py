"""Collect the environment report of `nsa doctor`.

Torch is imported only in child processes, because torch itself may be broken.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from nsa_cli import output, trial_imports
from nsa_cli.trial_imports import TrialResult
from nsa_core.contract import SLOTS
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.registry import Registry
from nsa_core.plan.standing import Standing, standing_of

SCHEMA_VERSION = 1
_OUR_PACKAGES = (
    "nsa-core",
    "nsa-verify",
    "nsa-bench",
    "nsa-models",
    "nsa-cli",
    "nsa-backend-sdpa",
    "nsa-backend-triton",
    "nsa-backend-fa2",
)


def inspect_environment(limit_s: float) -> dict[str, Any]:
    """Return the document that `nsa doctor --json` prints.

    Its field ``works`` is true if torch imports and a backend runs a small attention.

    Args:
        limit_s: Seconds after which a child process is ended.
    """
    registry = output.find_backends()
    own = [entry for entry in registry.ready() if entry.child is None]
    plugins = [entry for entry in registry.ready() if entry.child is not None]
    # A third-party backend may end the process: without it, this project's own show what works.
    used = Registry(tuple(own) or registry.ready())
    (torch, triton, flash, attention_result, of_own), of_plugins = trial_imports.try_all(
        [
            (trial_imports.torch_facts,),
            (trial_imports.triton_facts,),
            (trial_imports.flash_attn_facts,),
            (trial_imports.attention_facts, used),
            (trial_imports.probe_facts, Registry(tuple(own))),
        ],
        plugins,
        limit_s,
    )
    gpu = bool(torch.facts.get("gpus"))
    probes = [(entry, of_own) for entry in own] + [*zip(plugins, of_plugins)]
    results = {entry.name: result for entry, result in probes}
    standings = [
        (entry, _standing(entry, torch, results.get(entry.name))) for entry in registry.entries
    ]
    problems = _python_problems() + _torch_problems(torch) + _optional_problems(triton, flash, gpu)
    problems += _backend_problems(registry)
    if torch.facts.get("version"):
        for entry, result in probes:
            problems += _probe_problems(entry, result)
        problems += _attention_problems(attention_result, registry)
    return {
        "schema_version": SCHEMA_VERSION,
        "works": (
            bool(attention_result.facts)
            and "error" not in attention_result.facts
            and all(run["finite"] for run in attention_result.facts.values())
        ),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {
            name: installed for name in _OUR_PACKAGES if (installed := _installed_version(name))
        },
        "torch": _library(torch, "torch"),
        "driver": trial_imports.driver_version(),
        "triton": _library(triton, "triton"),
        "flash_attn": _library(flash, "flash-attn"),
        "backends": [_backend(entry, standing) for entry, standing in standings],
        "attention": attention_result.facts if "error" not in attention_result.facts else {},
        "variables": {
            "NSA_PLUGINS": os.environ.get("NSA_PLUGINS"),
            "NSA_DISABLE_PLUGINS": os.environ.get("NSA_DISABLE_PLUGINS"),
            "NSA_CHECK": os.environ.get("NSA_CHECK"),
        },
        "troubles": problems,
    }


def _installed_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _library(result: TrialResult, distribution: str) -> dict[str, Any]:
    """Return the facts about a library and its status: ok, missing or broken (fails to import)."""
    broken = result.reason is not None or "error" in result.facts
    absent = "missing" in result.facts and not _installed_version(distribution)
    status = "ok" if not broken else "missing" if absent else "broken"
    error = str(result.reason) if result.reason else result.facts.get("error", "")
    facts = {key: value for key, value in result.facts.items() if key not in ("error", "missing")}
    return {"version": _installed_version(distribution), **facts, "status": status, "error": error}


def _standing(entry: BackendEntry, torch: TrialResult, probe: TrialResult | None) -> Standing:
    """Return the standing of ``entry`` that its child process found.

    Args:
        entry: The backend.
        torch: The result of importing torch.
        probe: The result of the child that probed the backend; None if it was not probed.
    """
    if entry.spec is None:
        return standing_of(entry, {})
    if not torch.facts.get("version"):
        return Standing("unavailable", "torch cannot be imported")
    facts = probe.facts if probe else {}
    if entry.name in facts.get("standings", {}):
        return Standing(*facts["standings"][entry.name])
    failure = str(probe.reason) if probe and probe.reason else str(facts.get("error", ""))
    return Standing("broken", f"its probe failed in a child process: {output.one_line(failure)}")


def _backend(entry: BackendEntry, standing: Standing) -> dict[str, Any]:
    reason = entry.reason
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "status": standing.status,
        "sentence": standing.sentence,
        "slots": [slot for slot in SLOTS if entry.spec and slot in entry.spec.slots],
        "reason": (
            None
            if reason is None
            else {"code": reason.code, "message": reason.message, "hint": reason.hint}
        ),
    }


def _problem(subject: str, message: str, hint: str) -> dict[str, str]:
    return {"what": subject, "message": message, "hint": hint}


def _python_problems() -> list[dict[str, str]]:
    if sys.maxsize > 2**32:
        return []
    return [
        _problem("python", "this Python is 32-bit, torch needs 64-bit", "install a 64-bit Python")
    ]


def _torch_problems(result: TrialResult) -> list[dict[str, str]]:
    torch = _library(result, "torch")
    if torch["status"] == "missing":
        return [_problem("torch", "torch is not installed", "pip install torch")]
    if torch["status"] == "broken":
        slow = result.reason is not None and result.reason.code == "hangs"
        hint = (
            "nsa doctor --limit 300  # for a busy machine or a slow disk; if that does not help, "
            * slow
        )
        return [_problem("torch", torch["error"], hint + "pip install --force-reinstall torch")]
    problems = []
    requirement = next(
        (r for r in map(Requirement, requires("nsa-core") or []) if r.name == "torch"), None
    )
    try:
        compatible = requirement is None or requirement.specifier.contains(
            Version(torch["version"]), prereleases=True
        )
    except InvalidVersion:
        compatible = True  # a custom build with its own version scheme
    if not compatible:
        required = f"torch{requirement.specifier}" if requirement else "torch"
        text = f"torch {torch['version']} is too old, nsa-core needs {required}"
        problems.append(_problem("torch", text, f'pip install "{required}"'))
    return problems + _cuda_problems(torch)


def _cuda_problems(torch: dict[str, Any]) -> list[dict[str, str]]:
    problems = []
    if trial_imports.has_nvidia_device() and not torch["cuda"] and not torch["hip"]:
        text = "this machine has an NVIDIA GPU, but the installed torch is built for the CPU only"
        problems.append(
            _problem(
                "cuda", text, "pip install --force-reinstall torch, from an index with CUDA builds"
            )
        )
    elif torch["cuda"] and not torch["cuda_available"] and trial_imports.has_nvidia_device():
        text = (
            f"torch is built for CUDA {torch['cuda']} and finds no usable GPU (driver"
            f" {trial_imports.driver_version()})"
        )
        problems.append(
            _problem(
                "cuda", text, "nvidia-smi  # the usual cause is a driver too old for this CUDA"
            )
        )
    for gpu in torch["gpus"]:
        major, minor = gpu["capability"]
        if torch["built_for"] and not any(_runs(arch, major, minor) for arch in torch["built_for"]):
            text = (
                f"{gpu['name']} is sm_{major}{minor}, and this torch is built for"
                f" {', '.join(torch['built_for'])}"
            )
            problems.append(_problem("cuda", text, "install a torch built for this GPU"))
    if torch["gpus"] and not torch.get("computes"):
        problems.append(
            _problem("cuda", "a matrix product on the GPU is wrong", "nvidia-smi -q -d ECC")
        )
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


def _optional_problems(triton: TrialResult, flash: TrialResult, gpu: bool) -> list[dict[str, str]]:
    problems = []
    for name, distribution, result in (
        ("triton", "triton", triton),
        ("flash-attn", "flash-attn", flash),
    ):
        library = _library(result, distribution)
        # flash-attn does not import without CUDA libraries, which matters only with a GPU.
        if library["status"] == "broken" and (gpu or result.reason):
            hint = (
                f"pip uninstall -y {distribution}; pip install --no-build-isolation {distribution}"
            )
            problems.append(_problem(name, library["error"], hint))
    if gpu and "missing" in triton.facts and not _installed_version("triton"):
        text = "this machine has a GPU, but triton is not installed"
        problems.append(_problem("triton", text, "pip install triton"))
    return problems


def _backend_problems(registry: Registry) -> list[dict[str, str]]:
    problems = []
    if not registry.ready():
        problems.append(
            _problem("backends", "no backend can be used", "pip install nsa-backend-sdpa")
        )
    for entry in registry.entries:
        if entry.status in ("broken", "incompatible") and entry.reason:
            subject = f"backend {entry.name} {entry.version} ({entry.distribution})"
            hint = entry.reason.hint or f"pip uninstall {entry.distribution}"
            problems.append(_problem(subject, entry.reason.message, hint))
    return problems


def _probe_problems(entry: BackendEntry, result: TrialResult) -> list[dict[str, str]]:
    error = result.facts.get("error") or result.facts.get("failed", {}).get(entry.name, "")
    message = str(result.reason) if result.reason else error
    hint = f"pip uninstall {entry.distribution}, or set NSA_DISABLE_PLUGINS={entry.name}"
    return [_problem(f"probe of backend {entry.name}", message, hint)] if message else []


def _attention_problems(result: TrialResult, registry: Registry) -> list[dict[str, str]]:
    if not registry.ready():
        return []  # _backend_problems reports it
    hint = "nsa backends explain; nsa verify"
    if result.reason or "error" in result.facts:
        message = str(result.reason) if result.reason else str(result.facts["error"])
        return [_problem("attention", message, hint)]
    not_finite = [device for device, run in result.facts.items() if not run["finite"]]
    return [
        _problem("attention", f"the output of a small attention on {device} is not finite", hint)
        for device in not_finite
    ]
