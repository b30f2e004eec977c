"""Run a generated case on a combination and judge it by the oracle."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from nsa_core.dispatch.plan import Plan
from nsa_core.errors import InvalidInput, NSAError, Unsupported
from nsa_core.torch_ops.slot_op import DIFFERENTIABLE, Kernel
from nsa_verify import oracle
from nsa_verify.cases import Case
from nsa_verify.combination import Combination, spec_of
from nsa_verify.findings import Finding, judged, same_bits
from nsa_verify.generated.case import GeneratedCase
from nsa_verify.generated.data import Problem, problem_of
from nsa_verify.generated.shrink import ShrinkBudget, shrink
from nsa_verify.judge.selection import MAX_REGRET, judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.judge.tensor import LIMITS, Verdict
from nsa_verify.slot_runs import SlotRun, run_kernel

# The bias is a rule for many rows. With few, the error of one row decides it, and that may be
# parallel to the row: the gradient of a query that sees two keys is a multiple of their difference.
_MIN_BIAS_ROWS = 12


@dataclasses.dataclass(frozen=True)
class OnGenerated:
    """Adapter that runs a generated case as a check of a case.

    Attributes:
        generated: The generated case.
        budget: Time for shrinking that the cases of a slot share.
        if_declared: Whether a case with first_query is left out, without a finding, where no
            backend of the slot declares such queries.
    """

    generated: GeneratedCase
    budget: ShrinkBudget
    if_declared: bool = False

    def __call__(
        self, combination: Combination, case: Case, dtype: torch.dtype
    ) -> Iterator[Finding]:
        """Judge the case; a failing case is shrunk first. ``case`` and ``dtype`` are its own."""
        if self.if_declared and not combination.declares_partial(self.generated.slot):
            return
        findings = judge_generated(combination, self.generated)
        if any(finding.ok is False for finding in findings) and self.budget.seconds > 0:
            started = time.perf_counter()

            def still_fails(smaller: GeneratedCase) -> bool:
                return any(f.ok is False for f in judge_generated(combination, smaller))

            smallest = shrink(self.generated, still_fails, self.budget.seconds)
            self.budget.seconds -= time.perf_counter() - started
            findings = judge_generated(combination, smallest)
        yield from findings


def judge_generated(combination: Combination, generated: GeneratedCase) -> list[Finding]:
    """Judge one generated case.

    The findings cover outputs, LSE and all gradients, a second run of a whole call if the backend
    declares equal bits, and the NaN or Inf of the case. A refused case gives one finding with ok
    None; a kernel that raises gives a failed one.

    Raises:
        InvalidInput: The case is wrong for every backend.
        BackendUnavailable: A backend cannot run on this machine.
    """
    slot, check = generated.slot, generated.check

    def finding(quantity: str, ok: bool | None, detail: str) -> list[Finding]:
        name = generated.text()
        return [Finding(check, slot, name, generated.dtype, quantity, ok, detail=detail)]

    try:
        kernel, grad, deterministic = _kernel(combination, generated)
    except Unsupported as refusal:
        return finding("plan", None, _reasons(refusal))
    try:
        problem = problem_of(generated, combination.device)
        return list(_findings(check, generated, problem, kernel, grad, deterministic))
    except InvalidInput:
        raise
    except NSAError as fault:  # a kernel raised, or returned an invalid result
        return finding("run", False, str(fault))


def _reasons(refusal: Unsupported) -> str:
    """Return the reasons of a refusal in a line."""
    return " ".join(str(refusal).split())


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
    kernel: Kernel,
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
    yield from _judge(check, generated, case, run, problem)
    if deterministic and generated.first_query is None:
        again = run_kernel(kernel, problem.inputs, do, problem, problem.first_query)
        for name, output in run.outputs.items():
            yield same_bits(
                check, slot, case, dtype, f"{name} of a second run", again.outputs[name], output
            )
    if generated.poison != "none" and slot != "combine":  # combine has it in its inputs
        yield from _judge_poisoned(check, generated, case, kernel, run, problem)


def _judge(
    check: str, generated: GeneratedCase, case: Case, run: SlotRun, problem: Problem
) -> Iterator[Finding]:
    """Judge every output of ``run``."""
    slot, dtype = generated.slot, getattr(torch, generated.dtype)
    sizes = (generated.config.geometry, generated.config.softmax_scale)
    if slot == "select":
        yield _judge_blocks(check, generated, run, problem)
        return
    verdicts = judge_slot(
        slot, run.inputs, run.outputs, *sizes, do=run.do, **_documents_of(problem)
    )
    few = _seeing_rows(generated) < _MIN_BIAS_ROWS
    verdicts = {
        name: _without_bias(verdict, dtype)
        if name != "lse" and (few or (name.startswith("dv") and _scores_equal(generated)))
        else verdict
        for name, verdict in verdicts.items()
    }
    yield from judged(check, slot, case, dtype, verdicts)


def _scores_equal(generated: GeneratedCase) -> bool:
    """Return whether all scores of a row are equal.

    So are the roundings of its probabilities: a window of 5 gives 1/5 to each key, which fp16
    rounds down by nearly half a unit. dv of a correct kernel is too small by that part.
    """
    return generated.scale == 0 or generated.scores == "zero"


def _seeing_rows(generated: GeneratedCase) -> int:
    """Return the rows of a head that see a key: of all documents, or of one sequence."""
    hidden = generated.l - 1 if generated.slot == "cmp" else 0
    spans = generated.query_spans if generated.packed else generated.query_spans[:1]
    return sum(max(0, end - begin - max(0, hidden - position)) for begin, end, position in spans)


def _documents_of(problem: Problem) -> dict[str, Any]:
    """Return the arguments of the oracle and the judges that place the rows of ``problem``."""
    return {"cu_seqlens": problem.cu_seqlens, "first_query": problem.first_query}


def _without_bias(verdict: Verdict, dtype: torch.dtype) -> Verdict:
    """Return ``verdict``, passed if only its bias is too large."""
    limits = LIMITS[dtype]
    if verdict.row <= limits.row and verdict.elem <= limits.elem:
        return dataclasses.replace(verdict, ok=True, bias=min(verdict.bias, 1.0), why="")
    return verdict


def _judge_blocks(check: str, generated: GeneratedCase, run: SlotRun, problem: Problem) -> Finding:
    """Judge the blocks of select.

    The limit of 0.1 % on exchanged sets is for thousands of sets with random scores. In a case with
    fewer, one set with a regret within its limit passes. If all logits are 0, the scores of many
    blocks are equal but for rounding, and every set with such a regret passes.
    """
    inputs: dict[str, Any] = dict(run.inputs)
    verdict = judge_selection(
        **inputs,
        blocks=run.outputs["blocks"],
        geometry=generated.config.geometry,
        scale=generated.config.softmax_scale,
        **_documents_of(problem),
    )
    exchanged = verdict.flip_rate * generated.rows
    legal = verdict.regret <= MAX_REGRET and (_scores_equal(generated) or exchanged < 1.5)
    detail = verdict.why or f"regret {verdict.regret:.2g}"
    return Finding(
        check,
        "select",
        generated.text(),
        generated.dtype,
        "blocks",
        verdict.ok or legal,
        verdict.regret / MAX_REGRET,
        detail=detail,
    )


def _judge_poisoned(
    check: str,
    generated: GeneratedCase,
    case: Case,
    kernel: Kernel,
    clean: SlotRun,
    problem: Problem,
) -> Iterator[Finding]:
    """Check that NaN or Inf in one row reaches every output that reads it, and no distant one.

    A NaN in q stays in its row and kv head. One in k or v may spread to rows of its document and kv
    head, because 0 x NaN is NaN, and must reach the rows that see it.
    """
    kind, name = generated.poison.split("_")
    if name != "q" and generated.slot in ("cmp", "select"):
        name += "_cmp"
    place = _place(generated, problem, name)
    if place is None:
        return
    where, region = place
    inputs: dict[str, Any] = dict(problem.inputs)
    poisoned = inputs[name].clone()
    poisoned[where] = math.inf if kind == "inf" else math.nan
    inputs[name] = poisoned
    slot, dtype, quantity = generated.slot, getattr(torch, generated.dtype), f"{kind} in {name}"
    geometry, scale = generated.config.geometry, generated.config.softmax_scale
    if slot == "select":
        inputs["lse"] = inputs["lse"].clone().movedim(-2, -1)
        inputs["lse"][region] = math.nan
        inputs["lse"] = inputs["lse"].movedim(-1, -2).contiguous()
        run = run_kernel(kernel, inputs, None, problem, problem.first_query)
        blocks = run.outputs["blocks"]
        expected = oracle.select(
            **inputs, geometry=geometry, scale=scale, **_documents_of(problem)
        ).to(blocks)
        groups = _by_groups(generated, region, blocks)
        yield same_bits(check, slot, case, dtype, quantity, blocks[groups], expected[groups])
        merged = torch.where(groups[..., None], clean.outputs["blocks"], blocks)
        yield dataclasses.replace(
            _judge_blocks(
                check, generated, SlotRun(clean.inputs, {"blocks": merged}, None), problem
            ),
            quantity=f"blocks beside {quantity}",
        )
        return
    outputs = run_kernel(kernel, inputs, None, problem, problem.first_query).outputs
    golden = getattr(oracle, slot)(*inputs.values(), geometry, scale, **_documents_of(problem)).o
    reached = ~torch.isfinite(golden.to(outputs["o"].device))
    missed = int((reached & torch.isfinite(outputs["o"])).sum())
    detail = f"{missed} of {int(reached.sum())} outputs that read it are finite" if missed else ""
    yield Finding(check, slot, case.name, generated.dtype, quantity, not missed, detail=detail)
    # With the clean results where NaN may be, the rest must be as right as without NaN.
    beside = {}
    for key in ("o", "lse"):
        may = region if key == "o" else region.movedim(-1, -2)
        may = may[..., None].expand_as(outputs[key]) if key == "o" else may
        spread = may & ~torch.isfinite(outputs[key])
        beside[key] = torch.where(spread, clean.outputs[key], outputs[key])
    verdicts = judge_slot(slot, clean.inputs, beside, geometry, scale, **_documents_of(problem))
    renamed = {f"{key} beside {quantity}": verdict for key, verdict in verdicts.items()}
    yield from judged(check, slot, case, dtype, renamed)


def _place(
    generated: GeneratedCase, problem: Problem, name: str
) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """Return the index of the poisoned element, and the rows and heads that it may reach.

    The element is in the middle of the document with the most queries and in the last head. The
    mask is bool [.., rows, heads]. Returns None if the document has no row of this tensor.
    """
    lengths, device = generated.lengths, problem.inputs["q"].device
    spans = generated.query_spans
    queries = [end - begin for begin, end, _ in spans]
    document = max(range(len(lengths)), key=lambda index: queries[index])
    geometry = generated.config.geometry
    counts = [geometry.num_compressed(n) if name.endswith("_cmp") else n for n in lengths]
    counts = queries if name == "q" else counts
    if not counts[document] or not queries[document]:
        return None
    row = counts[document] // 2
    region = torch.zeros(problem.inputs["q"].shape[:-1], dtype=torch.bool, device=device)
    head = -generated.h  # the first head of the last group
    if generated.packed:
        span = slice(*spans[document][:2])
        index: tuple[int, ...] = (sum(counts[:document]) + row,)
        lead: tuple[int | slice, ...] = (index[0],) if name == "q" else (span,)
    else:
        index = (document, row)
        lead = index if name == "q" else (document,)
    if name == "q":
        heads = (*lead, slice(head, None))
        region[heads] = True
    else:
        region[lead][..., head:] = True
    return (*index, -1, 0), region


def _by_groups(
    generated: GeneratedCase, region: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """Return the mask [.., rows, heads] as a mask [.., rows, kv heads]."""
    by_group: torch.Tensor = region.unflatten(-1, (generated.groups, generated.h))
    return by_group.any(-1).to(blocks.device)
