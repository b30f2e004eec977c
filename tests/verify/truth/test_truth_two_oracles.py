"""Two independent oracles agree to 1e-12 of the magnitude on random problems."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

import reference_selection
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle
from nsa_verify.judge.selection import judge_selection
from nsa_verify.reference import attention
from truth_cases import TruthCase, oracle_scores, truth_cases

SLOTS = {"cmp": ("q", "k_cmp", "v_cmp"), "sel": ("q", "k", "v", "blocks"), "win": ("q", "k", "v")}
PACKED_WITH_EMPTY = TruthCase(
    BlockGeometry(4, 2, 8, 4, 1, 2, 5), (0, 11, 0, 3, 20, 0), True, 1, 3, 2, 3, 5, 0.35, 1
)
ONE = TruthCase(BlockGeometry(4, 2, 8, 4, 1, 2, 5), (1,), False, 1, 7, 1, 3, 5, 1.0, 2)
run = settings(
    max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def agree(a: torch.Tensor, b: torch.Tensor, size: torch.Tensor) -> bool:
    """Compare to 1e-12 of ``size``, with infinities in the same places."""
    finite = torch.isfinite(b)
    same = torch.equal(a[~finite], b[~finite]) and a.shape == b.shape
    return same and bool(((a - b)[finite].abs() <= 1e-12 * size[finite]).all())


@pytest.mark.slow
@pytest.mark.parametrize("slot", SLOTS)
@run
@given(case=truth_cases())
@example(case=PACKED_WITH_EMPTY)
@example(case=dataclasses.replace(PACKED_WITH_EMPTY, lengths=(0, 0)))
@example(case=ONE)
@example(case=dataclasses.replace(ONE, batch=0))
@example(case=dataclasses.replace(ONE, lengths=(0,)))
def test_branch_forward_and_gradients(slot: str, case: TruthCase) -> None:
    t = case.tensors()
    args = (*(t[name] for name in SLOTS[slot]), case.geometry, case.scale)
    call = {"cu_seqlens": case.cu_seqlens, "do": t["do"]}
    a, b = getattr(oracle, slot)(*args, **call), getattr(attention, slot)(*args, **call)
    size = getattr(attention, slot)(*args, **call, arithmetic="magnitude")
    assert agree(a.o, b.o, size.o)
    assert agree(a.lse, b.lse, 1 + size.top)
    assert (
        a.grads.keys() == b.grads.keys() == {f"d{name}" for name in SLOTS[slot] if name != "blocks"}
    )
    for name in a.grads:
        assert agree(a.grads[name], b.grads[name], size.grads[name]), name
        assert a.grads[name].shape == t[name[1:]].shape


@run
@given(case=truth_cases())
def test_combine_forward_and_gradients(case: TruthCase) -> None:
    t = case.tensors()
    args = [t[name] for name in ("gates", "o_cmp", "o_sel", "o_win", "do")]
    a, b, size = (
        oracle.combine(*args),
        attention.combine(*args),
        attention.combine(*args, arithmetic="magnitude"),
    )
    assert agree(a.o, b.o, size.o)
    assert set(a.grads) == {"dgates", "do_cmp", "do_sel", "do_win"}
    for name in a.grads:
        assert agree(a.grads[name], b.grads[name], size.grads[name]), name


@pytest.mark.slow
@run
@given(case=truth_cases())
@example(case=PACKED_WITH_EMPTY)
@example(case=dataclasses.replace(PACKED_WITH_EMPTY, geometry=BlockGeometry(6, 2, 6, 1, 0, 0, 5)))
@example(case=dataclasses.replace(ONE, lengths=(45,), scale=0.0))
def test_scores_and_selection(case: TruthCase) -> None:
    t, call = case.tensors(), {"cu_seqlens": case.cu_seqlens}
    lse = oracle.cmp(t["q"], t["k_cmp"], t["v_cmp"], case.geometry, case.scale, **call).lse
    assert lse is not None
    args = (t["q"], t["k_cmp"], lse, case.geometry, case.scale)
    scores, reference = oracle_scores(*args, **call), reference_selection.scores(*args, **call)
    bounds = [0, *itertools.accumulate(case.lengths)]
    spans = [scores[a:b] for a, b in itertools.pairwise(bounds)] if case.packed else list(scores)
    for span, expected in zip(spans, reference, strict=True):
        assert agree(span[..., : expected.shape[-1]], expected, expected)
        assert not span[..., expected.shape[-1] :].any()
        assert torch.equal(
            reference_selection.choose(span[..., : expected.shape[-1]], case.geometry),
            choice(span, case),
        )
    blocks = oracle.select(*args, **call)
    verdict = judge_selection(*args[:3], blocks, case.geometry, case.scale, **call)
    assert verdict, verdict
    assert verdict.flip_rate == 0
    if case.scale:  # if all scores are equal, the matrix product of the reference may break ties
        assert torch.equal(reference_selection.select(*args, **call), blocks)


def choice(scores: torch.Tensor, case: TruthCase) -> torch.Tensor:
    """Select blocks with the oracle from scores [S, G, NB]."""
    out = torch.full((*scores.shape[:2], case.geometry.num_selected_blocks), -1, dtype=torch.int32)
    blocks = -(-len(scores) // case.geometry.select_block_size)
    for t, g in itertools.product(range(len(scores)), range(scores.shape[1])):
        selected = oracle.choose(scores[t, g, :blocks].tolist(), t, case.geometry)
        out[t, g, : len(selected)] = torch.tensor(selected, dtype=torch.int32)
    return out


def test_sampled_rows_equal_the_full_result_with_do_masked() -> None:
    case = dataclasses.replace(PACKED_WITH_EMPTY, lengths=(9, 0, 25))
    t, rows = case.tensors(), [0, 8, 9, 20, 33]
    sampled = torch.zeros(34, dtype=torch.bool)
    sampled[rows] = True
    masked_do = t["do"] * sampled[:, None, None]
    for slot, names in SLOTS.items():
        args = (*(t[name] for name in names), case.geometry, case.scale)
        full = getattr(oracle, slot)(*args, cu_seqlens=case.cu_seqlens, do=masked_do)
        for module in (oracle, attention):
            part = getattr(module, slot)(*args, cu_seqlens=case.cu_seqlens, do=t["do"], rows=rows)
            assert torch.allclose(part.o[sampled], full.o[sampled], rtol=0, atol=1e-14)
            assert torch.allclose(part.lse[:, sampled], full.lse[:, sampled], rtol=0, atol=1e-14)
            assert not part.o[~sampled].any()
            assert not part.lse[:, ~sampled].any()
            for name in full.grads:
                assert torch.allclose(part.grads[name], full.grads[name], rtol=0, atol=1e-13), (
                    slot,
                    name,
                )


def test_rows_out_of_range_are_refused() -> None:
    t = ONE.tensors()
    with pytest.raises(ValueError, match=r"rows must lie in \[0, 1\), got 1 .. 1"):
        oracle.win(t["q"], t["k"], t["v"], ONE.geometry, 1.0, rows=[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_arithmetic_rounds_only_p_ds_and_results(dtype: torch.dtype) -> None:
    case = TruthCase(BlockGeometry(4, 2, 8, 4, 1, 2, 40), (32,), False, 1, 1, 1, 8, 8, 0.5, 4)
    t = case.tensors(dtype)
    actual = attention.win(
        t["q"], t["k"], t["v"], case.geometry, 0.5, do=t["do"], arithmetic="rounded", dtype=dtype
    )

    def r(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).float()

    q, k, v, do = (t[name][0, :, 0].float() for name in ("q", "k", "v", "do"))
    s = (q @ k.T * 0.5).masked_fill(torch.ones(32, 32).triu(1).bool(), -torch.inf)
    e = (s - s.amax(-1, keepdim=True)).exp()
    p = e / e.sum(-1, keepdim=True)
    o = r(r(e) @ v / e.sum(-1, keepdim=True))
    ds = r(p * (do @ v.T - (do * o).sum(-1, keepdim=True)))
    expected = {"dq": r(0.5 * (ds @ k)), "dk": r(0.5 * (ds.T @ q)), "dv": r(r(p).T @ do)}
    assert torch.equal(actual.o[0, :, 0], o)
    assert actual.lse is not None
    assert torch.allclose(actual.lse[0, 0], s.logsumexp(-1), rtol=1e-6, atol=0)
    assert not torch.equal(actual.lse, r(actual.lse))
    for name, grad in expected.items():
        assert torch.equal(actual.grads[name][0, :, 0], grad), name
    gates = attention.combine(
        t["gates"], t["o_cmp"], t["o_sel"], t["o_win"], t["do"], arithmetic="rounded", dtype=dtype
    )
    g, branches = t["gates"], [t[f"o_{name}"].float() for name in ("cmp", "sel", "win")]
    assert torch.allclose(
        gates.o, r(sum(g[..., c, None] * x for c, x in enumerate(branches))), rtol=1e-2, atol=1e-5
    )
    assert torch.equal(gates.o, r(gates.o))
    assert torch.equal(gates.grads["do_sel"], r(g[..., 1, None] * t["do"].float()))
    assert not torch.equal(gates.grads["dgates"], r(gates.grads["dgates"]))
