"""Generated decode steps: sizes from a covering design, lengths around every boundary."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from nsa_core.contract import DTYPES
from nsa_core.dtypes import dtype_name
from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported
from nsa_verify.checks.calls import DECODE
from nsa_verify.checks.decode_fused import fused_step
from nsa_verify.checks.decode_parity import decode_parity
from nsa_verify.generated.bias import MIN_ROWS, without_bias
from nsa_verify.generated.block_step import CHECK, block_step_findings
from nsa_verify.generated.design import (
    GROUP_SIZES,
    OneOf,
    Row,
    covering_design,
    longer_design,
    take_turns,
)
from nsa_verify.generated.shrink import OnGenerated, ShrinkBudget
from nsa_verify.generated.step import INDICES, GeneratedStep
from nsa_verify.problems.cases import Case
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.problems.step_runs import decode_plan

NAME = "generated steps"
NAMES = (NAME, CHECK)
CALLS = frozenset((*DECODE, ("step", "decode")))
# For any two parameters and any value of each, at least one step has both values.
LEVELS: dict[str, tuple[Any, ...]] = {
    "kv_heads": (1, 2, 5, 9),
    "group": GROUP_SIZES,  # query heads per kv head
    "widths": ((16, 16), (64, 64), (72, 13), (16, 24)),  # Dk, Dv
    "stride": (2, 4, 8),  # d
    "compress": (1, 2, 3),  # l / d
    "select": (3, 4, 6),  # l' / d
    "blocks": ((4, 1, 2), (1, 0, 0), (5, 3, 1), (19, 1, 2), (6, 1, 3)),  # n, init, local
    "window": (1, 7, 24, 200),
    "batch": (1, 3, 8),  # at least
    "rows": (1, 2, 3, 5, 40),
    "pages": (0, 1, 3),  # blocks per page; 0: no pages
    "spare": (0, 1, 9),
    "scale": (None, 0.02, -0.1, 0.0),
    "gates": ("unit", "wide"),
    "scores": ("normal", "large"),
    "order": ("ascending", "messy"),  # of the blocks that sel receives
    "metadata": ("dense", "strided"),
}
# 48 rows have every allowed pair, with four dtypes; a test checks this.
COUNTS = {"quick": 48, "full": 192, "interpreter": 0}
# The parameters of block_attention_decode: those of quick, added in full, of the interpreter.
BLOCK_LEVELS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "kv_heads": ((1, 2, 3), (), (1, 2)),
    "group": (GROUP_SIZES, (), (OneOf((1, 2)), OneOf((3, 5)))),
    "widths": (((16, 16), (64, 64), (16, 8)), ((128, 128), (96, 64)), ((16, 16), (16, 8))),
    "select": ((16, 32, 48, 128, 512), (64, 192, 256), (16,)),
    "blocks": ((3, 1, 16, 70, 130), (256,), (3, 1)),
    "rows": ((1, 2, 3, 5), (8,), (1, 3)),
    # The pages of a contiguous cache hold two blocks, or the largest part of one that kernels take.
    "pages": (("none", "part", "two"), (), ("none", "part")),
    "starts": (("given", "default"), (), ("given", "default")),
    "index": (INDICES, (), ("int32", "int64")),
    "scale": ((None, -0.2), (0.0,), (None,)),
    "metadata": (("dense", "strided"), (), ("dense", "strided")),
}


_Job = TypeVar("_Job")


def jobs_for(
    preset: str,
    dtypes: Sequence[torch.dtype],
    seed: int,
    job: Callable[[str, Any, Any, torch.dtype], _Job],
) -> list[_Job]:
    """Return the jobs of the generated steps.

    Args:
        preset: "quick", "full" or "interpreter".
        dtypes: Dtypes of q, k and v, a parameter of the design.
        seed: Seed of the design.
        job: Creates a job from its name, check, case and dtype.
    """
    budget = ShrinkBudget()
    names = tuple(dtype_name(dtype) for dtype in dtypes)
    steps = (*draw_steps(preset, seed, names), *draw_block_steps(preset, seed, names))
    return [job_of(step, f"generated {number}", job, budget) for number, step in enumerate(steps)]


def job_of(
    step: GeneratedStep,
    name: str,
    job: Callable[[str, Any, Any, torch.dtype], _Job],
    budget: ShrinkBudget,
) -> _Job:
    """Return the job of one step, made by ``job`` as in :func:`jobs_for`."""
    case = Case(name, step.config, (sum(step.lengths),), seed=step.seed)
    of_blocks = step.form == "block_attention"
    check, calls = (CHECK, frozenset({("sel", "decode")})) if of_blocks else (NAME, CALLS)
    return job(
        check, OnGenerated(step, judge_step, budget, calls), case, getattr(torch, step.dtype)
    )


NEEDS = ("kv_heads", "group")  # the parameters that `allowed` reads
_MOST_HEADS = 90  # the queries of all tokens are drawn


def allowed(row: Row) -> bool:
    """Return whether the query heads of ``row`` are few enough, with the mean of a OneOf."""
    sizes = row["group"]
    return bool(row["kv_heads"] * sum(sizes) <= _MOST_HEADS * len(sizes))


@functools.lru_cache(maxsize=4)
def draw_steps(
    preset: str, seed: int = 0, dtypes: tuple[str, ...] = DTYPES
) -> tuple[GeneratedStep, ...]:
    """Return the generated steps of a preset, with the names ``dtypes`` as a parameter."""
    count = COUNTS[preset]
    levels, options = {"dtype": dtypes, **LEVELS}, {"allowed": allowed, "needs": NEEDS}
    rows = longer_design(levels, count, seed=seed, **options) if count else []
    return tuple(_step(row, number, seed) for number, row in enumerate(take_turns(rows, seed)))


@functools.lru_cache(maxsize=4)
def draw_block_steps(
    preset: str, seed: int = 0, dtypes: tuple[str, ...] = DTYPES
) -> tuple[GeneratedStep, ...]:
    """Return the generated steps of block_attention_decode, as :func:`draw_steps`."""
    levels = {
        name: tiny if preset == "interpreter" else (*quick, *(added * (preset == "full")))
        for name, (quick, added, tiny) in BLOCK_LEVELS.items()
    }
    rows = take_turns(covering_design({"dtype": dtypes, **levels}, seed=seed), seed)
    return tuple(_block_step(row, seed) for row in rows)


def _block_step(row: Row, seed: int) -> GeneratedStep:
    """Return the step of ``row``: one sequence is empty, and one is shorter than the step."""
    size, rows = row["select"], row["rows"]
    part = next(part for part in (256, 128, 64, 48, 32, 16) if size % part == 0)
    lengths = (2 * size + 13, size, 0, max(1, rows - 1), size + 1)
    new = tuple(min(length, rows) for length in lengths)
    if row["starts"] == "given":
        new = (new[0], max(0, new[1] - 1), 0, *new[3:])
    return GeneratedStep(
        form="block_attention",
        dtype=row["dtype"],
        block=size,
        n=row["blocks"],
        h=row["group"],
        groups=row["kv_heads"],
        dk=row["widths"][0],
        dv=row["widths"][1],
        scale=row["scale"],
        seed=seed,
        lengths=lengths,
        new=new,
        rows=rows,
        page={"none": 0, "part": part, "two": 2 * size}[row["pages"]],
        metadata=row["metadata"],
        starts=row["starts"],
        index=row["index"],
    )


_MAX_LENGTH = 256
_MOST_ROWS = 5  # of a sequence after the first


def _step(row: Row, number: int, seed: int) -> GeneratedStep:
    rng = random.Random(f"{seed} {number}")
    stride, (blocks, init, local), window = row["stride"], row["blocks"], row["window"]
    size = row["compress"] * stride
    select = max(row["select"], row["compress"]) * stride
    page = row["pages"] * select
    edges = (1, size, size + stride, select, window, (blocks + 2) * select, page or select)
    longest = min(max(edges) + 2, _MAX_LENGTH)
    # One sequence has more blocks than are selected, if that is not too long.
    lengths, new = [longest], [min(longest, row["rows"])]
    while len(lengths) < row["batch"] or sum(new) < MIN_ROWS:
        edge = rng.choice(edges) * rng.choice((1, 1, 2, 3)) + rng.choice((-1, 0, 0, 1))
        length = edge if 1 <= edge <= longest else rng.randint(1, longest)
        lengths.append(length)
        # Only the first sequence has many rows: the oracle takes 0.1 ms for a row and kv head.
        most = min(row["rows"], _MOST_ROWS)
        new.append(min(length, rng.choice((most, most, rng.randint(0, most)))))
    return GeneratedStep(
        dtype=row["dtype"],
        l=size,
        d=stride,
        block=select,
        n=blocks,
        init=init,
        local=local,
        w=window,
        h=row["group"],
        groups=row["kv_heads"],
        dk=row["widths"][0],
        dv=row["widths"][1],
        scale=row["scale"],
        seed=seed,
        lengths=tuple(lengths),
        new=tuple(new),
        rows=row["rows"],
        page=page,
        spare=row["spare"],
        gates=row["gates"],
        scores=row["scores"],
        order=row["order"],
        metadata=row["metadata"],
    )


def judge_step(combination: Combination, generated: GeneratedStep) -> list[Finding]:
    """Judge the decode forms, and the fused step if the backend has one, or block_attention_decode.

    The case of each finding is the line of the step. A refused step gives one finding with ok None;
    a kernel that raises gives a failed one.

    Raises:
        InvalidInput: The step is wrong for every backend.
        BackendUnavailable: A backend cannot run on this machine.
    """
    step, dtype = generated.step(), getattr(torch, generated.dtype)
    check, slot = (CHECK, "sel") if generated.form == "block_attention" else (NAME, "")

    def finding(quantity: str, ok: bool | None, detail: str) -> list[Finding]:
        return [Finding(check, slot, step.case.name, generated.dtype, quantity, ok, detail=detail)]

    try:
        if generated.form == "block_attention":
            return list(block_step_findings(combination, generated))
        messy = messy_blocks if generated.order == "messy" else None
        findings = list(decode_parity(combination, step, dtype, messy))
        if "step" in decode_plan(combination, step, dtype).fused:
            findings += fused_step(combination, step, dtype)
    except Unsupported as refusal:
        return finding("plan", None, " ".join(str(refusal).split()))
    except (InvalidInput, BackendUnavailable):
        raise
    except NSAError as fault:  # a kernel raised, or returned an invalid result
        return finding("run", False, str(fault))
    few = sum(generated.new) < MIN_ROWS
    return [without_bias(f) if few else f for f in _named(findings)]


def messy_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Return blocks [.., n] in descending order, -1 first, with a duplicate or a hole.

    In even rows -1 replaces the second block, in odd rows the third is named twice.
    """
    messy = blocks.flip(-1).clone()
    if messy.shape[-1] > 2:
        messy[:, ::2, :, 1] = -1
        messy[:, 1::2, :, 1] = messy[:, 1::2, :, 2]
    return messy


def _named(findings: Sequence[Finding]) -> Iterator[Finding]:
    for finding in findings:
        yield dataclasses.replace(finding, check=NAME)
