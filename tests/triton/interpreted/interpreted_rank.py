"""The ranking of select, alone, against a plain sort: ties, NaN, inf, windows."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.select.forward import scratch_row
from nsa_backend_triton.select.rank import rank_rows

TOKENS = 16  # of a block
ROWS = 64


@triton.jit
def _rank(
    SCORES, OUT, first_token, end_token, stride_out, stride_scores,
    ROWS: tl.constexpr, NUM_SELECTED: tl.constexpr, NUM_SELECTED_PAD: tl.constexpr,
    INIT_BLOCKS: tl.constexpr, LOCAL_BLOCKS: tl.constexpr, SELECT_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    token = first_token + tl.arange(0, ROWS)
    rank_rows(
        SCORES, OUT, token, token < end_token, stride_out, stride_scores,
        NUM_SELECTED, NUM_SELECTED_PAD, INIT_BLOCKS, LOCAL_BLOCKS, SELECT_BLOCK, CHUNKS, LANES,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Rows of ``blocks`` to blocks + 3 scores, of which the first ``rows`` exist."""

    blocks: int
    num_selected: int = 5
    init: int = 1
    local: int = 1
    rows: int = ROWS
    lanes: int = 8
    chunks: int = 4

    def found(self, scores: Tensor) -> list[list[int]]:
        """The blocks that the kernel selects."""
        pad = max(16, triton.next_power_of_2(self.num_selected))
        stride = scratch_row(scores.shape[1], 1, pad, self.chunks * self.lanes)
        # numbers that another tile left there
        scratch = scores.new_full((ROWS, stride // 2, 2), 1e30)
        scratch[:, ::3] = math.nan
        scratch[:, pad : pad + scores.shape[1], 0] = scores
        scratch[:, pad : pad + scores.shape[1], 1] = 0
        out = torch.full((ROWS, self.num_selected), -7, dtype=torch.int32)
        first = (self.blocks - 1) * TOKENS
        _rank[(1,)](
            scratch, out, first, first + self.rows, self.num_selected, stride, ROWS,
            self.num_selected, pad, self.init, self.local, TOKENS, self.chunks, self.lanes,
        )  # fmt: skip
        assert (out[self.rows :] == -7).all()
        return out[: self.rows].tolist()

    def expected(self, scores: Tensor) -> list[list[int]]:
        """The same from a plain sort: higher scores first, then lower blocks, NaN last."""
        sets = []
        for row in range(self.rows):
            blocks = self.blocks + row // TOKENS
            if blocks <= self.num_selected:
                sets.append([*range(blocks), *[-1] * (self.num_selected - blocks)])
                continue
            forced = {*range(self.init), *range(blocks - self.local, blocks)}
            values = [-math.inf if math.isnan(x) else x for x in scores[row].tolist()]
            free = [x for x in range(blocks) if x not in forced]
            free.sort(key=lambda block: -values[block])  # stable
            sets.append(sorted(forced | set(free[: self.num_selected - len(forced)])))
        return sets


# A window of 32 columns has 16 new blocks.
RANKINGS = {
    "one window": Ranking(13),
    "all blocks in some rows": Ranking(3),
    "two windows in some rows": Ranking(15),
    "five windows": Ranking(80),
    "some rows": Ranking(50, rows=37),
    "more than lanes": Ranking(60, 14, 2, 2),
    "all survivors": Ranking(60, 16, 0, 0),
    "half windows": Ranking(46, chunks=8),
    "half a window": Ranking(14, chunks=8),
    "one": Ranking(40, 1, 0, 0),
    "forced blocks in three windows": Ranking(150, 48, 36, 3, lanes=16, chunks=8),
    "many lanes": Ranking(150, 20, 1, 2, lanes=32, chunks=4),
    "two packs": Ranking(130, 20, 1, 2, chunks=16),
}
WIDE = Ranking(300, 70, 0, 0, lanes=32, chunks=32)


def _scores(columns: int, dtype: torch.dtype) -> Tensor:
    """Rows of eleven kinds in turn."""
    generator = torch.Generator().manual_seed(columns)
    order = torch.rand(ROWS, columns, generator=generator, dtype=torch.float64)
    scores = torch.rand(ROWS, columns, generator=generator, dtype=torch.float64).pow(8)
    column = torch.arange(columns, dtype=torch.float64).expand(ROWS, -1)
    kinds = [
        scores,
        (order * 6).floor(),  # ties
        torch.full_like(scores, 0.25),
        torch.where(order < 0.05, scores, 0.0),
        torch.where(order < 0.3, torch.nan, scores),
        torch.where(column < columns - columns // 8, torch.nan, scores),
        torch.where(order < 0.5, torch.nan, -torch.inf),  # -inf ranks like NaN
        torch.where(order < 0.1, torch.inf, torch.where(order < 0.2, torch.nan, scores)),
        scores * 2.0**-140,  # subnormal in float32
        column,
        columns - column,
    ]
    row = torch.arange(ROWS) % TOKENS
    return torch.stack(kinds)[row % len(kinds), torch.arange(ROWS)].to(dtype)


ORDINARY = ("two windows in some rows", "five windows", "many lanes", "two packs")
NAMES = [
    pytest.param(name, marks=[] if name in ORDINARY else [pytest.mark.slow]) for name in RANKINGS
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranking_equals_a_plain_sort(name: str, dtype: torch.dtype) -> None:
    ranking = RANKINGS[name]
    scores = _scores(ranking.blocks + 3, dtype)
    assert ranking.found(scores) == ranking.expected(scores)


@pytest.mark.slow
def test_a_window_of_1024_columns() -> None:
    scores = _scores(WIDE.blocks + 3, torch.float32)
    assert WIDE.found(scores) == WIDE.expected(scores)
