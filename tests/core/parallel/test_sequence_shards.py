"""Shards partition the rows, halos come from their owners, and layouts have exact costs."""

from __future__ import annotations

import itertools

import pytest
import torch

from nsa_core import InvalidInput, NSAConfig
from nsa_core.parallel import ContextParallel, Shards, choose_layout, pad_to
from nsa_core.parallel.compressed_rows import capacity, gathered_rows
from nsa_core.parallel.exchange_rows import Ranks
from nsa_core.parallel.halo import segments
from nsa_core.parallel.layouts import in_order, in_rank_order
from nsa_core.parallel.shards import rank_costs
from nsa_verify.problems.cases import config_of

LAYOUTS = ("contiguous", "head_tail")
CONFIG = config_of(4, 2, 8, 8, (8, 4, 8, 4, 9))


@pytest.mark.parametrize(("layout", "world"), [*itertools.product(LAYOUTS, (1, 2, 3, 8))])
def test_pieces_partition_the_rows(layout: str, world: int) -> None:
    x = torch.arange(48 * 3).view(48, 3)
    shards = [Shards(48, world, rank, layout) for rank in range(world)]
    rows = torch.cat([s.positions() for s in shards])
    assert rows.sort().values.tolist() == list(range(48))
    for s in shards:
        assert torch.equal(s.take(x), x[s.positions()])
        assert torch.equal(s.take(x.t(), -1), x[s.positions()].t())
        assert sum(end - first for first, end in s.pieces) == s.rows == 48 // world
    gathered = torch.cat([s.take(x) for s in shards])
    assert torch.equal(in_order(gathered, world, layout), x)
    assert torch.equal(in_rank_order(x, world, layout), gathered)


def test_head_tail_pairs_an_early_with_a_late_chunk() -> None:
    assert [Shards(16, 2, rank).pieces for rank in (0, 1)] == [
        ((0, 4), (12, 16)),
        ((4, 8), (8, 12)),
    ]


@pytest.mark.parametrize(("layout", "world"), [*itertools.product(LAYOUTS, (2, 4))])
@pytest.mark.parametrize("width", [0, 1, 5, 23, 100])
def test_segments_are_the_rows_to_the_left_of_each_piece(
    layout: str, world: int, width: int
) -> None:
    shards = [Shards(48, world, rank, layout) for rank in range(world)]
    arrived: dict[tuple[int, int], dict[int, int]] = {}
    for s in segments(48, world, layout, (width,)):
        rows = shards[s.sender].positions()[s.source : s.source + s.rows].tolist()
        piece = arrived.setdefault((s.receiver, s.piece), {})
        assert not piece.keys() & set(range(s.target, s.target + s.rows))
        piece.update(zip(range(s.target, s.target + s.rows), rows))
    for rank, s in enumerate(shards):
        for index, (first, _) in enumerate(s.pieces):
            expected = {i: first - width + i for i in range(width) if first - width + i >= 0}
            assert arrived.get((rank, index), {}) == expected


@pytest.mark.parametrize(("layout", "world"), [*itertools.product(LAYOUTS, (2, 4))])
@pytest.mark.parametrize("lengths", [[104], [5, 50, 0, 3, 22, 24], [1] * 8 + [96], [26] * 4])
def test_each_compressed_token_comes_from_the_rank_of_its_last_token(
    layout: str, world: int, lengths: list[int]
) -> None:
    geometry = CONFIG.geometry
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    ranks = Ranks.of(Shards(104, world, 0, layout), 104, "", torch.float32)
    sent: dict[int, list[int]] = {}  # place in the gathered buffer -> last tokens, by brute force
    pieces = [p for rank in range(world) for p in Shards(104, world, rank, layout).pieces]
    ends = [
        int(start) + i * 4 + 7
        for start, length in zip(bounds, lengths)
        for i in range(geometry.num_compressed(length))
    ]
    for number, (first, end) in enumerate(pieces):
        owned = [e for e in ends if first <= e < end]
        assert len(owned) <= capacity(ranks, geometry)
        for slot, token in enumerate(owned):
            sent.setdefault(number * capacity(ranks, geometry) + slot, []).append(token)
    at = gathered_rows(bounds, ranks, geometry, geometry.max_compressed(104))
    assert [sent[int(place)] for place in at[: len(ends)]] == [[end] for end in ends]


def brute_costs(lengths: list[int], world: int, layout: str) -> list[int]:
    """Count the compressed tokens of cmp, and twice the keys of sel and win, row by row."""
    g, costs = CONFIG.geometry, []
    for length in lengths:
        for t in range(length):
            first = t // g.select_block_size - g.num_selected_blocks + 1  # with the n latest blocks
            keys = t + 1 - max(0, first) * g.select_block_size
            costs.append(g.num_compressed(t + 1) + 2 * (keys + min(t + 1, g.window_size)))
    shards = (Shards(len(costs), world, rank, layout) for rank in range(world))
    return [sum(costs[row] for row in s.positions().tolist()) for s in shards]


@pytest.mark.parametrize("lengths", [[96], [5, 50, 0, 3, 14, 24], [12] * 8])
def test_costs_count_the_keys_of_every_row(lengths: list[int]) -> None:
    for layout, world in itertools.product(LAYOUTS, (2, 4)):
        assert rank_costs(lengths, world, CONFIG, layout) == brute_costs(lengths, world, layout)


def test_choose_layout_takes_the_less_loaded_slowest_rank() -> None:
    assert choose_layout([4096], 2, CONFIG) == "head_tail"
    assert choose_layout([512] * 8, 2, CONFIG) == "contiguous"  # equal costs
    assert choose_layout([6], 2, CONFIG) == "contiguous"  # head_tail does not divide 6 rows
    # An early and a late long document: contiguous has one on each rank, head_tail both on rank 0.
    assert choose_layout([900, *[1] * 1800, 900], 2, CONFIG) == "contiguous"


@pytest.mark.parametrize(
    ("lengths", "share"), [([65536], 0.83), ([1 << 20], 0.686)], ids=["64k", "1M"]
)
def test_contiguous_wastes_a_share_of_two_gpus_on_one_document(
    lengths: list[int], share: float
) -> None:
    config = NSAConfig(4096, 64, 4, head_dim=128)
    costs = rank_costs(lengths, 2, config, "contiguous")
    assert sum(costs) / 2 / max(costs) == pytest.approx(share, abs=0.002)
    even = rank_costs(lengths, 2, config, "head_tail")
    assert sum(even) / 2 / max(even) > 0.99


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Shards(18, 4, 0),
            "total must be a multiple of 8 for 4 ranks and layout 'head_tai"
            r"l', got 18: pad the rows to pad_to\(18, 4, 'head_tail'\) = 24",
        ),
        (lambda: Shards(16, 2, 2), "rank must be below world = 2, got 2"),
        (lambda: Shards(16, 0, 0), "world must be an integer >= 1, got 0"),
        (lambda: Shards(16, 2, 0, "zigzag"), "layout must be one of contiguous, head_tail, got"),
        (lambda: Shards(16, 2, 0).take(torch.zeros(8)), "x must have 16 rows on axis 0"),
        (lambda: Shards(16, 2, 0).whole(torch.zeros(9)), "local must have 8 rows on axis 0"),
        (lambda: Shards(16, 2, 0).whole(torch.zeros(8)), "torch.distributed has no process group"),
        (lambda: pad_to(-1, 2), "total must be an integer >= 0, got -1"),
        (lambda: choose_layout([5], 2, CONFIG), "total must be a multiple of 2 for 2 ranks"),
        (lambda: choose_layout([4, 2.0], 2, CONFIG), r"lengths\[1\] must be an integer >= 0"),
        (lambda: ContextParallel("ring"), "mode must be one of auto, heads, sequence, got 'ring'"),
        (lambda: ContextParallel(layout="ring"), "layout must be one of contiguous, head_tail"),
        (lambda: ContextParallel(reduce_dtype="fp32"), "reduce_dtype must be a floating-point"),
    ],
)
def test_wrong_arguments_are_named(call, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        call()
