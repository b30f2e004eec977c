"""Import libraries in child processes, and report the facts or the failure of each one."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_core.contract import Reason
from nsa_core.plan.trial import failure_reason, kill_child, start_child

# Each child assigns a dict ``facts`` and writes it as JSON. An exception becomes {"error": "..."}.
TORCH = """
import torch
version = torch.version
facts = {"version": torch.__version__, "cuda": version.cuda, "hip": version.hip, "gpus": []}
facts["built_for"] = torch.cuda.get_arch_list() if torch.version.cuda else []
facts["cuda_available"] = torch.cuda.is_available()
for index in range(torch.cuda.device_count() if facts["cuda_available"] else 0):
    p = torch.cuda.get_device_properties(index)
    capability = [p.major, p.minor]
    facts["gpus"].append({"name": p.name, "capability": capability, "memory_bytes": p.total_memory})
if facts["gpus"]:
    x = torch.ones(8, 8, device="cuda")
    facts["computes"] = float((x @ x).sum().item()) == 512.0
"""
TRITON = 'import triton\nfacts = {"version": triton.__version__}'
FLASH_ATTN = 'import flash_attn, flash_attn_2_cuda\nfacts = {"version": flash_attn.__version__}'
ATTENTION = """
import torch
from nsa_core import NSAConfig, nsa_attention
from nsa_core.plan.plan import resolve
from nsa_core.plan.registry import discover
registry = discover(safe={safe!r})
config = NSAConfig(64, 4, 2, num_selected_blocks=3)
facts = {{}}
for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    plan = resolve(config, device=device, dtype=dtype, needs_grad=True, registry=registry)
    options = {{"device": device, "dtype": dtype, "requires_grad": True}}
    q, k, v = (torch.randn(1, 200, heads, 16, **options) for heads in (4, 2, 2))
    gates = torch.rand(1, 200, 4, 3, device=device)
    o = nsa_attention(q, k, v, gates, config=config, plan=plan)
    o.float().sum().backward()
    finite = all(bool(x.isfinite().all()) for x in (o, q.grad, k.grad, v.grad))
    chosen = {{slot: choice.backend for slot, choice in plan.choices.items()}}
    facts[device] = {{"finite": finite, "backends": chosen}}
"""
PROBE = """
import torch
from nsa_core import NSAConfig
from nsa_core.plan.registry import discover
from nsa_core.plan.candidates import find_candidates
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.standing import FAULTS, standings, typical_candidates
registry = discover(safe={safe!r})
registry = type(registry)(tuple(entry for entry in registry.ready() if entry.name in {names!r}))
devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
config = NSAConfig(768, 12, 2)
options = [PlanOptions(device=device) for device in devices]
by_slot = [find_candidates(config, each, registry=registry).by_slot for each in options]
candidates = [c for slots in by_slot for of_slot in slots.values() for c in of_slot]
failed = {{c.backend: str(r) for c in candidates for r in c.reasons if r.code in FAULTS}}
typical = standings(typical_candidates(registry))
stated = {{name: [s.status, s.sentence] for (name, _), s in typical.items()}}
facts = {{"failed": failed, "standings": stated}}
"""
_FINISH = """
import json
with open(sys.argv[1], "w", encoding="utf-8") as file:
    json.dump(facts, file)
import os
os._exit(86)
"""
_GUARDED = """
import sys
sys.path[:] = {path!r}
try:
    import resource
    # A crash of this process is expected, so it writes no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except ImportError:
    pass
try:
{body}
except ModuleNotFoundError as error:
    facts = {{"missing": str(error.name), "error": str(error)}}
except BaseException as error:
    facts = {{"error": type(error).__name__ + ": " + str(error)}}
"""


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """The facts that one child wrote, or the reason why it wrote none."""

    facts: dict[str, Any]
    reason: Reason | None  # set if the child crashed, hung or exited early


def try_all(bodies: Sequence[str], limit_s: float) -> list[TrialResult]:
    """Run each body in a separate child process, in parallel.

    Args:
        bodies: Python source that assigns a dict ``facts``.
        limit_s: Seconds after which a child is ended.
    """
    with tempfile.TemporaryDirectory(prefix="nsa-") as folder:
        files = [Path(folder) / str(index) for index in range(len(bodies))]
        deadline = time.monotonic() + limit_s
        children = [start_child([_script(body), str(file)]) for body, file in zip(bodies, files)]
        statuses: list[int | None] = []
        try:
            for child in children:
                while child.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.01)
                statuses.append(child.poll())
        finally:
            for child in children:
                kill_child(child)
        return [_result(file, status, limit_s) for file, status in zip(files, statuses)]


def _script(body: str) -> str:
    path = [entry for entry in sys.path if isinstance(entry, str)]
    indented = "\n".join("    " + line for line in body.strip().splitlines())
    return _GUARDED.format(path=path, body=indented) + _FINISH


def _result(file: Path, status: int | None, limit_s: float) -> TrialResult:
    reason = failure_reason(status, limit_s, "during the import test", "reinstall it")
    if reason is not None:
        return TrialResult({}, reason)
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        facts = {}
    return TrialResult(facts if isinstance(facts, dict) else {}, None)


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
