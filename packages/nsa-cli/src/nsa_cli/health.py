"""What `nsa doctor` and `nsa env` find and print. Torch is imported in children only: it may be
what is broken.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from nsa_cli import output, trial_imports
from nsa_cli.trial_imports import Tried
from nsa_core.contract import SLOTS
from nsa_core.dispatch.loading import BackendEntry
from nsa_core.dispatch.registry import Registry

SCHEMA_VERSION = 1
_OURS = (
    "nsa-core",
    "nsa-verify",
    "nsa-bench",
    "nsa-models",
    "nsa-cli",
    "nsa-backend-sdpa",
    "nsa-backend-triton",
    "nsa-backend-fa2",
)


def examine(limit_s: float) -> dict[str, Any]:
    """Everything `nsa doctor --json` prints; ``works``: torch imports and some backend runs a small
    attention.
    """
    registry = output.find_backends()
    bodies = (trial_imports.TORCH, trial_imports.TRITON, trial_imports.FLASH_ATTN)
    safe = output.safe_mode()
    # Our own probes share a child process; each third-party probe, which may crash, has one to
    # itself.
    groups = [[entry for entry in registry.ready() if entry.first_party]]
    groups += [[entry] for entry in registry.ready() if not entry.first_party]
    probes = [
        trial_imports.PROBE.format(safe=safe, names=[entry.name for entry in group])
        for group in groups
    ]
    attention = trial_imports.ATTENTION.format(safe=safe)
    torch, triton, flash, ran, *asked = trial_imports.try_all(
        [*bodies, attention, *probes], limit_s
    )
    gpu = bool(torch.facts.get("gpus"))
    troubles = _python_troubles() + _torch_troubles(torch) + _optional_troubles(triton, flash, gpu)
    troubles += _backend_troubles(registry)
    if torch.facts.get("version"):
        for group, tried in zip(groups, asked):
            troubles += [trouble for entry in group for trouble in _probe_troubles(entry, tried)]
        troubles += _attention_troubles(ran, registry)
    return {
        "schema_version": SCHEMA_VERSION,
        "works": (
            bool(ran.facts)
            and "error" not in ran.facts
            and all(d["finite"] for d in ran.facts.values())
        ),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: found for name in _OURS if (found := _installed(name))},
        "torch": _library(torch, "torch"),
        "driver": trial_imports.driver_version(),
        "triton": _library(triton, "triton"),
        "flash_attn": _library(flash, "flash-attn"),
        "backends": [_backend(entry) for entry in registry.entries],
        "attention": ran.facts if "error" not in ran.facts else {},
        "variables": {
            "NSA_PLUGINS": os.environ.get("NSA_PLUGINS"),
            "NSA_DISABLE_PLUGINS": os.environ.get("NSA_DISABLE_PLUGINS"),
            "NSA_CHECK": os.environ.get("NSA_CHECK"),
        },
        "troubles": troubles,
    }


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _library(tried: Tried, distribution: str) -> dict[str, Any]:
    """Facts, and a status: ok, missing (not installed) or broken (installed, and does not
    import).
    """
    broken = tried.reason is not None or "error" in tried.facts
    absent = "missing" in tried.facts and not _installed(distribution)
    status = "ok" if not broken else "missing" if absent else "broken"
    error = str(tried.reason) if tried.reason else tried.facts.get("error", "")
    facts = {key: value for key, value in tried.facts.items() if key not in ("error", "missing")}
    return {"version": _installed(distribution), **facts, "status": status, "error": error}


def _backend(entry: BackendEntry) -> dict[str, Any]:
    reason = entry.reason
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "status": entry.status,
        "slots": [slot for slot in SLOTS if entry.spec and slot in entry.spec.slots],
        "reason": (
            None
            if reason is None
            else {"code": reason.code, "message": reason.message, "hint": reason.hint}
        ),
    }


def _trouble(what: str, message: str, hint: str) -> dict[str, str]:
    return {"what": what, "message": message, "hint": hint}


def _python_troubles() -> list[dict[str, str]]:
    if sys.maxsize > 2**32:
        return []
    return [
        _trouble("python", "this Python has 32 bits, and torch needs 64", "install a 64-bit Python")
    ]


def _torch_troubles(tried: Tried) -> list[dict[str, str]]:
    found = _library(tried, "torch")
    if found["status"] == "missing":
        return [_trouble("torch", "torch is not installed", "pip install torch")]
    if found["status"] == "broken":
        slow = tried.reason is not None and tried.reason.code == "hangs"
        hint = (
            "nsa doctor --limit 300  # a busy machine or a slow disk; if that does not help, "
            * slow
        )
        return [_trouble("torch", found["error"], hint + "pip install --force-reinstall torch")]
    troubles = []
    needed = next(
        (r for r in map(Requirement, requires("nsa-core") or []) if r.name == "torch"), None
    )
    try:
        fits = needed is None or needed.specifier.contains(
            Version(found["version"]), prereleases=True
        )
    except InvalidVersion:
        fits = True  # a build with a name of its own
    if not fits:
        wanted = f"torch{needed.specifier}" if needed else "torch"
        text = f"torch {found['version']} is too old, nsa-core needs {wanted}"
        troubles.append(_trouble("torch", text, f'pip install "{wanted}"'))
    return troubles + _cuda_troubles(found)


def _cuda_troubles(found: dict[str, Any]) -> list[dict[str, str]]:
    troubles = []
    if trial_imports.has_nvidia_device() and not found["cuda"] and not found["hip"]:
        text = "there is an NVIDIA GPU, and this torch is built for the CPU only"
        troubles.append(
            _trouble(
                "cuda", text, "pip install --force-reinstall torch, from an index with CUDA builds"
            )
        )
    elif found["cuda"] and not found["cuda_available"] and trial_imports.has_nvidia_device():
        text = (
            f"torch is built for CUDA {found['cuda']} and finds no usable GPU (driver"
            f" {trial_imports.driver_version()})"
        )
        troubles.append(
            _trouble(
                "cuda", text, "nvidia-smi  # a driver too old for this CUDA is the usual cause"
            )
        )
    for gpu in found["gpus"]:
        major, minor = gpu["capability"]
        if found["built_for"] and not any(_runs(arch, major, minor) for arch in found["built_for"]):
            text = (
                f"{gpu['name']} is sm_{major}{minor}, and this torch is built for"
                f" {', '.join(found['built_for'])}"
            )
            troubles.append(_trouble("cuda", text, "install a torch built for this GPU"))
    if found["gpus"] and not found.get("computes"):
        troubles.append(
            _trouble("cuda", "a matrix product on the GPU is wrong", "nvidia-smi -q -d ECC")
        )
    return troubles


def _runs(arch: str, major: int, minor: int) -> bool:
    """Code for ``arch`` runs on sm_<major><minor>: the same major and no later minor, or PTX for no
    later GPU.
    """
    digits = re.sub(r"\D", "", arch)
    if len(digits) < 2:
        return True
    built = (int(digits[:-1]), int(digits[-1]))
    return built <= (major, minor) and (arch.startswith("compute") or built[0] == major)


def _optional_troubles(triton: Tried, flash: Tried, gpu: bool) -> list[dict[str, str]]:
    troubles = []
    for name, distribution, tried in (
        ("triton", "triton", triton),
        ("flash-attn", "flash-attn", flash),
    ):
        found = _library(tried, distribution)
        # flash-attn does not import without a GPU's libraries; that is no trouble where there is no
        # GPU.
        if found["status"] == "broken" and (gpu or tried.reason):
            hint = (
                f"pip uninstall -y {distribution}; pip install --no-build-isolation {distribution}"
            )
            troubles.append(_trouble(name, found["error"], hint))
    if gpu and "missing" in triton.facts and not _installed("triton"):
        troubles.append(_trouble("triton", "there is a GPU and no triton", "pip install triton"))
    return troubles


def _backend_troubles(registry: Registry) -> list[dict[str, str]]:
    troubles = []
    if not registry.ready():
        troubles.append(
            _trouble("backends", "no backend can be used", "pip install nsa-backend-sdpa")
        )
    for entry in registry.entries:
        if entry.status in ("broken", "incompatible") and entry.reason:
            what = f"backend {entry.name} {entry.version} ({entry.distribution})"
            hint = entry.reason.hint or f"pip uninstall {entry.distribution}"
            troubles.append(_trouble(what, entry.reason.message, hint))
    return troubles


def _probe_troubles(entry: BackendEntry, tried: Tried) -> list[dict[str, str]]:
    error = tried.facts.get("error") or tried.facts.get("wrong", {}).get(entry.name, "")
    said = str(tried.reason) if tried.reason else error
    hint = f"pip uninstall {entry.distribution}, or set NSA_DISABLE_PLUGINS={entry.name}"
    return [_trouble(f"probe of backend {entry.name}", said, hint)] if said else []


def _attention_troubles(ran: Tried, registry: Registry) -> list[dict[str, str]]:
    if not registry.ready():
        return []  # said already
    hint = "nsa backends explain; nsa verify"
    if ran.reason or "error" in ran.facts:
        return [
            _trouble("attention", str(ran.reason) if ran.reason else str(ran.facts["error"]), hint)
        ]
    wrong = [device for device, row in ran.facts.items() if not row["finite"]]
    return [
        _trouble("attention", f"a small attention on {device} is not finite", hint)
        for device in wrong
    ]


def _rows(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(component, state, detail), the same for the screen and the block."""
    torch = document["torch"]
    rows = [("python", document["python"], f"{document['platform']}, {document['cpus']} CPUs")]
    rows += [("nsa", v, name) for name, v in document["packages"].items()]
    for name, found in (
        ("torch", torch),
        ("triton", document["triton"]),
        ("flash-attn", document["flash_attn"]),
    ):
        state = str(found["version"] or "") if found["status"] == "ok" else found["status"]
        rows.append((name, state, found["error"] if found["status"] == "broken" else ""))
    rows.append(("cuda", str(torch.get("cuda") or "none"), "what torch is built for"))
    rows.append(("driver", document["driver"] or "none", ""))
    for index, gpu in enumerate(torch.get("gpus", [])):
        size = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        rows.append(
            (f"gpu {index}", f"sm_{''.join(map(str, gpu['capability']))}", f"{gpu['name']}, {size}")
        )
    if not torch.get("gpus"):
        rows.append(("gpu", "none", "the CPU is used"))
    for backend in document["backends"]:
        said = (
            backend["reason"]["message"]
            if backend["reason"]
            else f"offers {', '.join(backend['slots'])}"
        )
        title = f"{backend['distribution']} {backend['version']}"
        rows.append((f"backend {backend['name']}", backend["status"], f"{title}: {said}"))
    for device, run in document["attention"].items():
        chosen = ", ".join(f"{slot} {name}" for slot, name in run["backends"].items())
        rows.append((f"runs on {device}", "yes" if run["finite"] else "wrong", chosen))
    for name, value in document["variables"].items():
        rows.append((name, "not set" if value is None else repr(value), ""))
    return rows


def print_screen(document: dict[str, Any]) -> None:
    """The table, then every trouble with what to type."""
    from rich.text import Text

    made = output.plain_table("what", "state", "detail")
    for row in _rows(document):
        bad = row[1] in ("broken", "incompatible", "wrong")
        cells = [output.one_line(cell) for cell in row]
        made.add_row(cells[0], Text(cells[1], "red" if bad else ""), cells[2])
    console = output.console()
    console.print(made)
    for trouble in document["troubles"]:
        console.print(
            f"TROUBLE {output.one_line(trouble['what'])}: {output.one_line(trouble['message'])}",
            style="red",
        )
        console.print(f"  type: {output.one_line(trouble['hint'])}")
    if not document["works"]:
        console.print("this environment cannot work", style="bold red")
    else:
        console.print(
            f"this environment works, {len(document['troubles'])} troubles", style="bold green"
        )


def print_block(document: dict[str, Any]) -> None:
    """Markdown for a bug report, paths cut to their last part and the user's name taken out."""
    lines = [
        f"{what}: {state}" + (f" ({detail})" if detail else "")
        for what, state, detail in _rows(document)
    ]
    lines += [f"TROUBLE {t['what']}: {t['message']}" for t in document["troubles"]]
    print("```")
    for line in lines:
        print(anonymous(output.one_line(line)))
    print("```")


def anonymous(line: str) -> str:
    """``line`` with absolute paths cut to their last part, and without the user's name."""
    line = re.sub(r"""(?<![\w.:/])(?:[A-Za-z]:)?[/\\](?:[^/\\\s'":;,]+[/\\])*""", ".../", line)
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        return line
    return re.sub(rf"\b{re.escape(user)}\b", "USER", line) if len(user) > 2 else line
