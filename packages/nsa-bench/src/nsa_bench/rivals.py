"""Other libraries' NSA: timed in the same run on the same tensors, but not judged.

Any exception of their code becomes the reason in its row of the result.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Sequence

import torch

from nsa_bench.baselines import Baseline, is_installed, refusal
from nsa_bench.inputs import Inputs
from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.util.text import did_you_mean

KIND = "rival"


def check_rivals(names: Sequence[str]) -> None:
    """Check the names of rivals.

    Raises:
        InvalidInput: A name is unknown; the message lists the known names.
    """
    for name in names:
        if name not in KNOWN:
            raise InvalidInput(
                f"rival must be one of {', '.join(KNOWN)}, got {name!r}{did_you_mean(name, KNOWN)}"
            )


def rivals(
    names: Sequence[str] | None, config: NSAConfig, device: str, dtype: torch.dtype
) -> list[Baseline]:
    """Return the named rivals; those that cannot run here carry the reason.

    ``names=None`` means all known rivals on a GPU and none elsewhere.
    """
    if names is None:
        names = list(KNOWN) if device.startswith("cuda") else []
    selected = []
    for name in names:
        rival = KNOWN[name](config)
        # Twice as many tokens as the selection covers. This run also compiles kernels.
        length = 2 * config.num_selected_blocks * config.select_block_size
        target = (config, device, dtype, length, ("q", "k", "v", "gates"))
        reason = rival.reason or refusal(rival.forward, *target)
        selected.append(dataclasses.replace(rival, reason=reason))
    return selected


def _fla(config: NSAConfig) -> Baseline:
    """flash-linear-attention (fla-core).

    It compresses whole selection blocks by their mean and runs the window with flash-attn.
    """
    block, heads = config.select_block_size, config.n_heads // config.n_kv_heads
    computes = dataclasses.replace(config, compress_block_size=block, compress_stride=block)

    def forward(x: Inputs) -> torch.Tensor:
        module = importlib.import_module("fla.ops.nsa.parallel")
        if getattr(module, "flash_attn_func", module) is None:
            raise ImportError("its window needs the package flash-attn, which is not installed")
        gates = x.gates.to(x.q.dtype).unbind(-1)
        o: torch.Tensor = module.parallel_nsa(
            x.q,
            x.k,
            x.v,
            *(gate.contiguous() for gate in gates),
            block_counts=config.num_selected_blocks,
            block_size=block,
            window_size=config.window_size,
            scale=config.softmax_scale,
        )
        return o

    reason = ""
    if importlib.util.find_spec("fla") is None:
        reason = "the package fla-core is not installed"
    elif heads < 16 or heads & (heads - 1):
        reason = f"needs 16, 32, 64, ... query heads per kv head, got {heads}"
    elif (config.init_blocks, config.local_blocks) != (1, 2):
        reason = (
            f"always selects the first block and the last 2, not the first {config.init_blocks}"
            f" and the last {config.local_blocks}"
        )
    return Baseline(f"fla NSA, l=d={block}", forward, reason, KIND, computes)


def _sfnsa(config: NSAConfig) -> Baseline:
    """Scalable-Flash-Native-Sparse-Attention (flash_nsa), with mean compression.

    It applies the sigmoid of the gates itself, so it gets their logits. The window, which has one
    key more, runs on flash-attn.
    """

    def forward(x: Inputs) -> torch.Tensor:
        library = importlib.import_module("flash_nsa")
        core = library.HFNSACore(
            library.NSAConfig(
                qk_head_dim=config.qk_dim,
                v_head_dim=config.v_dim,
                num_heads=config.n_heads,
                num_kv_heads=config.n_kv_heads,
                kernel_size=config.compress_block_size,
                stride=config.compress_stride,
                block_size=config.select_block_size,
                top_n=config.num_selected_blocks,
                num_init_blocks=config.init_blocks,
                num_local_blocks=config.local_blocks,
                window_size=config.window_size,
            )
        )
        logits = torch.logit(x.gates).to(x.q.dtype).flatten(0, 1)
        o: torch.Tensor = core(*_packed(x), logits, _boundaries(x))
        return o.view(x.do.shape)

    reason = _missing("flash_nsa", "flash_nsa") or _other_scale(config)
    return Baseline("sfnsa NSA", forward, reason, KIND, config)


def _xunhao(config: NSAConfig) -> Baseline:
    """native-sparse-attention-triton (native_sparse_attention), with mean compression.

    The window, which has one key more, runs on flash-attn.
    """

    def forward(x: Inputs) -> torch.Tensor:
        ops = importlib.import_module("native_sparse_attention.ops")
        window = importlib.import_module("flash_attn").flash_attn_varlen_func
        (q, k, v), bounds, length = _packed(x), _boundaries(x), x.q.shape[1]
        sizes = config.compress_block_size, config.compress_stride
        k_cmp, bounds_cmp = ops.avgpool_compress(k, None, bounds, *sizes)
        v_cmp, _ = ops.avgpool_compress(v, None, bounds, *sizes)
        o_cmp, blocks = ops.compressed_attention(
            *(q, k_cmp, v_cmp, *sizes),
            *(config.select_block_size, config.num_selected_blocks),
            *(bounds, bounds_cmp, length, config.geometry.num_compressed(length)),
            init_blocks=config.init_blocks,
            local_blocks=config.local_blocks,
        )
        o_sel = ops.topk_sparse_attention(q, k, v, blocks, config.select_block_size, bounds)
        limits = (bounds, bounds, length, length)
        o_win = window(q, k, v, *limits, causal=True, window_size=(config.window_size, -1))
        gates = x.gates.to(q.dtype).flatten(0, 1).unsqueeze(-1).unbind(-2)
        o: torch.Tensor = sum(gate * o for gate, o in zip(gates, (o_cmp, o_sel, o_win)))  # type: ignore[assignment]
        return o.view(x.do.shape)

    reason = _missing("native_sparse_attention", "native-sparse-attention-triton")
    if not reason and config.qk_dim != config.v_dim:
        reason = f"needs v as wide as q and k, got {config.v_dim} and {config.qk_dim}"
    return Baseline("xunhao NSA", forward, reason or _other_scale(config), KIND, config)


def _missing(module: str, package: str) -> str:
    """Return why the library cannot be used, or "" if it and flash-attn are installed."""
    if importlib.util.find_spec(module) is None:
        return f"the package {package} is not installed"
    if not is_installed("flash_attn"):
        return "its window needs the package flash-attn, which is not installed"
    return ""


def _other_scale(config: NSAConfig) -> str:
    """Return why a library without an argument for the scale cannot compute ``config``."""
    default = config.qk_dim**-0.5
    if config.softmax_scale == default:
        return ""
    return f"always scales scores by {default:.4g}, not by {config.softmax_scale:.4g}"


def _packed(x: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v [B * S, H, D]."""
    return x.q.flatten(0, 1), x.k.flatten(0, 1), x.v.flatten(0, 1)


def _boundaries(x: Inputs) -> torch.Tensor:
    """Return the boundaries of the sequences, int32 [B + 1]."""
    batch, length = x.q.shape[:2]
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=x.q.device)


KNOWN: dict[str, Callable[[NSAConfig], Baseline]] = {
    "fla": _fla,
    "sfnsa": _sfnsa,
    "xunhao": _xunhao,
}
