"""divided_block_attention: block_attention over a sequence that is divided over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nsa_core.block.attention import block_attention
from nsa_core.block.checks import check_arguments
from nsa_core.block.plans import BlockPlan, BlockSizes, plan_of_call
from nsa_core.errors import InvalidInput
from nsa_core.parallel.agreement import agreed, names_of, values_of_packing
from nsa_core.parallel.collectives import group_name
from nsa_core.parallel.exchange_rows import Ranks, attend_gathered, rows_first
from nsa_core.parallel.shards import Shards
from nsa_core.torch_ops.packing_checks import check_cu_seqlens, has_values
from nsa_core.torch_ops.tensor_kinds import check_types

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def divided_block_attention(
    q: torch.Tensor,  # [B, n, Hq, Dk], packed [n, Hq, Dk]
    k: torch.Tensor,  # [B, n, G, Dk]
    v: torch.Tensor,  # [B, n, G, Dv]
    blocks: torch.Tensor,  # any integer dtype, [B, n, G, blocks of a query]
    shards: Shards,
    *,
    block_size: int,
    group: ProcessGroup | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,  # int32 [documents + 1]
    max_seqlen: int | None = None,
    plan: BlockPlan | None = None,
    backends: str | None = None,
) -> torch.Tensor:
    """Attend as :func:`nsa_core.block_attention` from this rank's rows to the keys of all ranks.

    Keys and values travel: one all-gather forward; backward, another one and a reduce-scatter of
    their gradients, which are summed in fp32. All ranks must call it. Block indices count from the
    start of the whole sequence, or of a document, as without ranks.

    Args:
        q: queries of this rank's n = ``shards.rows`` rows, as :meth:`Shards.take` returns them.
        k: keys of these rows.
        v: values of these rows.
        blocks: blocks of these rows; otherwise as for block_attention.
        shards: the rows of this rank.
        block_size: keys of a block.
        group: the ranks; default: all processes.
        scale: factor of q k^T before the softmax; default 1 / sqrt(Dk).
        cu_seqlens: int32 [documents + 1] on q's device, the documents of the whole sequence, the
            same on all ranks.
        max_seqlen: host integer, length in tokens of the longest document or an upper bound;
            default: all rows.
        plan: a plan from :func:`nsa_core.plan_block_attention` with ``partial=True``. By default,
            a plan is resolved once per shape, device and dtype and cached.
        backends: name of the backend, without ``plan``.

    Returns:
        The rows of this rank of the output [B, n, Hq, Dv], in q's dtype. They are those of one
        process up to rounding, and so are the gradients of q, k and v.

    Raises:
        InvalidInput: an argument is invalid, the tensors do not have ``shards.rows`` rows, or the
            group does not have the ranks of ``shards``; or, with NSA_CHECK=1, the ranks do not
            agree.
        Unsupported, BackendUnavailable, NSAError: as block_attention.

    Example:
        >>> shards = Shards(total, dist.get_world_size(), dist.get_rank())
        >>> own = [shards.take(x, 1) for x in (q, k, v, blocks)]
        >>> o = divided_block_attention(*own, shards, block_size=64)
    """
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "blocks": blocks}
    check_types(tensors)
    if not isinstance(shards, Shards):
        raise InvalidInput(f"shards must be Shards, got {type(shards).__name__}")
    packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    options: dict[str, Any] = {"block_size": block_size, "scale": scale, **packing}
    given, packed = plan, cu_seqlens is not None

    def check() -> None:
        check_arguments(tensors, block_size, scale, None, cu_seqlens, max_seqlen, given, backends)
        rows = q.shape[-3]
        if rows != shards.rows:
            raise InvalidInput(
                f"q, k, v and blocks must have the {shards.rows} rows of this rank, got {rows}:"
                " pass shards.take(x, -3)"
            )
        if has_values(cu_seqlens):
            check_cu_seqlens(cu_seqlens, shards.total, max_seqlen)

    def prepare() -> BlockPlan:
        check()
        shards.checked_group(group)
        heads, widths = (q.shape[-2], k.shape[-2]), (q.shape[-1], v.shape[-1])
        sizes = BlockSizes(*heads, *widths, block_size, blocks.shape[-1], scale)
        return plan_of_call(tensors, sizes, packed, True, shards.total, given, backends)

    def values(plan: BlockPlan | None) -> dict[str, object]:
        named = {name: tensors[name] for name in "qkv"}
        return {
            "the layout": shards.layout,
            **values_of_packing(cu_seqlens, max_seqlen),
            "the total of shards": shards.total,
            "the world of shards": shards.world,
            # The number of blocks of a query may differ.
            **{f"the shape of {name}": tuple(x.shape) for name, x in named.items()},
            "the dtype of q": q.dtype,
            "block_size": block_size,
            "scale": scale,
            "the plan": None if plan is None else names_of({"sel": plan.choice}),
            "grad mode": torch.is_grad_enabled(),
            "requires_grad": [name for name, x in named.items() if x.requires_grad],
        }

    if shards.world == 1:
        check()
        return block_attention(**tensors, **options, plan=plan, backends=backends)
    plan = agreed(prepare, values, group_name(group), q)
    ranks = Ranks.of(shards, shards.total, shards.checked_group(group), torch.float32)
    choices = blocks.split(ranks.chunk, -3)

    def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        first, _ = ranks.pieces[index]
        own = choices[index]
        return block_attention(q, k, v, own, **options, first_query=first, plan=plan)

    rows, local = q.split(ranks.chunk, -3), (rows_first(k, packed), rows_first(v, packed))
    outputs = attend_gathered(attend, plan.kernel, rows, local, packed, ranks)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -3)
