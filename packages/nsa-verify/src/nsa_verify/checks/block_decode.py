"""Compare `nsa_core.block_attention_decode` with the oracle: output and LSE of each sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from nsa_core.config import NSAConfig
from nsa_core.dispatch.options import PlanOptions
from nsa_core.layer.block_decode import block_attention_decode
from nsa_core.layer.block_plans import BlockSizes, resolve_blocks
from nsa_core.layout import BlockGeometry
from nsa_verify.cases import Case
from nsa_verify.checks.block_attention import chosen_blocks
from nsa_verify.checks.calls import Call
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding, judged, same_bits
from nsa_verify.judge.slot import judge_slot

CHECK = "block attention decode"
_Job = TypeVar("_Job")


@dataclasses.dataclass(frozen=True)
class BlockStep:
    """A call of block_attention_decode, and the check of it on a combination.

    Attributes:
        lengths: Tokens of each sequence after the step.
        size: Keys of a block.
        n: Blocks of each query and kv head.
        rows: New tokens, m.
        page: Rows of a page; None: a contiguous cache.
        heads: Query heads per kv head.
        groups: Key/value heads.
        widths: Dk and Dv.
        index: Dtype of the blocks.
        scale: The argument ``scale``.
    """

    lengths: tuple[int, ...]
    size: int
    n: int
    rows: int = 1
    page: int | None = None
    heads: int = 2
    groups: int = 2
    widths: tuple[int, int] = (16, 16)
    index: torch.dtype = torch.int32
    scale: float | None = None

    @property
    def calls(self) -> frozenset[Call]:
        """The functions that the check may call."""
        return frozenset({("sel", "decode")})

    def case(self, seed: int) -> Case:
        """Return a case with the name and the heads of the step."""
        heads, (dk, dv) = self.heads * self.groups, self.widths
        pages = f"pages of {self.page}" if self.page else "contiguous"
        name = f"{self.n} blocks of {self.size}, {heads}/{self.groups}/{dk}/{dv}, {pages}"
        config = NSAConfig(heads * dk, heads, self.groups, dk, dv, rope=False)
        return Case(f"{name}, {self.rows} new", config, self.lengths, seed=seed)

    def _tensors(self, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
        """Return the arguments of the call; memory that no token owns is NaN."""
        generator = torch.Generator().manual_seed(seed)
        batch, longest = len(self.lengths), max(self.lengths)
        page = self.page or longest + 5
        columns = -(-longest // page) if self.page else 1
        table = torch.arange(batch)[:, None]
        if self.page:
            columns += 1  # the last one is never read: it names a page that does not exist
            table = torch.randperm(batch * columns, generator=generator).view(batch, columns)
        owned = torch.arange(columns * page) < torch.tensor(self.lengths)[:, None]
        stores = {}
        for name, width in zip("kv", self.widths):
            rows = torch.randn(batch, columns * page, self.groups, width, generator=generator)
            rows[~owned] = torch.nan
            store = torch.empty(batch * columns, page, self.groups, width)
            store[table.flatten()] = rows.view(-1, page, self.groups, width)
            stores[name] = store.to(dtype)
        q = torch.randn(
            batch, self.rows, self.heads * self.groups, self.widths[0], generator=generator
        )
        blocks = chosen_blocks(
            (batch, self.rows, self.groups, self.n), longest, self.size, self.index, generator
        )
        # The first sequence has only its newest block, at the end of its list. Kv head 0 of the
        # last sequence has no block.
        blocks[-1, :, 0] = -1
        blocks[0] = torch.iinfo(self.index).min
        blocks[0, ..., -1] = (self.lengths[0] - 1) // self.size
        tensors = {"q": q.to(dtype), **stores, "blocks": blocks}
        tensors["lengths"] = torch.tensor(self.lengths, dtype=torch.int32)
        if self.page:
            tensors["block_table"] = table.int()
        return tensors

    def __call__(
        self, combination: Combination, case: Case, dtype: torch.dtype
    ) -> Iterator[Finding]:
        """Judge one step."""
        tensors = self._tensors(dtype, case.seed)
        moved: dict[str, Any] = {n: t.clone().to(combination.device) for n, t in tensors.items()}
        sizes = BlockSizes(
            *(self.heads * self.groups, self.groups, *self.widths),
            *(self.size, self.n, self.scale, self.page),
        )
        options = PlanOptions(
            device=combination.device,
            dtype=dtype,
            backends=combination.backends.get("sel"),
            phase="decode",
            page_size=self.page,
            batch=len(self.lengths),
            seq_len=max(self.lengths),
        )
        plan = resolve_blocks(sizes, options, registry=combination.registry)
        if "block_table" in moved:  # entries after the last token are not read
            beyond = -(-max(self.lengths) // (self.page or 1))
            moved["block_table"][:, beyond:] = 2**30
        o, lse = block_attention_decode(
            **moved, block_size=self.size, scale=self.scale, plan=plan, return_lse=True
        )
        for b, length in enumerate(self.lengths):
            yield from self._judge(case, dtype, tensors, b, length, (o, lse), sizes.softmax_scale)

    def _judge(
        self,
        case: Case,
        dtype: torch.dtype,
        tensors: dict[str, torch.Tensor],
        b: int,
        length: int,
        results: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> Iterator[Finding]:
        """Judge the rows of one sequence as queries inside it; its padding must be empty."""
        first = max(length - self.rows, 0)
        count = length - first
        o, lse = (x[b : b + 1].cpu() for x in results)
        empty = torch.full_like(lse[..., count:], -torch.inf)
        zero = torch.zeros_like(o[:, count:])
        yield same_bits(CHECK, "sel", case, dtype, "padding of o", o[:, count:], zero)
        yield same_bits(CHECK, "sel", case, dtype, "padding of lse", lse[..., count:], empty)
        if not count:
            return
        pages = tensors["block_table"][b].long() if self.page else torch.tensor([b])
        keys = {n: tensors[n][pages].flatten(0, 1)[None, :length] for n in "kv"}
        queries = {n: tensors[n][b : b + 1, :count] for n in ("q", "blocks")}
        verdicts = judge_slot(
            "sel",
            {**queries, **keys},
            {"o": o[:, :count].contiguous(), "lse": lse[..., :count].contiguous()},
            BlockGeometry(self.size, self.size, self.size, self.n, 0, 0, 1),
            scale,
            first_query=first,
        )
        yield from judged(CHECK, "sel", case, dtype, verdicts)


_INT64 = torch.int64
_TINY = (
    BlockStep((45, 16, 1, 0), 16, 3, page=16, widths=(16, 8)),
    BlockStep((50, 30), 32, 2, rows=2, page=16, heads=3, groups=1, index=_INT64),
    BlockStep((40, 3), 16, 70, heads=1),
    BlockStep((60, 17), 256, 2, heads=3, groups=1),
)
_QUICK = (
    *_TINY,
    BlockStep((300, 256, 1), 128, 16, rows=3, page=64, heads=16, groups=1, widths=(64, 64)),
    BlockStep((700, 513), 256, 2, page=256, heads=4, groups=1, index=_INT64, scale=-0.2),
    BlockStep((530, 257), 512, 2, rows=2, page=512, heads=3, groups=1, widths=(16, 8)),
    BlockStep((130, 65), 64, 5, rows=4, heads=1, groups=3, index=torch.int16),
    BlockStep((300, 100, 299), 48, 130, rows=2, page=48, heads=8, groups=1),
)
_FULL = (
    *_QUICK,
    BlockStep((3000, 17), 16, 256, page=16, heads=16, groups=1, widths=(128, 128), index=_INT64),
    BlockStep((2000, 1025, 1024), 512, 4, rows=2, page=128, heads=7, groups=1, widths=(96, 64)),
    BlockStep((2100,), 192, 10, rows=8, heads=2, groups=2, widths=(32, 64)),
)
STEPS = {"interpreter": _TINY, "quick": _QUICK, "full": _FULL}


def jobs_for(
    preset: str,
    dtypes: Sequence[torch.dtype],
    seed: int,
    job: Callable[[str, Any, Any, torch.dtype], _Job],
) -> list[_Job]:
    """List a job per step and dtype, created by ``job(name, check, case, dtype)``."""
    return [job(CHECK, step, step.case(seed), dtype) for step in STEPS[preset] for dtype in dtypes]
