"""divided_block_attention on several processes computes block_attention on one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from block_cases import BLOCK, block_problem
from nsa_core import InvalidInput, block_attention
from nsa_core.parallel import Shards, divided_block_attention
from parallel_cases import FORMS
from rank_processes import run_on_ranks

LIMIT = 1e-13  # relative, in float64
FORM_LAYOUTS = list(itertools.product(FORMS, ("contiguous", "head_tail")))
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("divided_blocks", {"form": f, "layout": layout}) for f, layout in FORM_LAYOUTS),
    ("divided_blocks", {"form": "packed", "layout": "head_tail", "wrap": "checkpoint"}),
]
REFUSALS = {
    "whole rows": "InvalidInput: q, k, v and blocks must have the 56 rows of this rank, got 112:"
    " pass shards.take(x, -3)",
    "no shards": "InvalidInput: shards must be Shards, got NoneType",
    "a plan for whole sequences": "InvalidInput: plan was resolved without partial=True, but q",
    "the documents of one rank": "InvalidInput: cu_seqlens must end at the 112 tokens given, got",
    "a transform": "Unsupported: a call that is divided over ranks is not supported under torch.fu",
    "other ranks": "InvalidInput: group must have the 4 ranks of these shards, got 2: pass the",
}


def assert_equal_to_one_process(case: Any, results: list[Any]) -> None:
    """Assert that the errors of every rank are below the limit."""
    for errors in results:
        assert isinstance(errors, dict), (case, errors)
        assert max(errors.values()) <= LIMIT, (case, errors)


@pytest.mark.slow
def test_two_processes_compute_the_blocks_of_one() -> None:
    refusals = [("block_refusal", {"of": of}) for of in REFUSALS]
    outcomes = run_on_ranks(2, [*CASES, *refusals])
    for case, results in zip(CASES, outcomes):
        assert_equal_to_one_process(case, results)
    for of, results in zip(REFUSALS, outcomes[len(CASES) :]):
        for text in results:
            assert text.startswith(REFUSALS[of]), text


@pytest.mark.slow
def test_a_compiled_call_computes_the_blocks_of_one() -> None:
    cases = [
        ("divided_blocks", {"form": form, "layout": "head_tail", "wrap": "compile"})
        for form in ("packed", "batch")
    ]
    for case, results in zip(cases, run_on_ranks(2, cases)):
        assert_equal_to_one_process(case, results)


@pytest.mark.slow
def test_four_processes_compute_the_blocks_of_one() -> None:
    for case, results in zip(CASES, run_on_ranks(4, CASES)):
        assert_equal_to_one_process(case, results)


def test_one_rank_needs_no_process_group() -> None:
    case = block_problem("packed")
    tensors, options = case[:4], {"block_size": BLOCK, "cu_seqlens": case.cu_seqlens}
    o = divided_block_attention(*tensors, Shards(112, 1, 0), **options)
    assert torch.equal(o, block_attention(*tensors, **options))
    with pytest.raises(InvalidInput, match="block_size must be an integer >= 1, got 0"):
        divided_block_attention(*tensors, Shards(112, 1, 0), block_size=0)
