"""Compare a layer, from projections to output, with the oracle's layer in float64.

Checks of single slots do not cover the projections, rotary embedding, phi and gates, nor the keys
and values that each branch receives. The layer runs on the combination under test if it accepts
float64, and otherwise on the best backend that does; the code of the layer is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nsa_core.config import COMPRESS_KINDS, NSAConfig
from nsa_core.errors import Unsupported
from nsa_core.layer.module import NSAttention
from nsa_core.plan.plan import Plan, resolve
from nsa_verify.checks.under_test import CaseUnderTest, case_check
from nsa_verify.judge.layer_gradients import golden_layer, judge_results, run_layer
from nsa_verify.problems.cases import Case
from nsa_verify.problems.findings import Finding

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
    """List a dense and a packed job per option, created by ``job(name, check, case, dtype)``.

    The quick preset has only the first option, the mlp phi.
    """
    options = OPTIONS if preset == "full" else OPTIONS[:1]
    cases = []
    for option in options:
        config = dataclasses.replace(CONFIG, **option)
        label = ", ".join(f"{k}={v}" for k, v in option.items())
        cases.append(Case(f"layer {label}", config, (37,), batch=2, seed=seed))
        cases.append(Case(f"layer {label}, packed", config, (3, 0, 25, 9), packed=True, seed=seed))
    return [job("layer", layer, case, torch.float64) for case in cases]


@case_check("layer")
def layer(subject: CaseUnderTest) -> Iterator[Finding]:
    """Compare NSAttention with the oracle: output, and gradients of input and parameters.

    The layer runs without recompute, and with it.
    """
    case, dtype = subject.case, subject.dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        attn = NSAttention(case.config).to(dtype)
        shape = (*(() if case.packed else (case.batch,)), case.tokens, case.config.dim)
        x, do = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    plan = _plan(subject) or resolve(case.config, dtype=dtype, needs_grad=True, varlen=case.packed)
    cu_seqlens = case.data(dtype).cu_seqlens
    truth = golden_layer(attn, x, do, plan, cu_seqlens)
    for attn.recompute, label in ((False, ""), (True, " recomputed")):
        verdicts = judge_results(run_layer(attn, x, do, cu_seqlens, plan), *truth)
        yield from subject.judged("", {name + label: v for name, v in verdicts.items()})


def _plan(subject: CaseUnderTest) -> Plan | None:
    """Return the plan of the combination if it accepts the dtype on the CPU, else None."""
    if subject.combination.device != "cpu":
        return None
    try:
        return subject.plan()
    except Unsupported:
        return None
