"""FlashAttention-4 (the package flash-attn-4) for the large causal calls of cmp.

It writes o and dq in place, through strided views. FlashAttention-2 runs every other call: those
without a causal mask, with a window, with few rows, with other head widths, and deterministic ones.
win and sel have no causal call without a window, so that they never run here.

FlashAttention-4 compiles its kernels at the first call of each shape of heads, in a few seconds,
and takes about as long to import. It is imported for the first request or call that it can run.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from nsa_backend_fa2.providers import Attention, Gradients, Provider, Source, package_source
from nsa_core.contract import Reason, Request
from nsa_core.layout import BlockGeometry

NAME = "flash-attn-4"
OLDEST = Version("4.0.0b36")
INSTALL = "pip install --pre flash-attn-4"
# flash-attn 2.8 has older files of the same names, and removes them when it is uninstalled.
REINSTALL = (
    "install it again, after flash-attn, which overwrites its files:"
    " pip install --pre --force-reinstall --no-deps flash-attn-4"
)
# Hopper and the Blackwell GPUs of data centres. Only an H200 was tested.
OLDEST_GPU, NEWEST_GPU = (9, 0), (11, 9)
# Head widths of the calls. On sm_90, 4.0.0b36 computes wrong gradients for widths that are no
# multiple of 32 (github.com/Dao-AILab/flash-attention/pull/2896).
WIDTHS = (64, 96, 128)
# Fewest rows of a call, of its longest document if it is packed, and most documents. Other calls
# would compile other kernels, which warm-up does not reach; short ones are launch-bound.
MIN_RUNS = 256
MAX_DOCUMENTS = 256


class FlashAttention4:
    """The package flash-attn-4; ``interface`` is its module flash_attn.cute.interface."""

    def __init__(self, interface: Any, version: Version) -> None:
        self._interface, self.title = interface, f"{NAME} {version}"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention: Attention, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return o, which is ``out`` unless that is None, and lse."""
        o, lse, *_ = self._interface._flash_attn_fwd(
            q, k, v, out=out, return_lse=True, **_arguments(attention)
        )
        # Unlike FlashAttention-2, it returns -inf for a row whose sum is 0 or NaN.
        return o, lse.masked_fill_(lse == -torch.inf, torch.inf)

    def backward(
        self, tensors: Sequence[Tensor], attention: Attention, out: Tensor | None = None
    ) -> Gradients:
        """Return dq, which is ``out`` unless that is None, dk and dv."""
        do, q, k, v, o, lse = tensors
        dq = q.new_empty(q.shape) if out is None else out
        dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
        self._interface._flash_attn_bwd(
            q, k, v, o, do, lse, dq=dq, dk=dk, dv=dv, **_arguments(attention)
        )
        return dq, dk, dv


def _arguments(attention: Attention) -> dict[str, Any]:
    """Return the keyword arguments that forward and backward share."""
    packed = {} if attention.packed is None else attention.packed.arguments
    return {"softmax_scale": attention.scale, "causal": True, **packed}


def _load(version: Version) -> Provider | Reason:
    """Import the package."""
    try:
        interface = importlib.import_module("flash_attn.cute.interface")
        calls = (interface._flash_attn_fwd, {"out"}), (interface._flash_attn_bwd, {"dq", "dk"})
        changed = [f.__name__ for f, names in calls if names - {*inspect.signature(f).parameters}]
    except Exception as error:  # noqa: BLE001  its compiler raises errors of its own
        message = f"{NAME} {version} does not load: {type(error).__name__}: {error}"
        return Reason("package_abi_mismatch", message, REINSTALL)
    if changed:
        message = f"{NAME} {version} is too new: {', '.join(changed)} takes other arguments"
        return Reason("package_too_new", message, f"pip install {NAME}=={OLDEST}")
    return FlashAttention4(interface, version)


@functools.lru_cache(maxsize=1)
def source() -> Source:
    """Look for the package, once per process."""
    return package_source(NAME, OLDEST, INSTALL, INSTALL, _load)


def provider_of(q: Tensor, attention: Attention) -> Provider | None:
    """Return the provider of a call if FlashAttention-4 runs it, from the metadata of the call.

    Forward and backward of a call get the same result.
    """
    packed = attention.packed
    takes = (
        attention.causal
        and attention.window is None
        and not attention.deterministic
        and (q.shape[1] if packed is None else packed.max_q) >= MIN_RUNS
        and (packed is None or packed.cu_q.shape[0] <= MAX_DOCUMENTS + 1)
        and _supports(q.shape[-1], _capability(q))
    )
    return source().provider if takes else None


def serves(request: Request) -> bool:
    """Return whether FlashAttention-4 runs the causal call of a request."""
    if request.slot != "cmp" or request.phase == "decode" or request.deterministic:
        return False
    if request.varlen and (request.batch or 1) > MAX_DOCUMENTS:
        return False
    width = -(-max(request.head_dim, request.v_head_dim) // 8) * 8
    return _complete_runs(request.seq_len or 0, request.geometry) >= MIN_RUNS and _supports(
        width, request.capability
    )


def _complete_runs(tokens: int, geometry: BlockGeometry) -> int:
    return max(0, tokens - geometry.compress_block_size + 1) // geometry.compress_stride


def _capability(x: Tensor) -> tuple[int, int] | None:
    """Return the compute capability of the GPU of ``x``; None elsewhere, and in a dry run."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else None


def _supports(width: int, capability: tuple[int, int] | None) -> bool:
    """Return whether the package is installed and runs heads of ``width`` on this GPU."""
    return (
        width in WIDTHS
        and capability is not None
        and OLDEST_GPU <= capability <= NEWEST_GPU
        and source().provider is not None
    )
