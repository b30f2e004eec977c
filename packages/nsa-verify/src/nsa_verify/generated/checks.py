"""Run a generated case on a combination and judge it by the oracle."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nsa_core.block.attention import block_attention
from nsa_core.block.plans import BlockPlan, BlockSizes, resolve_blocks
from nsa_core.contract import SLOTS
from nsa_core.errors import InvalidInput, NSAError, Unsupported
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.schema import DIFFERENTIABLE
from nsa_verify import oracle
from nsa_verify.generated.case import GeneratedCase
from nsa_verify.generated.core import core_findings
from nsa_verify.generated.data import Problem, problem_of
from nsa_verify.generated.verdicts import (
    documents_of,
    judge_blocks,
    judge_run,
    judge_second_run,
)
from nsa_verify.judge.truth_cache import cached, caching
from nsa_verify.problems.cases import Case
from nsa_verify.problems.combination import Combination, spec_of
from nsa_verify.problems.findings import Finding, same_bits
from nsa_verify.problems.slot_runs import SlotRun, run_kernel


def judge_if_declared(combination: Combination, generated: GeneratedCase) -> list[Finding]:
    """Judge a generated case with first_query; nothing where no backend declares such queries."""
    if not combination.declares_partial(generated.kernel):
        return []
    return judge_generated(combination, generated)


def judge_generated(combination: Combination, generated: GeneratedCase) -> list[Finding]:
    """Judge one generated case.

    The findings cover outputs, LSE and all gradients, a second run, and the NaN or Inf of the case.
    In the second run the frozen inputs of the case need no gradient. A refused case gives one
    finding with ok None; a kernel that raises gives a failed one.

    Raises:
        InvalidInput: The case is wrong for every backend.
        BackendUnavailable: A backend cannot run on this machine.
    """
    slot, check = generated.slot, generated.check_name

    def finding(quantity: str, ok: bool | None, detail: str) -> list[Finding]:
        name = generated.text()
        return [Finding(check, slot, name, generated.dtype, quantity, ok, detail=detail)]

    try:
        findings = (_core if slot == "core" else _slot)(combination, generated)
    except Unsupported as refusal:
        return finding("plan", None, _reasons(refusal))
    try:
        with caching():  # the other runs need the truths of the first
            return list(findings)
    except InvalidInput:
        raise
    except NSAError as fault:  # a kernel raised, or returned an invalid result
        return finding("run", False, str(fault))


def _reasons(refusal: Unsupported) -> str:
    """Return the reasons of a refusal in a line."""
    return " ".join(str(refusal).split())


def _core(combination: Combination, generated: GeneratedCase) -> Iterator[Finding]:
    """Plan a case of core, and return its findings."""
    dtype = getattr(torch, generated.dtype)
    plan = combination.plan(generated.config, dtype, varlen=generated.packed)
    specs = [spec_of(combination, plan, slot).slots[slot] for slot in SLOTS]
    deterministic = all(spec.deterministic for spec in specs)
    problem = problem_of(generated, combination.device)
    return core_findings(generated, problem, plan, deterministic)


def _slot(combination: Combination, generated: GeneratedCase) -> Iterator[Finding]:
    """Plan a case of a slot or of block_attention, and return its findings."""
    plan = _block_attention if generated.slot == "block_attention" else _kernel
    kernel, grad, deterministic = plan(combination, generated)
    problem = problem_of(generated, combination.device)
    return _findings(generated.check_name, generated, problem, kernel, grad, deterministic)


@dataclasses.dataclass(frozen=True)
class _BlockAttention:
    """block_attention with a plan, called as the kernel of sel."""

    plan: BlockPlan
    slot: str = "sel"

    def __call__(self, *tensors: torch.Tensor, max_seqlen: int, **options: Any) -> Any:
        """Return o and lse."""
        sizes = self.plan.sizes
        if options["cu_seqlens"] is not None:
            options["max_seqlen"] = max_seqlen
        options |= {"block_size": sizes.block_size, "scale": sizes.scale, "plan": self.plan}
        return block_attention(*tensors, return_lse=True, **options)


def _block_attention(
    combination: Combination, generated: GeneratedCase
) -> tuple[_BlockAttention, bool, bool]:
    """Return what :func:`_kernel` does, for block_attention; its bits are not compared."""
    heads = generated.h * generated.groups
    sizes = BlockSizes(
        *(heads, generated.groups, generated.dk, generated.dv),
        *(generated.block, generated.n, generated.scale),
    )
    first, end = generated.query_rows
    options = PlanOptions(
        device=combination.device,
        dtype=getattr(torch, generated.dtype),
        backends=combination.backends.get("sel"),
        needs_grad=True,
        varlen=generated.packed,
        partial=generated.first_query is not None,
        batch=generated.batch,
        seq_len=end - first,
    )
    plan = resolve_blocks(sizes, options, registry=combination.registry)
    return _BlockAttention(plan), True, False


def _kernel(combination: Combination, generated: GeneratedCase) -> tuple[Kernel, bool, bool]:
    """Return the kernel of the slot, whether it has gradients, and whether its bits repeat.

    Only the slot itself is planned as the user named it, so that no other slot refuses the case.
    """
    slot = generated.slot
    named = {slot: combination.backends[slot]} if slot in combination.backends else {}
    alone = dataclasses.replace(combination, backends=named)
    dtype, grad = getattr(torch, generated.dtype), bool(DIFFERENTIABLE[slot])

    def plan_with(grad: bool) -> Plan:
        fields = {"varlen": generated.packed, "needs_grad": grad}
        if generated.first_query is None:
            return alone.plan(generated.config, dtype, **fields)
        return alone.plan_partial(slot, generated.config, dtype, **fields)

    try:
        plan = plan_with(grad)
    except Unsupported:
        if not grad:
            raise
        grad = False
        plan = plan_with(grad)
    spec = spec_of(alone, plan, slot).slots[slot]
    return getattr(plan, slot), grad, spec.deterministic


def _findings(
    check: str,
    generated: GeneratedCase,
    problem: Problem,
    kernel: Kernel | _BlockAttention,
    grad: bool,
    deterministic: bool,
) -> Iterator[Finding]:
    case, dtype, slot = generated.as_case(), getattr(torch, generated.dtype), generated.slot
    do = problem.do if grad else None
    run = run_kernel(kernel, problem.inputs, do, problem, problem.first_query)
    if not generated.rows:
        # Without queries, the keys of a partial call have gradients, which are zero.
        for name, output in run.outputs.items():
            yield same_bits(check, slot, case, dtype, name, output, torch.zeros_like(output))
        return
    yield from judge_run(check, generated, case, run, problem)
    equal = deterministic and generated.first_query is None
    frozen = generated.frozen if grad else ()
    if equal or frozen:
        again = run_kernel(kernel, problem.inputs, do, problem, problem.first_query, frozen)
        yield from judge_second_run(check, generated, case, run, again, problem, equal=equal)
    if generated.poison != "none" and slot != "combine":  # combine has it in its inputs
        yield from _judge_poisoned(check, generated, case, kernel, run, problem)


def _judge_poisoned(
    check: str,
    generated: GeneratedCase,
    case: Case,
    kernel: Kernel | _BlockAttention,
    clean: SlotRun,
    problem: Problem,
) -> Iterator[Finding]:
    """Check that NaN or Inf in one row reaches every output that reads it, and no distant one.

    A NaN in q or do stays in its row and kv head, and in the keys that the row sees. One in k or v
    may spread to rows of its document and kv head, because 0 x NaN is NaN, and must reach the rows
    that see it. The same holds for gradients.
    """
    kind, name = generated.poison.split("_")
    if name not in ("q", "do") and generated.slot in ("cmp", "select"):
        name += "_cmp"
    place = _place(generated, problem, name)
    if place is None:
        return
    inputs: dict[str, Any] = dict(problem.inputs)
    original = clean.do if name == "do" else inputs[name]
    if original is None:  # the slot has no gradient
        return
    poisoned = original.clone()
    poisoned[place.index] = math.inf if kind == "inf" else math.nan
    do = poisoned if name == "do" else clean.do
    if name != "do":
        inputs[name] = poisoned
    slot, quantity = generated.slot, f"{kind} in {name}"
    if slot == "select":
        yield from _judge_poisoned_blocks(
            check, generated, case, kernel, clean, problem, inputs, place, quantity
        )
        return
    sizes = (generated.config.geometry, generated.config.softmax_scale)
    outputs = run_kernel(kernel, inputs, do, problem, problem.first_query).outputs
    options = {**documents_of(problem), "do": do}
    golden = cached(
        ("poisoned", slot, *sizes, problem.first_query),
        [*inputs.values(), problem.cu_seqlens, do],
        lambda: getattr(oracle, slot)(*inputs.values(), *sizes, **options),
    )
    truths, beside = {"o": golden.o, "lse": golden.lse, **golden.grads}, {}
    for key, actual in outputs.items():
        label = quantity if key == "o" else f"{key} of {quantity}"
        reached = ~torch.isfinite(truths[key].to(actual.device))
        missed = int((reached & torch.isfinite(actual)).sum()) if key != "lse" else 0
        detail = f"{missed} of {int(reached.sum())} elements that read it are finite"
        yield Finding(
            check,
            slot,
            case.name,
            generated.dtype,
            label,
            not missed,
            detail=detail if missed else "",
        )
        # With the clean results where NaN may be, the rest must be as right as without NaN.
        spread = place.region(key, actual) & ~torch.isfinite(actual)
        beside[key] = torch.where(spread, clean.outputs[key], actual)
    for finding in judge_run(
        check, generated, case, SlotRun(clean.inputs, beside, clean.do), problem
    ):
        yield dataclasses.replace(finding, quantity=f"{finding.quantity} beside {quantity}")


def _judge_poisoned_blocks(
    check: str,
    generated: GeneratedCase,
    case: Case,
    kernel: Kernel | _BlockAttention,
    clean: SlotRun,
    problem: Problem,
    inputs: dict[str, Any],
    place: _Place,
    quantity: str,
) -> Iterator[Finding]:
    """Judge the blocks that select returns for NaN in ``inputs``."""
    dtype = getattr(torch, generated.dtype)
    inputs["lse"] = inputs["lse"].clone().movedim(-2, -1)
    inputs["lse"][place.rows] = math.nan
    inputs["lse"] = inputs["lse"].movedim(-1, -2).contiguous()
    blocks = run_kernel(kernel, inputs, None, problem, problem.first_query).outputs["blocks"]
    expected = oracle.select(
        **inputs,
        geometry=generated.config.geometry,
        scale=generated.config.softmax_scale,
        **documents_of(problem),
    ).to(blocks)
    groups = _by_groups(generated, place.rows, blocks)
    yield same_bits(check, "select", case, dtype, quantity, blocks[groups], expected[groups])
    merged = torch.where(groups[..., None], clean.outputs["blocks"], blocks)
    run = SlotRun(clean.inputs, {"blocks": merged}, None)
    yield dataclasses.replace(
        judge_blocks(check, generated, run, problem), quantity=f"blocks beside {quantity}"
    )


@dataclasses.dataclass(frozen=True)
class _Place:
    """A poisoned element, and the rows that it may reach.

    Attributes:
        index: Index of the element.
        rows: Mask of the query rows and heads, bool [.., rows, heads].
        keys: Mask of the key rows and kv heads, bool [.., keys, kv heads].
    """

    index: tuple[int, ...]
    rows: torch.Tensor
    keys: torch.Tensor

    def region(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mask of the elements of the output ``name`` that the poison may reach."""
        if name == "lse":
            return self.rows.movedim(-1, -2)
        return (self.rows if name in ("o", "dq") else self.keys)[..., None].expand_as(tensor)


def _place(generated: GeneratedCase, problem: Problem, name: str) -> _Place | None:
    """Return the poisoned element of ``name`` and the rows that it may reach.

    The element is in the last kv head, in the middle of the document with the most queries, or of
    these queries. Returns None if the document has no row of this tensor, or no query.
    """
    lengths, (q, k) = generated.lengths, list(problem.inputs.values())[:2]
    spans, compressed = generated.query_spans, generated.slot in ("cmp", "select")
    document = max(range(len(lengths)), key=lambda index: spans[index][1] - spans[index][0])
    counts = map(generated.config.geometry.num_compressed, lengths) if compressed else lengths
    keys, queries = _bounds(list(counts)), spans[document][:2]
    of_query = name in ("q", "do")
    begin, end = queries if of_query else keys[document : document + 2]
    row = (end - begin) // 2
    if begin == end or queries[0] == queries[1]:
        return None
    row_mask = torch.zeros(q.shape[:-1], dtype=torch.bool, device=q.device)
    key_mask = torch.zeros(k.shape[:-1], dtype=torch.bool, device=q.device)
    if generated.packed:
        index: tuple[int, ...] = (begin + row,)
        reached: tuple[int | slice, ...] = (slice(*queries),)
        key_mask[keys[document] : keys[document + 1], -1] = True
    else:
        index, reached = (document, row), (document, slice(None))
        key_mask[document, :, -1] = True
    lead = index if of_query else reached
    row_mask[lead + (slice(-generated.h, None),)] = True  # noqa: RUF005  # Python 3.10
    return _Place((*index, -1, 0), row_mask, key_mask)


def _bounds(lengths: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def _by_groups(
    generated: GeneratedCase, region: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """Return the mask [.., rows, heads] as a mask [.., rows, kv heads]."""
    by_group: torch.Tensor = region.unflatten(-1, (generated.groups, generated.h))
    return by_group.any(-1).to(blocks.device)
