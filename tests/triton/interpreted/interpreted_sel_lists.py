"""The pairs sorted by block against a plain loop, dense and packed, for arbitrary blocks."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from interpreted_sel_forward import problem, tuned
from launches import filled
from nsa_backend_triton import probe
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel import backward as sel_backward
from nsa_backend_triton.sel import forward as sel_forward
from nsa_backend_triton.sel import pair_bits, pair_lists
from nsa_core.layout import BlockGeometry

GEOMETRY = BlockGeometry(4, 2, 8, 6, 1, 2, 8)  # l' = 8, n = 6


@pytest.fixture(params=["bits", "sort"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Short sequences count bits and long ones sort; every test runs both."""
    if request.param == "sort":
        monkeypatch.setattr(pair_bits, "MAX_WORDS_PER_PAIR", 0)
    return str(request.param)


def _any_blocks(rows: int, groups: int, n: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks as a caller may pass them: unsorted, repeated, negative, future and too large."""
    draw = random.Random(seed)
    values = [draw.choice([-1, -7, 2**30, *range(12)]) for _ in range(rows * groups * n)]
    blocks = torch.tensor(values, dtype=dtype).view(rows, groups, n)
    if dtype == torch.int64:
        blocks[0] += 2**32  # their low 32 bits look like valid blocks
    return blocks


def _expected_pairs(
    blocks: torch.Tensor, lengths: list[int], groups: int, packed: bool
) -> list[list[tuple[int, int]]]:
    size = GEOMETRY.select_block_size
    total, per_head = sum(lengths), 0
    bases = []  # first bucket of (sequence, head)
    if packed:
        per_head = total // size + len(lengths)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        bases = [
            [g * per_head + a // size + i for g in range(groups)] for i, a in enumerate(starts)
        ]
        count = groups * per_head
    else:
        per_head = -(-lengths[0] // size)
        bases = [[(i * groups + g) * per_head for g in range(groups)] for i in range(len(lengths))]
        count = groups * per_head * len(lengths)
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    row = 0
    for i, length in enumerate(lengths):
        for t in range(length):
            for g in range(groups):
                selected = blocks[row, g].tolist()
                for choice, block in enumerate(selected):
                    if 0 <= block <= t // size and block not in selected[:choice]:
                        pairs[bases[i][g] + block].append((t, choice))
            row += 1
    return pairs


def _pairs(lists: pair_lists.PairLists) -> list[list[tuple[int, int]]]:
    """(token, choice) of the pairs of each bucket; each pair that counts has its own place."""
    n, end = lists.places.shape[-1], int(lists.offsets[-1])
    places = lists.places.flatten()
    counts = (places >= 0).nonzero().flatten()
    assert sorted(places[counts].tolist()) == list(range(end))
    assert set(places[places < 0].tolist()) <= {-1}
    choices = counts[places[counts].argsort()] % n
    pairs = list(zip(lists.tokens[:end].tolist(), choices.tolist()))
    return [pairs[a:b] for a, b in itertools.pairwise(lists.offsets.tolist())]


@pytest.mark.few_cases
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("packed", "lengths"), [(False, [1]), (False, [61, 61]), (True, [0, 13, 0, 1, 40, 16, 0])]
)
def test_pairs_are_sorted_by_block(packed: bool, lengths: list[int], dtype: torch.dtype) -> None:
    groups, n = 3, GEOMETRY.num_selected_blocks
    rows = _any_blocks(sum(lengths), groups, n, seed=1, dtype=dtype)
    blocks = rows if packed else rows.view(len(lengths), -1, groups, n)
    cu = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
    seqs = Sequences(cu, cu, len(lengths), len(rows) if packed else lengths[0], packed)
    lists = pair_lists.build(blocks, seqs, GEOMETRY)
    expected = _expected_pairs(rows, lengths, groups, packed)
    assert len(lists.offsets) == len(expected) + 1
    assert {x.dtype for x in lists} == {torch.int32}
    assert len(lists.tokens) == rows.numel()
    assert lists.places.shape == blocks.shape
    assert _pairs(lists) == expected


@pytest.mark.few_cases
@pytest.mark.parametrize(
    ("packed", "heads", "run_rows"),
    [(False, 1, 7), (False, 2, 45), (True, 2, 7), (True, 1, 30), (True, 3, 44)],
)
def test_runs_have_the_pairs_of_their_heads_and_rows(
    packed: bool, heads: int, run_rows: int
) -> None:
    groups, n, lengths = 3, GEOMETRY.num_selected_blocks, [13, 32] if packed else [22, 22]
    rows = _any_blocks(sum(lengths), groups, n, seed=2, dtype=torch.int32)
    blocks = rows if packed else rows.view(len(lengths), -1, groups, n)
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    seqs = Sequences(cu, cu, len(lengths), len(rows) if packed else lengths[0], packed)
    runs = pair_lists.Runs(heads, run_rows)
    found = _pairs(pair_lists.build(blocks, seqs, GEOMETRY, runs=runs))
    expected = []
    for head, row in itertools.product(range(0, groups, heads), range(0, len(rows), run_rows)):
        others = torch.full_like(rows, -1)
        part = slice(row, row + run_rows), slice(head, head + heads)
        others[part] = rows[part]
        buckets = _expected_pairs(others, lengths, groups, packed)
        per_head = len(buckets) // groups // (1 if packed else len(lengths))
        for i in range(1 if packed else len(lengths)):
            for g in range(head, head + heads):
                first = (i * groups + g) * per_head
                expected += buckets[first : first + per_head] if g < groups else [[]] * per_head
    assert found == expected


@pytest.mark.slow
def test_more_than_2_15_buckets_sort_int32_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_lists, "MAX_TOKENS", 4096)
    monkeypatch.setattr(pair_lists, "MAX_TILE_PAIRS", 4096)
    groups, rows = 2, 2**14 * 8 + 1  # 2 * 16385 buckets do not fit 15 bits
    blocks = torch.zeros(1, rows, groups, 1, dtype=torch.int32)
    blocks[0, :, :, 0] = (torch.arange(rows) // 8)[:, None]
    seqs = Sequences(blocks, blocks, 1, rows, False)
    lists = pair_lists.build(blocks, seqs, BlockGeometry(4, 2, 8, 1, 0, 1, 8))
    assert lists.offsets.diff().tolist() == ([8] * (2**14) + [1]) * 2
    assert lists.tokens.tolist() == list(range(rows)) * 2


@pytest.mark.few_cases("sort")
def test_lists_of_many_blocks_take_tiles_of_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_lists, "MAX_TILE_PAIRS", 64)
    assert [pair_lists._tokens_per_program(n) for n in (1, 2, 3, 16, 17, 100)] == [
        32,
        32,
        16,
        4,
        2,
        1,
    ]
    rows = _any_blocks(61, 2, 20, seed=2, dtype=torch.int32)
    seqs = Sequences(rows, rows, 1, 61, False)
    lists = pair_lists.build(rows[None], seqs, BlockGeometry(4, 2, 8, 20, 1, 2, 8))
    assert _pairs(lists) == _expected_pairs(rows, [61], 2, False)


def test_more_pairs_than_positions_are_refused() -> None:
    blocks = torch.empty((1, 2**20, 4, 512), dtype=torch.int32, device="meta")
    seqs = Sequences(blocks, blocks, 1, 2**20, False)
    with pytest.raises(ValueError, match=r"1048576 tokens with 4 lists of 512 blocks are 21474836"):
        pair_lists.build(blocks, seqs, BlockGeometry(128, 128, 128, 512, 0, 0, 8))


def test_the_most_pairs_have_positions_of_32_bits() -> None:
    """The first program of a launch over MAX_PAIRS pairs writes pairs, not offsets."""
    order = torch.arange(1024, dtype=torch.int64)
    keys = torch.zeros(1024, dtype=torch.int32)
    local_tokens = torch.arange(300, dtype=torch.int32)
    tokens, places = torch.full((2, 1024), -1, dtype=torch.int32)
    offsets = torch.full((2,), -1, dtype=torch.int32)
    pair_lists.sel_pairs_kernel[(1,)](
        order, keys, local_tokens, tokens, places, offsets, pair_lists.MAX_PAIRS, 1, 2,
        NUM_SELECTED=2, BLOCK_SIZE=1024,
    )  # fmt: skip
    assert tokens.tolist() == (order // 4).tolist()
    assert places.tolist() == order.tolist()
    assert probe.MAX_PAIRS == pair_lists.MAX_PAIRS


@pytest.mark.few_cases("bits-bounds1", "sort-bounds0", "bits-bounds2")
@pytest.mark.parametrize("bounds", [(0, 30, 16, 16, 16, 30), (0, 60, 20, 30), (0, 5, 12)])
def test_malformed_boundaries_lead_to_no_access_outside_a_tensor(bounds: tuple[int, ...]) -> None:
    """Documents that share rows would share buckets; the strict interpreter reports the access."""
    geometry = BlockGeometry(4, 2, 4, 4, 1, 1, 8)
    x, call = problem([30], True, 1, 2, 8, 8, geometry)
    cu = torch.tensor(bounds, dtype=torch.int32)
    call = dataclasses.replace(call, cu_seqlens=cu)
    with filled():
        o, lse = sel_forward.forward(**x, call=call, tuned=tuned(3))
        for deterministic in (False, True):
            call = dataclasses.replace(call, deterministic=deterministic)
            sel_backward.backward(torch.ones_like(o), *x.values(), o, lse, call=call)
