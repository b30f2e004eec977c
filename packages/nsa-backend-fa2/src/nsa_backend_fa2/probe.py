"""The probe of the backend ``fa2``: which requests it accepts, with every reason against others."""

from __future__ import annotations

from collections.abc import Iterator

from nsa_backend_fa2 import flash4, providers
from nsa_backend_fa2.decode import PAGE_ROWS
from nsa_backend_fa2.padding import MAX_WIDTH, width_of
from nsa_core.contract import Reason, Request
from nsa_core.flash import MAX_BATCH

OLDEST_GPU = (8, 0)
NEWEST_GPU = (12, 1)
MAX_HEADS = 65535  # heads per library call: the limit of an axis of the kernels' grid
# Loading flash-attn may take seconds. It is loaded here, so that probes are fast.
providers.sources()

# GPUs whose shared memory is too small for PyTorch's backward of heads with 224 elements.
_SMALL_SHARED_MEMORY = (
    (8, 6),
    (8, 7),
    (8, 9),
    (12, 0),
    (12, 1),
)


def probe(request: Request) -> list[Reason]:
    """Return all reasons against ``request``; [] if the backend accepts it."""
    if request.phase == "decode":
        phase_reasons = _decode_reasons(request)
    else:
        phase_reasons = _provider_reasons(request)
    return [*_device_reasons(request), *_shape_reasons(request), *phase_reasons]


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _device_reasons(request: Request) -> list[Reason]:
    reasons, capability = [], request.capability
    if request.device != "cuda":
        reasons.append(
            Reason(
                "device", f"needs cuda, got {request.device}", "use a CUDA GPU, or sdpa on the CPU"
            )
        )
    elif capability is None:
        reasons.append(
            Reason("no_gpu", "no CUDA GPU is visible", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
        )
    elif capability < OLDEST_GPU:
        message = f"needs {_sm(OLDEST_GPU)}, this GPU is {_sm(capability)}"
        reasons.append(Reason("sm_too_old", message, "use sdpa"))
    elif capability > NEWEST_GPU:
        message = f"supports GPUs up to {_sm(NEWEST_GPU)}, this GPU is {_sm(capability)}"
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
            f"the library call has {heads} heads (query heads, times compress_stride for cmp),"
            f" at most {MAX_HEADS} are supported"
        )
        reasons.append(Reason("too_many_heads", message, "use sdpa"))
    if request.varlen and request.slot != "sel" and (request.batch or 0) > MAX_BATCH:
        message = f"{request.batch} documents exceed the {MAX_BATCH} of one call"
        reasons.append(Reason("too_many_documents", message, "pack fewer documents, or use triton"))
    return reasons


def _decode_reasons(request: Request) -> list[Reason]:
    """Return the reasons against a decode step.

    Only cmp has a decode form: the library cannot read the cached keys of sel and win.
    """
    reasons = list(_cache_reasons(request))
    provider = providers.first()
    if provider is None:
        return reasons + _provider_reasons(request)
    has_cache = isinstance(provider, providers.FlashAttnPackage) and provider.with_cache is not None
    if request.slot == "cmp" and not has_cache:
        message = f"{provider.title} has no attention over a cache that returns the LSE"
        reasons.append(
            Reason("no_kvcache", message, f"install a newer flash-attn: {providers.INSTALL}")
        )
    return reasons


def _cache_reasons(request: Request) -> Iterator[Reason]:
    """Yield the reasons against the layout of the cache."""
    size, stride = request.geometry.select_block_size, request.geometry.compress_stride
    if request.slot == "win":
        message = (
            "needs the keys of a window in order of position; a ring holds them turned, with older"
            " keys among them"
        )
        yield Reason("ring", message, "use triton or sdpa")
    if request.slot == "sel":
        message = (
            f"needs pages of a multiple of {PAGE_ROWS} tokens; selected blocks have {size} and"
            " would have to be gathered"
        )
        yield Reason("gathered_blocks", message, "use triton or sdpa")
    if request.slot != "cmp":
        return
    widths, rows = (request.head_dim, request.v_head_dim), (request.page_size or 0) // stride
    if widths[0] != widths[1] or widths[0] % 8:
        message = (
            f"needs equal head widths of a multiple of 8, got {widths[0]}/{widths[1]}: every step"
            " would copy the cache to pad them"
        )
        yield Reason("head_dim_decode", message, "use triton or sdpa")
    if rows % PAGE_ROWS:
        message = (
            f"needs pages of a multiple of {PAGE_ROWS} compressed tokens, pages of"
            f" {request.page_size} tokens hold {rows}"
        )
        yield Reason("page_size", message, f"use pages of {PAGE_ROWS * stride} tokens, or triton")


def _provider_reasons(request: Request) -> list[Reason]:
    """Return why no provider exists, or why PyTorch's kernels cannot run the backward."""
    provider = providers.first()
    if provider is None:
        return [source.reason for source in providers.sources() if source.reason is not None]
    if not isinstance(provider, providers.TorchFlash) or not request.needs_grad:
        return []
    reasons = []
    if request.deterministic and not providers.torch_is_deterministic():
        reasons.append(providers.not_deterministic())
    width = width_of(request.head_dim, request.v_head_dim)
    if 192 < width <= 224 and request.capability in _SMALL_SHARED_MEMORY:
        message = (
            f"PyTorch's backward for head width {width} does not run on {_sm(request.capability)}"
        )
        reasons.append(Reason("head_dim_backward", message, "install flash-attn, or use sdpa"))
    return reasons


def detail() -> list[str]:
    """Return a line per source: the provider in use, or the reason why it is not used."""
    lines, in_use = [], False
    for source in providers.sources():
        if source.provider is None:
            lines.append(f"{source.name}: {source.reason}")
        elif in_use:
            lines.append(f"{source.provider.title}: not needed")
        else:
            lines.append(f"{source.provider.title}: in use")
            in_use = True
    provider, reason = flash4.source().provider, flash4.source().reason
    if provider is None:
        return [*lines, f"{flash4.NAME}: {reason}"]
    gpus = f"{_sm(flash4.OLDEST_GPU)} and the Blackwell GPUs of data centres"
    return [*lines, f"{provider.title}: long causal calls of cmp, on {gpus}"]
