"""Checks without a golden result: equal bits, and the backend that ran."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import torch

from nsa_core.contract import SLOTS
from nsa_core.dtypes import dtype_name
from nsa_core.layer.attention import nsa_attention
from nsa_core.plan.plan import Plan
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_core.torch_ops.core_kernels import selects_all
from nsa_verify.checks.calls import PREFILL, may_call
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.cases import Case, CaseData
from nsa_verify.problems.combination import Combination, spec_of
from nsa_verify.problems.findings import Finding, judged, same_bits
from nsa_verify.problems.slot_runs import (
    CausalSel,
    SlotRun,
    masked_do,
    run_slot,
    run_slots,
    slot_inputs,
)

HUGE = {torch.float16: 6e4}  # finite poison; 1e30 in other dtypes


@may_call(*PREFILL)
def composition(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that nsa_attention equals the five slots in order, bit for bit, with gradients.

    In sequences of at most n * l' tokens, its sel is the causal kernel of the plan.
    """
    data = case.data(dtype, combination.device)
    # Equal bits of two runs require deterministic slots.
    plan = combination.plan(case.config, dtype, varlen=case.packed, deterministic=True)
    do = masked_do(case, data.do)
    names = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
    leaves = {n: getattr(data, n).detach().requires_grad_() for n in ("q", *names)}
    kv = {n: leaves[n] for n in ("k_cmp", "v_cmp")}
    k, v = (None, leaves["k_sel"], leaves["k_win"]), (None, leaves["v_sel"], leaves["v_win"])
    o, blocks = nsa_attention(
        leaves["q"],
        k,
        v,
        leaves["gates"],
        config=case.config,
        plan=plan,
        cu_seqlens=data.cu_seqlens,
        max_seqlen=_longest(data),
        return_blocks=True,
        **kv,
    )
    grads = dict(zip(names, torch.autograd.grad(o, [leaves[n] for n in names], do)))
    if plan.causal_sel is not None and selects_all(plan, None, data.max_seqlen):
        plan = dataclasses.replace(plan, sel=CausalSel(plan.causal_sel))
    runs = run_slots(plan, case, data)
    yield same_bits("composition", "combine", case, dtype, "o", o, runs["combine"].outputs["o"])
    yield same_bits(
        "composition", "select", case, dtype, "blocks", blocks, runs["select"].outputs["blocks"]
    )
    yield same_bits(
        "composition",
        "combine",
        case,
        dtype,
        "dgates",
        grads["gates"],
        runs["combine"].outputs["dgates"],
    )
    for branch in ("cmp", "sel", "win"):
        upstream = runs["combine"].outputs[f"do_{branch}"]
        run = run_slot(plan, branch, slot_inputs(branch, data, runs), upstream, data)
        suffix = "_cmp" if branch == "cmp" else ""
        for kind in "kv":
            expected = run.outputs[f"d{kind}{suffix}"]
            yield same_bits(
                "composition",
                branch,
                case,
                dtype,
                f"d{kind}_{branch}",
                grads[f"{kind}_{branch}"],
                expected,
            )


def _longest(data: CaseData) -> int | None:
    return None if data.cu_seqlens is None else data.max_seqlen


@may_call(*PREFILL)
def causality(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that no row before t0 depends on tokens from t0 on, by equal bits and by autograd."""
    if case.packed or case.tokens < 2 or case.rows is not None:
        return
    data = case.data(dtype, combination.device)
    other = case.data(dtype, combination.device, seed=1)
    plan = combination.plan(case.config, dtype)

    def run(d: CaseData) -> tuple[torch.Tensor, torch.Tensor]:
        # The keys of win replace the uncompressed keys of cmp. With mean compression, every branch
        # then depends on the tokens.
        k, v = (d.k_win, d.k_sel, d.k_win), (d.v_win, d.v_sel, d.v_win)
        o, blocks = nsa_attention(
            d.q, k, v, d.gates, config=case.config, plan=plan, return_blocks=True
        )
        return o, blocks

    with torch.no_grad():
        o, blocks = run(data)
    geometry = case.config.geometry
    points = {
        1,
        geometry.compress_block_size,
        geometry.select_block_size + 1,
        case.tokens // 2,
        case.tokens - 1,
    }
    for t0 in sorted(t for t in points if 0 < t < case.tokens):
        with torch.no_grad():
            changed_o, changed_blocks = run(_splice(data, other, t0))
        yield same_bits(
            "causality", "whole", case, dtype, f"o before {t0}", changed_o[:, :t0], o[:, :t0]
        )
        yield same_bits(
            "causality",
            "select",
            case,
            dtype,
            f"blocks before {t0}",
            changed_blocks[:, :t0],
            blocks[:, :t0],
        )
    t0 = case.tokens // 2
    leaves = {
        n: getattr(data, n).detach().requires_grad_()
        for n in ("q", "k_sel", "v_sel", "k_win", "v_win")
    }
    o, _ = run(_replaced(data, **leaves))
    grads = torch.autograd.grad(o[:, :t0], list(leaves.values()), data.do[:, :t0])
    for name, grad in zip(leaves, grads):
        future = grad[:, t0:]
        yield same_bits(
            "causality",
            "whole",
            case,
            dtype,
            f"d{name} from {t0}",
            future,
            torch.zeros_like(future),
        )


def _replaced(data: CaseData, **tensors: torch.Tensor) -> CaseData:
    return CaseData(**{**{n: getattr(data, n) for n in CaseData.__dataclass_fields__}, **tensors})


def _splice(data: CaseData, other: CaseData, t0: int) -> CaseData:
    """Join ``data`` before t0 and ``other`` from t0 on, except for the compressed tensors."""
    joined = {}
    for name in ("q", "k_sel", "v_sel", "k_win", "v_win", "gates"):
        a, b = getattr(data, name), getattr(other, name)
        joined[name] = torch.cat([a[:, :t0], b[:, t0:]], 1)
    return _replaced(data, **joined)


@may_call(*PREFILL)
def finite_poison(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that huge keys and values after t do not change o, LSE and dq of rows <= t, bitwise.

    The values are +-1e30, in float16 +-6e4.
    """
    if case.packed or case.tokens < 2 or case.rows is not None:
        return
    data = case.data(dtype, combination.device)
    plan = combination.plan(case.config, dtype, deterministic=True)
    runs = run_slots(plan, case, data)
    t = case.tokens // 2
    visible = case.config.geometry.num_compressed(t + 1)
    huge = HUGE.get(dtype, 1e30)
    for slot in ("cmp", "sel", "win"):
        inputs = dict(runs[slot].inputs)
        for name in (n for n in inputs if n[0] in "kv"):
            poisoned = inputs[name].clone()
            tail = poisoned[:, visible if name.endswith("_cmp") else t + 1 :]
            tail.copy_(torch.where(tail >= 0, huge, -huge))
            inputs[name] = poisoned
        run = run_slot(plan, slot, inputs, data.do, data)
        for quantity in ("o", "dq"):
            actual = run.outputs[quantity][:, : t + 1]
            clean = runs[slot].outputs[quantity][:, : t + 1]
            yield same_bits("poison", slot, case, dtype, f"{quantity} up to {t}", actual, clean)
        actual, clean = run.outputs["lse"][..., : t + 1], runs[slot].outputs["lse"][..., : t + 1]
        yield same_bits("poison", slot, case, dtype, f"lse up to {t}", actual, clean)


@may_call(*PREFILL)
def nan_storage(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Judge slots on inputs with NaN beyond S and between rows, and on outputs filled with NaN."""
    if case.rows is not None:
        return
    data = case.data(dtype, combination.device)
    plan = combination.plan(case.config, dtype, varlen=case.packed)
    runs = run_slots(plan, case, data)
    with poisoned_memory():
        for slot in ("cmp", "sel", "win"):
            inputs = {
                n: t if n in ("blocks",) else between_nans(t) for n, t in runs[slot].inputs.items()
            }
            run = run_slot(plan, slot, inputs, data.do, data)
            verdicts = judge_slot(
                slot,
                run.inputs,
                run.outputs,
                case.config.geometry,
                case.config.softmax_scale,
                cu_seqlens=data.cu_seqlens,
                do=run.do,
            )
            yield from judged("nan storage", slot, case, dtype, verdicts)


def between_nans(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into storage that has NaN before, after and between the token rows."""
    axis = tensor.dim() - 3
    shape = list(tensor.shape)
    shape[axis] = 2 * shape[axis] + 2
    storage = tensor.new_full(shape, torch.nan)
    view = storage.narrow(axis, 1, 2 * tensor.shape[axis])[
        (slice(None),) * axis + (slice(None, None, 2),)
    ]
    return view.copy_(tensor)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make torch.empty return NaN, so that unwritten outputs are visible."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@may_call(*PREFILL)
def run_to_run(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that three runs have equal bits, forward and backward.

    This holds for slots declared deterministic, and for every slot under ``deterministic=True``.
    """
    data = case.data(dtype, combination.device)
    for required in (False, True):
        plan = combination.plan(case.config, dtype, varlen=case.packed, deterministic=required)
        first, *others = [run_slots(plan, case, data) for _ in range(3)]
        for slot in SLOTS:
            if not (required or spec_of(combination, plan, slot).slots[slot].deterministic):
                detail = f"{plan.choices[slot].backend} does not declare {slot} deterministic"
                yield Finding(
                    "run to run",
                    slot,
                    case.name,
                    dtype_name(dtype),
                    "as declared",
                    None,
                    detail=detail,
                )
                continue
            for other, quantity in itertools.product(others, first[slot].outputs):
                actual, expected = other[slot].outputs[quantity], first[slot].outputs[quantity]
                yield same_bits("run to run", slot, case, dtype, quantity, actual, expected)


@may_call(*PREFILL)
def inputs_untouched(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that no slot writes to its inputs, forward or backward."""
    data = case.data(dtype, combination.device)
    plan = combination.plan(case.config, dtype, varlen=case.packed)
    runs = run_slots(plan, case, data)
    for slot in SLOTS:
        inputs = slot_inputs(slot, data, runs)
        before = {n: t.clone() for n, t in inputs.items()} | {"do": data.do.clone()}
        run_slot(plan, slot, inputs, None if slot == "select" else data.do, data)
        for name, tensor in {**inputs, "do": data.do}.items():
            yield same_bits("inputs untouched", slot, case, dtype, name, tensor, before[name])


@may_call(*PREFILL)
def dispatch(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that the requested kernels ran, by the dispatch record and by a profile."""
    data = case.data(dtype, combination.device)
    plan = combination.plan(case.config, dtype, varlen=case.packed)
    with record_dispatch() as trace:
        runs = run_slots(plan, case, data)
    for slot in SLOTS:
        backend = plan.choices[slot].backend
        requested = combination.backends.get(slot, backend)
        ran = sorted({r.backend for r in trace if r.slot == slot})
        directions = {r.direction for r in trace if r.slot == slot}
        expected = {"forward"} if slot == "select" else {"forward", "backward"}
        no_keys = slot == "cmp" and not runs[slot].inputs["k_cmp"].numel()
        ok = no_keys or (ran == [requested] and directions == expected)
        detail = (
            "no compressed token: no call"
            if no_keys
            else f"asked {requested}, ran {', '.join(ran) or 'nothing'}"
        )
        yield Finding("dispatch", slot, case.name, dtype_name(dtype), "record", ok, detail=detail)
        if not no_keys:
            yield _profiled(combination, plan, slot, case, dtype, data, runs[slot])


def _profiled(
    combination: Combination,
    plan: Plan,
    slot: str,
    case: Case,
    dtype: torch.dtype,
    data: CaseData,
    run: SlotRun,
) -> Finding:
    """Check that a profile shows an event name that the backend declares as evidence."""
    evidence = spec_of(combination, plan, slot).slots[slot].evidence
    if not evidence:
        return Finding(
            "dispatch",
            slot,
            case.name,
            dtype_name(dtype),
            "profile",
            None,
            detail="no evidence declared",
        )
    with torch.profiler.profile() as profile:
        run_slot(plan, slot, run.inputs, run.do, data)
    names = {event.key for event in profile.key_averages()}
    events = sorted({n for n in names for e in evidence if e in n})
    detail = (
        f"profile shows {events[0]}" if events else f"profile shows none of {', '.join(evidence)}"
    )
    return Finding(
        "dispatch", slot, case.name, dtype_name(dtype), "profile", bool(events), detail=detail
    )
