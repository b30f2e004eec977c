"""Checks of slots against the oracle, and on inputs for which simpler attention is the truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nsa_core.contract import SLOTS
from nsa_core.dtypes import dtype_name
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle
from nsa_verify.checks.calls import PREFILL, may_call, prefill
from nsa_verify.judge.selection import MAX_REGRET, judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.cases import Case, CaseData
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding, judged, same_bits
from nsa_verify.problems.slot_runs import SlotRun, run_slot, run_slots


@may_call(*PREFILL)
def parity(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Compare every slot with the oracle on the same inputs: outputs, LSE and all gradients."""
    data = case.data(dtype, combination.device)
    runs = run_slots(combination.plan(case.config, dtype, varlen=case.packed), case, data)
    for slot in SLOTS:
        yield from _judge_run("parity", slot, case, dtype, runs[slot], data.cu_seqlens)


def _judge_run(
    check: str,
    slot: str,
    case: Case,
    dtype: torch.dtype,
    run: SlotRun,
    cu_seqlens: torch.Tensor | None,
) -> Iterator[Finding]:
    """Judge the results of one slot call."""
    geometry, scale = case.config.geometry, case.config.softmax_scale
    if slot == "select":
        inputs: dict[str, Any] = dict(run.inputs)
        verdict = judge_selection(
            **inputs,
            blocks=run.outputs["blocks"],
            geometry=geometry,
            scale=scale,
            cu_seqlens=cu_seqlens,
            rows=case.rows,
        )
        detail = (
            verdict.why
            or f"regret {verdict.regret:.2g}, {verdict.flip_rate:.2%} of sets are not the oracle's"
        )
        yield Finding(
            check,
            slot,
            case.name,
            dtype_name(dtype),
            "blocks",
            verdict.ok,
            verdict.regret / MAX_REGRET,
            detail=detail,
        )
        return
    verdicts = judge_slot(
        slot,
        run.inputs,
        run.outputs,
        geometry,
        scale,
        cu_seqlens=cu_seqlens,
        do=run.do,
        rows=case.rows,
    )
    yield from judged(check, slot, case, dtype, verdicts)


@may_call(*PREFILL)
def coverage(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Compare branches that see every key with dense causal attention.

    These are sel with n*l' >= S, win with w >= S, and cmp with l = d = 1.
    """
    length = max(case.lengths, default=0)
    if length == 0 or case.rows is not None:
        return
    config = dataclasses.replace(
        case.config,
        num_selected_blocks=max(3, case.config.geometry.num_select_blocks(length)),
        window_size=length,
    )
    data = case.data(dtype, combination.device)
    plan = combination.plan(config, dtype, varlen=case.packed)
    runs = run_slots(plan, case, data)
    dense = dataclasses.replace(config.geometry, window_size=length)
    for slot in ("sel", "win"):
        yield from _judge_dense("coverage", slot, case, dtype, runs[slot], dense, {}, data)
    single = dataclasses.replace(config, compress_block_size=1, compress_stride=1)
    inputs = {"q": data.q, "k_cmp": data.k_win, "v_cmp": data.v_win}
    run = run_slot(
        combination.plan(single, dtype, varlen=case.packed), "cmp", inputs, data.do, data
    )
    yield from _judge_dense(
        "coverage", "cmp", case, dtype, run, dense, {"k_cmp": "k", "v_cmp": "v"}, data
    )


def _judge_dense(
    check: str,
    slot: str,
    case: Case,
    dtype: torch.dtype,
    run: SlotRun,
    geometry: BlockGeometry,
    rename: Mapping[str, str],
    data: CaseData,
) -> Iterator[Finding]:
    """Judge a slot call as win with the window of ``geometry``."""
    inputs = {rename.get(n, n): t for n, t in run.inputs.items() if n != "blocks"}
    outputs = {
        ("d" + rename.get(n[1:], n[1:]) if n.startswith("d") else n): t
        for n, t in run.outputs.items()
    }
    scale = case.config.softmax_scale
    verdicts = judge_slot(
        "win", inputs, outputs, geometry, scale, cu_seqlens=data.cu_seqlens, do=run.do
    )
    yield from judged(check, slot, case, dtype, verdicts)


@may_call(*PREFILL)
def packed_equals_separate(
    combination: Combination, case: Case, dtype: torch.dtype
) -> Iterator[Finding]:
    """Judge each document of a packed call as a dense sequence of its own."""
    if not case.packed:
        return
    data = case.data(dtype, combination.device)
    runs = run_slots(combination.plan(case.config, dtype, varlen=True), case, data)
    geometry = case.config.geometry
    token = compressed = 0
    for length in case.lengths:
        rows, count = slice(token, token + length), geometry.num_compressed(length)
        cmp_rows = slice(compressed, compressed + count)
        for slot in ("cmp", "select", "sel", "win"):
            if length:
                document = _document(runs[slot], rows, cmp_rows)
                yield from _judge_run("packed", slot, case, dtype, document, None)
        token, compressed = token + length, compressed + count


def _document(run: SlotRun, rows: slice, cmp_rows: slice) -> SlotRun:
    """Extract one document of a packed run as a dense batch of one."""

    def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
        part = (
            tensor[:, rows]
            if name == "lse"
            else tensor[cmp_rows if name.endswith("_cmp") else rows]
        )
        return part[None]

    inputs = {n: cut(n, t) for n, t in run.inputs.items()}
    outputs = {n: cut(n, t) for n, t in run.outputs.items()}
    return SlotRun(inputs, outputs, None if run.do is None else run.do[None, rows])


@may_call(*prefill("cmp", "select"))
def ties(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Check that equal scores select the lower block: with zero keys, and with exact logits."""
    if case.rows is not None or case.text is not None:
        return
    data = case.data(dtype, combination.device)
    plan = combination.plan(case.config, dtype, varlen=case.packed, needs_grad=False)
    zero = torch.zeros_like(data.k_cmp)
    # Keys repeat with the selection block, so the scores of these blocks are equal in any order of
    # addition. q has one nonzero entry and the scale is a power of two, so every logit is exact in
    # fp32.
    period = case.config.select_block_size // case.config.compress_stride
    generator = torch.Generator().manual_seed(case.seed)
    pattern = torch.randint(-1, 2, (period, *zero.shape[-2:]), generator=generator).to(zero)
    periodic = pattern[torch.arange(zero.shape[-3]) % period].expand(zero.shape).contiguous()
    q = torch.zeros_like(data.q)
    q[..., 0] = 4.0
    exact = dataclasses.replace(case.config, scale=0.25)
    exact_plan = combination.plan(exact, dtype, varlen=case.packed, needs_grad=False)
    for label, plan_, config, queries, keys in (
        ("zero keys", plan, case.config, data.q, zero),
        ("integer logits", exact_plan, exact, q, periodic),
    ):
        inputs = {"q": queries, "k_cmp": keys, "v_cmp": data.v_cmp}
        lse = run_slot(plan_, "cmp", inputs, None, data).outputs["lse"]
        inputs = {"q": queries, "k_cmp": keys, "lse": lse}
        blocks = run_slot(plan_, "select", inputs, None, data).outputs["blocks"]
        expected = oracle.select(
            queries, keys, lse, config.geometry, config.softmax_scale, cu_seqlens=data.cu_seqlens
        )
        yield same_bits("ties", "select", case, dtype, label, blocks.cpu(), expected)


@may_call(*prefill("sel"))
def any_blocks(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Judge sel on unsorted blocks with duplicates, -1, out-of-range and future entries."""
    if case.tokens == 0 or case.rows is not None:
        return
    data = case.data(dtype, combination.device)
    plan = combination.plan(case.config, dtype, varlen=case.packed)
    last = case.config.geometry.num_select_blocks(max(case.lengths))
    shape = (*data.q.shape[:-2], case.config.n_kv_heads, 6)
    blocks = torch.randint(
        -1, last + 2, shape, generator=torch.Generator().manual_seed(case.seed), dtype=torch.int32
    )
    blocks[..., 4] = blocks[..., 0]
    blocks[..., 5] = 2**30
    for kind in (torch.int32, torch.int64):
        inputs = {
            "q": data.q,
            "k": data.k_sel,
            "v": data.v_sel,
            "blocks": blocks.to(data.q.device, kind),
        }
        run = run_slot(plan, "sel", inputs, data.do, data)
        yield from _judge_run("any blocks", "sel", case, dtype, run, data.cu_seqlens)


@may_call(*prefill("cmp", "sel"))
def empty_rows(combination: Combination, case: Case, dtype: torch.dtype) -> Iterator[Finding]:
    """Check rows without a visible key: output exactly 0, LSE -inf, and gradients exactly 0."""
    if case.packed or case.tokens == 0 or case.rows is not None:
        return
    data = case.data(dtype, combination.device)
    plan = combination.plan(case.config, dtype, varlen=False)
    first = min(case.config.compress_block_size - 1, case.tokens)
    cmp = run_slot(
        plan, "cmp", {"q": data.q, "k_cmp": data.k_cmp, "v_cmp": data.v_cmp}, data.do, data
    )
    yield from _zeros(case, dtype, "cmp", cmp, slice(0, first), ("o", "dq"))
    blocks = data.q.new_full((*data.q.shape[:2], case.config.n_kv_heads, 3), -1, dtype=torch.int32)
    sel = run_slot(
        plan,
        "sel",
        {"q": data.q, "k": data.k_sel, "v": data.v_sel, "blocks": blocks},
        data.do,
        data,
    )
    yield from _zeros(case, dtype, "sel", sel, slice(0, case.tokens), ("o", "dq", "dk", "dv"))


def _zeros(
    case: Case,
    dtype: torch.dtype,
    slot: str,
    run: SlotRun,
    rows: slice,
    quantities: tuple[str, ...],
) -> Iterator[Finding]:
    """Check that ``quantities`` are 0 and the LSE is -inf in ``rows``."""
    for quantity in quantities:
        actual = run.outputs[quantity][:, rows]
        yield same_bits("empty rows", slot, case, dtype, quantity, actual, torch.zeros_like(actual))
    lse = run.outputs["lse"][..., rows]
    yield same_bits("empty rows", slot, case, dtype, "lse", lse, torch.full_like(lse, -torch.inf))
