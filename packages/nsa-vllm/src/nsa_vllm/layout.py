"""Compressed tokens in the blocks of an engine: a block per block of tokens. It imports no vLLM.

A block of cmp holds the compressed tokens whose last token is in the block of tokens with the same
number. So it depends on the tokens of this block and of earlier ones only, and sequences that share
these tokens can share it. Compressed token i, of tokens i*d to i*d + l - 1, is state i + l/d - 1 of
its sequence. To :func:`nsa_core.nsa_decode` each state is a page of one row.
"""

from __future__ import annotations

import torch

from nsa_core.errors import Unsupported
from nsa_core.layout import BlockGeometry


def state_pages(blocks: torch.Tensor) -> torch.Tensor:
    """Return a view [pages, 1, G, D] of blocks [blocks, states, G, D]: each state is a page.

    State r of block b is page b * pitch + r, where the pitch is the distance of blocks in states.
    Pages between the blocks are other memory of the engine.

    Raises:
        Unsupported: the distance of two blocks is no multiple of that of two states.
    """
    count, states, heads, width = blocks.shape
    block, state, head, _ = blocks.stride()
    if block % state:
        raise Unsupported(
            "blocks: the distance of two blocks must be a multiple of that of two states, got"
            f" {block} and {state} elements: leave VLLM_KV_CACHE_LAYOUT unset"
        )
    pages = (count - 1) * pitch(blocks) + states
    return blocks.as_strided((pages, 1, heads, width), (state, state, head, 1))


def pitch(blocks: torch.Tensor) -> int:
    """Return the distance of two blocks [blocks, states, G, D] in states."""
    return blocks.stride(0) // blocks.stride(1)


def state_table(
    table: torch.Tensor, geometry: BlockGeometry, states: int, pitch: int, max_len: int
) -> torch.Tensor:
    """Return the page of each compressed token, int32 [B, compressed tokens].

    Args:
        table: int32 [B, columns], the blocks of tokens of each sequence.
        geometry: the sizes of blocks.
        states: compressed tokens per block.
        pitch: distance of two blocks in states.
        max_len: host integer, an upper bound of the lengths.
    """
    first = geometry.compress_block_size // geometry.compress_stride - 1
    count = max(1, geometry.num_compressed(max_len))
    state = torch.arange(first, first + count, dtype=torch.int32, device=table.device)
    block = table.index_select(1, state.div(states, rounding_mode="floor"))
    return block * pitch + state % states
