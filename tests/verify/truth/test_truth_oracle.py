"""The oracle equals explicit formulas and torch.autograd."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import pathlib

import pytest
import torch

import reference_selection
from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle
from truth_cases import TINY, normal, oracle_scores

CONFIG = NSAConfig(12, 4, 2, 6, 3, *dataclasses.astuple(TINY)[:4], window_size=5)


def test_oracle_imports_nothing_that_it_judges() -> None:
    allowed = {"nsa_core.errors", "nsa_core.layout", "nsa_core.config", "torch"}
    for path in pathlib.Path(oracle.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                inside = name.startswith("nsa_verify.oracle") or not name.startswith(
                    ("nsa", "torch.")
                )
                assert inside or name in allowed, (path.name, name)


def test_oracle_uses_no_helper_of_the_geometry() -> None:
    methods = {n for n in vars(BlockGeometry) if not n.startswith("_")} - set(
        BlockGeometry.__dataclass_fields__
    )
    for path in pathlib.Path(oracle.__file__).parent.glob("*.py"):
        used = {
            n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
        }
        assert not used & methods, (path.name, used & methods)


def masked_softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute attention of one head, differentiable; rows without a visible key are 0."""
    s = (q @ k.T * scale).masked_fill(~seen, -math.inf)
    return torch.where(seen.any(-1, keepdim=True), s.softmax(-1).nan_to_num(0.0) @ v, 0.0)


@pytest.mark.parametrize("slot", ["cmp", "sel", "win"])
def test_gradients_equal_autograd(slot: str) -> None:
    S, h = 11, 2
    keys = 4 if slot == "cmp" else S
    q, k, v, do = (
        normal(1, S, h, 3),
        normal(1, keys, 1, 3, seed=1),
        normal(1, keys, 1, 2, seed=2),
        normal(1, S, h, 2),
    )
    blocks = (
        torch.tensor([[0, 0], [1, -1], [9, 0]], dtype=torch.int32).repeat(4, 1)[:S].view(1, S, 1, 2)
    )
    t, j = torch.arange(S)[:, None], torch.arange(keys)[None]
    member = ((j[..., None] // 8) == blocks[0, :, 0][:, None]).any(-1)
    seen = {"cmp": j * 2 + 3 <= t, "sel": (j <= t) & member, "win": (j <= t) & (t - j < 5)}[slot]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = torch.stack(
        [
            masked_softmax(leaves[0][0, :, i], leaves[1][0, :, 0], leaves[2][0, :, 0], seen, 0.7)
            for i in (0, 1)
        ],
        1,
    )
    expected = torch.autograd.grad(o, leaves, do[0])
    args = (q, k, v, blocks) if slot == "sel" else (q, k, v)
    truth = getattr(oracle, slot)(*args, TINY, 0.7, do=do)
    assert torch.allclose(truth.o[0], o, rtol=0, atol=1e-14)
    for actual, grad in zip(truth.grads.values(), expected, strict=True):
        assert torch.allclose(actual, grad, rtol=0, atol=1e-13)


def test_row_4_rows_without_a_visible_token_are_exactly_zero() -> None:
    q, k, v = normal(1, 3, 2, 4), normal(1, 0, 1, 4), normal(1, 0, 1, 4)
    truth = oracle.cmp(q, k, v, TINY, 0.5, do=torch.ones(1, 3, 2, 4))
    assert not truth.o.any()
    assert bool((truth.lse == -math.inf).all())
    assert not truth.grads["dq"].any()


def test_row_5_a_compressed_token_is_visible_from_its_last_token_on() -> None:
    q, k, v = normal(1, 7, 1, 4), normal(1, 2, 1, 4), normal(1, 2, 1, 1)
    o = oracle.cmp(q, k, v, TINY, 0.5).o[0, :, 0, 0]
    assert not o[:3].any()
    assert torch.equal(o[3:5], v[0, 0, 0].expand(2))
    assert bool((o[5:] != v[0, 0, 0]).all())


def eq9(p: list[float], j: int, geometry: BlockGeometry, first: int) -> float:
    """Compute Eq. 9 as printed, with indices that start at ``first``.

    p_slc[j] = sum over m and n of p_cmp[(l'/d) j - m - n].
    """
    ratio = geometry.select_block_size // geometry.compress_stride
    total = 0.0
    for m, n in itertools.product(
        range(ratio), range(geometry.compress_block_size // geometry.compress_stride)
    ):
        i = ratio * (j + first) - m - n - first
        total += p[i] if 0 <= i < len(p) else 0.0
    return total


@pytest.mark.parametrize(
    "sizes", [(32, 16, 64), (4, 2, 8), (4, 4, 8), (6, 2, 6), (3, 1, 7), (8, 4, 16)]
)
def test_eq9_is_the_token_overlap_only_with_1_based_indices(
    sizes: tuple[int, int, int],
) -> None:
    geometry = BlockGeometry(*sizes, 4, 0, 0, 8)
    S = 5 * sizes[2]
    n_c = (S - sizes[0]) // sizes[1] + 1
    q, k = normal(1, S, 1, 2), normal(1, n_c, 1, 2, seed=1)
    lse = oracle.cmp(q, k, k, geometry, 1.0).lse
    assert lse is not None
    score = oracle_scores(q, k, lse, geometry, 1.0)[0, -1, 0]
    p = (k[0, :, 0] @ q[0, -1, 0] - lse[0, 0, -1]).exp().tolist()
    from_one = torch.tensor([eq9(p, j, geometry, 1) for j in range(5)], dtype=torch.float64)
    from_zero = torch.tensor([eq9(p, j, geometry, 0) for j in range(5)], dtype=torch.float64)
    assert torch.allclose(score, from_one, rtol=0, atol=1e-14)
    assert not torch.allclose(score, from_zero, rtol=0, atol=1e-2)


def test_eq9_with_0_based_indices_selects_another_block() -> None:
    geometry = BlockGeometry(32, 16, 64, 1, 0, 0, 8)
    q = torch.ones(1, 320, 1, 1)
    k = torch.zeros(1, 19, 1, 1)
    k[0, 9] = 5.0  # tokens 144 .. 175, inside selection block 2 = tokens 128 .. 191
    lse = oracle.cmp(q, k, k, geometry, 1.0).lse
    assert lse is not None
    assert oracle.select(q, k, lse, geometry, 1.0)[0, -1, 0].tolist() == [2]
    p = (k[0, :, 0, 0].double() - lse[0, 0, -1]).exp().tolist()
    assert max(range(5), key=lambda j: eq9(p, j, geometry, 1)) == 2
    assert max(range(5), key=lambda j: eq9(p, j, geometry, 0)) == 3


@pytest.mark.parametrize(
    ("score", "t", "expected"),
    [
        ([0.0] * 6, 47, [0, 1, 4, 5]),  # row 39: equal scores go to the lower index
        ([0, 1, 9, 2, 0, 0], 47, [0, 2, 4, 5]),
        ([0, math.nan, 0, 0, 0, 0], 47, [0, 2, 4, 5]),  # NaN ranks last
        ([math.nan] * 6, 47, [0, 1, 4, 5]),
        ([5, 5, 5, 5, 5, 5], 9, [0, 1]),  # a block that is both initial and local counts once
        ([0, 0, 1, 5, 9, 9], 24, [0, 1, 2, 3]),  # future blocks are not candidates
        ([1.0], 0, [0]),
    ],
)
def test_row_39_equal_scores_and_nan(score: list[float], t: int, expected: list[int]) -> None:
    assert oracle.choose(score, t, TINY) == expected
    scores = torch.tensor(score, dtype=torch.float64).expand(t + 1, 1, -1)
    assert [
        j for j in reference_selection.choose(scores, TINY)[t, 0].tolist() if j >= 0
    ] == expected


def test_block_that_is_initial_and_local_frees_a_place_for_the_next_score() -> None:
    geometry = dataclasses.replace(TINY, init_blocks=2, num_selected_blocks=4)
    assert oracle.choose([0, 0, 1, 9], 23, geometry) == [0, 1, 2]
    assert oracle.choose([0, 0, 1, 9, 0, 0], 47, geometry) == [0, 1, 4, 5]
    assert oracle.choose([0, 0, 0, 5], 31, dataclasses.replace(geometry, local_blocks=1)) == [
        0,
        1,
        2,
        3,
    ]


def test_row_48_oversized_call_is_refused_with_its_bytes_and_the_rows_option() -> None:
    S, geometry = 131072, BlockGeometry()
    q = torch.zeros(1, 1, 12, 64).expand(1, S, 12, 64)
    k = torch.zeros(1, 1, 2, 64).expand(1, S, 2, 64)
    k_cmp = k[:, : S // 16 - 1]
    size = S * S * 12 * 8
    with pytest.raises(InvalidInput, match=rf"{size} bytes .* sampled rows .*rows=") as error:
        oracle.win(q, k, k, geometry, 0.125)
    assert str(131072) in str(error.value)
    blocks = torch.zeros(1, 1, 2, 16, dtype=torch.int32).expand(1, S, 2, 16)
    lse = torch.zeros(1, 12, S)
    for call in (
        lambda rows: oracle.cmp(q, k_cmp, k_cmp, geometry, 0.125, rows=rows),
        lambda rows: oracle.sel(q, k, k, blocks, geometry, 0.125, rows=rows),
        lambda rows: oracle.select(q, k_cmp, lse, geometry, 0.125, rows=rows),
    ):
        with pytest.raises(InvalidInput, match=r"\d{9,} bytes .* sampled rows"):
            call(None)


def test_row_48_sampled_rows_are_evaluated() -> None:
    S, geometry, rows = 131072, BlockGeometry(), [0, 31, 131071]
    q = torch.ones(1, 1, 1, 1).expand(1, S, 1, 1)
    v = torch.arange(S, dtype=torch.float32).view(1, S, 1, 1)
    o = oracle.win(q, torch.zeros(1, S, 1, 1), v, geometry, 1.0, rows=rows).o[0, :, 0, 0]
    assert o[rows].tolist() == pytest.approx([0, 15.5, 131071 - 255.5])
    assert o.count_nonzero() == 2
