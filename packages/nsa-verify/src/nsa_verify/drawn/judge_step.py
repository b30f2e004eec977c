"""Judge a decode step by the oracle: each decode form, or each sequence of a block step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from nsa_core.block.decode import block_attention_decode_with_lse
from nsa_verify.checks.decode_fused import fused_step
from nsa_verify.checks.decode_parity import decode_parity
from nsa_verify.drawn.block_plan import block_plan
from nsa_verify.drawn.step import BlockStep, DecodeStep
from nsa_verify.drawn.verdicts import MIN_ROWS, without_bias
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.problems.step_data import column_of_table
from nsa_verify.problems.step_runs import decode_plan

_Results = tuple[torch.Tensor, torch.Tensor]  # o, lse


def step_findings(combination: Combination, drawn: DecodeStep) -> list[Finding]:
    """Judge the decode forms, and the fused step if the backend has one.

    Raises:
        NSAError: As the plan of the combination and the decode forms.
    """
    step, dtype = drawn.step(), drawn.torch_dtype
    findings = list(
        decode_parity(combination, step, dtype, messy_blocks if drawn.order == "messy" else None)
    )
    if "step" in decode_plan(combination, step, dtype).fused:
        findings += fused_step(combination, step, dtype)
    findings = [dataclasses.replace(finding, check=drawn.check_name) for finding in findings]
    return [without_bias(f) for f in findings] if sum(drawn.new) < MIN_ROWS else findings


def messy_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks [.., n] in descending order, -1 first, with a duplicate or a hole.

    In even rows -1 replaces the second block, in odd rows the third is named twice.
    """
    messy = blocks.flip(-1).clone()
    if messy.shape[-1] > 2:
        messy[:, ::2, :, 1] = -1
        messy[:, 1::2, :, 1] = messy[:, 1::2, :, 2]
    return messy


def block_step_findings(combination: Combination, step: BlockStep) -> list[Finding]:
    """Run block_attention_decode, and judge each sequence.

    Raises:
        NSAError: As block_attention_decode.
    """
    plan = block_plan(
        combination,
        step,
        phase="decode",
        page_size=step.page_size or None,
        batch=len(step.lengths),
        seq_len=max(step.lengths),
    )
    tensors = block_step_tensors(step)
    results = block_attention_decode_with_lse(
        **block_step_arguments(step, tensors, combination.device),
        block_size=step.block,
        scale=step.scale,
        plan=plan,
    )
    every = range(len(step.lengths))
    return [f for b in every for f in _judge(step, tensors, b, results, plan.sizes.softmax_scale)]


def block_step_tensors(step: BlockStep) -> dict[str, torch.Tensor]:
    """Return the arguments of the call; memory that no token owns is NaN."""
    generator = torch.Generator().manual_seed(step.seed)
    batch, longest = len(step.lengths), max(step.lengths)
    page = step.page_size or longest + 5
    columns = -(-longest // page) if step.page_size else 1
    table = torch.arange(batch)[:, None]
    if step.page_size:
        columns += 1  # the last one is never read: it names a page that does not exist
        table = torch.randperm(batch * columns, generator=generator).view(batch, columns)
    owned = torch.arange(columns * page) < torch.tensor(step.lengths)[:, None]
    stores = {}
    for name, width in (("k", step.dk), ("v", step.dv)):
        rows = torch.randn(batch, columns * page, step.groups, width, generator=generator)
        rows[~owned] = torch.nan
        store = torch.empty(batch * columns, page, step.groups, width)
        store[table.flatten()] = rows.view(-1, page, step.groups, width)
        stores[name] = store.to(step.torch_dtype)
    shape = (batch, step.rows, step.h * step.groups, step.dk)
    tensors = {"q": torch.randn(shape, generator=generator).to(step.torch_dtype), **stores}
    tensors["blocks"] = _blocks(step, longest, generator)
    tensors["lengths"] = torch.tensor(step.lengths, dtype=torch.int32)
    tensors["starts"] = tensors["lengths"] - torch.tensor(step.new, dtype=torch.int32)
    return tensors | ({"block_table": table.int()} if step.page_size else {})


def _blocks(step: BlockStep, longest: int, generator: torch.Generator) -> torch.Tensor:
    """Return random blocks [B, m, G, n], among them repeated, future, negative and far ones.

    The first sequence has only its newest block, at the end of its list. Where there are several,
    kv head 0 of the last sequence has no block.
    """
    kind: torch.dtype = getattr(torch, step.index)
    last, limit = -(-longest // step.block), torch.iinfo(kind)
    shape = (len(step.lengths), step.rows, step.groups, step.n)
    blocks = torch.randint(-1, last + 1, shape, generator=generator)
    odd = torch.randint(0, 20, shape, generator=generator)
    for number, value in enumerate((limit.min, limit.max, limit.max // 2, last + 7)):
        blocks[odd == number] = value
    if step.groups > 1:
        blocks[-1, :, 0] = -1
    blocks[0] = limit.min
    blocks[0, ..., -1] = max(step.lengths[0] - 1, 0) // step.block
    return blocks.to(kind)


def block_step_arguments(
    step: BlockStep, tensors: dict[str, torch.Tensor], device: str
) -> dict[str, Any]:
    """Return copies of ``tensors`` on the device, with the memory layout of the step."""
    arguments: dict[str, Any] = {n: t.clone().to(device) for n, t in tensors.items()}
    if step.starts == "default":
        del arguments["starts"]
    if step.page_size:  # entries after the last token are not read
        arguments["block_table"][:, -(-max(step.lengths) // step.page_size) :] = 2**30
    if step.metadata == "strided":
        for name in arguments.keys() & {"starts", "lengths", "blocks"}:
            arguments[name] = column_of_table(arguments[name])
        if step.page_size:
            arguments["block_table"] = arguments["block_table"].T.contiguous().T
    return arguments


def _judge(
    step: BlockStep, tensors: dict[str, torch.Tensor], b: int, results: _Results, scale: float
) -> Iterator[Finding]:
    """Judge the rows of one sequence as queries inside it; its padding must be empty."""
    length, count = step.lengths[b], step.new[b]
    o, lse = (x[b : b + 1].cpu() for x in results)
    empty = torch.full_like(lse[..., count:], -torch.inf)
    yield step.findings.same_bits(
        step.slot, "padding of o", o[:, count:], torch.zeros_like(o[:, count:])
    )
    yield step.findings.same_bits(step.slot, "padding of lse", lse[..., count:], empty)
    if not count:
        return
    pages = tensors["block_table"][b].long() if step.page_size else torch.tensor([b])
    keys = {n: tensors[n][pages].flatten(0, 1)[None, :length] for n in "kv"}
    queries = {n: tensors[n][b : b + 1, :count] for n in ("q", "blocks")}
    verdicts = judge_slot(
        "sel",
        {**queries, **keys},
        {"o": o[:, :count].contiguous(), "lse": lse[..., :count].contiguous()},
        step.config.geometry,
        scale,
        first_query=length - count,
    )
    for finding in step.findings.judged(step.slot, verdicts):
        yield without_bias(finding) if count < MIN_ROWS else finding
