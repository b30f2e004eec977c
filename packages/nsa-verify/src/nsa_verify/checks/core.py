"""Checks of the backward of the whole core, as nsa_attention runs it.

A combination with a fused backward runs it. The others run the backwards of their slots, which the
checks of the slots cover; so all checks but the gradients' are for fused backwards alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from nsa_core.config import NSAConfig
from nsa_core.dtypes import dtype_name
from nsa_core.layer.attention import nsa_attention
from nsa_core.plan.plan import Plan
from nsa_verify.checks.calls import CORE, PREFILL, may_call
from nsa_verify.checks.invariants import HUGE, between_nans, poisoned_memory
from nsa_verify.judge.core import judge_core
from nsa_verify.problems.cases import Case, CaseData
from nsa_verify.problems.combination import Combination, spec_of
from nsa_verify.problems.findings import Finding, judged, same_bits
from nsa_verify.problems.slot_runs import Documents, masked_do

_NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
_SMALL_GATE = 1e-6  # its logarithm, which a fused backward may use, is large


class CoreRun:
    """One call of nsa_attention, whose backward may run several times.

    Args:
        plan: The plan of the call.
        config: The layer configuration.
        data: Document bounds.
        tensors: The tensors of the core by name.
        blocks: Blocks that replace the selection.
        recompute: The argument of nsa_attention.
        nonnegative: Its argument ``nonnegative_gates``.
        frozen: Names of tensors that need no gradient.

    Attributes:
        inputs: The tensors by name, and the blocks that were selected or given.
        o: The output.
        lse: The log-sum-exps of cmp, sel and win.
    """

    def __init__(
        self,
        plan: Plan,
        config: NSAConfig,
        data: Documents,
        tensors: Mapping[str, torch.Tensor],
        blocks: torch.Tensor | None = None,
        *,
        recompute: bool = False,
        nonnegative: bool = True,
        frozen: Sequence[str] = (),
    ) -> None:
        leaves = {n: tensors[n].detach().requires_grad_(n not in frozen) for n in _NAMES}
        self.o: torch.Tensor
        self.lse: tuple[torch.Tensor, ...]
        self.o, self.lse, used = nsa_attention(
            leaves["q"],
            (None, leaves["k_sel"], leaves["k_win"]),
            (None, leaves["v_sel"], leaves["v_win"]),
            leaves["gates"],
            config=config,
            plan=plan,
            k_cmp=leaves["k_cmp"],
            v_cmp=leaves["v_cmp"],
            cu_seqlens=data.cu_seqlens,
            max_seqlen=None if data.cu_seqlens is None else data.max_seqlen,
            blocks=blocks,
            recompute=recompute,
            nonnegative_gates=nonnegative,
            return_lse=True,
            return_blocks=True,
        )
        self._leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        self.inputs = {name: leaf.detach() for name, leaf in leaves.items()} | {"blocks": used}

    def gradients(self, do: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run the backward, and return dq, dk_cmp, and so on, but not those of frozen tensors.

        A gradient that is missing is NaN, which no verdict accepts.
        """
        leaves, options = self._leaves, {"retain_graph": True, "allow_unused": True}
        grads = torch.autograd.grad(self.o, list(leaves.values()), do, **options)
        return {
            f"d{name}": torch.full_like(leaf, torch.nan) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads)
        }


def _tensors(data: CaseData) -> dict[str, torch.Tensor]:
    """Return the inputs of the core, with gates of 0, small gates and gates of 2.5.

    Of eleven tokens in a row, nine have one such gate: each value in each branch.
    """
    tensors = {name: getattr(data, name) for name in _NAMES}
    gates = tensors["gates"] = data.gates.clone()
    for token, (gate, branch) in enumerate(itertools.product((0.0, _SMALL_GATE, 2.5), range(3))):
        gates[..., token::11, :, branch] = gate
    return tensors


def _judged(
    check: str, run: CoreRun, do: torch.Tensor, case: Case, dtype: torch.dtype, data: CaseData
) -> Iterator[Finding]:
    """Judge the gradients of ``run``, computed while new memory holds NaN."""
    with poisoned_memory():
        gradients = run.gradients(do)
    verdicts = judge_core(
        run.inputs,
        do,
        gradients,
        case.config.geometry,
        case.config.softmax_scale,
        cu_seqlens=data.cu_seqlens,
        rows=case.rows,
    )
    yield from judged(check, "", case, dtype, verdicts)


@may_call(*PREFILL, CORE)
def core_gradients(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Judge the gradients of nsa_attention, given the blocks that it selected.

    Some gates are 0, 1e-6 or 2.5. During the backward, new memory holds NaN: a
    gradient that reads memory before it is written fails.
    """
    data = case.data(dtype, combination.device)
    plan = combination.plan(case.config, dtype, varlen=case.packed)
    run = CoreRun(plan, case.config, data, _tensors(data))
    yield from _judged("core gradients", run, masked_do(case, data.do), case, dtype, data)


@may_call(*PREFILL, CORE)
def nan_storage(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Judge a fused backward on inputs and a do with NaN beyond S and between rows."""
    plan = combination.plan(case.config, dtype, varlen=case.packed)
    if case.rows is not None or "backward" not in plan.fused:
        return
    data = case.data(dtype, combination.device)
    tensors = {name: between_nans(tensor) for name, tensor in _tensors(data).items()}
    run = CoreRun(plan, case.config, data, tensors)
    yield from _judged("core nan storage", run, between_nans(data.do), case, dtype, data)


@may_call(*PREFILL, CORE)
def finite_poison(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that huge keys and values after t do not change dq and dgates of rows <= t, bitwise.

    The values are those of the check "poison"; the blocks are those of the run without them.
    """
    plan = combination.plan(case.config, dtype, deterministic=True)
    if case.packed or case.tokens < 2 or case.rows is not None or "backward" not in plan.fused:
        return
    data = case.data(dtype, combination.device)
    clean = CoreRun(plan, case.config, data, _tensors(data))
    t, huge, poisoned = case.tokens // 2, HUGE.get(dtype, 1e30), _tensors(data)
    visible = case.config.geometry.num_compressed(t + 1)
    for name in _NAMES[1:-1]:
        poisoned[name] = poisoned[name].clone()
        tail = poisoned[name][:, visible if name.endswith("_cmp") else t + 1 :]
        tail.copy_(torch.where(tail >= 0, huge, -huge))
    other = CoreRun(plan, case.config, data, poisoned, clean.inputs["blocks"])
    expected, actual = (run.gradients(data.do) for run in (clean, other))
    for name in ("dq", "dgates"):
        rows = (gradients[name][:, : t + 1] for gradients in (actual, expected))
        yield same_bits("core poison", "core", case, dtype, f"{name} up to {t}", *rows)


@may_call(*PREFILL, CORE)
def inputs_untouched(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that a fused backward writes to none of its inputs, blocks and do included."""
    plan = combination.plan(case.config, dtype, varlen=case.packed)
    if "backward" not in plan.fused:
        return
    data = case.data(dtype, combination.device)
    run = CoreRun(plan, case.config, data, _tensors(data))
    tensors = {**run.inputs, "do": data.do.clone()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    run.gradients(tensors["do"])
    for name, tensor in tensors.items():
        yield same_bits("core inputs", "core", case, dtype, name, tensor, before[name])


@may_call(*PREFILL, CORE)
def run_to_run(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that a fused backward gives equal bits three times.

    This holds if every slot is declared deterministic, and under ``deterministic=True``. The runs
    share their forward: a backward that changes what the forward saved fails.
    """
    data = case.data(dtype, combination.device)
    for required in (False, True):
        plan = combination.plan(case.config, dtype, varlen=case.packed, deterministic=required)
        if "backward" not in plan.fused:
            continue
        slots = spec_of(combination, plan, "sel").slots
        not_declared = [name for name, slot in slots.items() if not slot.deterministic]
        if not_declared and not required:
            backend = plan.choices["sel"].backend
            yield Finding(
                "core run to run",
                "core",
                case.name,
                dtype_name(dtype),
                "as declared",
                None,
                detail=f"{backend} does not declare {not_declared[0]} deterministic",
            )
            continue
        run = CoreRun(plan, case.config, data, _tensors(data))
        first, *others = [run.gradients(masked_do(case, data.do)) for _ in range(3)]
        for other, name in itertools.product(others, first):
            values = other[name], first[name]
            yield same_bits("core run to run", "core", case, dtype, name, *values)
