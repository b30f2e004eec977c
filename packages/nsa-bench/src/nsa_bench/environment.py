"""The measurement environment: device, driver, clocks, and the source that ran."""

from __future__ import annotations

from typing import Any

import torch

from nsa_bench.provenance import command_output, source
from nsa_core.plan import tuned

_QUERY = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


def device_name(device: str | torch.device) -> str:
    """Return the name of the GPU, or the model of the CPU."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return tuned.processor_name()


def machine(device: str) -> dict[str, Any]:
    """Return device and source facts for a result file; an unknown fact is None."""
    return hardware(device) | source()


def hardware(device: str) -> dict[str, Any]:
    """Return device facts for a result file; an unknown fact is None."""
    facts: dict[str, Any] = {
        "device": device_name(device),
        "device_type": torch.device(device).type,
        "torch_cuda": torch.version.cuda,
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "cudnn": torch.backends.cudnn.version(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "driver": command_output("nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv") or None,
        }
    return facts
