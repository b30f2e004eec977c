"""The rivals: dense causal attention by the kernels PyTorch carries and by flash-attn, on the
bench's own tensors.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_bench.inputs import Inputs, make_inputs
from nsa_core.config import NSAConfig
from nsa_core.util.text import describe_error


@dataclasses.dataclass(frozen=True)
class Dense:
    """A dense kernel: ``forward(inputs)`` gives o; ``reason`` says why it cannot run, "" that it
    can.

    Or, with another ``kind``, somebody else's NSA (nsa_bench.rivals), which computes that of
    ``config``.
    """

    name: str
    forward: Callable[[Inputs], torch.Tensor]
    reason: str = ""
    kind: str = "dense"
    config: NSAConfig | None = None


_SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_SDPA["efficient"] = SDPBackend.EFFICIENT_ATTENTION


def dense_baselines(config: NSAConfig, device: str, dtype: torch.dtype) -> list[Dense]:
    """Every dense kernel known, those that cannot run here with the reason."""
    names = list(_SDPA) if device.startswith("cuda") else ["flash"]
    found = [_sdpa(name, config, device, dtype) for name in names]
    if device.startswith("cuda"):
        found.append(_flash_attn(config, device, dtype))
    return found


def _sdpa(name: str, config: NSAConfig, device: str, dtype: torch.dtype) -> Dense:
    backend, scale, groups = _SDPA[name], config.softmax_scale, config.n_heads // config.n_kv_heads

    def grouped(x: Inputs) -> torch.Tensor:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
        assert q.shape[2] == k.shape[2], (
            "is_causal aligns top-left: only for as many queries as keys"
        )
        with sdpa_kernel([backend]):
            o = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=groups > 1
            )
        return o.transpose(1, 2)

    def repeated(x: Inputs) -> torch.Tensor:
        q, k, v = (
            x.q.transpose(1, 2),
            *(t.transpose(1, 2).repeat_interleave(groups, 1) for t in (x.k, x.v)),
        )
        assert q.shape[2] == k.shape[2], (
            "is_causal aligns top-left: only for as many queries as keys"
        )
        with sdpa_kernel([backend]):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return o.transpose(1, 2)

    label = f"dense {name}"
    reason = _refusal(grouped, config, device, dtype)
    if (
        reason and groups > 1
    ):  # a kernel without grouped heads is given the heads it wants, inside the time
        again = _refusal(repeated, config, device, dtype)
        if not again:
            return Dense(f"{label}, repeated k/v", repeated)
    return Dense(label, grouped, reason)


def _flash_attn(config: NSAConfig, device: str, dtype: torch.dtype) -> Dense:
    def forward(x: Inputs) -> torch.Tensor:
        from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

        o: torch.Tensor = flash_attn_func(
            x.q, x.k, x.v, softmax_scale=config.softmax_scale, causal=True
        )
        return o

    if importlib.util.find_spec("flash_attn") is None:
        return Dense("dense flash-attn", forward, "the package flash-attn is not installed")
    return Dense("dense flash-attn", forward, _refusal(forward, config, device, dtype))


def _refusal(
    forward: Callable[[Inputs], torch.Tensor], config: NSAConfig, device: str, dtype: torch.dtype
) -> str:
    """Why a forward and backward on 64 tokens fails; "" when it does not."""
    x = make_inputs("random", config, batch=1, length=64, dtype=dtype, device=device, seed=0)
    try:
        torch.autograd.grad(forward(x), [x.q, x.k, x.v], x.do)
    except (RuntimeError, ImportError, AssertionError) as error:
        return describe_error(error)
    return ""
