"""Both oracles on queries that begin inside a sequence: the pieces give what the whole call gives.

Contract 1.1, "Queries inside a sequence".
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import reference_selection
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle
from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.reference import attention
from truth_cases import TruthCase

SLOTS = {"cmp": ("q", "k_cmp", "v_cmp"), "sel": ("q", "k", "v", "blocks"), "win": ("q", "k", "v")}
GEOMETRY = BlockGeometry(4, 2, 6, 3, 1, 1, 5)
PACKED = TruthCase(GEOMETRY, (0, 9, 0, 3, 16, 0), True, 1, 2, 1, 3, 5, 0.35, 1)
DENSE = TruthCase(GEOMETRY, (22,), False, 2, 2, 1, 3, 5, 0.35, 2)
CASES = {"packed": PACKED, "dense": DENSE}


def rows_of(x: torch.Tensor, axis: int, first: int, end: int) -> torch.Tensor:
    return x.narrow(axis, first, end - first)


def piece(t: dict[str, torch.Tensor], case: TruthCase, first: int, end: int) -> dict[str, Any]:
    """Return the tensors of a call with the queries first .. end - 1, and 3 unused dense keys."""
    cut = {name: rows_of(t[name], -3, first, end) for name in ("q", "blocks", "do")}
    if case.packed:
        return {**t, **cut}
    compressed = case.geometry.num_compressed(min(end + 3, case.total))
    keys = {name: t[name][:, : end + 3] for name in ("k", "v")}
    return {**t, **cut, **keys, **{n: t[n][:, :compressed] for n in ("k_cmp", "v_cmp")}}


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-12)


def cuts(case: TruthCase) -> list[tuple[int, ...]]:
    """Two pieces cut at every token, three pieces, and one row."""
    total = case.total
    return [(0, cut, total) for cut in range(total + 1)] + [(0, 8, 9, total), (0, 5, 5, 11, total)]


@pytest.mark.few_cases("sel-dense")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("slot", SLOTS)
def test_pieces_of_a_call_give_the_whole_call(slot: str, case: TruthCase) -> None:
    t = case.tensors()
    sizes = (case.geometry, case.scale)
    tensors = [t[name] for name in SLOTS[slot]]
    whole = getattr(oracle, slot)(*tensors, *sizes, cu_seqlens=case.cu_seqlens, do=t["do"])
    for edges in cuts(case):
        for module in (oracle, attention):
            sums = {n: torch.zeros_like(g) for n, g in whole.grads.items() if n != "dq"}
            for first, end in itertools.pairwise(edges):
                x = piece(t, case, first, end)
                part = getattr(module, slot)(
                    *(x[name] for name in SLOTS[slot]),
                    *sizes,
                    cu_seqlens=case.cu_seqlens,
                    do=x["do"],
                    first_query=first,
                )
                assert close(part.o, rows_of(whole.o, -3, first, end)), (edges, module)
                assert close(part.lse, rows_of(whole.lse, -1, first, end)), (edges, module)
                assert close(part.grads["dq"], rows_of(whole.grads["dq"], -3, first, end))
                for name, total in sums.items():
                    grad = part.grads[name]
                    assert grad.shape == x[name[1:]].shape
                    rows_of(total, -3, 0, grad.shape[-3]).add_(grad)
            for name, total in sums.items():
                assert close(total, whole.grads[name]), (edges, module, name)


@pytest.mark.few_cases("packed")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pieces_select_what_the_whole_call_selects(case: TruthCase) -> None:
    t, sizes, call = case.tensors(), (case.geometry, case.scale), {"cu_seqlens": case.cu_seqlens}
    lse = oracle.cmp(t["q"], t["k_cmp"], t["v_cmp"], *sizes, **call).lse
    assert lse is not None
    whole = oracle.select(t["q"], t["k_cmp"], lse, *sizes, **call)
    for edges in cuts(case):
        for first, end in itertools.pairwise(edges):
            x = piece(t, case, first, end)
            arguments = (x["q"], x["k_cmp"], rows_of(lse, -1, first, end))
            expected = rows_of(whole, -3, first, end)
            for module in (oracle, reference_selection):
                blocks = module.select(*arguments, *sizes, **call, first_query=first)
                assert torch.equal(blocks, expected), (edges, module)
            verdict = judge_selection(*arguments, expected, *sizes, **call, first_query=first)
            assert verdict, verdict
            assert verdict.flip_rate == 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("slot", SLOTS)
def test_verdict_takes_the_position_from_first_query(slot: str, case: TruthCase) -> None:
    """Results of the queries at 7 pass there and nowhere else, forward and backward."""
    t, sizes = case.tensors(torch.float32), (case.geometry, case.scale)
    x, call = piece(t, case, 7, 18), {"cu_seqlens": case.cu_seqlens}
    inputs = {name: x[name] for name in SLOTS[slot]}
    truth = getattr(oracle, slot)(*inputs.values(), *sizes, **call, do=x["do"], first_query=7)
    outputs = {"o": truth.o, "lse": truth.lse, **truth.grads}
    outputs = {name: value.float() for name, value in outputs.items()}
    for first in (7, 6, 5, 0):
        verdicts = judge_slot(slot, inputs, outputs, *sizes, **call, do=x["do"], first_query=first)
        assert all(verdicts.values()) == (first == 7), (first, verdicts)


def test_queries_behind_the_last_document_are_refused() -> None:
    t = PACKED.tensors()
    arguments = (t["q"], t["k"], t["v"], GEOMETRY, 1.0)
    with pytest.raises(InvalidInput, match="need 30 rows of keys, but cu_seqlens ends at 28"):
        oracle.win(*arguments, cu_seqlens=PACKED.cu_seqlens, first_query=2)
    with pytest.raises(InvalidInput, match="first_query must be >= 0, got -1"):
        oracle.win(*arguments, cu_seqlens=PACKED.cu_seqlens, first_query=-1)
