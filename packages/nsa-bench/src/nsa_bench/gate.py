"""Correctness first: a combination is judged against the oracle on a case of its shape class before
it is timed.
"""

from __future__ import annotations

import dataclasses
import time

import torch

from nsa_bench.shapes import Shape
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS
from nsa_core.dispatch.plan import Plan
from nsa_core.dtypes import dtype_name
from nsa_core.errors import NSAError
from nsa_core.util.text import describe_error
from nsa_verify.cases import Case
from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.slot_runs import SlotRun, masked_do, run_slot, slot_inputs

NOT_CORRECT = "not correct: its gate failed"  # why there is no figure


@dataclasses.dataclass(frozen=True)
class Gate:
    """Whether a combination may be timed. ``failures``: a line per tensor that is not within its
    budget.
    """

    combo: str
    shape: str
    dtype: str
    ok: bool
    case: str
    seconds: float
    failures: list[str]


def gate_case(config: NSAConfig, device: str, seed: int) -> Case:
    """A small case of the class: the same group size, head widths and l, d, l'; at most two
    key/value heads.

    On a GPU also the same n and w; on the CPU n = 4 blocks (or those forced) and w = l', so that it
    stays short. About a hundred query rows are judged, every key row's gradient with them.
    """
    kv, geometry = min(2, config.n_kv_heads), config.geometry
    n, window = geometry.num_selected_blocks, geometry.window_size
    if not device.startswith("cuda"):
        n, window = (
            min(n, max(4, geometry.init_blocks + geometry.local_blocks)),
            min(window, geometry.select_block_size),
        )
    heads = kv * (config.n_heads // config.n_kv_heads)
    small = dataclasses.replace(
        config, n_heads=heads, n_kv_heads=kv, num_selected_blocks=n, window_size=window
    )
    block = geometry.select_block_size
    length = (n + 2) * block + 1
    # Not fewer: a key that one judged query alone sees carries that query's error whole into dv's
    # bias.
    rows = {*range(0, length, max(3, length // 96)), geometry.compress_block_size - 1, length - 1}
    name = f"{Shape.of(small).name} S={length} n={n} w={window}, {len(rows)} rows"
    return Case(name, small, (length,), rows=tuple(sorted(rows)), seed=seed)


def judge_plan(
    plan: Plan, case: Case, dtype: torch.dtype, device: str, gradients: bool
) -> list[str]:
    """What is wrong with the plan's slots on ``case``, a line per tensor; empty: nothing."""
    data = case.data(dtype, device)
    geometry, scale = case.config.geometry, case.config.softmax_scale
    do = masked_do(case, data.do) if gradients else None
    runs: dict[str, SlotRun] = {}
    wrong = []
    for slot in SLOTS:
        runs[slot] = run = run_slot(
            plan, slot, slot_inputs(slot, data, runs), None if slot == "select" else do, data
        )
        who = f"{slot} ({plan.choices[slot].backend})"
        if slot == "select":
            choice = judge_selection(
                **run.inputs,
                blocks=run.outputs["blocks"],
                geometry=geometry,
                scale=scale,
                rows=case.rows,
            )
            wrong += [] if choice.ok else [f"{who} blocks: {choice.why}"]
            continue
        verdicts = judge_slot(
            slot, run.inputs, run.outputs, geometry, scale, do=run.do, rows=case.rows
        )
        wrong += [
            f"{who} {name}: {verdict.why}" for name, verdict in verdicts.items() if not verdict.ok
        ]
    return wrong


def pass_gate(
    combo: str, plan: Plan, case: Case, dtype: torch.dtype, device: str, gradients: bool, shape: str
) -> Gate:
    """Judge a combination; ``plan`` is for ``case.config``. A kernel that raises has failed."""
    started = time.perf_counter()
    try:
        wrong = judge_plan(plan, case, dtype, device, gradients)
    except (NSAError, RuntimeError) as error:
        wrong = [describe_error(error)]
    seconds = round(time.perf_counter() - started, 3)
    name = dtype_name(dtype)
    return Gate(combo, shape, name, not wrong, case.name, seconds, wrong)
