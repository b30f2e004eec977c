"""Tuned tile shapes as data: per architecture and kernel, an ordered list of (limits, settings).

A row fits if each trait that its limits name is at most the limit; the first row that fits applies.
Nothing is measured when a kernel is called. This module imports neither torch nor triton, because
the probe reads these tables.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping

from nsa_core.contract import Request
from nsa_core.layout import BlockGeometry

# Table of each architecture, by shared memory per block: 163 KiB (80, 87), 99 KiB (86, 89, 120,
# 121), 227 KiB (90, 100, 103).
TABLES = {
    0: "interpreter",
    80: "sm80",
    86: "sm86",
    87: "sm80",
    89: "sm86",
    90: "sm90",
    100: "sm90",
    103: "sm90",
}
TABLES |= {120: "sm86", 121: "sm86"}
# How the settings of an architecture were chosen; those of the others have never run.
MEASURED = {90: "measured"}
MEASURED |= dict.fromkeys((80, 86), "measured with this architecture's code on an H200")

# Kernels that each slot launches; the probe requires a row for each.
FORWARD: Mapping[str, tuple[str, ...]] = {
    "cmp": ("span_forward",),
    "select": ("select_forward",),
    "sel": ("sel_forward", "sel_bucket", "sel_merge"),
    "win": ("span_forward",),
    "combine": ("combine_forward",),
}
BACKWARD: Mapping[str, tuple[str, ...]] = {
    "cmp": ("span_dq", "span_dkdv"),
    "select": (),
    "sel": ("sel_bitmask_dq", "sel_bitmask_dkdv", "sel_block_backward", "sel_tile_backward"),
    "win": ("span_dq", "span_dkdv"),
    "combine": ("combine_backward",),
}
# A fused step uses the settings of decode_span and decode_sel, and runs three kernels before it.
DECODE: Mapping[str, tuple[str, ...]] = {
    "cmp": ("decode_span",),
    "select": ("decode_span",),
    "sel": ("decode_sel",),
    "win": ("decode_span",),
    "combine": (
        *("combine_forward", "decode_append", "decode_gates"),
        *("decode_compress", "decode_compress_rows"),
    ),
}

Settings = Mapping[str, int]
Tuned = Mapping[str, Settings]  # of each kernel
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@functools.cache
def table(architecture: int) -> Mapping[str, list[tuple[dict[str, int], dict[str, int]]]]:
    """Return kernel name -> rows for ``architecture`` (90 for sm_90; 0: the interpreter)."""
    text = (
        importlib.resources.files("nsa_backend_triton")
        .joinpath(f"tuned/{TABLES[architecture]}.json")
        .read_text()
    )
    return {kernel: [(row[0], row[1]) for row in rows] for kernel, rows in json.loads(text).items()}


def find(kernel: str, architecture: int, **traits: int) -> Settings | None:
    """Return the settings as :func:`pick` does, or None if no row fits."""
    for limits, settings in table(architecture).get(kernel, ()):
        if all(traits[name] <= limit for name, limit in limits.items()):
            return settings
    return None


def pick(kernel: str, architecture: int, **traits: int) -> Settings:
    """Return the constexprs, num_warps and num_stages of ``kernel`` for a call's traits.

    Example: ``pick("span_forward", 90, head_dim=128, itemsize=2)``.

    Raises:
        LookupError: No row fits. The probe refuses such a request, so a planned call never gets
            here.
    """
    settings = find(kernel, architecture, **traits)
    if settings is None:
        raise LookupError(
            f"{kernel} has no configuration for {traits} on architecture {architecture}"
        )
    return settings


def launch_options(settings: Settings) -> dict[str, int]:
    """Return num_warps, num_stages and maxnreg of ``settings``, without those absent or 0."""
    names = ("num_warps", "num_stages", "maxnreg")
    return {name: settings[name] for name in names if settings.get(name)}


def cmp_per_block_pad(geometry: BlockGeometry) -> int:
    """Return the compressed tokens that begin in a selection block, padded to a power of two.

    Tiles of scores hold this number of compressed tokens per block.
    """
    return 1 << (geometry.select_block_size // geometry.compress_stride - 1).bit_length()


def missing(request: Request, architecture: int) -> list[str]:
    """Return the kernels of ``request`` without a row: their tiles would not fit."""
    kernels = DECODE[request.slot] if request.phase == "decode" else FORWARD[request.slot]
    kernels += BACKWARD[request.slot] if request.needs_grad else ()
    traits = {
        "head_dim": request.head_dim,
        "v_head_dim": request.v_head_dim,
        "itemsize": _ITEMSIZE[request.dtype],
        "heads": request.n_heads // request.n_kv_heads,
        "kv_heads": request.n_kv_heads,
        "block": request.geometry.select_block_size,
        "selected": request.geometry.num_selected_blocks,
        "window": request.geometry.window_size if request.slot == "win" else 0,
        "cmp_per_block": cmp_per_block_pad(request.geometry),
        "pointers": 1,  # kernels without TMA descriptors, which every call can use
        "blocks": 2**31,  # of the longest sequence: rows for every length
    }
    return [kernel for kernel in kernels if find(kernel, architecture, **traits) is None]
