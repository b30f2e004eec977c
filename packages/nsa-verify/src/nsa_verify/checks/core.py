"""Check of the backward of the whole core, as nsa_attention runs it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nsa_core.layer.attention import nsa_attention
from nsa_verify.cases import Case
from nsa_verify.checks.calls import CORE, PREFILL, may_call
from nsa_verify.checks.invariants import poisoned_memory
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding, judged
from nsa_verify.judge.core import judge_core
from nsa_verify.slot_runs import masked_do


@may_call(*PREFILL, CORE)
def core_gradients(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Judge the gradients of nsa_attention, given the blocks that it selected.

    A combination with a fused backward runs it; the others run the backwards of their slots. During
    the backward, new memory holds NaN: a gradient that reads memory before it is written fails.
    """
    data = case.data(dtype, combination.device)
    plan = combination.plan(case.config, dtype, varlen=case.packed)
    do = masked_do(case, data.do)
    names = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
    leaves = {name: getattr(data, name).detach().requires_grad_() for name in names}
    o, blocks = nsa_attention(
        leaves["q"],
        (None, leaves["k_sel"], leaves["k_win"]),
        (None, leaves["v_sel"], leaves["v_win"]),
        leaves["gates"],
        config=case.config,
        plan=plan,
        k_cmp=leaves["k_cmp"],
        v_cmp=leaves["v_cmp"],
        cu_seqlens=data.cu_seqlens,
        max_seqlen=None if data.cu_seqlens is None else data.max_seqlen,
        nonnegative_gates=True,
        return_blocks=True,
    )
    with poisoned_memory():
        grads = torch.autograd.grad(o, list(leaves.values()), do)
    verdicts = judge_core(
        {**{name: leaf.detach() for name, leaf in leaves.items()}, "blocks": blocks},
        do,
        {f"d{name}": grad for name, grad in zip(leaves, grads)},
        case.config.geometry,
        case.config.softmax_scale,
        cu_seqlens=data.cu_seqlens,
        rows=case.rows,
    )
    yield from judged("core gradients", "", case, dtype, verdicts)
