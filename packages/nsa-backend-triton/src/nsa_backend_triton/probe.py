"""The probe of the Triton backend: every reason why its kernels cannot run a request."""

from __future__ import annotations

import re

from nsa_backend_triton.host import configs
from nsa_core.contract import Reason, Request

# Released with torch 2.8, the oldest torch that nsa-core supports; older versions lack
# triton.knobs.
OLDEST_TRITON = (3, 4)
OLDEST_GPU, NEWEST_GPU = min(a for a in configs.TABLES if a), max(configs.TABLES)
MAX_WIDTH = 256
MAX_HEADS = 64  # query heads per group
SELECT_BLOCKS = {"select": (16, 128), "sel": (16, 256)}  # l', in the slots that it matters to
MAX_PAIRS = 2**31 - 2**13  # tokens x kv heads x n, see sel/pair_lists.py
MAX_SELECTED = {"select": 64, "sel": 512}  # n, in the same slots
_SHARED_KIB = {"sm80": 163, "sm86": 99, "sm90": 227}  # per table, shared memory of a block

_version: str | None = None
_import_reason: Reason | None = None
try:  # import Triton with this module, so that a probe is quick
    import triton

    _version = str(triton.__version__)
except ModuleNotFoundError as error:
    # Under TRITON_INTERPRET=1 Triton needs numpy, which it does not install.
    _package = (error.name or "triton").partition(".")[0]
    _missing = "triton (Linux)" if _package == "triton" else _package
    _import_reason = Reason(
        "triton_missing",
        f"triton cannot be imported: {error}",
        f"pip install {_missing}, or use sdpa",
    )
except (ImportError, OSError, RuntimeError) as error:
    _import_reason = Reason(
        "triton_broken", f"importing triton failed: {error}", "reinstall triton"
    )


def probe(request: Request) -> list[Reason]:
    """Return all reasons why the backend cannot run ``request``.

    Args:
        request: The slot, shapes, dtype and device of a call. No tensor is read.

    Returns:
        One reason per obstacle, each with a code, a sentence and a hint. Empty if the backend runs
        the request.
    """
    missing = _import_reason or _version_reason(_version or "")
    reasons = [missing] if missing else []
    interpreted = not missing and _interpreted()
    architecture, device_reasons = (0, []) if interpreted else _device(request)
    reasons += device_reasons + _shape_reasons(request)
    if request.dtype == "float64" and not interpreted:
        hint = "use float32 or sdpa; fp64 runs in triton's interpreter only"
        reasons.append(Reason("dtype", "needs bfloat16, float16 or float32, got float64", hint))
    elif architecture is not None:
        # Widths above the limit have a reason of their own.
        kernels = configs.missing(request, architecture) if not _too_wide(request) else []
        name = configs.TABLES[architecture]
        kib = _SHARED_KIB.get(name, "unlimited")
        reasons += [
            Reason(
                "no_configuration",
                f"{kernel}: no tile configuration fits {name}'s {kib} KiB of shared memory",
                "use smaller heads, a narrower dtype, a longer compress_stride if blocks hold many"
                " compressed tokens, or sdpa",
            )
            for kernel in kernels
        ]
    return reasons


def _interpreted() -> bool:
    from nsa_backend_triton.host.device import interpreted

    return interpreted()


def _version_reason(version: str) -> Reason | None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers >= OLDEST_TRITON:
        return None
    oldest = ".".join(map(str, OLDEST_TRITON))
    return Reason(
        "triton_too_old",
        f"needs triton {oldest} or later, found {version}",
        "upgrade torch and triton",
    )


def _device(request: Request) -> tuple[int | None, list[Reason]]:
    """Return the architecture whose table serves the request, if any, and reasons against it."""
    if request.device != "cuda":
        return None, [
            Reason(
                "device", f"needs cuda, got {request.device}", "use a CUDA GPU, or sdpa on the CPU"
            )
        ]
    import torch

    if torch.version.hip is not None:
        text = f"the kernels need an NVIDIA GPU, this torch is built for ROCm {torch.version.hip}"
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
                "sm_too_new",
                f"supports GPUs up to sm_{NEWEST_GPU}, this GPU is sm_{have}",
                "use sdpa",
            )
        ]
    if have not in configs.TABLES:
        known = ", ".join(f"sm_{a}" for a in configs.TABLES if a)
        return None, [Reason("sm_unknown", f"supports {known}, this GPU is sm_{have}", "use sdpa")]
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
    if request.kv_dtype and (request.head_dim % 2 or request.v_head_dim % 2):
        message = f"{request.kv_dtype} pages need even head widths"
        reasons.append(Reason("quantized_head_dim", message, "use sdpa"))
    heads = request.n_heads // request.n_kv_heads
    if heads > MAX_HEADS and request.slot != "combine":
        message = f"{heads} query heads per group exceed {MAX_HEADS}"
        reasons.append(Reason("too_many_heads", message, "use more kv heads, or sdpa"))
    block, num_selected = geometry.select_block_size, geometry.num_selected_blocks
    low, high = SELECT_BLOCKS.get(request.slot, (block, block))
    if not low <= block <= high:
        message = f"select_block_size must be from {low} to {high}, got {block}"
        reasons.append(
            Reason("select_block_size", message, "choose a size in this range, or use sdpa")
        )
    most = MAX_SELECTED.get(request.slot, num_selected)
    if num_selected > most:
        message = f"num_selected_blocks must be at most {most}, got {num_selected}"
        hint = f"select at most {most} blocks, or use sdpa"
        reasons.append(Reason("num_selected_blocks", message, hint))
    # The backward lists every pair. The seq_len of a packed request counts all its documents.
    batch = 1 if request.varlen else request.batch or 1
    pairs = batch * (request.seq_len or 0) * request.n_kv_heads * num_selected
    if request.slot == "sel" and request.needs_grad and pairs > MAX_PAIRS:
        message = f"{pairs} (token, block) pairs exceed the {MAX_PAIRS} of a backward"
        reasons.append(
            Reason(
                "too_many_pairs",
                message,
                "pass fewer sequences or queries (first_query) a call, or use sdpa",
            )
        )
    return reasons


def detail() -> list[str]:
    """Return Triton's version and, for each visible GPU, its table of tile shapes, as lines."""
    if _import_reason is not None:
        return [str(_import_reason)]
    too_old = _version_reason(_version or "")
    lines = [f"triton {_version}" + (f": {too_old}" if too_old else "")]
    if _interpreted():
        return [*lines, "kernels run in triton's interpreter, on CPU tensors (TRITON_INTERPRET)"]
    import torch

    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        name, number = torch.cuda.get_device_name(index), 10 * major + minor
        shapes = (
            f"tile shapes of table {configs.TABLES[number]}"
            if number in configs.TABLES
            else "no tile shapes"
        )
        measured = configs.MEASURED.get(number, "not measured on this architecture")
        lines.append(f"GPU {index}, {name}, sm_{number}: {shapes}, {measured}")
    return lines if len(lines) > 1 else [*lines, "no CUDA GPU is visible"]
