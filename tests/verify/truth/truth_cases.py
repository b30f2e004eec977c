"""Random problems for the truth tests, drawn and shrunk by hypothesis."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from hypothesis import strategies as st

from nsa_core.layout import BlockGeometry
from nsa_verify import oracle

TINY = BlockGeometry(4, 2, 8, 4, 1, 2, 5)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return float64 numbers of the normal distribution."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def oracle_scores(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the group scores of the oracle [B, S, G, NB], packed [T, G, NB] with the largest NB.

    Scores are 0 for future blocks and without a visible compressed token.
    """
    rows = list(oracle.row_scores(q, k_cmp, lse, geometry, scale, cu_seqlens=cu_seqlens))
    blocks = max((row.terms.shape[-1] for row in rows), default=0)
    out = torch.zeros((*q.shape[:-2], k_cmp.shape[-2], blocks), dtype=torch.float64)
    for row in rows:
        index = (row.row, row.kv_head) if out.dim() == 3 else (row.document, row.row, row.kv_head)
        out[index][: row.terms.shape[-1]] = row.per_group()
    return out


@dataclasses.dataclass(frozen=True)
class TruthCase:
    """A problem with ``batch`` dense sequences of ``lengths[0]`` tokens, or packed documents."""

    geometry: BlockGeometry
    lengths: tuple[int, ...]
    packed: bool
    batch: int
    group: int  # h
    groups: int  # G
    dk: int
    dv: int
    scale: float
    seed: int

    @property
    def total(self) -> int:
        return sum(self.lengths) if self.packed else self.lengths[0]

    @property
    def lead(self) -> tuple[int, ...]:
        return (self.total,) if self.packed else (self.batch, self.total)

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        bounds = [0, *itertools.accumulate(self.lengths)]
        return torch.tensor(bounds, dtype=torch.int32) if self.packed else None

    @property
    def n_c(self) -> int:
        g = self.geometry
        if self.packed:
            return self.total // g.compress_stride
        return max(0, (self.total - g.compress_block_size) // g.compress_stride + 1)

    def tensors(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """Create the inputs of all slots; blocks have duplicates, -1 and future entries."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        heads, lead, cmp_lead = self.group * self.groups, self.lead, (*self.lead[:-1], self.n_c)
        shapes = {
            "q": (lead, heads, self.dk),
            "k": (lead, self.groups, self.dk),
            "v": (lead, self.groups, self.dv),
        }
        shapes |= {
            "k_cmp": (cmp_lead, self.groups, self.dk),
            "v_cmp": (cmp_lead, self.groups, self.dv),
        }
        shapes |= dict.fromkeys(("do", "o_cmp", "o_sel", "o_win"), (lead, heads, self.dv))
        tensors = {n: normal(*leading, *sizes) for n, (leading, *sizes) in shapes.items()}
        tensors["gates"] = normal(*lead, heads, 3).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        )
        limit = self.total // self.geometry.select_block_size + 3
        shape = (*lead, self.groups, self.geometry.num_selected_blocks)
        tensors["blocks"] = torch.randint(-1, limit, shape, generator=generator, dtype=torch.int32)
        return tensors


@st.composite
def geometries(draw: st.DrawFn) -> BlockGeometry:
    stride = draw(st.sampled_from([1, 2, 4]))
    size = stride * draw(st.integers(1, 3))
    select = stride * draw(st.integers(size // stride, 6))
    init, local = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    n = max(1, init + local) + draw(st.integers(0, 4))
    return BlockGeometry(size, stride, select, n, init, local, draw(st.integers(1, 30)))


@st.composite
def truth_cases(draw: st.DrawFn) -> TruthCase:
    geometry, packed = draw(geometries()), draw(st.booleans())
    size, select = geometry.compress_block_size, geometry.select_block_size
    edges = st.sampled_from(
        [0, 1, size - 1, size, size + 1, select - 1, select, select + 1, 3 * select + 1]
    )
    length = st.one_of(edges, st.integers(0, 45))
    lengths = draw(st.lists(length, min_size=1, max_size=4)) if packed else [draw(length)]
    return TruthCase(
        geometry=geometry,
        lengths=tuple(lengths),
        packed=packed,
        batch=draw(st.integers(0, 2)),
        group=draw(st.sampled_from([1, 2, 3, 7])),
        groups=draw(st.integers(1, 2)),
        dk=draw(st.sampled_from([1, 3, 8])),
        dv=draw(st.sampled_from([1, 5, 8])),
        scale=draw(st.sampled_from([0.35, 1.0, -0.5, 0.0])),
        seed=draw(st.integers(0, 2**16)),
    )
