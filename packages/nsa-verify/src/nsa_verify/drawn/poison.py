"""NaN or Inf in one element of a case reaches every output that reads it, and no distant one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nsa_verify import oracle
from nsa_verify.drawn.case import SlotCase
from nsa_verify.drawn.tensors import Problem
from nsa_verify.drawn.verdicts import judge_blocks, judge_run
from nsa_verify.judge.truth_cache import cached
from nsa_verify.problems.findings import Finding
from nsa_verify.problems.slot_runs import SlotRun

Run = Callable[[dict[str, Any], Problem], SlotRun]  # of a kernel on inputs


def poison_findings(
    case: SlotCase, clean: SlotRun, problem: Problem, run: Run
) -> Iterator[Finding]:
    """Check the results of a run with the NaN or Inf of ``case``.

    A NaN in q or do stays in its row and kv head, and in the keys that the row sees. One in k or v
    may spread to rows of its document and kv head, because 0 x NaN is NaN, and must reach the rows
    that see it. The same holds for gradients.

    Args:
        case: The case.
        clean: Its run without NaN and Inf.
        problem: Its tensors.
        run: Runs the kernel on inputs.
    """
    kind, name = case.poison.split("_")
    if name not in ("q", "do") and case.kind in ("cmp", "select"):
        name += "_cmp"
    place = _place(case, problem, name)
    original = clean.do if name == "do" else problem.inputs[name]
    if place is None or original is None:  # the slot has no gradient
        return
    poisoned = original.clone()
    poisoned[place.index] = math.inf if kind == "inf" else math.nan
    inputs: dict[str, Any] = dict(problem.inputs)
    if name == "do":
        problem = dataclasses.replace(problem, do=poisoned)
    else:
        inputs[name] = poisoned
    quantity = f"{kind} in {name}"
    if case.kind == "select":
        yield from _judge_select(case, clean, problem, run, inputs, place, quantity)
        return
    sizes = (case.config.geometry, case.config.softmax_scale)
    poisoned_run = run(inputs, problem)
    do = poisoned_run.do
    truth = cached(getattr(oracle, case.kernel))
    golden = truth(*inputs.values(), *sizes, **problem.placement, do=do)
    truths, beside = {"o": golden.o, "lse": golden.lse, **golden.grads}, {}
    for key, actual in poisoned_run.outputs.items():
        reached = ~torch.isfinite(truths[key].to(actual.device))
        missed = int((reached & torch.isfinite(actual)).sum()) if key != "lse" else 0
        detail = f"{missed} of {int(reached.sum())} elements that read it are finite"
        label = quantity if key == "o" else f"{key} of {quantity}"
        yield case.findings.finding(case.slot, label, not missed, detail=detail if missed else "")
        # With the clean results where NaN may be, the rest must be as right as without NaN.
        spread = place.region(key, actual) & ~torch.isfinite(actual)
        beside[key] = torch.where(spread, clean.outputs[key], actual)
    for finding in judge_run(case, SlotRun(clean.inputs, beside, clean.do), problem):
        yield dataclasses.replace(finding, quantity=f"{finding.quantity} beside {quantity}")


def _judge_select(
    case: SlotCase,
    clean: SlotRun,
    problem: Problem,
    run: Run,
    inputs: dict[str, Any],
    place: _Place,
    quantity: str,
) -> Iterator[Finding]:
    """Judge the blocks that select returns for NaN in ``inputs``."""
    inputs["lse"] = inputs["lse"].clone().movedim(-2, -1)
    inputs["lse"][place.rows] = math.nan
    inputs["lse"] = inputs["lse"].movedim(-1, -2).contiguous()
    blocks = run(inputs, problem).outputs["blocks"]
    sizes: dict[str, Any] = {"geometry": case.config.geometry, "scale": case.config.softmax_scale}
    expected = oracle.select(**inputs, **sizes, **problem.placement).to(blocks)
    heads = place.rows.unflatten(-1, (case.groups, case.h))
    groups = heads.any(-1).to(blocks.device)
    yield case.findings.same_bits(case.slot, quantity, blocks[groups], expected[groups])
    merged = torch.where(groups[..., None], clean.outputs["blocks"], blocks)
    finding = judge_blocks(case, SlotRun(clean.inputs, {"blocks": merged}, None), problem)
    yield dataclasses.replace(finding, quantity=f"blocks beside {quantity}")


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


def _place(case: SlotCase, problem: Problem, name: str) -> _Place | None:
    """Return the poisoned element of ``name`` and the rows that it may reach.

    The element is in the last kv head, in the middle of the document with the most queries, or of
    these queries. Returns None if the document has no row of this tensor, or no query.
    """
    lengths, (q, k) = case.lengths, list(problem.inputs.values())[:2]
    spans, compressed = case.query_spans, case.kind in ("cmp", "select")
    document = max(range(len(lengths)), key=lambda index: spans[index][1] - spans[index][0])
    counts = map(case.config.geometry.num_compressed, lengths) if compressed else lengths
    keys, queries = [0, *itertools.accumulate(counts)], spans[document][:2]
    of_query = name in ("q", "do")
    begin, end = queries if of_query else keys[document : document + 2]
    row = (end - begin) // 2
    if begin == end or queries[0] == queries[1]:
        return None
    row_mask = torch.zeros(q.shape[:-1], dtype=torch.bool, device=q.device)
    key_mask = torch.zeros(k.shape[:-1], dtype=torch.bool, device=q.device)
    if case.packed:
        index: tuple[int, ...] = (begin + row,)
        reached: tuple[int | slice, ...] = (slice(*queries),)
        key_mask[keys[document] : keys[document + 1], -1] = True
    else:
        index, reached = (document, row), (document, slice(None))
        key_mask[document, :, -1] = True
    lead = index if of_query else reached
    row_mask[lead + (slice(-case.h, None),)] = True  # noqa: RUF005  # Python 3.10
    return _Place((*index, -1, 0), row_mask, key_mask)
