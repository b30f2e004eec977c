"""select in the strict interpreter: ties, ranking windows, odd geometries, NaN, tiles."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from nsa_backend_triton.host.configs import Settings
from nsa_backend_triton.select import forward as select
from nsa_backend_triton.strict.interpreter import strict
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle
from nsa_verify.judge.selection import judge_selection

# A window of 32 scores, 16 of them new: rows of more blocks take several.
SMALL = {
    "BLOCK_M": 32,
    "BLOCK_N": 32,
    "Q_BYTES": 8192,
    "RANK_ROWS": 16,
    "RANK_CHUNKS": 4,
    "RANK_LANES": 8,
    "PROGRAMS_PER_SM": 2,
}
SMALL |= {"num_warps": 1, "num_stages": 1}
TILES = {
    "the widest": SMALL | {"BLOCK_M": 128, "BLOCK_N": 128, "Q_BYTES": 65536, "num_warps": 4},
    "wide windows": SMALL
    | {
        "BLOCK_M": 64,
        "BLOCK_N": 64,
        "Q_BYTES": 65536,
        "RANK_CHUNKS": 16,
        "RANK_LANES": 32,
        "num_warps": 4,
    },
    "tiles of heads": SMALL | {"BLOCK_M": 16, "Q_BYTES": 8192, "RANK_ROWS": 2},
    "one head per tile": SMALL | {"BLOCK_M": 16, "Q_BYTES": 65536},
    "eight warps": SMALL | {"BLOCK_N": 256, "num_warps": 8},
}
WINDOWS = {  # of 28 blocks
    1: SMALL | {"RANK_CHUNKS": 16, "RANK_LANES": 4},
    2: SMALL | {"RANK_CHUNKS": 16, "RANK_LANES": 2},
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes and the kind of logits; several ``lengths`` are packed documents."""

    geometry: BlockGeometry
    lengths: tuple[int, ...]
    heads: int = 2
    groups: int = 1
    kind: str = "normal"
    width: int = 16
    dtype: torch.dtype = torch.float64

    @property
    def name(self) -> str:
        """The test id."""
        return (
            f"{self.kind} {self.geometry.as_ints()[:6]} S={self.lengths} {self.heads}/{self.groups}"
        )

    def call(self) -> SlotCall:
        """The SlotCall of this problem."""
        starts = [0, *itertools.accumulate(self.lengths)]
        cu = torch.tensor(starts, dtype=torch.int32) if len(self.lengths) > 1 else None
        return SlotCall(self.geometry, self.width**-0.5, cu, max(self.lengths))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k_cmp, and the lse of the cmp branch."""
        generator, geometry, call, total = (
            torch.Generator().manual_seed(7),
            self.geometry,
            self.call(),
            sum(self.lengths),
        )
        packed = call.cu_seqlens is not None
        lead = () if packed else (1,)
        rows = geometry.max_compressed(total) if packed else geometry.num_compressed(total)
        q = torch.randn(
            *lead, total, self.heads, self.width, generator=generator, dtype=torch.float64
        )
        k = torch.randn(
            *lead, rows, self.groups, self.width, generator=generator, dtype=torch.float64
        )
        if self.kind == "k = 0":
            k = torch.zeros_like(k)
        elif self.kind == "integers":
            q, k = q.round(), k.round()
        elif self.kind == "far":  # almost all scores are 0
            q = 10_000 * q
        elif self.kind == "periodic":  # all blocks score alike, except at the two ends
            period = geometry.select_block_size // geometry.compress_stride
            q, k = q.round(), k.round()[..., torch.arange(rows) % period, :, :]
        q, k = q.to(self.dtype), k.to(self.dtype)
        lse = oracle.cmp(q, k, k, geometry, call.scale, cu_seqlens=call.cu_seqlens).lse
        assert lse is not None  # cmp always returns it
        return q, k, lse.to(torch.float64 if self.dtype == torch.float64 else torch.float32)


def run(
    problem: Problem,
    tensors: tuple[Tensor, Tensor, Tensor],
    settings: Settings = SMALL,
    seed: int = 0,
) -> Tensor:
    with strict(seed):
        return select.forward(*tensors, call=problem.call(), settings=settings)


def assert_right(
    problem: Problem, tensors: tuple[Tensor, Tensor, Tensor], found: Tensor, equal: bool = True
) -> None:
    """Check the verdict and, if ``equal``, that the sets equal the oracle's."""
    call = problem.call()
    verdict = judge_selection(
        *tensors, found, call.geometry, call.scale, cu_seqlens=call.cu_seqlens
    )
    assert verdict.ok, verdict
    if equal:
        expected = oracle.select(*tensors, call.geometry, call.scale, cu_seqlens=call.cu_seqlens)
        assert found.tolist() == expected.tolist()


def _geometry(
    size: int, stride: int, block: int, n: int = 4, init: int = 1, local: int = 2
) -> BlockGeometry:
    return BlockGeometry(size, stride, block, n, init, local, 8)


FINE = _geometry(4, 2, 4, 5)
EXACT = [
    Problem(FINE, (110,)),  # 28 blocks in windows of 16
    Problem(FINE, (110,), 3, kind="k = 0"),
    Problem(FINE, (110,), 1, kind="periodic"),
    Problem(_geometry(4, 2, 4, 6, 3, 2), (90,), 16, kind="periodic"),
    Problem(_geometry(8, 4, 16, 3, 0, 0), (100,), 6, 2),
    Problem(_geometry(32, 32, 64), (330,), kind="k = 0"),
    Problem(_geometry(16, 8, 24), (170,), 3, kind="periodic"),
    Problem(_geometry(16, 8, 48, 3, 0, 1), (300,)),
    Problem(_geometry(4, 2, 4, 1, 0, 0), (60,), kind="k = 0"),
    Problem(_geometry(4, 2, 4, 33), (150,), 1),
    Problem(FINE, (0, 9, 0, 0, 61, 3, 0), 4, 2),
    Problem(_geometry(8, 4, 8), (7,)),
]
EXACT_SLOW = [
    Problem(dataclasses.replace(FINE, num_selected_blocks=n), (300,), heads, kind=kind)
    for n, heads, kind in [
        (3, 1, "normal"),
        (16, 3, "periodic"),
        (17, 3, "k = 0"),
        (64, 2, "normal"),
        (64, 2, "k = 0"),
    ]
] + [
    Problem(_geometry(4, 2, 4, 2, 0, 0), (500,), 16, kind="normal"),
    Problem(_geometry(4, 2, 4, 20), (0, 130, 1, 0, 77), 3, kind="periodic"),
    Problem(_geometry(32, 4, 32), (300,), 4, 2),
    Problem(_geometry(64, 16, 64, 3, 0, 2), (600,), 7),
]


@pytest.mark.few_cases(
    "normal [4, 2, 4, 5, 1, 2] S=(110,) 2/1",
    "k = 0 [4, 2, 4, 1, 0, 0] S=(60,) 2/1",
    "normal [4, 2, 4, 33, 1, 2] S=(150,) 1/1",
    "normal [4, 2, 4, 5, 1, 2] S=(0, 9, 0, 0, 61, 3, 0) 4/2",
    "normal [8, 4, 8, 4, 1, 2] S=(7,) 2/1",
)
@pytest.mark.parametrize(
    "problem",
    [
        *(pytest.param(p, id=p.name) for p in EXACT),
        *(pytest.param(p, id=p.name, marks=pytest.mark.slow) for p in EXACT_SLOW),
    ],
)
def test_sets_equal_the_oracle(problem: Problem) -> None:
    tensors = problem.tensors()
    assert_right(problem, tensors, run(problem, tensors))


@pytest.mark.few_cases("1-normal", "1-periodic", "2-periodic")
@pytest.mark.parametrize("kind", ["normal", "periodic", "far"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_sets_do_not_depend_on_ranking_windows(windows: int, kind: str) -> None:
    problem, settings = Problem(FINE, (110,), 1, kind=kind), WINDOWS[windows]
    # 16 scores of a window are survivors
    assert -(-28 // (settings["RANK_CHUNKS"] * settings["RANK_LANES"] - 16)) == windows
    tensors = problem.tensors()
    assert_right(problem, tensors, run(problem, tensors, settings))


def test_tokens_that_select_all_blocks_compute_no_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(select, "_walk", None)  # computes the scores
    everything = FINE.num_selected_blocks * FINE.select_block_size
    problem = Problem(FINE, (everything,))
    tensors = problem.tensors()
    assert_right(problem, tensors, run(problem, tensors))
    longer = Problem(FINE, (everything + 1,))
    with pytest.raises(Exception, match="not callable"):
        run(longer, longer.tensors())


@pytest.mark.few_cases("the widest")
@pytest.mark.parametrize("tiles", TILES)
def test_sets_do_not_depend_on_tiles(tiles: str) -> None:
    # 5 heads: tiles of one head, and of two with one head of padding
    problem = Problem(_geometry(8, 4, 16), (110,), 10, 2)
    tensors = problem.tensors()
    assert_right(problem, tensors, run(problem, tensors, TILES[tiles], seed=3))


def test_split_heads() -> None:
    """(heads of a tile, tiles) for the tiles above."""
    assert [
        select.split_heads(5, 128, 256),
        select.split_heads(5, 16, 32),
        select.split_heads(5, 16, 256),
    ] == [(4, 2), (4, 2), (1, 5)]
    # every choice exceeds the columns: the fewest
    assert select.split_heads(16, 128, 64) == (
        16,
        1,
    )


@pytest.mark.few_cases
@pytest.mark.parametrize("kind", ["normal", "periodic", "integers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision_sets_pass_the_regret_rule(dtype: torch.dtype, kind: str) -> None:
    # neighbours are chosen
    problem = Problem(_geometry(8, 4, 16, 6, 1, 1), (150,), 4, 1, kind, dtype=dtype)
    tensors = problem.tensors()
    assert_right(problem, tensors, run(problem, tensors), equal=kind == "periodic")


def test_row_39_blocks_of_mirrored_taps_differ_only_by_rounding() -> None:
    """Block 0 has the taps 8 7 .. 1 of equal probabilities, the last block 1 2 .. 8: 36 both.

    Sums of the same numbers in another order round differently, in the oracle too: that is all that
    may decide here. What no order can tell apart, blocks equal tap by tap, is in the tests above.
    """
    problem = Problem(_geometry(32, 4, 32, 4, 0, 0), (165,), kind="k = 0")
    tensors, call = problem.tensors(), problem.call()
    found = run(problem, tensors)
    expected = oracle.select(*tensors, call.geometry, call.scale)
    differing = (found != expected).any(-1)[0, :, 0].nonzero().flatten().tolist()
    for row in oracle.row_scores(*tensors, call.geometry, call.scale, rows=differing):
        taps = (row.terms[0] * row.logits.shape[1]).round().sum(0)  # p is 1 / visible
        one, other = (
            [j for j in sets[0, row.token, 0].tolist() if j >= 0] for sets in (found, expected)
        )
        assert sorted(taps[one].tolist()) == sorted(taps[other].tolist())
    assert 0 < len(differing) < 10


def test_row_34_nan_stays_in_its_row_and_group() -> None:
    problem = Problem(FINE, (70,), 4, 2)
    q, k, lse = problem.tensors()
    healthy = run(problem, (q, k, lse))
    q, lse = q.clone(), lse.clone()
    q[0, 50, 1, 3] = lse[0, 1, 50] = torch.nan  # head 1, of group 0: all its scores are NaN
    found = run(problem, (q, k, lse))
    # forced, and of equal NaN scores the lowest
    assert found[0, 50, 0].tolist() == [
        0,
        1,
        2,
        11,
        12,
    ]
    healthy[0, 50, 0] = found[0, 50, 0]
    assert torch.equal(found, healthy)


# tokens 28 .. 35, and 24 .. 31
@pytest.mark.parametrize(("key", "blocks"), [(7, {1, 2}), (6, {1})])
def test_blocks_with_a_nan_key_rank_last(key: int, blocks: set[int]) -> None:
    problem = Problem(_geometry(8, 4, 16, 4, 0, 0), (130,), 2)
    q, k, lse = problem.tensors()
    k[0, key] = torch.nan
    found = run(problem, (q, k, lse))
    assert_right(problem, (q, k, lse), found)
    assert not blocks & set(found[0, 129, 0].tolist())
