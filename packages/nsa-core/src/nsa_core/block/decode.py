"""block_attention_decode: attention of the newest tokens to chosen blocks of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_core.block.attention import BlockOutput

if TYPE_CHECKING:
    from nsa_core.block.plans import BlockPlan


def block_attention_decode(
    q: torch.Tensor,  # [B, m, Hq, Dk]
    k: torch.Tensor,  # [P, page, G, Dk], or [B, N, G, Dk]
    v: torch.Tensor,  # [P, page, G, Dv], or [B, N, G, Dv]
    blocks: torch.Tensor,  # any integer dtype, [B, m, G, n]
    *,
    block_size: int,
    lengths: torch.Tensor,  # int32 [B]
    starts: torch.Tensor | None = None,  # int32 [B]
    block_table: torch.Tensor | None = None,  # int32 [B, pages]
    scale: float | None = None,
    plan: BlockPlan | None = None,
    backends: str | None = None,
) -> torch.Tensor:
    """Attend from the newest tokens of B sequences to chosen blocks of their cached keys.

    The mathematics are those of :func:`nsa_core.block_attention`. The cache already holds the keys
    and values of these tokens. The call has no gradient and reads nothing from the device, so that
    a CUDA graph can replay it with new values in the same tensors, which may have any strides.

    Sizes: B sequences of m new tokens, Hq query heads, G kv heads, head widths Dk and Dv, n blocks
    a token and kv head. The cache has P pages, or N rows a sequence.

    Args:
        q: queries [B, m, Hq, Dk], bfloat16, float16, float32 or float64. Row r of sequence b is its
            token ``starts[b] + r``; rows from ``lengths[b]`` on are padding. m is 1 or a few.
        k: cached keys of q's dtype in pages [P, page, G, Dk], or without ``block_table`` of one
            sequence after the other [B, N, G, Dk]. The columns must be contiguous.
        v: cached values [P, page, G, Dv] or [B, N, G, Dv] of q's dtype, as for ``k``.
        blocks: block indices [B, m, G, n], as in :func:`nsa_core.block_attention`.
        block_size: keys of a block, as in :func:`nsa_core.block_attention`. Pages must hold whole
            blocks: a size that does not divide the rows of a page is split into blocks of 256,
            128, 64, 32 or 16 keys that do, and refused if none of them divides both.
        lengths: int32 [B] on q's device, number of tokens of each sequence, the new ones included.
        starts: int32 [B] on q's device, number of tokens before the new ones; default lengths - m,
            at least 0.
        block_table: int32 [B, pages] on q's device. Page block_table[b, i] holds the tokens
            page * i .. page * (i + 1) - 1 of sequence b; entries of pages without a block that is
            read, and those after the last token, may have any value.
        scale: factor of q k^T before the softmax; default 1 / sqrt(Dk).
        plan: a plan from :func:`nsa_core.plan_block_attention` with ``phase="decode"``, and with
            ``page_size`` for pages. By default, a plan is resolved once per shape and cached.
        backends: name of the backend, without ``plan``; default: the highest-ranked one that
            supports the call.

    Returns:
        The output [B, m, Hq, Dv] in q's dtype, 0 for queries without a key and for padding.
        :func:`block_attention_decode_with_lse` also returns the log-sum-exp.

    Raises:
        InvalidInput: an argument is invalid, the tensors do not fit each other or the plan, or q
            requires a gradient. Values of lengths and block_table are checked on the CPU, and on a
            GPU with NSA_CHECK=1.
        Unsupported: no backend supports the call. The message lists each backend with its reasons.
        BackendUnavailable: no backend is usable on this machine.
        NSAError: the backend failed while it ran. The message names it.

    Example:
        >>> import torch
        >>> from nsa_core import block_attention_decode
        >>> k, v = torch.randn(2, 6, 64, 2, 32)  # 6 pages of 64 rows
        >>> table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
        >>> lengths = torch.tensor([130, 64], dtype=torch.int32)
        >>> q = torch.randn(2, 1, 8, 32)
        >>> blocks = torch.tensor([2, 0, -1]).expand(2, 1, 2, 3)
        >>> o = block_attention_decode(
        ...     q, k, v, blocks, block_size=64, lengths=lengths, block_table=table
        ... )
        >>> o.shape
        torch.Size([2, 1, 8, 32])
    """
    return block_attention_decode_with_lse(
        q,
        k,
        v,
        blocks,
        block_size=block_size,
        lengths=lengths,
        starts=starts,
        block_table=block_table,
        scale=scale,
        plan=plan,
        backends=backends,
    ).o


def block_attention_decode_with_lse(
    q: torch.Tensor,  # [B, m, Hq, Dk]
    k: torch.Tensor,  # [P, page, G, Dk], or [B, N, G, Dk]
    v: torch.Tensor,  # [P, page, G, Dv], or [B, N, G, Dv]
    blocks: torch.Tensor,  # any integer dtype, [B, m, G, n]
    *,
    block_size: int,
    lengths: torch.Tensor,  # int32 [B]
    starts: torch.Tensor | None = None,  # int32 [B]
    block_table: torch.Tensor | None = None,  # int32 [B, pages]
    scale: float | None = None,
    plan: BlockPlan | None = None,
    backends: str | None = None,
) -> BlockOutput:
    """Compute :func:`block_attention_decode`, and return the log-sum-exp with it.

    The arguments are those of :func:`block_attention_decode`.

    Returns:
        The named tuple (o, lse): the output [B, m, Hq, Dv] and the log-sum-exp [B, Hq, m], -inf for
        padding. See :class:`nsa_core.block.attention.BlockOutput`.

    Raises:
        InvalidInput, Unsupported, BackendUnavailable, NSAError: as :func:`block_attention_decode`.

    Example:
        >>> import torch
        >>> from nsa_core import block_attention_decode_with_lse
        >>> k, v = torch.randn(2, 3, 200, 2, 32)  # three sequences of up to 200 tokens
        >>> lengths = torch.tensor([130, 64, 200], dtype=torch.int32)
        >>> q = torch.randn(3, 1, 8, 32)
        >>> blocks = torch.tensor([0, 1]).expand(3, 1, 2, 2)
        >>> o, lse = block_attention_decode_with_lse(
        ...     q, k, v, blocks, block_size=64, lengths=lengths
        ... )
        >>> o.shape, lse.shape
        (torch.Size([3, 1, 8, 32]), torch.Size([3, 8, 1]))
    """
    # The import takes as long as that of torch, because it imports the compiler.
    from nsa_core.block.step import run_step

    tensors = {"q": q, "k": k, "v": v, "blocks": blocks, "lengths": lengths}
    tensors |= {} if starts is None else {"starts": starts}
    tensors |= {} if block_table is None else {"block_table": block_table}
    return BlockOutput(*run_step(tensors, block_size, scale, plan, backends))
