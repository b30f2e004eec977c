"""The steps of block_attention_decode, which torch.compile does not trace."""

from __future__ import annotations

import torch

from nsa_core.block.checks import check_decode_arguments
from nsa_core.block.plans import (
    BlockPlan,
    BlockSizes,
    check_plan,
    default_decode_plan,
    split_blocks,
)
from nsa_core.contract import BlockTables, DecodeCall
from nsa_core.decode.checks import raise_at
from nsa_core.dtypes import stats_dtype
from nsa_core.errors import InvalidInput
from nsa_core.torch_ops.packing_checks import has_values
from nsa_core.torch_ops.torch_state import checks_values


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
    check_decode_arguments(tensors, block_size, scale, plan, backends)
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
        deterministic = torch.are_deterministic_algorithms_enabled()
        plan = default_decode_plan(sizes, q.device, q.dtype, backends, deterministic)
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
        blocks = split_blocks(blocks, sizes, rows)
        if has_values(lengths) and checks_values(lengths):
            _check_values(blocks, size, lengths, block_table, k)
        geometry, factor = plan.request.geometry, sizes.softmax_scale
        tables = BlockTables(*(block_table,) * 4)
        call = DecodeCall(geometry, factor, starts, lengths, tables, rows)
        o, lse = plan.kernel(q, k, v, blocks, call=call)
    return o, lse


def _check_values(
    blocks: torch.Tensor,
    size: int,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    k: torch.Tensor,
) -> None:
    """Check the lengths, and the pages of the blocks that are read.

    Args:
        blocks: The blocks [B, m, G, n] that the kernel sees.
        size: Keys of such a block.
        lengths: Number of tokens of each sequence.
        block_table: The pages of each sequence.
        k: The keys in pages.

    Raises:
        InvalidInput: A length exceeds the room of a sequence, or a page is none of the pool.
    """
    pages, page = k.shape[:2]
    room = block_table.shape[1] * page
    wrong = (lengths < 0) | (lengths > room)
    raise_at(wrong, lengths, f"lengths must be from 0 to {room}, the room of a sequence")
    first = blocks.flatten(1).long().clamp(-1, 2**31) * size  # the first token of each block
    is_read = (first >= 0) & (first < lengths[:, None])
    entries = block_table.gather(1, first.where(is_read, 0) // page)
    outside = (is_read & ((entries < 0) | (entries >= pages))).nonzero()
    if len(outside):
        sequence, place = outside[0].tolist()
        raise InvalidInput(
            f"block_table must name one of {pages} pages for each block that is read, got"
            f" {int(entries[sequence, place])} for token {int(first[sequence, place])} of sequence"
            f" {sequence}"
        )
