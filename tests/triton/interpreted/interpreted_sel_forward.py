"""Forward of sel against the oracle, with blocks read by tiles and by buckets."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch
from torch import Tensor

from interpreted_span import inexact_exp2
from nsa_backend_triton.host import descriptors
from nsa_backend_triton.host.configs import Tuned
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel import forward as sel_forward
from nsa_backend_triton.sel import runs
from nsa_backend_triton.sel import unions as sel_union
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle

GEOMETRY = BlockGeometry(4, 2, 8, 4, 1, 2, 8)  # l' = 8, n = 4: half of a key tile of 16
# l' = 16: one key tile; earlier blocks need no mask
EVEN = BlockGeometry(4, 2, 16, 4, 1, 2, 8)
ODD = BlockGeometry(4, 4, 20, 3, 1, 1, 8)  # l' = 20: two key tiles of 16
LONG = BlockGeometry(4, 4, 256, 3, 1, 1, 8)  # l' = 256, the longest block: four key tiles of 64


SHAPE = ("lengths", "packed", "groups", "heads", "dk", "dv")


def tuned(min_sharing: int, block_m: int = 16, tiles: int = 2, block_n: int = 16) -> Tuned:
    """Tuned with which a tile reads the blocks that ``min_sharing`` of its tokens selected."""
    compiler = {"num_warps": 4, "num_stages": 1}
    return {
        "sel_forward": {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "MIN_SHARING_TOKENS": min_sharing,
            "SHARE_ALL_MAX_LEN": 0,
            **compiler,
        },
        "sel_bucket": {"BLOCK_M": block_m, "TILES_PER_PROGRAM": tiles, **compiler},
        "sel_merge": {"BLOCK_M": block_m, "UNROLL": 1, **compiler},
    }


def problem(
    lengths: list[int],
    packed: bool,
    groups: int,
    heads: int,
    dk: int,
    dv: int,
    geometry: BlockGeometry = GEOMETRY,
) -> tuple[dict[str, Tensor], SlotCall]:
    """Inputs of the slot in float64; blocks unsorted, repeated, negative, future and too large."""
    torch.manual_seed(sum(lengths) + heads)
    draw = random.Random(sum(lengths))
    total, n, last = (
        sum(lengths),
        geometry.num_selected_blocks,
        max(lengths) // geometry.select_block_size + 1,
    )
    x = {
        name: torch.randn(total, count, width, dtype=torch.float64)
        for name, count, width in (("q", groups * heads, dk), ("k", groups, dk), ("v", groups, dv))
    }
    values = [
        draw.choice([-1, -3, 2**29, *range(last), *range(last)]) for _ in range(total * groups * n)
    ]
    x["blocks"] = torch.tensor(values, dtype=torch.int32).view(total, groups, n)
    if not packed:
        return {name: t.unflatten(0, (len(lengths), -1)) for name, t in x.items()}, SlotCall(
            geometry, dk**-0.5
        )
    cu = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32)
    return x, SlotCall(geometry, dk**-0.5, cu, max(lengths))


def assert_equals_oracle(x: dict[str, Tensor], call: SlotCall, settings: Tuned) -> None:
    o, lse = sel_forward.forward(**x, call=call, tuned=settings)
    truth = oracle.sel(**x, geometry=call.geometry, scale=call.scale, cu_seqlens=call.cu_seqlens)
    torch.testing.assert_close(o, truth.o, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(lse, truth.lse, rtol=1e-13, atol=1e-14)
    assert truth.lse is not None
    unseen = torch.isinf(truth.lse).transpose(-1, -2)
    assert not o[unseen].any()


@pytest.mark.parametrize("rising", [pytest.param(1, marks=pytest.mark.slow), -1])
def test_an_error_of_exp2_enters_the_lse_once(rising: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of the two orders, every tile raises the maximum."""
    x, call = problem([60], False, 1, 1, 8, 8)
    x["q"].fill_(1 / 8)
    x["k"].copy_(torch.arange(60)[None, :, None, None] * rising / 30)
    x["blocks"].copy_(torch.tensor([0, 3, 5, 7]).expand_as(x["blocks"]))
    call, error = dataclasses.replace(call, scale=1.0), 2**-10
    _, exact = sel_forward.forward(**x, call=call, tuned=tuned(1))
    inexact_exp2(monkeypatch, error)
    _, found = sel_forward.forward(**x, call=call, tuned=tuned(1))
    seen = exact > -math.inf
    assert (exact - found)[seen].max() < 1.1 * error


PROBLEMS = [
    ([1], False, 1, 1, 8, 8),
    ([19, 19], False, 1, 3, 8, 6),
    ([0, 11, 1, 0, 17, 0], True, 2, 4, 8, 8),
    ([26], False, 1, 7, 20, 5),
    ([21], False, 2, 1, 16, 16),
    ([18], False, 1, 16, 8, 16),
    ([3, 25], True, 1, 3, 8, 6),
]


@pytest.mark.few_cases("lengths1-False-1-1-8-8-2", "lengths6-False-1-7-20-5-1")
@pytest.mark.parametrize(
    (*SHAPE, "min_sharing"),
    [
        pytest.param(
            *shape,
            min_sharing,
            marks=[pytest.mark.slow] if i >= 4 or (min_sharing == 1 and i < 2) else [],
        )
        for i, shape in enumerate(PROBLEMS)
        for min_sharing in (1, 2)
    ],
)
def test_output_equals_the_oracle(
    lengths: list[int], packed: bool, groups: int, heads: int, dk: int, dv: int, min_sharing: int
) -> None:
    x, call = problem(lengths, packed, groups, heads, dk, dv)
    assert_equals_oracle(x, call, tuned(min_sharing))


@pytest.mark.few_cases("1")
@pytest.mark.parametrize("min_sharing", [1, 2])
def test_block_of_whole_key_tiles(min_sharing: int) -> None:
    x, call = problem([14, 39], True, 1, 2, 8, 8, EVEN)
    assert_equals_oracle(x, call, tuned(min_sharing))


@pytest.mark.few_cases("False-1", "True-1", "True-2")
@pytest.mark.parametrize("min_sharing", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_block_size_not_a_multiple_of_the_key_tile(packed: bool, min_sharing: int) -> None:
    x, call = problem([43], packed, 1, 2, 8, 8, ODD)
    assert_equals_oracle(x, call, tuned(min_sharing))


@pytest.mark.slow
@pytest.mark.parametrize("size", [256, 200])
@pytest.mark.parametrize("min_sharing", [1, 2])
@pytest.mark.parametrize("lengths", [[261], [3, 259, 1]], ids=["dense", "packed"])
def test_blocks_of_several_key_tiles(lengths: list[int], min_sharing: int, size: int) -> None:
    geometry = dataclasses.replace(LONG, select_block_size=size)
    x, call = problem(lengths, len(lengths) > 1, 1, 2, 8, 6, geometry)
    assert_equals_oracle(x, call, tuned(min_sharing, block_m=32, block_n=64))


@pytest.mark.parametrize(
    ("geometry", "packed", "width", "count"),
    [(EVEN, False, 16, 2), (EVEN, True, 16, 0), (ODD, False, 16, 0), (EVEN, False, 8, 0)],
    ids=["whole key tiles", "packed", "key tile does not divide a block", "8 wide"],
)
def test_descriptors_are_used_for_whole_key_tiles_of_dense_inputs(
    geometry: BlockGeometry,
    packed: bool,
    width: int,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, call = problem([23], packed, 2, 2, width, width, geometry)
    settings = tuned(2)
    created: list[object] = []
    create = descriptors.key_descriptor
    monkeypatch.setattr(
        descriptors, "key_descriptor", lambda *a: created.append(create(*a)) or created[-1]
    )
    assert_equals_oracle(
        x, call, {**settings, "sel_forward": {**settings["sel_forward"], "USE_TMA": 1}}
    )
    assert len(created) == count


@pytest.mark.few_cases("False")
@pytest.mark.parametrize("packed", [False, True])
def test_partial_outputs_in_several_runs(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, call = problem([15, 15], packed, 2, 2, 8, 8)
    monkeypatch.setattr(runs, "PARTIAL_BYTES", 13 * 2 * 4 * 8 * 8)  # a head of 13 of 30 rows
    monkeypatch.setattr(runs, "MAX_RUNS", 100)
    assert_equals_oracle(x, call, tuned(7))


@pytest.mark.few_cases("False")
@pytest.mark.parametrize("packed", [False, True])
def test_the_last_run_may_have_fewer_heads(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, call = problem([15, 12] if packed else [15, 15], packed, 3, 1, 8, 8)
    monkeypatch.setattr(runs, "PARTIAL_BYTES", 1)
    monkeypatch.setattr(runs, "MAX_RUNS", 2)
    assert_equals_oracle(x, call, tuned(7))


def test_runs_are_few_even_if_their_partial_outputs_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    o = torch.empty(2, 50, 6, 16)  # 100 rows
    monkeypatch.setattr(runs, "PARTIAL_BYTES", 100 * 16 * 6 * 3 * 4 // 10)  # a tenth of the bytes
    for heads, max_runs, expected in (
        (1, 99, (1, 10)),
        (1, 8, (1, 13)),  # rows of a run
        (3, 99, (1, 25)),  # 3 parts of the heads, 4 of the rows
        (3, 8, (1, 50)),
        (6, 8, (1, 100)),
        (6, 4, (2, 100)),
        (6, 1, (6, 100)),
    ):
        monkeypatch.setattr(runs, "MAX_RUNS", max_runs)
        seqs = Sequences(o, o, 2, 50, False)
        assert runs.divide(o, heads, 3, seqs) == expected, (heads, max_runs)
    monkeypatch.setattr(runs, "PARTIAL_BYTES", 2**40)
    assert runs.divide(o, 3, 3, seqs) == (3, 100)


@pytest.mark.parametrize(
    ("partial_rows", "length", "rows"),
    [
        (13, 48, 12),  # alone in 4 parts
        (13, 54, 18),  # in 3 parts, because 4 and 5 would not be equal
        (13, 53, 53),  # a prime number
        (48, 48, 48),
        (60, 48, {1: 48, 2: 48, 3: 48, 5: 96}),  # whole entries, two of them together
    ],
)
def test_runs_of_entries_apart_do_not_depend_on_the_batch(
    partial_rows: int, length: int, rows: int | dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of an entry begins a run in every batch or in none, except at the entry's start."""
    monkeypatch.setattr(runs, "PARTIAL_BYTES", partial_rows * 16 * 6 * 3 * 4)
    monkeypatch.setattr(runs, "MAX_RUNS", 6)
    for batch in (1, 2, 3, 5):
        o = torch.empty(batch, length, 6, 16)
        seqs = Sequences(o, o, batch, length, False, apart=True)
        expected = rows[batch] if isinstance(rows, dict) else rows
        division = runs.divide(o, 1, 3, seqs)
        assert division == (1, expected), batch
        begins = {run.first_row % length for run in runs.each_run(division, 1, batch * length)}
        assert begins == set(range(0, length, min(expected, length))), batch


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_runs_of_any_length_give_the_same_bits(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, call = problem([22], packed, 1, 2, 8, 8)
    size, n = call.geometry.select_block_size, call.geometry.num_selected_blocks
    # Each token selects all blocks that it may: with 3, 7 or 21 rows, the last run needs every
    # program of its launch.
    blocks = torch.arange(22)[:, None, None] // size - torch.arange(n)
    x["blocks"] = blocks.reshape(x["blocks"].shape).contiguous()
    settings = tuned(40)  # no block is shared
    settings["sel_bucket"] = {**settings["sel_bucket"], "TILES_PER_PROGRAM": 1}
    expected = sel_forward.forward(**x, call=call, tuned=settings)
    row_bytes = x["q"].shape[-2] * x["v"].shape[-1] * x["blocks"].shape[-1] * x["q"].itemsize
    monkeypatch.setattr(runs, "MAX_RUNS", 100)
    for rows in (1, 3, 5, 7, 21):
        monkeypatch.setattr(runs, "PARTIAL_BYTES", rows * row_bytes)
        found = sel_forward.forward(**x, call=call, tuned=settings)
        assert all(torch.equal(a, b) for a, b in zip(found, expected)), rows


def test_buckets_of_more_tokens_than_keys() -> None:
    """Only their first tiles, whose tokens may lie in the block, need a mask."""
    x, call = problem([70], False, 1, 2, 8, 8, EVEN)
    assert_equals_oracle(x, call, tuned(40, tiles=5))  # no block is shared


def test_buckets_in_narrow_bands() -> None:
    """Two bands of K, and three of V, whose last one is half empty."""
    x, call = problem([41], False, 1, 2, 32, 40, EVEN)
    settings = tuned(40)  # no block is shared
    settings["sel_bucket"] = {**settings["sel_bucket"], "MAX_BAND": 16}
    assert_equals_oracle(x, call, settings)


@pytest.mark.few_cases("0.0")
@pytest.mark.parametrize("scale", [0.0, -300.0])
def test_scale_may_be_zero_or_negative(scale: float) -> None:
    x, call = problem([41], False, 1, 4, 8, 8, EVEN)
    assert_equals_oracle(x, SlotCall(call.geometry, scale), tuned(3))


@pytest.mark.slow
def test_strided_inputs() -> None:
    x, call = problem([18, 18], False, 2, 2, 8, 8)
    spread = {
        name: torch.stack([t, t], 3)[:, :, :, 1] if t.dim() == 4 else t for name, t in x.items()
    }
    o, lse = sel_forward.forward(**x, call=call, tuned=tuned(7))
    o2, lse2 = sel_forward.forward(**spread, call=call, tuned=tuned(7))
    assert torch.equal(o, o2)
    assert torch.equal(lse, lse2)


@pytest.mark.few_cases("1")
@pytest.mark.parametrize("min_sharing", [1, 2])
def test_future_keys_change_no_bit(min_sharing: int) -> None:
    x, call = problem([29], False, 1, 4, 8, 8)
    # Keys 16..23, selected by token 20 alone in its tile: with min_sharing 2 a bucket reads them.
    x["blocks"][0, 20, 0, 0] = 2
    x["blocks"][0, 21:24] = 0
    o, lse = sel_forward.forward(**x, call=call, tuned=tuned(min_sharing))
    x["k"][:, 21:], x["v"][:, 21:] = 1e30, -1e30
    o2, lse2 = sel_forward.forward(**x, call=call, tuned=tuned(min_sharing))
    assert torch.equal(o[:, :21], o2[:, :21])
    assert torch.equal(lse[..., :21], lse2[..., :21])


@pytest.mark.few_cases("1")
@pytest.mark.parametrize("min_sharing", [1, 2])
def test_nan_query_changes_only_its_own_row(min_sharing: int) -> None:
    x, call = problem([41], False, 2, 2, 8, 8, EVEN)
    x["blocks"][0, 36, 0, 0] = 0
    x["blocks"][0, 37, 0] = -1
    x["blocks"][0, 38, 0, 0] = 0
    clean, _ = sel_forward.forward(**x, call=call, tuned=tuned(min_sharing))
    x["q"][0, 36:38, :2] = torch.nan
    o, _ = sel_forward.forward(**x, call=call, tuned=tuned(min_sharing))
    assert o[0, 36, :2].isnan().all()
    o[0, 36, :2] = clean[0, 36, :2]
    assert torch.equal(o, clean)


def test_unions_hold_blocks_that_enough_tokens_selected() -> None:
    x, call = problem([29], False, 1, 1, 8, 8)
    seqs = Sequences.of(x["q"], x["k"], call)
    unions = sel_union.build(x["blocks"], seqs, GEOMETRY, 6, 2, write_unshared=True)
    selected = x["blocks"][0, :, 0].tolist()
    for tile in range(5):
        tokens_of: dict[int, list[int]] = {}
        for i, t in enumerate(range(tile * 6, min(tile * 6 + 6, 29))):
            for block in {j for j in selected[t] if 0 <= j <= t // 8}:
                tokens_of.setdefault(block, []).append(i)
        shared = sorted((j for j, tokens in tokens_of.items() if len(tokens) >= 2), reverse=True)
        count, num_masked = unions.counts[tile].tolist()
        assert unions.entries[tile, 0, :count].tolist() == shared
        assert unions.entries[tile, 1, :count].tolist() == [
            sum(1 << i for i in tokens_of[j]) for j in shared
        ]
        assert num_masked == sum((j + 1) * 8 > tile * 6 + 1 for j in shared)
        for t in range(tile * 6, min(tile * 6 + 6, 29)):
            is_first = [j not in selected[t][:i] for i, j in enumerate(selected[t])]
            unshared = [
                int(first and 0 <= j <= t // 8 and len(tokens_of[j]) == 1)
                for first, j in zip(is_first, selected[t])
            ]
            assert unions.unshared[0, t, 0].tolist() == unshared


def test_bit_mask_holds_32_tokens() -> None:
    geometry = BlockGeometry(4, 2, 8, 1, 0, 1, 8)
    x, call = problem([37], False, 1, 1, 8, 8, geometry)
    x["blocks"].zero_()
    unions = sel_union.build(x["blocks"], Sequences.of(x["q"], x["k"], call), geometry, 32, 32)
    assert unions.counts.tolist() == [[1, 1], [0, 0]]
    assert unions.entries[0, :, 0].tolist() == [0, -1]  # block 0, and the bits of all 32 tokens


@pytest.mark.few_cases("1")
@pytest.mark.parametrize("min_sharing", [1, 2])
def test_lists_of_many_blocks_take_tiles_of_fewer_tokens(
    min_sharing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sort of a tile holds 128 pairs here: 4 tokens of 20 blocks, where 16 rows fit."""
    monkeypatch.setattr(sel_union, "MAX_TILE_PAIRS", 128)
    x, call = problem([13, 30], True, 1, 1, 8, 8, BlockGeometry(4, 2, 8, 20, 1, 2, 8))
    sizes = []
    build = sel_union.build
    monkeypatch.setattr(
        sel_union, "build", lambda *a, **options: sizes.append(a[3]) or build(*a, **options)
    )
    assert_equals_oracle(x, call, tuned(min_sharing))
    assert sizes == [4]


@pytest.mark.slow
@pytest.mark.parametrize("min_sharing", [1, 2])
def test_lists_of_512_blocks(min_sharing: int) -> None:
    x, call = problem([21], False, 1, 2, 8, 8, BlockGeometry(4, 2, 8, 512, 1, 2, 8))
    assert_equals_oracle(x, call, tuned(min_sharing))


@pytest.mark.parametrize(
    ("tokens", "n", "num_blocks", "fitting"),
    [
        (32, 64, 2**19, 32),
        (32, 64, 2**19 + 1, 16),
        (32, 65, 100, 32),
        (32, 128, 1, 32),
        (32, 129, 0, 16),
        (10, 256, 100, 10),
        (20, 256, 100, 16),
        (32, 512, 100, 8),
        (7, 4096, 100, 1),
        (32, 10_000, 100, 1),
        (32, 512, 2**20, 2),
        (32, 5, 2**30 // 250, 16),
    ],
)
def test_tiles_fit_their_sort(tokens: int, n: int, num_blocks: int, fitting: int) -> None:
    assert sel_union.fitting_tokens(tokens, n, num_blocks) == fitting


def test_sort_keys_of_the_last_blocks_do_not_overflow() -> None:
    """A block whose number times the pairs of a tile is just below the keys of no block."""
    geometry = BlockGeometry(1, 1, 1, 2, 0, 0, 8)
    first = 2**29 - 4  # of a sequence of almost 2^29 blocks; a sort key has 2 pairs
    assert sel_union.fitting_tokens(16, 2, first + 4) == 1
    blocks = torch.tensor([first, first + 1], dtype=torch.int32).view(1, 1, 1, 2)
    seqs = Sequences(blocks, blocks, 1, 1, False, first + 3, True)
    unions = sel_union.build(blocks, seqs, geometry, 1, 1)
    assert unions.counts[0, 0] == 2
    assert unions.entries[0, 0].tolist() == [first + 1, first]
