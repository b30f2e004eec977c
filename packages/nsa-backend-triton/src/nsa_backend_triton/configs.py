"""Tuned tile shapes as data: per GPU architecture and kernel, an ordered list of (limits, settings).

A row fits when every trait it names is <= its limit; the first that fits is taken. Nothing is measured at a call.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping

from nsa_core.errors import NSAError

# The table an architecture reads: GPUs with 99 KiB of shared memory a block share one, as do those with 227 KiB.
TABLES = {0: "interpreter", 80: "sm80", 86: "sm86", 87: "sm80", 89: "sm86", 90: "sm90", 100: "sm90", 103: "sm90"}
TABLES |= {120: "sm86", 121: "sm86"}

Settings = Mapping[str, int]


@functools.cache
def table(architecture: int) -> Mapping[str, list[tuple[dict[str, int], dict[str, int]]]]:
    """Kernel name -> rows, for ``architecture`` (90 for sm_90; 0: the interpreter)."""
    text = importlib.resources.files("nsa_backend_triton").joinpath(f"tuned/{TABLES[architecture]}.json").read_text()
    return {kernel: [(row[0], row[1]) for row in rows] for kernel, rows in json.loads(text).items()}


def pick(kernel: str, architecture: int, **traits: int) -> Settings:
    """Constants and num_warps, num_stages of ``kernel``, e.g. pick("span_forward", 90, head_dim=128, itemsize=2)."""
    for limits, settings in table(architecture)[kernel]:
        if all(traits[name] <= limit for name, limit in limits.items()):
            return settings
    raise NSAError(f"{kernel} has no configuration for {traits} on architecture {architecture}")
