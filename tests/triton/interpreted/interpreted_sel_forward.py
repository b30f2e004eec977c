"""Forward of sel against the oracle: blocks that a tile shares, and those left to the buckets."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel import forward as sel_forward
from nsa_backend_triton.sel import unions as sel_union
from nsa_backend_triton.strict.interpreter import strict
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle

GEOMETRY = BlockGeometry(4, 2, 8, 4, 1, 2, 8)  # l' = 8, n = 4: half a step of 16 keys
# l' = 16: one step, nothing masked in a block of the past
WHOLE = BlockGeometry(4, 2, 16, 4, 1, 2, 8)
ODD = BlockGeometry(4, 4, 20, 3, 1, 1, 8)  # l' = 20: two steps of 16 keys


@pytest.fixture(autouse=True)
def strictly() -> Iterator[None]:
    """Every kernel here runs in the strict interpreter."""
    with strict():
        yield


SHAPE = ("lengths", "packed", "groups", "heads", "dk", "dv")


def tuned(least: int, rows: int = 16, tiles: int = 2) -> sel_forward.Settings:
    compiler = {"num_warps": 4, "num_stages": 1}
    return {
        "sel_forward": {"ROWS": rows, "KEYS": 16, "LEAST": least, "SHORT": 0, **compiler},
        "sel_bucket": {"ROWS": rows, "TILES": tiles, **compiler},
        "sel_merge": {"ROWS": rows, "UNROLL": 1, **compiler},
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
    """Inputs of the slot in float64, the blocks unsorted, repeated, negative, in the future and out
    of range.
    """
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


def agrees(x: dict[str, Tensor], call: SlotCall, settings: sel_forward.Settings) -> None:
    o, lse = sel_forward.forward(**x, call=call, tuned=settings)
    truth = oracle.sel(**x, geometry=call.geometry, scale=call.scale, cu_seqlens=call.cu_seqlens)
    torch.testing.assert_close(o, truth.o, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(lse, truth.lse, rtol=1e-13, atol=1e-14)
    assert truth.lse is not None
    unseen = torch.isinf(truth.lse).transpose(-1, -2)
    assert not o[unseen].any()


PROBLEMS = [
    ([1], False, 1, 1, 8, 8),
    ([19, 19], False, 1, 3, 8, 6),
    ([0, 11, 1, 0, 17, 0], True, 2, 4, 8, 8),
    ([26], False, 1, 7, 20, 5),
    ([21], False, 2, 1, 16, 16),
    ([18], False, 1, 16, 8, 16),
    ([3, 25], True, 1, 3, 8, 6),
]


@pytest.mark.parametrize(
    (*SHAPE, "least"),
    [
        pytest.param(
            *shape, least, marks=[pytest.mark.slow] if i >= 4 or (least == 1 and i < 2) else []
        )
        for i, shape in enumerate(PROBLEMS)
        for least in (1, 2)
    ],
)
def test_is_the_oracles(
    lengths: list[int], packed: bool, groups: int, heads: int, dk: int, dv: int, least: int
) -> None:
    x, call = problem(lengths, packed, groups, heads, dk, dv)
    agrees(x, call, tuned(least))


@pytest.mark.parametrize("least", [1, 2])
def test_block_of_whole_steps(least: int) -> None:
    x, call = problem([14, 39], True, 1, 2, 8, 8, WHOLE)
    agrees(x, call, tuned(least))


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_block_that_no_tile_of_keys_divides(packed: bool, least: int) -> None:
    x, call = problem([43], packed, 1, 2, 8, 8, ODD)
    agrees(x, call, tuned(least))


@pytest.mark.parametrize(
    ("geometry", "packed", "width", "made"),
    [(WHOLE, False, 16, 2), (WHOLE, True, 16, 0), (ODD, False, 16, 0), (WHOLE, False, 8, 0)],
    ids=["whole steps", "packed", "steps that do not divide a block", "8 wide"],
)
def test_descriptors_read_whole_steps_of_dense_rows(
    geometry: BlockGeometry, packed: bool, width: int, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, call = problem([23], packed, 2, 2, width, width, geometry)
    settings = tuned(2)
    found: list[object] = []
    describe = sel_forward.key_descriptor
    monkeypatch.setattr(
        sel_forward, "key_descriptor", lambda *a: found.append(describe(*a)) or found[-1]
    )
    agrees(x, call, {**settings, "sel_forward": {**settings["sel_forward"], "TMA": 1}})
    assert len(found) == made


@pytest.mark.parametrize("packed", [False, True])
def test_partial_outputs_in_several_runs(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, call = problem([15, 15], packed, 2, 2, 8, 8)
    monkeypatch.setattr(sel_forward, "PARTIAL_BYTES", 13 * 4 * 4 * 8 * 8)  # 13 of 30 rows at a time
    agrees(x, call, tuned(7))


@pytest.mark.parametrize("scale", [0.0, -300.0])
def test_scale_may_be_zero_or_negative(scale: float) -> None:
    x, call = problem([41], False, 1, 4, 8, 8, WHOLE)
    agrees(x, SlotCall(call.geometry, scale), tuned(3))


def test_strided_inputs() -> None:
    x, call = problem([18, 18], False, 2, 2, 8, 8)
    spread = {
        name: torch.stack([t, t], 3)[:, :, :, 1] if t.dim() == 4 else t for name, t in x.items()
    }
    o, lse = sel_forward.forward(**x, call=call, tuned=tuned(7))
    o2, lse2 = sel_forward.forward(**spread, call=call, tuned=tuned(7))
    assert torch.equal(o, o2)
    assert torch.equal(lse, lse2)


def test_packed_of_one_document_has_the_bits_of_dense() -> None:
    x, call = problem([29], False, 2, 3, 8, 8)
    cu = torch.tensor([0, 29], dtype=torch.int32)
    packed = {name: t[0] for name, t in x.items()}
    for least in (1, 2):
        o, lse = sel_forward.forward(**x, call=call, tuned=tuned(least))
        o2, lse2 = sel_forward.forward(
            **packed, call=SlotCall(call.geometry, call.scale, cu, 29), tuned=tuned(least)
        )
        assert torch.equal(o[0], o2)
        assert torch.equal(lse[0], lse2)


@pytest.mark.parametrize("least", [1, 2])
def test_the_future_changes_no_bit(least: int) -> None:
    x, call = problem([29], False, 1, 4, 8, 8)
    # keys 16..23, of row 20 alone in its tile: with ``least`` 2 a bucket's
    x["blocks"][0, 20, 0, 0] = 2
    x["blocks"][0, 21:24] = 0
    o, lse = sel_forward.forward(**x, call=call, tuned=tuned(least))
    x["k"][:, 21:], x["v"][:, 21:] = 1e30, -1e30
    o2, lse2 = sel_forward.forward(**x, call=call, tuned=tuned(least))
    assert torch.equal(o[:, :21], o2[:, :21])
    assert torch.equal(lse[..., :21], lse2[..., :21])


@pytest.mark.parametrize("least", [1, 2])
def test_nan_in_a_query_stays_in_its_row(least: int) -> None:
    x, call = problem([41], False, 2, 2, 8, 8, WHOLE)
    x["blocks"][0, 36, 0, 0] = 0
    x["blocks"][0, 37, 0] = -1
    x["blocks"][0, 38, 0, 0] = 0
    clean, _ = sel_forward.forward(**x, call=call, tuned=tuned(least))
    x["q"][0, 36:38, :2] = torch.nan
    o, _ = sel_forward.forward(**x, call=call, tuned=tuned(least))
    assert o[0, 36, :2].isnan().all()
    o[0, 36, :2] = clean[0, 36, :2]
    assert torch.equal(o, clean)


def test_unions_hold_what_enough_tokens_chose() -> None:
    x, call = problem([29], False, 1, 1, 8, 8)
    seqs = Sequences.of(x["q"], call)
    unions = sel_union.build(x["blocks"], seqs, GEOMETRY, 6, 2, leave=True)
    chosen = x["blocks"][0, :, 0].tolist()
    for tile in range(5):
        choosers: dict[int, list[int]] = {}
        for i, t in enumerate(range(tile * 6, min(tile * 6 + 6, 29))):
            for block in {j for j in chosen[t] if 0 <= j <= t // 8}:
                choosers.setdefault(block, []).append(i)
        shared = sorted((j for j, tokens in choosers.items() if len(tokens) >= 2), reverse=True)
        count, cut = unions.counts[tile].tolist()
        assert unions.entries[tile, 0, :count].tolist() == shared
        assert unions.entries[tile, 1, :count].tolist() == [
            sum(1 << i for i in choosers[j]) for j in shared
        ]
        assert cut == sum((j + 1) * 8 > tile * 6 + 1 for j in shared)
        for t in range(tile * 6, min(tile * 6 + 6, 29)):
            first = [j not in chosen[t][:i] for i, j in enumerate(chosen[t])]
            left = [
                int(new and 0 <= j <= t // 8 and len(choosers[j]) == 1)
                for new, j in zip(first, chosen[t])
            ]
            assert unions.left[0, t, 0].tolist() == left


def test_row_of_bits_holds_32_tokens() -> None:
    geometry = BlockGeometry(4, 2, 8, 1, 0, 1, 8)
    x, call = problem([37], False, 1, 1, 8, 8, geometry)
    x["blocks"].zero_()
    unions = sel_union.build(x["blocks"], Sequences.of(x["q"], call), geometry, 32, 32)
    assert unions.counts.tolist() == [[1, 1], [0, 0]]
    assert unions.entries[0, :, 0].tolist() == [0, -1]  # block 0, and every bit
