"""Checks without a golden result: equal bits, and the backend that ran."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch

from nsa_core.contract import BRANCHES, SLOTS
from nsa_core.layer.attention import nsa_attention_with_lse
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_verify.checks.slots import judge_run
from nsa_verify.checks.under_test import CaseUnderTest, case_check
from nsa_verify.problems.cases import CaseData
from nsa_verify.problems.findings import Finding

HUGE = {torch.float16: 6e4}  # finite poison; 1e30 in other dtypes


@case_check("causality")
def causality(subject: CaseUnderTest) -> Iterator[Finding]:
    """Check that no row before t0 depends on tokens from t0 on, by equal bits and by autograd."""
    case = subject.case
    if case.packed or case.tokens < 2 or case.rows is not None:
        return
    data = subject.data
    other = case.data(subject.dtype, subject.combination.device, seed=1)
    plan = subject.plan()

    def run(d: CaseData) -> tuple[torch.Tensor, torch.Tensor]:
        # The keys of win replace the uncompressed keys of cmp. With mean compression, every branch
        # then depends on the tokens.
        k, v = (d.k_win, d.k_sel, d.k_win), (d.v_win, d.v_sel, d.v_win)
        o, _, blocks = nsa_attention_with_lse(d.q, k, v, d.gates, config=case.config, plan=plan)
        return o, blocks

    with torch.no_grad():
        o, blocks = run(data)
    geometry = case.config.geometry
    points = {geometry.compress_block_size, geometry.select_block_size + 1}
    points |= {1, case.tokens // 2, case.tokens - 1}
    for t0 in sorted(t for t in points if 0 < t < case.tokens):
        with torch.no_grad():
            changed_o, changed_blocks = run(_splice(data, other, t0))
        yield subject.same_bits("whole", f"o before {t0}", changed_o[:, :t0], o[:, :t0])
        yield subject.same_bits(
            "select", f"blocks before {t0}", changed_blocks[:, :t0], blocks[:, :t0]
        )
    t0 = case.tokens // 2
    names = ("q", "k_sel", "v_sel", "k_win", "v_win")
    leaves: dict[str, Any] = {n: getattr(data, n).detach().requires_grad_() for n in names}
    o, _ = run(dataclasses.replace(data, **leaves))
    grads = torch.autograd.grad(o[:, :t0], list(leaves.values()), data.do[:, :t0])
    for name, grad in zip(leaves, grads):
        yield subject.filled("whole", f"d{name} from {t0}", grad[:, t0:], 0)


def _splice(data: CaseData, other: CaseData, t0: int) -> CaseData:
    """Join ``data`` before t0 and ``other`` from t0 on, except for the compressed tensors."""
    joined: dict[str, Any] = {}
    for name in ("q", "k_sel", "v_sel", "k_win", "v_win", "gates"):
        a, b = getattr(data, name), getattr(other, name)
        joined[name] = torch.cat([a[:, :t0], b[:, t0:]], 1)
    return dataclasses.replace(data, **joined)


@case_check("poison")
def finite_poison(subject: CaseUnderTest) -> Iterator[Finding]:
    """Check that huge keys and values after t do not change o, LSE and dq of rows <= t, bitwise.

    The values are +-1e30, in float16 +-6e4.
    """
    case, data = subject.case, subject.data
    if case.packed or case.tokens < 2 or case.rows is not None:
        return
    plan = subject.plan(deterministic=True)
    runs = subject.runs(plan)
    t = case.tokens // 2
    for slot in BRANCHES:
        inputs = {n: with_poison(subject, n, x) for n, x in runs[slot].inputs.items()}
        outputs, clean = subject.run(plan, slot, inputs, data.do).outputs, runs[slot].outputs
        for name in ("o", "dq", "lse"):
            tokens = -1 if name == "lse" else 1
            actual, expected = (x[name].narrow(tokens, 0, t + 1) for x in (outputs, clean))
            yield subject.same_bits(slot, f"{name} up to {t}", actual, expected)


def with_poison(subject: CaseUnderTest, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return keys or values with huge numbers after the middle token; other tensors unchanged.

    Compressed tokens are huge if one of their tokens is after the middle.
    """
    if name[0] not in "kv":
        return tensor
    t, huge = subject.case.tokens // 2, HUGE.get(subject.dtype, 1e30)
    compressed = subject.case.config.geometry.num_compressed(t + 1)
    poisoned = tensor.clone()
    tail = poisoned[:, compressed if name.endswith("_cmp") else t + 1 :]
    tail.copy_(torch.where(tail >= 0, huge, -huge))
    return poisoned


@case_check("nan storage")
def nan_storage(subject: CaseUnderTest) -> Iterator[Finding]:
    """Judge slots on inputs with NaN beyond S and between rows, and on outputs filled with NaN."""
    data = subject.data
    if subject.case.rows is not None:
        return
    plan = subject.plan()
    runs = subject.runs(plan)
    with poisoned_memory():
        for slot in BRANCHES:
            inputs = runs[slot].inputs
            inputs = {n: t if n == "blocks" else between_nans(t) for n, t in inputs.items()}
            run = subject.run(plan, slot, inputs, data.do)
            yield from judge_run(subject, slot, run, data.cu_seqlens)


def between_nans(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into storage that has NaN before, after and between the token rows."""
    axis = tensor.dim() - 3
    shape = list(tensor.shape)
    shape[axis] = 2 * shape[axis] + 2
    rows = tensor.new_full(shape, torch.nan).narrow(axis, 1, 2 * tensor.shape[axis])
    return rows[(slice(None),) * axis + (slice(None, None, 2),)].copy_(tensor)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make torch.empty return NaN, so that unwritten outputs are visible."""
    before = torch.get_deterministic_debug_mode()
    # torch.use_deterministic_algorithms would import torch._inductor, which takes a second.
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@case_check("run to run")
def run_to_run(subject: CaseUnderTest) -> Iterator[Finding]:
    """Check that three runs have equal bits, forward and backward.

    This holds for slots declared deterministic, and for every slot under ``deterministic=True``.
    That plan may run other kernels, so its results are judged, too.
    """
    for required in (False, True):
        plan = subject.plan(deterministic=required)
        runs = [subject.runs(plan) for _ in range(3)]
        for slot in SLOTS:
            if required:
                yield from judge_run(subject, slot, runs[0][slot], subject.data.cu_seqlens)
            if required or subject.is_deterministic(plan, slot):
                yield from subject.equal_runs(slot, [run[slot].outputs for run in runs])
            else:
                yield subject.not_deterministic(plan, slot)


@case_check("dispatch")
def dispatch(subject: CaseUnderTest) -> Iterator[Finding]:
    """Check that the requested kernels ran, by the dispatch record and by a profile."""
    plan = subject.plan()
    with record_dispatch() as trace:
        runs = subject.runs(plan)
    for slot, run in runs.items():
        if slot == "cmp" and not run.inputs["k_cmp"].numel():
            yield subject.finding(slot, "record", True, detail="no compressed token: no call")
            continue
        requested = subject.combination.backends.get(slot, plan.choices[slot].backend)
        ran = sorted({r.backend for r in trace if r.slot == slot})
        directions = {r.direction for r in trace if r.slot == slot}
        expected = {"forward"} if slot == "select" else {"forward", "backward"}
        detail = f"asked {requested}, ran {', '.join(ran) or 'nothing'}"
        ok = ran == [requested] and directions == expected
        yield subject.finding(slot, "record", ok, detail=detail)
        again = functools.partial(subject.run, plan, slot, run.inputs, run.do)
        yield subject.profiled(plan, slot, again)
