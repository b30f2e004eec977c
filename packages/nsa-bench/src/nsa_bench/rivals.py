"""Other libraries' NSA: timed in the same run on the same tensors, but not judged.

Any exception of their code becomes the reason in its row of the result.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nsa_bench.baselines import Baseline
from nsa_bench.inputs import Inputs, make_inputs
from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.util.text import describe_error, did_you_mean

KIND = "rival"
Call = Callable[[], Any]


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
        reason = rival.reason or _refusal(rival, config, device, dtype)
        selected.append(dataclasses.replace(rival, reason=reason))
    return selected


def guarded(make: Callable[[], Call]) -> Callable[[], Call]:
    """Wrap a setup function so that it and its call raise RuntimeError for any exception."""

    def convert_errors(function: Callable[..., Any]) -> Any:
        try:
            return function()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise RuntimeError(describe_error(error)) from error

    def guarded_make() -> Call:
        call: Call = convert_errors(make)
        return lambda: convert_errors(call)

    return guarded_make


def _refusal(rival: Baseline, config: NSAConfig, device: str, dtype: torch.dtype) -> str:
    """Run forward and backward once; return the error text, or "" on success.

    The sequence has twice as many tokens as the selection covers. This run also compiles kernels.
    """
    length = 2 * config.num_selected_blocks * config.select_block_size

    def once() -> Any:
        x = make_inputs(
            "random", config, batch=1, length=length, dtype=dtype, device=device, seed=0
        )
        return lambda: torch.autograd.grad(rival.forward(x), [x.q, x.k, x.v, x.gates], x.do)

    try:
        guarded(once)()()
    except RuntimeError as error:
        return describe_error(error)
    return ""


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
            f"always selects the first block and the last 2, not the first {config.init_blocks} and"
            f" the last {config.local_blocks}"
        )
    return Baseline(f"fla NSA, l=d={block}", forward, reason, KIND, computes)


KNOWN: dict[str, Callable[[NSAConfig], Baseline]] = {"fla": _fla}
