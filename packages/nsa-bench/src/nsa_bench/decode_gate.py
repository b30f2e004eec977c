"""The correctness gate of decode: judge the steps of a combination before timing them."""

from __future__ import annotations

import dataclasses
import time

import torch

from nsa_bench.decode_workloads import DecodeCell
from nsa_bench.gate import Gate, gate_case
from nsa_bench.timing import TimeUp
from nsa_core.config import NSAConfig
from nsa_core.dtypes import dtype_name
from nsa_core.util.text import describe_error
from nsa_verify.checks.decode_fused import fused_step as judge_fused
from nsa_verify.checks.decode_parity import decode_parity
from nsa_verify.isolation.call_guard import guarded_calls
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.steps import Step


def decode_gate(
    combo: str,
    combination: Combination,
    config: NSAConfig,
    cell: DecodeCell,
    dtype: torch.dtype,
    seed: int,
) -> Gate:
    """Judge a combination's decode forms and fused step on a few small steps of the same shape."""
    started = time.perf_counter()
    case = dataclasses.replace(gate_case(config, combination.device, seed), rows=None)
    longest = case.lengths[0]
    lengths = (longest, longest - 1, longest // 2, longest // 3)
    page = cell.page_size
    step_case = dataclasses.replace(
        case, name=f"{cell.shape.name} steps at {lengths} tokens, page {page or 'none'}"
    )
    step = Step(step_case, lengths, (4,) * 4, rows=4, page_size=page)
    try:
        with guarded_calls((TimeUp,)):
            findings = [
                *decode_parity(combination, step, dtype),
                *judge_fused(combination, step, dtype),
            ]
        failures = [
            f"{finding.slot or finding.check} {finding.quantity}: {finding.detail}"
            for finding in findings
            if finding.ok is False
        ]
    except Exception as error:  # noqa: BLE001  a kernel may return anything
        failures = [describe_error(error)]
    seconds = round(time.perf_counter() - started, 3)
    return Gate(
        combo, cell.shape.name, dtype_name(dtype), not failures, step_case.name, seconds, failures
    )
