"""Checks of slots against the oracle, and of branches that see every key against win."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nsa_core.contract import SLOTS
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle
from nsa_verify.checks.under_test import CaseUnderTest, case_check
from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.findings import Finding, Findings
from nsa_verify.problems.slot_runs import SlotRun


@case_check("parity")
def parity(subject: CaseUnderTest) -> Iterator[Finding]:
    """Compare every slot with the oracle on the same inputs: outputs, LSE and all gradients."""
    runs = subject.runs(subject.plan())
    for slot in SLOTS:
        yield from judge_run(subject, slot, runs[slot], subject.data.cu_seqlens)


def judge_run(
    findings: Findings, slot: str, run: SlotRun, cu_seqlens: torch.Tensor | None
) -> Iterator[Finding]:
    """Judge the results of one slot call; ``cu_seqlens`` are its document bounds."""
    config = findings.case.config
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "rows": findings.case.rows}
    if slot == "select":
        inputs: dict[str, Any] = {**run.inputs, "blocks": run.outputs["blocks"]}
        options |= {"geometry": config.geometry, "scale": config.softmax_scale}
        yield findings.selected(slot, judge_selection(**inputs, **options))
        return
    call = (slot, run.inputs, run.outputs, config.geometry, config.softmax_scale)
    yield from findings.judged(slot, judge_slot(*call, do=run.do, **options))


@case_check("coverage")
def coverage(subject: CaseUnderTest) -> Iterator[Finding]:
    """Compare branches that see every key with dense causal attention.

    These are sel with n*l' >= S, win with w >= S, and cmp with l = d = 1.
    """
    case, data = subject.case, subject.data
    length = max(case.lengths, default=0)
    if length == 0 or case.rows is not None:
        return
    blocks = max(3, case.config.geometry.num_select_blocks(length))
    config = dataclasses.replace(case.config, num_selected_blocks=blocks, window_size=length)
    runs = subject.runs(subject.plan(config))
    for slot in ("sel", "win"):
        yield from _judge_dense(subject, slot, runs[slot], config.geometry, {})
    single = dataclasses.replace(config, compress_block_size=1, compress_stride=1)
    inputs = {"q": data.q, "k_cmp": data.k_win, "v_cmp": data.v_win}
    run = subject.run(subject.plan(single), "cmp", inputs, data.do)
    yield from _judge_dense(subject, "cmp", run, config.geometry, {"k_cmp": "k", "v_cmp": "v"})


def _judge_dense(
    subject: CaseUnderTest,
    slot: str,
    run: SlotRun,
    geometry: BlockGeometry,
    rename: Mapping[str, str],
) -> Iterator[Finding]:
    """Judge a slot call as win with the window of ``geometry``."""
    inputs = {rename.get(n, n): t for n, t in run.inputs.items() if n != "blocks"}
    outputs = {
        ("d" + rename.get(n[1:], n[1:]) if n.startswith("d") else n): t
        for n, t in run.outputs.items()
    }
    options: dict[str, Any] = {"cu_seqlens": subject.data.cu_seqlens, "do": run.do}
    scale = subject.case.config.softmax_scale
    yield from subject.judged(slot, judge_slot("win", inputs, outputs, geometry, scale, **options))


@case_check("ties")
def ties(subject: CaseUnderTest) -> Iterator[Finding]:
    """Check that equal scores select the lower block: with zero keys, and with exact logits."""
    case, data = subject.case, subject.data
    if case.rows is not None:
        return
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
    for label, config, queries, keys in (
        ("zero keys", case.config, data.q, zero),
        ("integer logits", exact, q, periodic),
    ):
        plan = subject.plan(config, needs_grad=False)
        inputs = {"q": queries, "k_cmp": keys, "v_cmp": data.v_cmp}
        lse = subject.run(plan, "cmp", inputs, None).outputs["lse"]
        inputs = {"q": queries, "k_cmp": keys, "lse": lse}
        blocks = subject.run(plan, "select", inputs, None).outputs["blocks"]
        sizes = (config.geometry, config.softmax_scale)
        expected = oracle.select(queries, keys, lse, *sizes, cu_seqlens=data.cu_seqlens)
        yield subject.same_bits("select", label, blocks.cpu(), expected)


@case_check("any blocks")
def any_blocks(subject: CaseUnderTest) -> Iterator[Finding]:
    """Judge sel on unsorted blocks with duplicates, -1, out-of-range and future entries."""
    case, data = subject.case, subject.data
    if case.tokens == 0 or case.rows is not None:
        return
    plan = subject.plan()
    last = case.config.geometry.num_select_blocks(max(case.lengths))
    shape = (*data.q.shape[:-2], case.config.n_kv_heads, 6)
    blocks = torch.randint(
        -1, last + 2, shape, generator=torch.Generator().manual_seed(case.seed), dtype=torch.int32
    )
    blocks[..., 4] = blocks[..., 0]
    blocks[..., 5] = 2**30
    for kind in (torch.int32, torch.int64):
        inputs = {"q": data.q, "k": data.k_sel, "v": data.v_sel}
        inputs["blocks"] = blocks.to(data.q.device, kind)
        yield from judge_run(
            subject, "sel", subject.run(plan, "sel", inputs, data.do), data.cu_seqlens
        )
