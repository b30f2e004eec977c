"""The correctness gate: judge a combination against the float64 oracle before timing it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import torch

from nsa_bench.cells import Cell
from nsa_bench.result import Gate
from nsa_bench.shapes import Shape
from nsa_bench.timing import TimeUp
from nsa_core.config import NSAConfig
from nsa_core.plan.plan import Plan
from nsa_core.plan.registry import Registry
from nsa_core.util.text import describe_error
from nsa_verify.checks.decode_fused import fused_step
from nsa_verify.checks.decode_parity import decode_parity
from nsa_verify.checks.slots import judge_run
from nsa_verify.isolation.call_guard import guarded_calls
from nsa_verify.problems.cases import Case, spread_rows
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Findings
from nsa_verify.problems.slot_runs import run_slots
from nsa_verify.problems.steps import Step

Judge = Callable[[], list[str]]
NOT_CORRECT = "not correct: its gate failed"  # reason of a measurement without a time


def gate_case(config: NSAConfig, device: str, seed: int) -> Case:
    """Return a small case for a configuration, with at most two key/value heads.

    The group size, head widths, l, d and l' stay the same. On a GPU n and w stay the same too; on
    the CPU n = 4 blocks (or the number of always-selected blocks, if larger) and w = l' keep the
    case short. About a hundred query rows are judged, and the gradients of all key rows.
    """
    geometry = config.geometry
    n, window = geometry.num_selected_blocks, geometry.window_size
    if not device.startswith("cuda"):
        n, window = (
            min(n, max(4, geometry.init_blocks + geometry.local_blocks)),
            min(window, geometry.select_block_size),
        )
    small = dataclasses.replace(config, num_selected_blocks=n, window_size=window)
    tokens = (n + 2) * geometry.select_block_size + 1
    # Fewer rows would not do: if only one judged query sees a key, that query's whole error goes
    # into the bias of dv.
    rows = {*range(0, tokens, max(3, tokens // 96)), geometry.compress_block_size - 1, tokens - 1}
    return _case(small, tokens, tuple(sorted(rows)), groups=2, seed=seed)


def long_cases(
    registry: Registry,
    backends: Mapping[str, str],
    config: NSAConfig,
    device: str,
    seed: int,
    longest: int,
) -> list[Case]:
    """Return the case for the kernels of long calls, on a GPU; [] if there are none.

    Some backends run other kernels from a length on (SlotSpec.warmup_tokens). The case has that
    length, and one key/value head.

    Args:
        registry: The installed backends.
        backends: slot -> backend.
        config: The configuration of the calls.
        device: "cpu", "cuda" or "cuda:1".
        seed: Seed of the inputs.
        longest: Tokens of the longest call.
    """
    if not device.startswith("cuda"):
        return []
    slots = [(registry.get(name).spec, slot) for slot, name in backends.items()]
    reached = [spec.slots[slot].warmup_tokens for spec, slot in slots if spec is not None]
    tokens = min(longest, max(reached, default=0))
    small = gate_case(config, device, seed)
    if tokens <= small.tokens:
        return []
    return [_case(config, tokens, spread_rows(tokens), groups=1, seed=seed)]


def _case(config: NSAConfig, tokens: int, rows: tuple[int, ...], *, groups: int, seed: int) -> Case:
    """Return a case of at most ``groups`` kv heads whose ``rows`` are judged."""
    kv, geometry = min(groups, config.n_kv_heads), config.geometry
    heads = kv * (config.n_heads // config.n_kv_heads)
    small = dataclasses.replace(config, n_heads=heads, n_kv_heads=kv)
    blocks = f"n={geometry.num_selected_blocks} w={geometry.window_size}"
    name = f"{Shape.of(small).name} S={tokens} {blocks}, {len(rows)} rows"
    return Case(name, small, (tokens,), rows=rows, seed=seed)


def judge_plan(
    planner: Callable[[NSAConfig], Plan],
    case: Case,
    dtype: torch.dtype,
    device: str,
    gradients: bool,
) -> list[str]:
    """Plan for ``case`` and judge every slot on it; return one line per tensor that fails."""
    plan, data = planner(case.config), case.data(dtype, device)
    findings = Findings("gate", case, dtype)
    return [
        f"{slot} ({plan.choices[slot].backend}) {finding.quantity}: {finding.detail}"
        for slot, run in run_slots(plan, case, data, gradients).items()
        for finding in judge_run(findings, slot, run, data.cu_seqlens)
        if finding.ok is False
    ]


def decode_step(cell: Cell, device: str, seed: int) -> Step:
    """Return a few small steps of the shape of ``cell``."""
    case = dataclasses.replace(gate_case(cell.config, device, seed), rows=None)
    longest, page = case.lengths[0], cell.page_size
    lengths = (longest, longest - 1, longest // 2, longest // 3)
    name = f"{cell.shape} steps at {lengths} tokens, page {page or 'none'}"
    case = dataclasses.replace(case, name=name)
    return Step(case, lengths, (4,) * 4, rows=4, page_size=page)


def judge_step(combination: Combination, step: Step, dtype: torch.dtype) -> list[str]:
    """Judge a combination's decode forms and fused step; return one line per tensor that fails."""
    findings = [*decode_parity(combination, step, dtype), *fused_step(combination, step, dtype)]
    return [
        f"{finding.slot or finding.check} {finding.quantity}: {finding.detail}"
        for finding in findings
        if finding.ok is False
    ]


def failures_of(judge: Judge) -> list[str]:
    """Return what ``judge()`` returns. A kernel that raises is a failure, too."""
    try:
        with guarded_calls((TimeUp,)):
            return judge()
    except Exception as error:  # noqa: BLE001  a kernel may return anything
        return [describe_error(error)]


def gate_of(combo: str, shape: str, dtype: str, case: str, judge: Judge) -> Gate:
    """Return the verdict of ``judge()``, which returns one line per tensor that fails."""
    started = time.perf_counter()
    failures = judge()
    seconds = round(time.perf_counter() - started, 3)
    return Gate(combo, shape, dtype, not failures, case, seconds, failures)
