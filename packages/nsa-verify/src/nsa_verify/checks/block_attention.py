"""Compare `nsa_core.block_attention` with the oracle: output, LSE and gradients.

The oracle sees the call as the user makes it. The check therefore also judges the steps that the
function adds to the slot sel: the split of large blocks, index dtypes, queries inside a sequence,
and the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from nsa_core.config import NSAConfig
from nsa_core.dispatch.options import PlanOptions
from nsa_core.layer.block_attention import block_attention
from nsa_core.layer.block_plans import BlockSizes, resolve_blocks
from nsa_core.layout import BlockGeometry
from nsa_verify.cases import Case, CaseData
from nsa_verify.checks.calls import Call, prefill
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding, judged
from nsa_verify.judge.slot import judge_slot

CHECK = "block attention"
_Job = TypeVar("_Job")


def chosen_blocks(
    shape: tuple[int, ...],
    longest: int,
    size: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    limits: torch.dtype | None = None,
) -> torch.Tensor:
    """Return random blocks of ``size`` keys of sequences of up to ``longest`` tokens.

    Among them are repeated and future ones, -1, and the limits of the dtype ``limits``, which is
    ``dtype`` by default.
    """
    last, limit = -(-longest // size), torch.iinfo(limits or dtype)
    blocks = torch.randint(-1, last + 1, shape, generator=generator)
    odd = torch.randint(0, 20, shape, generator=generator)
    for number, value in enumerate((limit.min, limit.max, limit.max // 2, last + 7)):
        blocks[odd == number] = value
    return blocks.to(dtype)


@dataclasses.dataclass(frozen=True)
class BlockCall:
    """A call of block_attention, and the check of it on a combination.

    Attributes:
        lengths: Lengths of packed documents, or the one length of dense sequences.
        size: Keys of a block.
        n: Blocks of each query and kv head.
        heads: Query heads per kv head.
        groups: Key/value heads.
        widths: Dk and Dv.
        batch: Dense sequences; 0: packed documents.
        rows: First and last + 1 of the tokens whose queries are given, packed of the packed axis;
            None: all of them.
        index: Dtype of the blocks.
        scale: The argument ``scale``.
    """

    lengths: tuple[int, ...]
    size: int
    n: int
    heads: int = 2
    groups: int = 2
    widths: tuple[int, int] = (16, 16)
    batch: int = 1
    rows: tuple[int, int] | None = None
    index: torch.dtype = torch.int32
    scale: float | None = None

    @property
    def calls(self) -> frozenset[Call]:
        """The functions that the check may call."""
        return frozenset(prefill("sel"))

    @property
    def name(self) -> str:
        """The sizes, for reports."""
        form = "packed" if not self.batch else "dense"
        inside = f" rows {self.rows[0]} to {self.rows[1]}" if self.rows else ""
        heads = f"{self.heads * self.groups}/{self.groups}/{self.widths[0]}/{self.widths[1]}"
        return f"{self.n} blocks of {self.size}, {heads}, {form}{inside}"

    def case(self, seed: int) -> Case:
        """Return the tensors of the call as a case."""
        heads, (dk, dv) = self.heads * self.groups, self.widths
        config = NSAConfig(heads * dk, heads, self.groups, dk, dv, rope=False)
        return Case(
            self.name, config, self.lengths, max(1, self.batch), packed=not self.batch, seed=seed
        )

    def blocks(self, lead: Sequence[int], seed: int) -> torch.Tensor:
        """Return blocks [*lead, G, n], among them repeated, future, negative and far ones.

        Query 0 has no block. Query 1 has only future and negative ones. Every fourth query from
        query 3 on has blocks only in the second half of its list.
        """
        generator = torch.Generator().manual_seed(seed)
        longest = max(self.lengths)
        last = -(-longest // self.size)
        shape = (*lead, self.groups, self.n)
        blocks = chosen_blocks(shape, longest, self.size, torch.int64, generator, self.index)
        blocks[..., ::2, :, -1] = blocks[..., ::2, :, 0]
        blocks[..., 3::4, :, : self.n // 2] = -1
        blocks[..., :2, :, :] = -1
        blocks[..., 1, :, ::2] = last + 7
        return blocks.to(self.index)

    def __call__(
        self, combination: Combination, case: Case, dtype: torch.dtype
    ) -> Iterator[Finding]:
        """Judge one call, forward and backward."""
        data = case.data(dtype, combination.device)
        inputs, do, options = self._inputs(data, case)
        plan = resolve_blocks(
            BlockSizes(
                *(self.heads * self.groups, self.groups, *self.widths),
                *(self.size, self.n, self.scale),
            ),
            PlanOptions(
                device=combination.device,
                dtype=dtype,
                backends=combination.backends.get("sel"),
                needs_grad=True,
                varlen=case.packed,
                partial=self.rows is not None,
                batch=case.batch,
                seq_len=inputs["q"].shape[-3],
            ),
            registry=combination.registry,
        )
        names = ("q", "k", "v")
        leaves: dict[str, Any] = {
            n: t.detach().requires_grad_(n in names) for n, t in inputs.items()
        }
        o, lse = block_attention(
            **leaves,
            block_size=self.size,
            scale=self.scale,
            plan=plan,
            return_lse=True,
            **options,
        )
        grads = torch.autograd.grad(o, [leaves[n] for n in names], do)
        outputs = {"o": o.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), grads))}
        verdicts = judge_slot(
            "sel",
            {n: t.detach() for n, t in leaves.items()},
            outputs,
            BlockGeometry(self.size, self.size, self.size, self.n, 0, 0, 1),
            plan.sizes.softmax_scale,
            cu_seqlens=data.cu_seqlens,
            do=do,
            first_query=options.get("first_query"),
        )
        yield from judged(CHECK, "sel", case, dtype, verdicts)

    def _inputs(
        self, data: CaseData, case: Case
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
        """Return the tensors of the call, the gradient of o, and its other arguments."""
        q, do, options = data.q, data.do, dict[str, Any](cu_seqlens=data.cu_seqlens)
        if case.packed:
            options["max_seqlen"] = data.max_seqlen
        if self.rows is not None:
            options["first_query"] = self.rows[0]
            q, do = (x[..., slice(*self.rows), :, :] for x in (q, do))
        blocks = self.blocks(q.shape[:-2], case.seed + 1).to(q.device)
        return {"q": q, "k": data.k_sel, "v": data.v_sel, "blocks": blocks}, do, options


_INT64 = torch.int64
# At least twelve queries of each kv head see a key in every call: with fewer, the rounding of one
# LSE decides about the bias of dv (docs/explanation/verification.md).
_TINY = (
    BlockCall((37,), 16, 3, widths=(16, 8)),
    BlockCall((5, 0, 29, 3), 16, 4, heads=3, groups=1, batch=0, rows=(3, 31), index=_INT64),
    BlockCall((30,), 16, 70, heads=1, groups=2, index=torch.uint8),
    BlockCall((80,), 48, 2, heads=4, groups=1, batch=0, index=torch.int16),
    BlockCall((80,), 272, 2, heads=1, groups=1, rows=(20, 78)),
    BlockCall((80,), 256, 2, heads=3, groups=1, widths=(16, 8), rows=(20, 78)),
)
_QUICK = (
    BlockCall((61,), 16, 5, batch=2, widths=(16, 24)),
    BlockCall((130,), 64, 3, heads=1, groups=3, index=_INT64, scale=-0.2),
    BlockCall((300,), 256, 2, heads=4, groups=1),
    BlockCall((530, 3, 260), 256, 3, heads=16, groups=1, batch=0, rows=(200, 700)),
    BlockCall((450,), 200, 3, heads=3, groups=1, batch=2, index=_INT64),
    BlockCall((0, 250, 1, 149), 192, 3, batch=0, index=torch.int16),
    BlockCall((70,), 16, 130, heads=8, groups=1, index=torch.uint8),
    BlockCall((90,), 32, 4, heads=16, groups=1, batch=2, rows=(45, 80), index=_INT64),
    BlockCall((40, 3, 60), 128, 2, batch=0, rows=(17, 90), widths=(24, 16)),
    BlockCall((700,), 512, 3, heads=1, groups=2, rows=(500, 700), index=_INT64),
)
_FULL = (
    *_QUICK,
    BlockCall((600,), 128, 16, heads=16, groups=1, widths=(64, 64)),
    BlockCall((600,), 256, 256, heads=2, groups=1, index=_INT64),
    BlockCall((1100,), 256, 16, heads=16, groups=1, widths=(128, 64)),
    BlockCall((1200,), 64, 16, heads=4, groups=2, widths=(128, 128)),
    BlockCall((500, 0, 700), 48, 20, heads=8, groups=1, batch=0),
    BlockCall((300, 1, 500), 384, 2, heads=7, groups=1, batch=0, rows=(250, 700)),
    BlockCall((400,), 32, 64, heads=4, groups=2, batch=3, rows=(1, 399)),
    BlockCall((2100,), 1024, 4, heads=2, groups=1, index=_INT64),
    # Few queries over many keys: kernels may take another form of sel in long sequences.
    BlockCall((9000,), 128, 16, heads=4, groups=1, widths=(128, 128), rows=(8900, 9000)),
    BlockCall((9000,), 128, 16, heads=16, groups=1, widths=(128, 128), rows=(8900, 9000)),
    BlockCall((9000,), 128, 16, heads=2, groups=2, widths=(128, 128), rows=(8900, 9000)),
)
CALLS = {"interpreter": _TINY, "quick": _QUICK, "full": _FULL}


def jobs_for(
    preset: str,
    dtypes: Sequence[torch.dtype],
    seed: int,
    job: Callable[[str, Any, Any, torch.dtype], _Job],
) -> list[_Job]:
    """List a job per call and dtype, created by ``job(name, check, case, dtype)``."""
    return [job(CHECK, call, call.case(seed), dtype) for call in CALLS[preset] for dtype in dtypes]
