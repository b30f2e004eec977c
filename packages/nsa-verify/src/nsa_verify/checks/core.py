"""Checks of the whole core, as nsa_attention runs it: its slots, and its backward.

A combination with a fused backward runs it. The others run the backwards of their slots, which the
checks of the slots cover; so all checks but the composition's and the gradients' are for fused
backwards alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import BRANCHES, SLOTS
from nsa_core.layer.attention import nsa_attention_with_lse
from nsa_core.plan.plan import Plan
from nsa_core.torch_ops.core_kernels import selects_all
from nsa_verify.checks.invariants import between_nans, poisoned_memory, with_poison
from nsa_verify.checks.under_test import CaseUnderTest, case_check
from nsa_verify.judge.core import judge_core
from nsa_verify.problems.cases import CaseData
from nsa_verify.problems.findings import Finding
from nsa_verify.problems.slot_runs import CausalSel, Documents, masked_do, slot_inputs

CORE_INPUTS = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
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
        leaves = {n: tensors[n].detach().requires_grad_(n not in frozen) for n in CORE_INPUTS}
        self.o, self.lse, used = nsa_attention_with_lse(
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
    tensors = {name: getattr(data, name) for name in CORE_INPUTS}
    gates = tensors["gates"] = data.gates.clone()
    for token, (gate, branch) in enumerate(itertools.product((0.0, _SMALL_GATE, 2.5), range(3))):
        gates[..., token::11, :, branch] = gate
    return tensors


def _run(
    subject: CaseUnderTest,
    plan: Plan,
    tensors: Mapping[str, torch.Tensor] | None = None,
    blocks: torch.Tensor | None = None,
) -> CoreRun:
    """Run the forward on ``tensors``, by default those of the case."""
    tensors = _tensors(subject.data) if tensors is None else tensors
    return CoreRun(plan, subject.case.config, subject.data, tensors, blocks)


def _judged(subject: CaseUnderTest, run: CoreRun, do: torch.Tensor) -> Iterator[Finding]:
    """Judge the gradients of ``run``, computed while new memory holds NaN."""
    with poisoned_memory():
        gradients = run.gradients(do)
    case = subject.case
    sizes = (case.config.geometry, case.config.softmax_scale)
    verdicts = judge_core(
        run.inputs, do, gradients, *sizes, cu_seqlens=subject.data.cu_seqlens, rows=case.rows
    )
    yield from subject.judged("", verdicts)


@case_check("composition")
def composition(subject: CaseUnderTest) -> Iterator[Finding]:
    """Check that nsa_attention equals the five slots in order, bit for bit, with gradients.

    In sequences of at most n * l' tokens, its sel is the causal kernel of the plan.
    """
    data = subject.data
    # Equal bits of two runs require deterministic slots, and no fused backward.
    plan = subject.plan(deterministic=True)
    tensors = {name: getattr(data, name) for name in CORE_INPUTS}
    core = CoreRun(plan, subject.case.config, data, tensors, nonnegative=False)
    grads = core.gradients(masked_do(subject.case, data.do))
    if plan.causal_sel is not None and selects_all(plan, None, data.max_seqlen):
        plan = dataclasses.replace(plan, sel=CausalSel(plan.causal_sel))
    runs = subject.runs(plan)
    combined = runs["combine"].outputs
    yield subject.same_bits("combine", "o", core.o, combined["o"])
    blocks = runs["select"].outputs["blocks"]
    yield subject.same_bits("select", "blocks", core.inputs["blocks"], blocks)
    yield subject.same_bits("combine", "dgates", grads["dgates"], combined["dgates"])
    for branch in BRANCHES:
        upstream = combined[f"do_{branch}"]
        run = subject.run(plan, branch, slot_inputs(branch, data, runs), upstream)
        suffix = "_cmp" if branch == "cmp" else ""
        for kind in "kv":
            name, expected = f"d{kind}_{branch}", run.outputs[f"d{kind}{suffix}"]
            yield subject.same_bits(branch, name, grads[name], expected)


@case_check("core gradients")
def core_gradients(subject: CaseUnderTest) -> Iterator[Finding]:
    """Judge the gradients of nsa_attention, given the blocks that it selected.

    Some gates are 0, 1e-6 or 2.5. During the backward, new memory holds NaN: a
    gradient that reads memory before it is written fails.
    """
    do = masked_do(subject.case, subject.data.do)
    yield from _judged(subject, _run(subject, subject.plan()), do)


@case_check("core nan storage")
def nan_storage(subject: CaseUnderTest) -> Iterator[Finding]:
    """Judge a fused backward on inputs and a do with NaN beyond S and between rows."""
    plan = subject.plan()
    if subject.case.rows is not None or "backward" not in plan.fused:
        return
    tensors = {name: between_nans(tensor) for name, tensor in _tensors(subject.data).items()}
    yield from _judged(subject, _run(subject, plan, tensors), between_nans(subject.data.do))


@case_check("core poison")
def finite_poison(subject: CaseUnderTest) -> Iterator[Finding]:
    """Check that huge keys and values after t do not change dq and dgates of rows <= t, bitwise.

    The values are those of the check "poison"; the blocks are those of the run without them.
    """
    case, plan = subject.case, subject.plan(varlen=False, deterministic=True)
    if case.packed or case.tokens < 2 or case.rows is not None or "backward" not in plan.fused:
        return
    clean = _run(subject, plan)
    poisoned = {n: with_poison(subject, n, x) for n, x in _tensors(subject.data).items()}
    other = _run(subject, plan, poisoned, clean.inputs["blocks"])
    expected, actual = (run.gradients(subject.data.do) for run in (clean, other))
    t = case.tokens // 2
    for name in ("dq", "dgates"):
        rows = (gradients[name][:, : t + 1] for gradients in (actual, expected))
        yield subject.same_bits("core", f"{name} up to {t}", *rows)


@case_check("core run to run")
def run_to_run(subject: CaseUnderTest) -> Iterator[Finding]:
    """Check that a fused backward gives equal bits three times.

    This holds if every slot is declared deterministic, and under ``deterministic=True``. The runs
    share their forward: a backward that changes what the forward saved fails. The plan with
    ``deterministic=True`` may run another kernel, so its gradients are judged, too.
    """
    for required in (False, True):
        plan = subject.plan(deterministic=required)
        if "backward" not in plan.fused:
            continue
        not_declared = [slot for slot in SLOTS if not subject.is_deterministic(plan, slot)]
        if not_declared and not required:
            yield subject.not_deterministic(plan, not_declared[0], of="core")
            continue
        run, do = _run(subject, plan), masked_do(subject.case, subject.data.do)
        if required:
            yield from _judged(subject, run, do)
        yield from subject.equal_runs("core", [run.gradients(do) for _ in range(3)])
