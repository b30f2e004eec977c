"""Generated decode steps: sizes from a covering design, lengths around every boundary."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import torch

from nsa_core.errors import NSAError, Unsupported
from nsa_verify.cases import Case, config_of
from nsa_verify.checks.calls import DECODE, may_call
from nsa_verify.checks.decode_fused import step_parity
from nsa_verify.checks.decode_parity import Step, decode_parity, decode_plan
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding
from nsa_verify.generated.design import Row, longer_design

NAME = "generated steps"
# For any two parameters and any value of each, at least one step has both values.
LEVELS: dict[str, tuple[Any, ...]] = {
    "kv_heads": (1, 2, 5, 9),
    "group": (1, 2, 3, 16),  # query heads per kv head
    "widths": ((16, 16), (64, 64), (72, 13), (16, 24)),  # Dk, Dv
    "stride": (2, 4, 8),  # d
    "compress": (1, 2, 3),  # l / d
    "select": (3, 4, 6),  # l' / d
    "blocks": ((4, 1, 2), (1, 0, 0), (5, 3, 1), (19, 1, 2)),  # n, init, local
    "window": (1, 7, 24, 200),
    "batch": (1, 3, 7),  # at least
    "rows": (1, 2, 3, 5),
    "pages": (0, 1, 3),  # blocks per page; 0: no pages
    "spare_ring": (0, 1, 9),
    "scale": (None, 0.02, -0.1, 0.0),
    "wide_gates": (False, True),
    "sharpness": (1.0, 100.0),  # factor on q
}
# 32 rows have every pair; a test checks this.
COUNTS = {"quick": 32, "full": 128, "interpreter": 0}


@functools.lru_cache(maxsize=4)
def draw_steps(preset: str, seed: int = 0) -> tuple[Step, ...]:
    """Return the generated steps of a preset; they depend on ``seed`` alone."""
    count = COUNTS[preset]
    rows = longer_design(LEVELS, count, seed=seed) if count else []
    return tuple(_step(row, number, seed) for number, row in enumerate(rows))


# The bias rule needs several rows: the error of one row is biased towards its largest weight.
_MIN_ROWS = 12
_MAX_LENGTH = 256


def _step(row: Row, number: int, seed: int) -> Step:
    rng = random.Random(f"{seed} {number}")
    stride, (blocks, init, local) = row["stride"], row["blocks"]
    size = row["compress"] * stride
    select = max(row["select"], row["compress"]) * stride
    qk_dim, v_dim = row["widths"]
    config = dataclasses.replace(
        config_of(
            row["kv_heads"] * row["group"],
            row["kv_heads"],
            qk_dim,
            v_dim,
            (size, stride, select, max(blocks, 3), row["window"]),
        ),
        num_selected_blocks=blocks,
        init_blocks=init,
        local_blocks=local,
        scale=row["scale"],
    )
    page = row["pages"] * select
    edges = (1, size, size + stride, select, row["window"], (blocks + 2) * select, page or select)
    longest = min(max(edges) + 2, _MAX_LENGTH)
    # One sequence has more blocks than are selected, if that is not too long.
    lengths, new = [longest], [min(longest, row["rows"])]
    while len(lengths) < row["batch"] or sum(new) < _MIN_ROWS:
        edge = rng.choice(edges) * rng.choice((1, 1, 2, 3)) + rng.choice((-1, 0, 0, 1))
        length = edge if 1 <= edge <= longest else rng.randint(1, longest)
        lengths.append(length)
        new.append(min(length, rng.choice((row["rows"], row["rows"], rng.randint(0, row["rows"])))))
    case = Case(f"generated {number}", config, (), sharpness=row["sharpness"], seed=seed)
    return Step(
        case,
        tuple(lengths),
        tuple(new),
        row["rows"],
        page or None,
        row["spare_ring"],
        row["wide_gates"],
    )


@may_call(*DECODE, ("step", "decode"))
def parity(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Judge the decode forms, and the fused step if the backend has one; describe failures."""
    try:
        findings = list(decode_parity(combination, step, dtype))
        if "step" in decode_plan(combination, step, dtype).fused:
            findings += step_parity(combination, step, dtype)
    except NSAError as error:
        if isinstance(error, (Unsupported, RuntimeError, ValueError)):
            raise
        raise NSAError(f"{error}; {describe(step)}") from error
    for finding in findings:
        detail = finding.detail
        if finding.ok is False:
            detail += f"; {describe(step)}"
        yield dataclasses.replace(finding, check=NAME, detail=detail)


def describe(step: Step) -> str:
    """Describe a generated step, for a failure."""
    config = step.case.config
    geometry = config.geometry
    return (
        f"{step.case.name} of --seed {step.case.seed}: Hq={config.n_heads} G={config.n_kv_heads}"
        f" Dk={config.qk_dim} Dv={config.v_dim} l={geometry.compress_block_size}"
        f" d={geometry.compress_stride} l'={geometry.select_block_size}"
        f" n={geometry.num_selected_blocks} init={geometry.init_blocks}"
        f" local={geometry.local_blocks} w={geometry.window_size} scale={config.scale}"
        f" lengths={list(step.lengths)} new={list(step.new)} page={step.page_size}"
    )
