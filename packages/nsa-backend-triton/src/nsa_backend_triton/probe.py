"""What the kernels take, every reason why not, and what this machine looks like to them."""

from __future__ import annotations

import re

from nsa_backend_triton.host import configs
from nsa_core.contract import Reason, Request

# What torch 2.8, the oldest torch that nsa-core takes, was released with; older ones have no
# triton.knobs.
OLDEST_TRITON = (3, 4)
OLDEST_GPU, NEWEST_GPU = min(a for a in configs.TABLES if a), max(configs.TABLES)
MAX_WIDTH = 256
MAX_HEADS = 64  # query heads of a group
SELECT_BLOCKS = (16, 128)  # l'
MAX_SELECTED = 64  # n
_POINTED = ("select", "sel")  # the slots that know selection blocks

_found: str | None = None  # triton's version
_trouble: Reason | None = None
try:  # while this module loads: a probe has to be quick
    import triton

    _found = str(triton.__version__)
except ModuleNotFoundError as error:
    # Under TRITON_INTERPRET=1 triton itself needs numpy, which it does not install.
    _package = (error.name or "triton").partition(".")[0]
    _missing = "triton (Linux)" if _package == "triton" else _package
    _trouble = Reason(
        "triton_missing",
        f"triton cannot be imported: {error}",
        f"pip install {_missing}, or use sdpa",
    )
except (ImportError, OSError, RuntimeError) as error:
    _trouble = Reason("triton_broken", f"importing triton failed: {error}", "reinstall triton")


def probe(request: Request) -> list[Reason]:
    """All reasons against ``request``; none: the backend takes it."""
    trouble = _trouble or _version_reason(_found or "")
    reasons = [trouble] if trouble else []
    interpreted = not trouble and _interpreted()
    architecture, here = (0, []) if interpreted else _device(request)
    reasons += here + _shape_reasons(request)
    if request.dtype == "float64" and not interpreted:
        hint = "use float32 or sdpa; fp64 runs in triton's interpreter only"
        reasons.append(Reason("dtype", "needs bfloat16, float16 or float32, got float64", hint))
    elif architecture is not None:
        # A width past the limit has its own reason.
        lacking = configs.missing(request, architecture) if not _too_wide(request) else []
        name = configs.TABLES[architecture]
        reasons += [
            Reason(
                "no_configuration",
                f"no tile of {kernel} fits the shared memory that table {name} stands for",
                "use smaller heads, a narrower dtype, for blocks of many compressed tokens a longer"
                " stride, or sdpa",
            )
            for kernel in lacking
        ]
    return reasons


def _interpreted() -> bool:
    from nsa_backend_triton.host.sequences import interpreted

    return interpreted()


def _version_reason(version: str) -> Reason | None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers >= OLDEST_TRITON:
        return None
    wanted = ".".join(map(str, OLDEST_TRITON))
    return Reason(
        "triton_too_old",
        f"needs triton {wanted} or later, found {version}",
        "upgrade torch and triton",
    )


def _device(request: Request) -> tuple[int | None, list[Reason]]:
    """(architecture whose table serves the request, None: none; reasons against the device)."""
    if request.device != "cuda":
        return None, [Reason("device", f"needs cuda, got {request.device}", "use sdpa there")]
    import torch

    if torch.version.hip is not None:
        text = (
            f"kernels are written for NVIDIA GPUs; this torch is built for ROCm {torch.version.hip}"
        )
        return None, [Reason("rocm", text, "use sdpa")]
    if request.capability is None:
        return None, [
            Reason("no_gpu", "no CUDA GPU is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
        ]
    major, minor = request.capability
    have = 10 * major + minor
    if have < OLDEST_GPU:
        return None, [
            Reason("sm_too_old", f"needs sm_{OLDEST_GPU}, this GPU is sm_{have}", "use sdpa")
        ]
    if have > NEWEST_GPU:
        return None, [
            Reason(
                "sm_too_new", f"knows GPUs up to sm_{NEWEST_GPU}, this GPU is sm_{have}", "use sdpa"
            )
        ]
    if have not in configs.TABLES:
        known = ", ".join(f"sm_{a}" for a in configs.TABLES if a)
        return None, [Reason("sm_unknown", f"knows {known}, this GPU is sm_{have}", "use sdpa")]
    return have, []


def _too_wide(request: Request) -> bool:
    widths = (
        (request.v_head_dim,)
        if request.slot == "combine"
        else (request.head_dim, request.v_head_dim)
    )
    return max(widths) > MAX_WIDTH


def _shape_reasons(request: Request) -> list[Reason]:
    reasons, geometry = [], request.geometry
    if _too_wide(request):
        message = f"head widths {request.head_dim}/{request.v_head_dim} exceed {MAX_WIDTH}"
        reasons.append(Reason("head_dim", message, "use sdpa"))
    heads = request.n_heads // request.n_kv_heads
    if heads > MAX_HEADS and request.slot != "combine":
        message = f"{heads} query heads a group exceed {MAX_HEADS}"
        reasons.append(Reason("too_many_heads", message, "use more kv heads, or sdpa"))
    low, high = SELECT_BLOCKS
    block, chosen = geometry.select_block_size, geometry.num_selected_blocks
    if request.slot in _POINTED and not low <= block <= high:
        message = f"select_block_size must be from {low} to {high}, got {block}"
        reasons.append(Reason("select_block_size", message, "change it, or use sdpa"))
    if request.slot in _POINTED and chosen > MAX_SELECTED:
        message = f"{chosen} selected blocks exceed {MAX_SELECTED}"
        reasons.append(Reason("num_selected_blocks", message, "choose fewer, or use sdpa"))
    return reasons


def detail() -> list[str]:
    """Triton's version, and for each GPU here the table of tile shapes that serves it; a line
    each.
    """
    if _trouble is not None:
        return [str(_trouble)]
    old = _version_reason(_found or "")
    lines = [f"triton {_found}" + (f": {old}" if old else "")]
    if _interpreted():
        return [*lines, "kernels run in triton's interpreter, on CPU tensors (TRITON_INTERPRET)"]
    import torch

    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name, here = torch.cuda.get_device_name(index), 10 * major + minor
        serves = (
            f"tile shapes of table {configs.TABLES[here]}"
            if here in configs.TABLES
            else "no tile shapes"
        )
        known = "measured" if here in configs.MEASURED else "never measured on this kind of GPU"
        lines.append(f"GPU {index}, {name}, sm_{here}: {serves}, {known}")
    return lines if len(lines) > 1 else [*lines, "no CUDA GPU is visible"]
