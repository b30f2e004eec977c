"""Other people's NSA, where it is installed: timed beside ours in the same run, on the same
tensors, never judged.

Whatever their code raises is a reason in its row of the result.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nsa_bench.baselines import Dense
from nsa_bench.inputs import Inputs, make_inputs
from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.util.text import describe_error, did_you_mean

KIND = "rival"
Call = Callable[[], Any]


def check_rivals(names: Sequence[str]) -> None:
    """Refuse names that are no rival.

    Raises:
        InvalidInput: naming them, and those there are.
    """
    for name in names:
        if name not in KNOWN:
            raise InvalidInput(
                f"rival must be of {', '.join(KNOWN)}, got {name!r}{did_you_mean(name, KNOWN)}"
            )


def rivals(
    names: Sequence[str] | None, config: NSAConfig, device: str, dtype: torch.dtype
) -> list[Dense]:
    """Those of ``names`` (None: all known on a GPU, none elsewhere), each that cannot run with the
    reason.
    """
    if names is None:
        names = list(KNOWN) if device.startswith("cuda") else []
    found = []
    for name in names:
        rival = KNOWN[name](config)
        reason = rival.reason or _refusal(rival, config, device, dtype)
        found.append(dataclasses.replace(rival, reason=reason))
    return found


def guarded(make: Callable[[], Call]) -> Callable[[], Call]:
    """A setup whose errors, and those of the call it returns, are RuntimeErrors that quote what was
    raised.
    """

    def tried(function: Callable[..., Any]) -> Any:
        try:
            return function()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise RuntimeError(describe_error(error)) from error

    def made() -> Call:
        call: Call = tried(make)
        return lambda: tried(call)

    return made


def _refusal(rival: Dense, config: NSAConfig, device: str, dtype: torch.dtype) -> str:
    """Why a forward and backward over twice the chosen tokens fails; "" when it does not. Compiles
    what compiles.
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


def _fla(config: NSAConfig) -> Dense:
    """flash-linear-attention (fla-core): mean compression of whole selection blocks, window by
    flash-attn.
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
        reason = f"needs 16, 32, 64, ... query heads to a kv head, got {heads}"
    elif (config.init_blocks, config.local_blocks) != (1, 2):
        reason = (
            f"always takes 1 first and 2 last blocks, not {config.init_blocks} and"
            f" {config.local_blocks}"
        )
    return Dense(f"fla NSA, l=d={block}", forward, reason, KIND, computes)


KNOWN: dict[str, Callable[[NSAConfig], Dense]] = {"fla": _fla}
