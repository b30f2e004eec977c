"""InfLLM-v2 and MoBA on block_attention, against float64 loops written from their equations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa_core.errors import InvalidInput
from nsa_models.recipes.infllm2 import infllm2_attention, infllm2_blocks
from nsa_models.recipes.moba import moba_attention, moba_blocks

HEADS, GROUPS, WIDTH, V_WIDTH = 4, 2, 8, 6


def problem(tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = [(HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, V_WIDTH)]
    return [torch.randn(2, tokens, *size, dtype=dtype, requires_grad=True) for size in sizes]


def highest(scores: dict[int, float], count: int) -> set[int]:
    return set(sorted(scores, key=lambda block: -scores[block])[:count])


def infllm2_choice(
    q: torch.Tensor,
    k: torch.Tensor,
    t: int,
    head: int,
    block_size: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    pool: int,
    stride: int,
) -> set[int]:
    """Return the blocks of one query; q is [S, Hq, D], k [N, G, D], in float64.

    MiniCPM4 (arXiv 2506.07900), section 2.2: the relevance of a block is the largest relevance of
    the semantic kernels that overlap it; heads of a group share the sum.
    """
    group = head // (HEADS // GROUPS)
    starts = [i for i in range(0, len(k), stride) if i + pool <= t + 1]
    relevance = dict.fromkeys(starts, 0.0)
    for h in range(group * HEADS // GROUPS, (group + 1) * HEADS // GROUPS):
        logits = {
            i: float(q[t, h] @ (sum(k[i + n, group] for n in range(pool)) / pool))
            / math.sqrt(WIDTH)
            for i in starts
        }
        total = sum(math.exp(x) for x in logits.values())
        for i in starts:
            relevance[i] += math.exp(logits[i]) / total
    own = t // block_size
    local = {block for block in range(own - local_blocks + 1, own + 1) if block >= 0}
    scores = {}
    for block in range(own - local_blocks + 1):
        first, last = block * block_size, (block + 1) * block_size - 1
        overlapping = [i for i in starts if i <= last and i + pool - 1 >= first]
        scores[block] = math.inf if block < init_blocks else max(relevance[i] for i in overlapping)
    return local | highest(scores, topk)


def moba_choice(
    q: torch.Tensor, k: torch.Tensor, t: int, head: int, block_size: int, topk: int
) -> set[int]:
    """Return the blocks of one query: equations 5 and 6 of arXiv 2502.13189, causal."""
    group, own = head // (HEADS // GROUPS), t // block_size
    scores = {own: math.inf}
    for block in range(own):
        rows = k[block * block_size : (block + 1) * block_size, group]
        scores[block] = float(q[t, head] @ rows.sum(0)) / block_size
    return highest(scores, topk)


def attend_to(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    choose: Callable[..., set[int]],
    block_size: int,
    first_query: int = 0,
    **sizes: int,
) -> torch.Tensor:
    """Return softmax attention of each query to the keys up to its own in its blocks."""
    outputs = []
    for b in range(q.shape[0]):
        filler = q.new_zeros(first_query, *q.shape[2:])  # t counts from the sequence's start
        queries = torch.cat([filler, q[b]])
        for t in range(first_query, len(queries)):
            for h in range(HEADS):
                blocks = choose(
                    queries.detach(), k[b].detach(), t, h, block_size=block_size, **sizes
                )
                keys = [s for s in range(t + 1) if s // block_size in blocks]
                group = h // (HEADS // GROUPS)
                weights = (k[b, keys, group] @ queries[t, h] / math.sqrt(WIDTH)).softmax(0)
                outputs.append(weights @ v[b, keys, group])
    return torch.stack(outputs).reshape(*q.shape[:3], V_WIDTH)


INFLLM2 = [
    (73, {"block_size": 8, "topk": 2, "init_blocks": 1, "local_blocks": 2, "pool": 4, "stride": 2}),
    (50, {"block_size": 4, "topk": 3, "init_blocks": 2, "local_blocks": 1, "pool": 8, "stride": 4}),
    (40, {"block_size": 6, "topk": 9, "init_blocks": 0, "local_blocks": 3, "pool": 2, "stride": 2}),
    (7, {"block_size": 4, "topk": 2, "init_blocks": 1, "local_blocks": 1, "pool": 8, "stride": 4}),
]
MOBA = [
    (73, {"block_size": 8, "topk": 3}),
    (50, {"block_size": 5, "topk": 1}),
    (40, {"block_size": 16, "topk": 9}),
    (7, {"block_size": 8, "topk": 2}),
]
CASES = [(infllm2_attention, infllm2_choice, *case) for case in INFLLM2]
CASES += [(moba_attention, moba_choice, *case) for case in MOBA]
NAMES = [f"{case[0].__name__} {case[2]}" for case in CASES]


@pytest.mark.few_cases(
    "infllm2_attention 7",
    "moba_attention 73",
    "moba_attention 50",
    "moba_attention 40",
    "moba_attention 7",
)
@pytest.mark.parametrize(("recipe", "choose", "tokens", "sizes"), CASES, ids=NAMES)
def test_outputs_and_gradients_match_the_equations(recipe, choose, tokens, sizes):
    x = problem(tokens)
    o = recipe(*x, **sizes)
    expected = attend_to(*x, choose, **sizes)
    do = torch.randn_like(o)
    assert float((o - expected).detach().abs().max()) < 1e-12
    gradients, wanted = (torch.autograd.grad(out, x, do) for out in (o, expected))
    for a, b in zip(gradients, wanted, strict=True):
        assert float((a - b).abs().max()) < 1e-12


@pytest.mark.parametrize(("recipe", "choose", "tokens", "sizes"), CASES[::4], ids=NAMES[::4])
def test_queries_inside_a_sequence_choose_the_same_blocks(recipe, choose, tokens, sizes):
    """The last rows of a sequence, as in generation with a cache."""
    q, k, v = (x.detach() for x in problem(tokens))
    whole = recipe(q, k, v, **sizes)
    last = recipe(q[:, -5:], k, v, first_query=tokens - 5, **sizes)
    assert float((last - whole[:, -5:]).abs().max()) < 1e-12
    expected = attend_to(q[:, -5:], k, v, choose, first_query=tokens - 5, **sizes)
    assert float((last - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("recipe", [infllm2_attention, moba_attention])
def test_other_scales_and_low_precision(recipe: Callable[..., Any]):
    sizes = CASES[0][3] if recipe is infllm2_attention else CASES[4][3]
    x = [t.detach() for t in problem(73)]
    expected = recipe(x[0] * 0.5, *x[1:], **sizes)
    half = recipe(*x, scale=0.5 * WIDTH**-0.5, **sizes)
    assert float((half - expected).abs().max()) < 1e-12
    low = [t.to(torch.bfloat16) for t in x]
    o = recipe(*low, **sizes)
    assert o.dtype == torch.bfloat16
    near = recipe(*(t.double() for t in low), **sizes)
    assert float((o - near).abs().max()) < 0.03


def test_long_queries_are_scored_in_parts():
    q, k, _ = (x.detach() for x in problem(700, torch.float32))
    sizes = INFLLM2[0][1]
    whole = infllm2_blocks(q, k, **sizes)
    assert whole.shape == (2, 700, GROUPS, 4)
    part = infllm2_blocks(q[:, 300:], k, first_query=300, **sizes)
    assert torch.equal(part, whole[:, 300:])


@pytest.mark.parametrize(
    ("choose", "sizes"),
    [(infllm2_blocks, sizes) for _, sizes in INFLLM2] + [(moba_blocks, sizes) for _, sizes in MOBA],
)
def test_blocks_are_distinct_and_not_in_the_future(choose: Callable[..., Any], sizes: Any):
    q, k, _ = (x.detach() for x in problem(50))
    for rows in choose(q, k, **sizes):
        for t, heads in enumerate(rows.tolist()):
            for row in heads:
                blocks = [block for block in row if block != -1]
                assert len(set(blocks)) == len(blocks)
                assert t // sizes["block_size"] in blocks
                assert all(0 <= block <= t // sizes["block_size"] for block in blocks)


@pytest.mark.parametrize("choose", [infllm2_blocks, moba_blocks])
def test_float64_scores_stay_float64(choose: Callable[..., Any]):
    """The later block wins by 1e-10, which float32 rounds away."""
    q, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.zeros(1, 64, 1, 1).double()
    k[0, 8:10], k[0, 40:42] = 1, 1 + 1e-10
    sizes = {"block_size": 8, "topk": 2, "first_query": 63}
    if choose is infllm2_blocks:
        sizes |= {"topk": 1, "init_blocks": 0, "local_blocks": 1, "pool": 2, "stride": 2}
    assert choose(q, k, **sizes).tolist() == [[[[7, 5]]]]


def test_the_sizes_of_minicpm4_are_the_default():
    """A query sees its last 32 blocks, the first, and 63 others: 6144 tokens."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 8192, 2, 8)
    blocks = infllm2_blocks(q, k, first_query=8191)
    for row in blocks.flatten(0, -2).tolist():
        assert len(set(row)) == len(row) == 96
        assert {0, *range(96, 128)} <= set(row)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q, k: infllm2_blocks(q, k, block_size=72), "multiples of stride.* block_size 72"),
        (lambda q, k: infllm2_blocks(q, k, stride=0), "stride must be .* >= 1, got 0"),
        (lambda q, k: infllm2_blocks(q, k, pool=40), "multiples of stride.* pool 40"),
        (lambda q, k: infllm2_blocks(q, k, local_blocks=0), "local_blocks must be .* >= 1, got 0"),
        (lambda q, k: moba_blocks(q, k, block_size=8, topk=0), "topk must be .* >= 1, got 0"),
        (lambda q, k: moba_blocks(q, k, block_size=0, topk=1), "block_size must be .* got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(call: Callable[..., Any], message: str):
    q, k, _ = problem(8)
    with pytest.raises(InvalidInput, match=message):
        call(q, k)


LARGE = 10**9


@pytest.mark.parametrize(
    ("sizes", "like"),
    [
        ({"block_size": LARGE}, {"block_size": 48}),
        ({"pool": LARGE}, {"pool": 48}),
        ({"topk": LARGE}, {"topk": 9}),
        ({"init_blocks": LARGE}, {"init_blocks": 9}),
        ({"local_blocks": LARGE}, {"local_blocks": 9}),
        (dict.fromkeys(("block_size", "pool", "stride"), LARGE), {"block_size": 48, "pool": 48}),
    ],
    ids="-".join,
)
def test_sizes_above_the_number_of_keys_are_those_of_all_keys(
    sizes: dict[str, int], like: dict[str, int]
):
    """They change neither the result nor the memory, which would be gigabytes."""
    common = {"block_size": 8, "topk": 2, "local_blocks": 1, "pool": 8, "stride": 4}
    q, k, v = problem(41)
    expected = infllm2_attention(q, k, v, **{**common, **like})
    assert torch.allclose(infllm2_attention(q, k, v, **{**common, **sizes}), expected)


@pytest.mark.parametrize("rows", [(0, 10), (0, 0)], ids=["no queries", "no tokens"])
@pytest.mark.parametrize("recipe", [infllm2_attention, moba_attention])
def test_without_queries_the_output_is_empty(recipe: Callable[..., Any], rows: tuple[int, int]):
    queries, keys = rows
    q, k, v = problem(10)
    o = recipe(q[:, :queries], k[:, :keys], v[:, :keys], block_size=16)
    assert o.shape == (2, 0, HEADS, V_WIDTH)
