"""Baselines: dense causal attention by PyTorch's SDPA kernels and by FlashAttention 2, 3 and 4."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_bench.inputs import Inputs, make_inputs
from nsa_core.config import NSAConfig
from nsa_core.dtypes import dtype_name
from nsa_core.util.text import describe_error


@dataclasses.dataclass(frozen=True)
class Baseline:
    """An implementation that NSA is compared with.

    Attributes:
        name: Its name in result files.
        forward: Maps the inputs of a problem to the output o [B, S, Hq, Dv].
        reason: Why it cannot run on this machine; "" if it can.
        kind: "dense", or "rival" for another library's NSA (see :mod:`nsa_bench.rivals`).
        config: For a rival, the NSA configuration that it computes.
    """

    name: str
    forward: Callable[[Inputs], torch.Tensor]
    reason: str = ""
    kind: str = "dense"
    config: NSAConfig | None = None


# A dense kernel is not timed if the norm of its error, relative to exact attention, exceeds this.
# bf16 has 0.007. A package that was built without some width returns other numbers, and fast.
MAX_ERROR = 0.1
_SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_SDPA["efficient"] = SDPBackend.EFFICIENT_ATTENTION
# Packages of the authors: module and name. torch.nn.attention can use FlashAttention-3, but takes
# its kernels from the same module.
_PACKAGES = {
    "flash-attn": ("flash_attn", "flash-attn"),
    "flash-attn 3": ("flash_attn_interface", "flash-attn-3 (flash_attn_interface)"),
    "flash-attn 4": ("flash_attn.cute", "flash-attn-4"),
}


def dense_baselines(config: NSAConfig, device: str, dtype: torch.dtype) -> list[Baseline]:
    """Return every known dense kernel; those that cannot run here carry the reason."""
    names = list(_SDPA) if device.startswith("cuda") else ["flash"]
    baselines = [_sdpa(name, config, device, dtype) for name in names]
    if device.startswith("cuda"):
        baselines += [_package(name, config, device, dtype) for name in _PACKAGES]
    return baselines


def _sdpa(name: str, config: NSAConfig, device: str, dtype: torch.dtype) -> Baseline:
    groups = config.n_heads // config.n_kv_heads
    forward = functools.partial(_attend, backend=_SDPA[name], config=config)
    label = f"dense {name}"
    reason = dense_refusal(forward, config, device, dtype)
    # Some kernels need as many k/v heads as query heads, or v as wide as q and k. Copies for them
    # count as their time.
    copies = {}
    if reason and groups > 1:
        copies["repeated k/v"] = functools.partial(forward, repeats=groups)
    if reason and config.qk_dim != config.v_dim:
        copies["padded heads"] = functools.partial(_pad_heads, attend=forward)
    for words, copied in copies.items():
        if not dense_refusal(copied, config, device, dtype):
            return Baseline(f"{label}, {words}", copied)
    return Baseline(label, forward, reason)


def _attend(x: Inputs, *, backend: SDPBackend, config: NSAConfig, repeats: int = 1) -> torch.Tensor:
    """Return dense causal attention; each head of k and v is copied ``repeats`` times."""
    k, v = (t.transpose(1, 2) for t in (x.k, x.v))
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
    q, gqa = x.q.transpose(1, 2), config.n_heads // config.n_kv_heads > repeats
    assert q.shape[2] == k.shape[2], (
        "is_causal aligns top-left, so it needs as many queries as keys"
    )
    with sdpa_kernel([backend]):
        o = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=config.softmax_scale, enable_gqa=gqa
        )
    return o.transpose(1, 2)


def _pad_heads(x: Inputs, *, attend: Callable[[Inputs], torch.Tensor]) -> torch.Tensor:
    """Return what ``attend`` returns if zeros make q, k and v equally wide."""
    width = max(x.q.shape[-1], x.v.shape[-1])
    padded = {
        n: F.pad(getattr(x, n), (0, width - getattr(x, n).shape[-1])) for n in ("q", "k", "v")
    }
    return attend(dataclasses.replace(x, **padded))[..., : x.v.shape[-1]]


def _package(name: str, config: NSAConfig, device: str, dtype: torch.dtype) -> Baseline:
    module, package = _PACKAGES[name]

    def forward(x: Inputs) -> torch.Tensor:
        attend = importlib.import_module(module).flash_attn_func
        result = attend(x.q, x.k, x.v, softmax_scale=config.softmax_scale, causal=True)
        # FlashAttention-4 and early versions of FlashAttention-3 return the log-sum-exp as well.
        o: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return o

    label = f"dense {name}"
    if not is_installed(module):
        return Baseline(label, forward, f"the package {package} is not installed")
    if name == "flash-attn 4" and any(width % 32 for width in (config.qk_dim, config.v_dim)):
        # Seen in 4.0.0b36 on sm_90: github.com/Dao-AILab/flash-attention/pull/2896
        reason = "its gradients are wrong for heads whose width is no multiple of 32"
        return Baseline(label, forward, reason)
    reason = dense_refusal(forward, config, device, dtype)
    if reason and name == "flash-attn 4":
        reason += "; flash-attn has older files of the same names: install flash-attn-4 after it"
    return Baseline(label, forward, reason)


def is_installed(module: str) -> bool:
    """Return whether ``module`` is installed, though it may not load.

    A namespace package is not: flash-attn-4 alone makes one of flash_attn.
    """
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent
        return False
    except ImportError:  # its parent does not load
        return True
    return spec is not None and spec.origin is not None


def refusal(
    forward: Callable[[Inputs], torch.Tensor],
    config: NSAConfig,
    device: str,
    dtype: torch.dtype,
    length: int = 64,
    leaves: Sequence[str] = ("q", "k", "v"),
) -> str:
    """Run forward and backward on ``length`` tokens; return the error text, or "" on success."""
    x = make_inputs("random", config, batch=1, length=length, dtype=dtype, device=device, seed=0)
    try:
        with warnings.catch_warnings():  # PyTorch warns of each kernel that refuses, and why
            warnings.simplefilter("ignore")
            _results(forward, x, leaves)
    except Exception as error:  # noqa: BLE001  a compiler of kernels raises its own errors
        return describe_error(error)
    return ""


def dense_refusal(
    forward: Callable[[Inputs], torch.Tensor],
    config: NSAConfig,
    device: str,
    dtype: torch.dtype,
) -> str:
    """Return what :func:`refusal` returns, or how the results differ from exact attention."""
    if reason := refusal(forward, config, device, dtype):
        return reason
    x = make_inputs("random", config, batch=1, length=64, dtype=dtype, device=device, seed=0)
    leaves = {name: getattr(x, name).detach().double() for name in ("q", "k", "v", "do")}
    exact = dataclasses.replace(x, **{n: t.requires_grad_(n != "do") for n, t in leaves.items()})
    attend = functools.partial(_attend, backend=SDPBackend.MATH, config=config)
    for name, result, true in zip(
        ("o", "dq", "dk", "dv"), _results(forward, x), _results(attend, exact), strict=True
    ):
        error = ((result - true).norm() / true.norm()).item()
        if not error <= MAX_ERROR:
            width = max(config.qk_dim, config.v_dim)
            return (
                f"its {name} is wrong: {100 * error:.0f} % away from exact attention; was it built"
                f" for {dtype_name(dtype)} and heads of {width}?"
            )
    return ""


def _results(
    forward: Callable[[Inputs], torch.Tensor], x: Inputs, leaves: Sequence[str] = ("q", "k", "v")
) -> tuple[torch.Tensor, ...]:
    """Return the output of ``forward`` and the gradients of ``leaves``."""
    o = forward(x)
    return o, *torch.autograd.grad(o, [getattr(x, name) for name in leaves], x.do)
