"""Judge a step of block_attention_decode by the oracle: the output and LSE of each sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nsa_core.block.decode import block_attention_decode
from nsa_core.block.plans import BlockSizes, resolve_blocks
from nsa_core.plan.options import PlanOptions
from nsa_verify.generated.bias import MIN_ROWS, without_bias
from nsa_verify.generated.step import GeneratedStep
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.cases import Case
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding, judged, same_bits
from nsa_verify.problems.step_data import column_of_table

CHECK = "block attention decode"
_Results = tuple[torch.Tensor, torch.Tensor]  # o, lse


def block_step_findings(combination: Combination, step: GeneratedStep) -> Iterator[Finding]:
    """Run a step of form "block_attention", and judge each of its sequences.

    Raises:
        NSAError: As block_attention_decode.
    """
    sizes = BlockSizes(
        *(step.h * step.groups, step.groups, step.dk, step.dv),
        *(step.block, step.n, step.scale, step.page or None),
    )
    options = PlanOptions(
        device=combination.device,
        dtype=getattr(torch, step.dtype),
        backends=combination.backends.get("sel"),
        phase="decode",
        page_size=step.page or None,
        batch=len(step.lengths),
        seq_len=max(step.lengths),
    )
    plan = resolve_blocks(sizes, options, registry=combination.registry)
    tensors = _tensors(step)
    o, lse = block_attention_decode(
        **_arguments(step, tensors, combination.device),
        block_size=step.block,
        scale=step.scale,
        plan=plan,
        return_lse=True,
    )
    for b in range(len(step.lengths)):
        yield from _judge(step, tensors, b, (o, lse), sizes.softmax_scale)


def _tensors(step: GeneratedStep) -> dict[str, torch.Tensor]:
    """Return the arguments of the call; memory that no token owns is NaN."""
    generator = torch.Generator().manual_seed(step.seed)
    batch, longest = len(step.lengths), max(step.lengths)
    page = step.page or longest + 5
    columns = -(-longest // page) if step.page else 1
    table = torch.arange(batch)[:, None]
    if step.page:
        columns += 1  # the last one is never read: it names a page that does not exist
        table = torch.randperm(batch * columns, generator=generator).view(batch, columns)
    dtype = getattr(torch, step.dtype)
    owned = torch.arange(columns * page) < torch.tensor(step.lengths)[:, None]
    stores = {}
    for name, width in (("k", step.dk), ("v", step.dv)):
        rows = torch.randn(batch, columns * page, step.groups, width, generator=generator)
        rows[~owned] = torch.nan
        store = torch.empty(batch * columns, page, step.groups, width)
        store[table.flatten()] = rows.view(-1, page, step.groups, width)
        stores[name] = store.to(dtype)
    shape = (batch, step.rows, step.h * step.groups, step.dk)
    tensors = {"q": torch.randn(shape, generator=generator).to(dtype), **stores}
    tensors["blocks"] = _blocks(step, longest, generator)
    tensors["lengths"] = torch.tensor(step.lengths, dtype=torch.int32)
    tensors["starts"] = tensors["lengths"] - torch.tensor(step.new, dtype=torch.int32)
    return tensors | ({"block_table": table.int()} if step.page else {})


def _blocks(step: GeneratedStep, longest: int, generator: torch.Generator) -> torch.Tensor:
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


def _arguments(
    step: GeneratedStep, tensors: dict[str, torch.Tensor], device: str
) -> dict[str, Any]:
    """Return copies of ``tensors`` on the device, with the memory layout of the step."""
    arguments: dict[str, Any] = {n: t.clone().to(device) for n, t in tensors.items()}
    if step.starts == "default":
        del arguments["starts"]
    if step.page:  # entries after the last token are not read
        arguments["block_table"][:, -(-max(step.lengths) // step.page) :] = 2**30
    if step.metadata == "strided":
        for name in arguments.keys() & {"starts", "lengths", "blocks"}:
            arguments[name] = column_of_table(arguments[name])
        if step.page:
            arguments["block_table"] = arguments["block_table"].T.contiguous().T
    return arguments


def _judge(
    step: GeneratedStep,
    tensors: dict[str, torch.Tensor],
    b: int,
    results: _Results,
    scale: float,
) -> Iterator[Finding]:
    """Judge the rows of one sequence as queries inside it; its padding must be empty."""
    dtype, case = getattr(torch, step.dtype), Case(step.text(), step.config, step.lengths)
    length, count = step.lengths[b], step.new[b]
    o, lse = (x[b : b + 1].cpu() for x in results)
    empty = torch.full_like(lse[..., count:], -torch.inf)
    zero = torch.zeros_like(o[:, count:])
    yield same_bits(CHECK, "sel", case, dtype, "padding of o", o[:, count:], zero)
    yield same_bits(CHECK, "sel", case, dtype, "padding of lse", lse[..., count:], empty)
    if not count:
        return
    pages = tensors["block_table"][b].long() if step.page else torch.tensor([b])
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
    for finding in judged(CHECK, "sel", case, dtype, verdicts):
        yield without_bias(finding) if count < MIN_ROWS else finding
