"""The whole layer, projections to output, against the oracle's layer in float64: every phi kind,
dense and packed.

This proves what no slot can: that the right keys and values reach each branch, rotary, phi and
gates. It runs the combination under test where it takes float64, and else the best backend that
does: the layer's own code is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nsa_core.config import COMPRESS_KINDS, NSAConfig
from nsa_core.dispatch.plan import Plan, resolve
from nsa_core.errors import Unsupported
from nsa_core.layer.module import NSAttention
from nsa_verify.cases import Case
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding, judged
from nsa_verify.judge.layer_gradients import judge_layer

CONFIG = NSAConfig(
    dim=12,
    n_heads=4,
    n_kv_heads=2,
    head_dim=4,
    v_head_dim=6,
    compress_block_size=4,
    compress_stride=2,
    select_block_size=8,
    num_selected_blocks=3,
    window_size=10,
)
OPTIONS: tuple[dict[str, Any], ...] = (
    *({"compress": kind} for kind in COMPRESS_KINDS),
    {"gate": "mlp", "qk_norm": True},
    {"shared_kv": True},
    {"rope_before_compress": True},
    {"rope": False},
)


def jobs_for(preset: str, seed: int, job: Callable[..., Any]) -> list[Any]:
    """A dense and a packed job per option (quick: the default phi), made with ``job(name, check,
    case, dtype)``.
    """
    options = OPTIONS if preset == "full" else OPTIONS[:1]
    cases = []
    for option in options:
        config = dataclasses.replace(CONFIG, **option)
        label = ", ".join(f"{k}={v}" for k, v in option.items())
        cases.append(Case(f"layer {label}", config, (37,), batch=2, seed=seed))
        cases.append(Case(f"layer {label}, packed", config, (3, 0, 25, 9), packed=True, seed=seed))
    return [job("layer", layer, case, torch.float64) for case in cases]


def layer(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """NSAttention equals the oracle's layer: output, input gradient, and the gradient of every
    parameter.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        attn = NSAttention(case.config).to(dtype)
        shape = (*(() if case.packed else (case.batch,)), case.tokens, case.config.dim)
        x, do = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    plan = _plan(combination, case, dtype) or resolve(
        case.config, dtype=dtype, needs_grad=True, varlen=case.packed
    )
    verdicts = judge_layer(attn, x, do, case.data(dtype).cu_seqlens, plan)
    yield from judged("layer", "", case, dtype, verdicts)


def _plan(combination: Combination, case: Case, dtype: torch.dtype) -> Plan | None:
    """The combination's plan if it computes ``dtype`` on the CPU, where the oracle's layer is
    compared; None: the best.
    """
    if combination.device != "cpu":
        return None
    try:
        return combination.plan(case.config, dtype, varlen=case.packed)
    except Unsupported:
        return None
