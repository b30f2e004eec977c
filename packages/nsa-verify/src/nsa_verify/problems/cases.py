"""Cases: named problems with data on which verification and benchmarks run backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.dtypes import stats_dtype


@dataclasses.dataclass(frozen=True)
class Case:
    """A named problem: a layer configuration, sequence lengths, and the source of its data.

    Attributes:
        name: Name in reports.
        config: Layer configuration.
        lengths: Document lengths of a packed case, or the one sequence length of a dense case.
        batch: Batch size of a dense case.
        packed: Whether tensors are packed ([T, ...] with ``cu_seqlens``) or dense ([B, S, ...]).
        fused: Whether q, k and v are views of one buffer, as a fused projection returns them.
        sharpness: Factor on q. Values above 1 make the attention peaked.
        rows: Token positions to judge in every sequence, for long sequences; None judges all.
        seed: Seed of the random numbers.
    """

    name: str
    config: NSAConfig
    lengths: tuple[int, ...]
    batch: int = 1
    packed: bool = False
    fused: bool = False
    # Avoid 2 to 6, where the largest score is about 8 to 16: a correct fp32 kernel can fail in keys
    # that one query alone sees. Above 16 the noise contains the rounding of scores (see
    # nsa_verify.reference.score_noise).
    sharpness: float = 1.0
    rows: tuple[int, ...] | None = None
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens in one batch entry, over all documents."""
        return sum(self.lengths)

    def data(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> CaseData:
        """Create the tensors of the case.

        The values depend on the case, ``dtype`` and ``seed``, but not on ``device``.

        Args:
            dtype: Dtype of all tensors but the gates, which are float32 (float64 for float64).
            device: Device of the tensors.
            seed: Added to the seed of the case.
        """
        tensors = _random(self, dtype, seed + self.seed)
        cu_seqlens = None
        if self.packed:
            bounds = [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        return CaseData(
            **{name: tensor.to(device) for name, tensor in tensors.items()},
            cu_seqlens=cu_seqlens,
            max_seqlen=max(self.lengths, default=0),
        )


@dataclasses.dataclass(frozen=True)
class CaseData:
    """The tensors of a case, in the layouts of nsa_core.contract.

    Shapes are those of a dense case; packed tensors are [T, ...] without the batch axis.
    """

    q: torch.Tensor  # [B, S, Hq, Dk]
    k_cmp: torch.Tensor  # [B, n_c, G, Dk]
    v_cmp: torch.Tensor  # [B, n_c, G, Dv]
    k_sel: torch.Tensor  # [B, S, G, Dk]
    v_sel: torch.Tensor  # [B, S, G, Dv]
    k_win: torch.Tensor  # [B, S, G, Dk]
    v_win: torch.Tensor  # [B, S, G, Dv]
    gates: torch.Tensor  # [B, S, Hq, 3]
    do: torch.Tensor  # [B, S, Hq, Dv]
    cu_seqlens: torch.Tensor | None  # int32 [documents + 1]; None in a dense case
    max_seqlen: int


def _lead(case: Case, rows: int) -> tuple[int, ...]:
    return (rows,) if case.packed else (case.batch, rows)


def _random(case: Case, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    tensors = {
        name: x.to(stats_dtype(dtype) if name == "gates" else dtype, copy=True)
        for name, x in _normal(case, seed).items()
    }
    if case.fused:
        names = ("q", "k_sel", "v_sel", "k_win", "v_win")
        tensors |= _fuse({name: tensors[name] for name in names})
    return tensors


@lru_cache(maxsize=4)  # consecutive checks have the same case
def _normal(case: Case, seed: int) -> dict[str, torch.Tensor]:
    """Draw the tensors of a case in float64; the caller copies them."""
    config, generator = case.config, torch.Generator().manual_seed(seed)
    hq, g, dk, dv = config.n_heads, config.n_kv_heads, config.qk_dim, config.v_dim
    compressed = config.geometry.max_compressed if case.packed else config.geometry.num_compressed

    def normal(rows: int, heads: int, width: int) -> torch.Tensor:
        return torch.randn(
            *_lead(case, rows), heads, width, generator=generator, dtype=torch.float64
        )

    s, c = case.tokens, compressed(case.tokens)
    widths = {"k_sel": dk, "v_sel": dv, "k_win": dk, "v_win": dv}
    tensors = {
        "q": normal(s, hq, dk) * case.sharpness,
        "k_cmp": normal(c, g, dk),
        "v_cmp": normal(c, g, dv),
    }
    tensors |= {name: normal(s, g, width) for name, width in widths.items()}
    return tensors | {"do": normal(s, hq, dv), "gates": torch.sigmoid(normal(s, hq, 3))}


def _fuse(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy ``parts`` into one [..., sum of heads * width] buffer and return views of it."""
    buffer = torch.cat([tensor.flatten(-2) for tensor in parts.values()], -1)
    views = buffer.split([tensor.shape[-2] * tensor.shape[-1] for tensor in parts.values()], -1)
    return {name: view.unflatten(-1, parts[name].shape[-2:]) for name, view in zip(parts, views)}


def config_of(hq: int, g: int, dk: int, dv: int, blocks: Sequence[int], **fields: Any) -> NSAConfig:
    """Return the configuration of a layer with dim = Hq * Dk.

    Args:
        hq: Number of query heads.
        g: Number of kv heads.
        dk: Head dimension of queries and keys.
        dv: Head dimension of values.
        blocks: (l, d, l', n, w): compression block and stride, selection block, number of selected
            blocks, and window.
        **fields: Other fields of NSAConfig.
    """
    size, stride, select, n, window = blocks
    sizes = {
        "dim": hq * dk,
        "n_heads": hq,
        "n_kv_heads": g,
        "head_dim": dk,
        "v_head_dim": dv,
        "compress_block_size": size,
        "compress_stride": stride,
        "select_block_size": select,
        "num_selected_blocks": n,
        "window_size": window,
    }
    return NSAConfig(**{**sizes, **fields})


FREE = {"init_blocks": 0, "local_blocks": 0}  # no block is forced
TINY = (8, 4, 16, 4, 24)  # l, d, l', n, w
SMALL = (16, 8, 32, 4, 48)
PAPER = (32, 16, 64, 16, 512)


@lru_cache(maxsize=4)
def quick_cases() -> tuple[Case, ...]:
    """Return the quick preset: each class of shapes once, small."""
    small, reports = config_of(4, 2, 16, 16, TINY), config_of(12, 2, 64, 64, PAPER)
    return (
        Case("reports 12/2/64", config_of(12, 2, 64, 64, SMALL), (150,), fused=True),
        Case("paper 64/4 192/128", config_of(64, 4, 192, 128, (16, 8, 16, 4, 32)), (97,)),
        Case("h=1", config_of(2, 2, 16, 16, TINY), (93,), sharpness=1.5),
        Case("h=4, Dk != Dv", config_of(8, 2, 32, 16, TINY), (77,), batch=2),
        Case("S=w", small, (24,)),
        Case("S=2w", small, (48,)),
        Case("S=1", small, (1,)),
        Case("S<l", small, (5,), batch=2),
        # Two forced local blocks would hide scores that include invisible tokens.
        Case("nothing forced", config_of(4, 2, 16, 16, TINY, **FREE), (93,)),
        Case("packed", small, (0, 5, 40, 1, 77, 0), packed=True),
        # 258 complete compressed tokens: FlashAttention-4 computes cmp from 256 on.
        Case("long", config_of(4, 2, 64, 64, TINY), (1040,), rows=spread_rows(1040)),
        # 19 selection blocks of the paper's size, more than the 16 selected ones.
        Case("reports S=1155, sampled", reports, (1155,), sharpness=1.5, rows=spread_rows(1155)),
        # Scores of 100: what rounds them shows. Many keys are seen by one query alone.
        Case("large scores", config_of(3, 3, 16, 16, (8, 4, 16, 4, 5)), (28,), sharpness=30.0),
    )


def _edge_rows(s: int, block_sizes: Sequence[int]) -> tuple[int, ...]:
    """Sample rows of a sequence of ``s`` tokens: its ends, block edges, and 60 random rows."""
    edges = {0, 1, s - 1} | {e for size in block_sizes for e in (size - 1, size, size + 1)}
    spread = torch.randint(0, s, (60,), generator=torch.Generator().manual_seed(s)).tolist()
    return tuple(sorted(row for row in edges | set(spread) if 0 <= row < s))


def spread_rows(s: int) -> tuple[int, ...]:
    """Sample three runs of 24 rows of a long sequence of ``s`` tokens: its ends and its middle.

    Neighbouring queries share a window, so that most judged keys have several judged queries.
    """
    firsts = (0, s // 2, s - 24)
    return tuple(row for first in firsts for row in range(first, first + 24))


@lru_cache(maxsize=4)
def full_cases() -> tuple[Case, ...]:
    """Return the full preset.

    It adds the paper's block sizes, every group size, and a long sequence judged on sampled rows.
    """
    reports = config_of(12, 2, 64, 64, PAPER)
    return (
        *quick_cases(),
        Case("reports S=w", reports, (512,)),
        Case("reports S=2w", reports, (1024,)),
        Case("reports S=1155", reports, (1155,), fused=True, sharpness=1.5),
        Case("paper blocks 64/4 192/128", config_of(64, 4, 192, 128, PAPER), (203,)),
        Case("h=3", config_of(6, 2, 16, 16, TINY), (79,)),
        Case("h=7", config_of(7, 1, 16, 24, TINY), (80,)),
        Case("h=16", config_of(32, 2, 64, 64, SMALL), (161,)),
        Case("MQA h=64", config_of(64, 1, 16, 16, TINY), (81,)),
        Case("l=d", config_of(4, 2, 16, 16, (16, 16, 32, 4, 40)), (163,)),
        Case("l=l', w=1", config_of(4, 2, 16, 16, (16, 4, 16, 4, 1)), (75,)),
        Case("B=3", config_of(4, 2, 32, 32, SMALL), (150,), batch=3),
        Case(
            "packed 12/2/64", config_of(12, 2, 64, 64, SMALL), (33, 16, 15, 0, 210, 64), packed=True
        ),
        Case("long, sampled rows", reports, (4096,), rows=_edge_rows(4096, (32, 64, 512))),
        # Our backends have no other kernels for longer calls (SlotSpec.warmup_tokens).
        Case(
            "longest, sampled rows",
            config_of(8, 2, 64, 64, PAPER),
            (16640,),
            rows=spread_rows(16640),
        ),
        Case("large scores 12/2/64", config_of(12, 2, 64, 64, SMALL), (150,), sharpness=100.0),
        Case("large scores, D=192", config_of(4, 2, 192, 128, TINY), (93,), sharpness=30.0),
        Case(
            "large scores, packed",
            config_of(2, 2, 16, 16, TINY),
            (1, 40, 7, 0, 33),
            packed=True,
            sharpness=300.0,
        ),
    )


@lru_cache(maxsize=4)
def interpreter_cases() -> tuple[Case, ...]:
    """Return the cases for interpreted kernels, which take milliseconds per operation.

    They have S <= 80 and head dimension 16. Every check runs on the first one.
    """
    blocks, two_blocks = (8, 4, 16, 3, 12), (8, 4, 16, 2, 12)
    return (
        Case("interpreted", config_of(2, 1, 16, 16, blocks), (21,)),
        Case(
            "interpreted, packed, h=3", config_of(3, 1, 16, 16, blocks), (0, 3, 19, 1), packed=True
        ),
        Case("interpreted, h=1, fused", config_of(2, 2, 16, 16, blocks), (40,), fused=True),
        Case("interpreted, large scores", config_of(2, 2, 16, 16, blocks), (33,), sharpness=30.0),
        Case("interpreted, S<l", config_of(4, 1, 16, 16, blocks), (5,), batch=4),
        Case("interpreted, nothing forced", config_of(2, 1, 16, 16, two_blocks, **FREE), (49,)),
    )


PRESETS: dict[str, Callable[[], tuple[Case, ...]]] = {
    "quick": quick_cases,
    "full": full_cases,
    "interpreter": interpreter_cases,
}
