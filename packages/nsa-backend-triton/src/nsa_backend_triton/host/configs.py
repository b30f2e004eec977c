"""Tuned tile shapes as data: per GPU architecture and kernel, an ordered list of (limits,
settings).

A row fits when every trait it names is <= its limit; the first that fits is taken. Nothing is
measured at a call. No torch and no triton here: the probe reads these tables.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Mapping

from nsa_core.contract import Request
from nsa_core.layout import BlockGeometry

# The table an architecture reads, by shared memory a block: 163 KiB (80, 87), 99 KiB (86, 89, 120,
# 121), 227 KiB.
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
MEASURED = {90}  # the others are compiled offline for their limits, and have never run

# The kernels that each slot launches; the probe wants a row for each.
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
    "sel": ("sel_block_backward", "sel_tile_backward"),
    "win": ("span_dq", "span_dkdv"),
    "combine": ("combine_backward",),
}
# A fused step takes the settings of the first two, and has two more kernels before it.
DECODE: Mapping[str, tuple[str, ...]] = {
    "cmp": ("decode_span",),
    "select": ("decode_span",),
    "sel": ("decode_sel",),
    "win": ("decode_span",),
    "combine": ("combine_forward", "decode_append", "decode_gates"),
}

Settings = Mapping[str, int]
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@functools.cache
def table(architecture: int) -> Mapping[str, list[tuple[dict[str, int], dict[str, int]]]]:
    """Kernel name -> rows, for ``architecture`` (90 for sm_90; 0: the interpreter)."""
    text = (
        importlib.resources.files("nsa_backend_triton")
        .joinpath(f"tuned/{TABLES[architecture]}.json")
        .read_text()
    )
    return {kernel: [(row[0], row[1]) for row in rows] for kernel, rows in json.loads(text).items()}


def find(kernel: str, architecture: int, **traits: int) -> Settings | None:
    """As :func:`pick`; None: no row fits."""
    for limits, settings in table(architecture).get(kernel, ()):
        if all(traits[name] <= limit for name, limit in limits.items()):
            return settings
    return None


def pick(kernel: str, architecture: int, **traits: int) -> Settings:
    """Constants and num_warps, num_stages of ``kernel``, e.g. pick("span_forward", 90,
    head_dim=128, itemsize=2).

    Raises:
        LookupError: no row fits; a probe that said yes keeps this from happening.
    """
    settings = find(kernel, architecture, **traits)
    if settings is None:
        raise LookupError(
            f"{kernel} has no configuration for {traits} on architecture {architecture}"
        )
    return settings


def taps(geometry: BlockGeometry) -> int:
    """Compressed tokens that begin in a selection block, padded to a power of two: tiles of scores
    hold as many.
    """
    return 1 << (geometry.select_block_size // geometry.compress_stride - 1).bit_length()


def missing(request: Request, architecture: int) -> list[str]:
    """The kernels of ``request`` that have no row for it: their tiles would not fit."""
    kernels = DECODE[request.slot] if request.phase == "decode" else FORWARD[request.slot]
    kernels += BACKWARD[request.slot] if request.needs_grad else ()
    traits = {
        "head_dim": request.head_dim,
        "v_head_dim": request.v_head_dim,
        "itemsize": _ITEMSIZE[request.dtype],
        "heads": request.n_heads // request.n_kv_heads,
        "block": request.geometry.select_block_size,
        "selected": request.geometry.num_selected_blocks,
        "window": request.geometry.window_size if request.slot == "win" else 0,
        "taps": taps(request.geometry),
        "pointers": 1,  # what every call can take
    }
    return [kernel for kernel in kernels if find(kernel, architecture, **traits) is None]
