"""The steps of block_attention_decode, which torch.compile does not trace."""

from __future__ import annotations

import torch

from nsa_core.block.checks import check_decode_arguments, check_plan
from nsa_core.block.plans import (
    BlockPlan,
    BlockSizes,
    check_block_size,
    check_scale,
    default_decode_plan,
    split_blocks,
)
from nsa_core.contract import BlockTables, DecodeCall
from nsa_core.dtypes import stats_dtype
from nsa_core.errors import InvalidInput


@torch.compiler.disable(reason="a decode form is no operator: capture it in a CUDA graph")
def run_step(
    tensors: dict[str, torch.Tensor],
    block_size: int,
    scale: float | None,
    plan: BlockPlan | None,
    backends: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, m, Hq, Dv] and lse [B, Hq, m] of a step.

    Args:
        tensors: q, k, v, blocks, lengths and, if passed, starts and block_table.
        block_size: The other arguments are those of block_attention_decode.
        scale: As above.
        plan: As above.
        backends: As above.
    """
    check_block_size(block_size)
    check_scale(scale)
    check_decode_arguments(tensors, plan, backends)
    q, k, v, blocks, lengths = (tensors[n] for n in ("q", "k", "v", "blocks", "lengths"))
    starts, block_table = tensors.get("starts"), tensors.get("block_table")
    widths = (q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    page = None if block_table is None else k.shape[1]
    sizes = BlockSizes(*widths, block_size, blocks.shape[-1], scale, page)
    size, _ = sizes.kernel_blocks
    if page is not None and page % size:
        raise InvalidInput(
            f"pages of {page} rows do not hold whole blocks of {block_size} keys: use pages of a"
            f" multiple of {block_size}, or of 16 if the blocks are a multiple of 16"
        )
    if plan is None:
        plan = default_decode_plan(sizes, q.device, q.dtype, backends)
    else:
        check_plan(plan, sizes, q, phase="decode")
    with torch.no_grad():
        arguments = (q, k, blocks, block_table)
        if not all(tensor.numel() for tensor in arguments if tensor is not None):
            shape, stats = (len(q), q.shape[2], q.shape[1]), stats_dtype(q.dtype)
            lse = q.new_full(shape, -torch.inf, dtype=stats)
            return q.new_zeros((*q.shape[:3], v.shape[3])), lse
        if block_table is None:
            block_table = torch.arange(len(q), device=q.device, dtype=torch.int32)[:, None]
        if starts is None:
            starts = (lengths - q.shape[1]).clamp_(min=0)
        rows = block_table.shape[1] * k.shape[1]
        geometry, factor = plan.request.geometry, sizes.softmax_scale
        tables = BlockTables(*(block_table,) * 4)
        call = DecodeCall(geometry, factor, starts, lengths, tables, rows)
        o, lse = plan.kernel(q, k, v, split_blocks(blocks, sizes, rows), call=call)
    return o, lse
