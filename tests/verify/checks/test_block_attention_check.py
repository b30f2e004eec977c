"""The check of block_attention passes correct kernels, and fails faulty kernels and splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import toy_blocks
from nsa_core.layer import block_attention as core
from nsa_verify.checks import block_attention
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding
from nsa_verify.run import suite

KERNELS = sorted(name for name in vars(toy_blocks) if name.startswith(("forward_", "backward_")))


def findings(
    combination: Combination, preset: str = "quick", dtype: torch.dtype = torch.float32
) -> list[Finding]:
    jobs = block_attention.jobs_for(preset, [dtype], 3, suite.Job)
    return [finding for job in jobs for finding in job.run(combination)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "preset", ["interpreter", *(pytest.param(p, marks=pytest.mark.slow) for p in ("quick", "full"))]
)
def test_correct_kernels_pass(preset: str, dtype: torch.dtype) -> None:
    results = findings(toy_blocks.subject(), preset, dtype)
    assert len(results) == 5 * len(block_attention.CALLS[preset])
    assert all(finding.ok for finding in results), [f for f in results if not f.ok]


@pytest.mark.parametrize(
    "kernel",
    [
        *KERNELS[::4],
        *(pytest.param(k, marks=pytest.mark.slow) for k in KERNELS if k not in KERNELS[::4]),
    ],
)
def test_a_faulty_kernel_fails(kernel: str) -> None:
    direction = kernel.partition("_")[0]
    results = findings(toy_blocks.subject(**{direction: kernel}))
    failed = {finding.quantity for finding in results if finding.ok is False}
    assert failed, kernel
    if direction == "backward":
        assert failed <= {"dq", "dk", "dv"}


def _unsplit(blocks: torch.Tensor, parts: int) -> torch.Tensor:
    return blocks.long().repeat_interleave(parts, -1)


def _first_parts(blocks: torch.Tensor, parts: int) -> torch.Tensor:
    return torch.where(blocks.long() < 2**30, blocks.long() * parts, -1)


def _wrapping(blocks: torch.Tensor, parts: int) -> torch.Tensor:
    return split(blocks.long().to(torch.int8), parts)


split = core.split_blocks


@pytest.mark.parametrize("faulty_split", [_unsplit, _first_parts, _wrapping])
def test_a_faulty_split_fails(
    faulty_split: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "split_blocks", faulty_split)
    assert False in [finding.ok for finding in findings(toy_blocks.subject())]


def test_a_backend_without_partial_is_judged_on_whole_sequences_alone() -> None:
    results = findings(toy_blocks.subject(partial=False))
    refused = [finding for finding in results if finding.ok is None]
    inside = [call for call in block_attention.CALLS["quick"] if call.rows]
    assert [finding.case for finding in refused] == [call.name for call in inside]
    assert all(finding.ok for finding in results if finding.ok is not None)


@pytest.mark.parametrize(
    "preset", ["interpreter", *(pytest.param(p, marks=pytest.mark.slow) for p in ("quick", "full"))]
)
def test_the_jobs_of_a_preset_have_the_check(preset: str) -> None:
    jobs = suite.jobs(preset, [torch.float32], text=None, phase="prefill", cases_per_slot=0)
    names = [job.case.name for job in jobs if job.name == block_attention.CHECK]
    assert names == [call.name for call in block_attention.CALLS[preset]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "preset", ["interpreter", "quick", pytest.param("full", marks=pytest.mark.slow)]
)
def test_twelve_queries_of_each_head_see_a_key(preset: str, seed: int) -> None:
    for call in block_attention.CALLS[preset]:
        first, last = call.rows or (0, sum(call.lengths))
        batch = (call.batch,) if call.batch else ()
        blocks = call.blocks((*batch, last - first), seed + 1).long()
        tokens = torch.cat([torch.arange(length) for length in call.lengths])[first:last]
        sees = ((blocks >= 0) & (blocks * call.size <= tokens[:, None, None])).any(-1)
        assert sees.sum(-2).min() >= 12, call.name
