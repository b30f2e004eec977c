"""The requests that FlashAttention-2 takes, and every reason against the others."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_backend_fa2 import providers
from nsa_backend_fa2.decode import PAGE_ROWS
from nsa_backend_fa2.padding import MAX_BATCH, MAX_WIDTH, width_of
from nsa_core.contract import Reason, Request

OLDEST_GPU = (8, 0)
NEWEST_GPU = (12, 1)
MAX_HEADS = 65535  # of the library call: an axis of the kernels' grid
# Loads flash-attn with this module, which may take seconds: a probe has to be quick.
providers.sources()

# GPUs whose shared memory is too small for PyTorch's backward of 224
_SMALL = (
    (8, 6),
    (8, 7),
    (8, 9),
    (12, 0),
    (12, 1),
)


def probe(request: Request) -> list[Reason]:
    """All reasons against ``request``; none: the backend takes it."""
    of_phase = _decode_reasons(request) if request.phase == "decode" else _provider_reasons(request)
    return [*_device_reasons(request), *_shape_reasons(request), *of_phase]


def _dotted(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _device_reasons(request: Request) -> list[Reason]:
    reasons, have = [], request.capability
    if request.device != "cuda":
        reasons.append(Reason("device", f"needs cuda, got {request.device}", "use sdpa there"))
    elif have is None:
        reasons.append(
            Reason("no_gpu", "no CUDA GPU is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
        )
    elif have < OLDEST_GPU:
        message = f"needs {_dotted(OLDEST_GPU)}, this GPU is {_dotted(have)}"
        reasons.append(Reason("sm_too_old", message, "use sdpa or triton"))
    elif have > NEWEST_GPU:
        message = f"knows GPUs up to {_dotted(NEWEST_GPU)}, this GPU is {_dotted(have)}"
        reasons.append(Reason("sm_too_new", message, "use sdpa or triton"))
    if request.dtype not in ("bfloat16", "float16"):
        hint = "use sdpa, or run the layer in bfloat16"
        reasons.append(Reason("dtype", f"needs bfloat16 or float16, got {request.dtype}", hint))
    return reasons


def _shape_reasons(request: Request) -> list[Reason]:
    reasons = []
    width = width_of(request.head_dim, request.v_head_dim)
    if width > MAX_WIDTH:
        message = f"head widths {request.head_dim}/{request.v_head_dim} exceed {MAX_WIDTH}"
        reasons.append(Reason("head_dim", message, "use sdpa"))
    folded = request.slot == "cmp" and request.phase == "prefill"
    heads = request.n_heads * (request.geometry.compress_stride if folded else 1)
    if heads > MAX_HEADS:
        message = (
            f"{heads} heads of the library call (query heads, times the stride for cmp) exceed"
            f" {MAX_HEADS}"
        )
        reasons.append(Reason("too_many_heads", message, "use sdpa"))
    if request.varlen and request.slot != "sel" and (request.batch or 0) > MAX_BATCH:
        message = f"{request.batch} documents exceed the {MAX_BATCH} of one call"
        reasons.append(Reason("too_many_documents", message, "pack fewer, or use triton"))
    return reasons


def _decode_reasons(request: Request) -> list[Reason]:
    """cmp runs over the cached compressed tokens; the other branches' keys do not lie as the
    library reads them.
    """
    reasons = list(_layout_reasons(request))
    serving = providers.first()
    if serving is None:
        return reasons + _provider_reasons(request)
    lacks = not isinstance(serving, providers.FlashAttnPackage) or serving.with_cache is None
    if request.slot == "cmp" and lacks:
        message = f"{serving.title} has no attention over a cache that returns the LSE"
        reasons.append(
            Reason("no_kvcache", message, f"install a newer flash-attn: {providers.INSTALL}")
        )
    return reasons


def _layout_reasons(request: Request) -> Iterator[Reason]:
    size, stride = request.geometry.select_block_size, request.geometry.compress_stride
    if request.slot == "win":
        message = (
            "takes the cached keys of a window from the first on: a ring holds them turned, older"
            " ones among them"
        )
        yield Reason("ring", message, "use triton or sdpa")
    if request.slot == "sel":
        message = (
            f"takes pages of a multiple of {PAGE_ROWS} rows: chosen blocks of {size} would have to"
            " be gathered"
        )
        yield Reason("gathered_blocks", message, "use triton or sdpa")
    if request.slot != "cmp":
        return
    widths, rows = (request.head_dim, request.v_head_dim), (request.page_size or 0) // stride
    if widths[0] != widths[1] or widths[0] % 8:
        message = (
            f"every step would copy the cache to pad head widths {widths[0]}/{widths[1]} to one"
            " multiple of 8"
        )
        yield Reason("head_dim_decode", message, "use triton or sdpa")
    if rows % PAGE_ROWS:
        message = (
            f"pages of {request.page_size} tokens hold {rows} compressed ones, needs a multiple of"
            f" {PAGE_ROWS}"
        )
        yield Reason("page_size", message, f"use pages of {PAGE_ROWS * stride} tokens, or triton")


def _provider_reasons(request: Request) -> list[Reason]:
    serving = providers.first()
    if serving is None:
        return [source.reason for source in providers.sources() if source.reason is not None]
    if not isinstance(serving, providers.TorchFlash) or not request.needs_grad:
        return []
    reasons = []
    if request.deterministic and not providers.torch_is_deterministic():
        reasons.append(providers.not_deterministic())
    width = width_of(request.head_dim, request.v_head_dim)
    if 192 < width <= 224 and request.capability in _SMALL:
        message = (
            f"PyTorch's backward of heads of {width} does not run on {_dotted(request.capability)}"
        )
        reasons.append(Reason("head_dim_backward", message, "install flash-attn, or use sdpa"))
    return reasons


def detail() -> list[str]:
    """The provider in use, and why the others are not; a line each."""
    lines, served = [], False
    for source in providers.sources():
        if source.provider is None:
            lines.append(f"{source.name}: {source.reason}")
        elif served:
            lines.append(f"{source.provider.title}: not needed")
        else:
            lines.append(f"{source.provider.title}: serves")
            served = True
    return lines
