"""block_attention_decode: attention of the newest tokens to chosen blocks of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

if TYPE_CHECKING:
    from nsa_core.block.plans import BlockPlan


@overload
def block_attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    *,
    block_size: int,
    lengths: torch.Tensor,
    starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
    plan: BlockPlan | None = None,
    backends: str | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def block_attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    *,
    block_size: int,
    lengths: torch.Tensor,
    starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
    plan: BlockPlan | None = None,
    backends: str | None = None,
    return_lse: bool = False,
) -> Any: ...


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
    return_lse: bool = False,
) -> Any:
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
            page * i .. page * (i + 1) - 1 of sequence b; entries after the last token are not read.
        scale: factor of q k^T before the softmax; default 1 / sqrt(Dk).
        plan: a plan from :func:`nsa_core.plan_block_attention` with ``phase="decode"``, and with
            ``page_size`` for pages. By default, a plan is resolved once per shape and cached.
        backends: name of the backend, without ``plan``; default: the highest-ranked one that
            supports the call.
        return_lse: also return the log-sum-exp.

    Returns:
        The output o [B, m, Hq, Dv] in q's dtype, 0 for queries without a key and for padding. With
        ``return_lse`` the tuple (o, lse): lse [B, Hq, m], float32 (float64 for float64 q), -inf
        where no key is visible.

    Raises:
        InvalidInput: an argument is invalid, the tensors do not fit each other or the plan, or q
            requires a gradient.
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
    # The import takes as long as that of torch, because it imports the compiler.
    from nsa_core.block.step import run_step

    tensors = {"q": q, "k": k, "v": v, "blocks": blocks, "lengths": lengths}
    tensors |= {} if starts is None else {"starts": starts}
    tensors |= {} if block_table is None else {"block_table": block_table}
    o, lse = run_step(tensors, block_size, scale, plan, backends)
    return (o, lse) if return_lse else o
