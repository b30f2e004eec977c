"""block_attention: attention of each query to the blocks of keys chosen for it.

It is the selected branch of Native Sparse Attention (arXiv 2502.11089, Eq. 12) alone, for models
that choose blocks by other scores: MiniMax-M3, InfLLM-v2, MoBA.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

from nsa_core.block.checks import check_arguments
from nsa_core.block.plans import (
    BlockPlan,
    BlockSizes,
    plan_of_call,
    resolve_blocks,
    split_blocks,
)
from nsa_core.limits import check_integers
from nsa_core.plan.default_plan import as_constant
from nsa_core.plan.options import PlanOptions


class BlockOutput(NamedTuple):
    """The results of :func:`block_attention_with_lse` and its decode form; ``lse`` has no gradient.

    Attributes:
        o: the output [B, S, Hq, Dv] in q's dtype.
        lse: the log-sum-exp [B, Hq, S], float32 (float64 for float64 q), natural logarithm, -inf
            where no key is visible.
    """

    o: torch.Tensor
    lse: torch.Tensor


def block_attention(
    q: torch.Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: torch.Tensor,  # [B, N, G, Dk]
    v: torch.Tensor,  # [B, N, G, Dv]
    blocks: torch.Tensor,  # any integer dtype, [B, S, G, n]
    *,
    block_size: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,  # int32 [documents + 1]
    max_seqlen: int | None = None,
    first_query: int | None = None,
    plan: BlockPlan | None = None,
    backends: str | None = None,
) -> torch.Tensor:
    """Attend from each query to the keys up to its own position in the blocks chosen for it.

    For the query at position t and each query head of kv head g,

        o_t = softmax(scale q_t K^T) V   over the keys s <= t of the blocks in blocks[t, g] (Eq. 12)

    where block j holds the keys j * block_size .. (j + 1) * block_size - 1. A query without a key
    gives 0. Gradients flow to q, k and v.

    Sizes: B sequences of S queries and N keys, Hq query heads, G kv heads (G divides Hq), head
    widths Dk and Dv, n blocks a query and kv head. Packed documents drop the axis B, as in
    :func:`nsa_core.nsa_attention`; positions and block indices stay inside a document.

    Args:
        q: queries [B, S, Hq, Dk], bfloat16, float16, float32 or float64.
        k: keys [B, N, G, Dk] of q's dtype; N = S unless ``first_query`` is given.
        v: values [B, N, G, Dv] of q's dtype.
        blocks: block indices [B, S, G, n], any integer dtype, in any order. -1, duplicates, future
            blocks and indices out of range have no effect.
        block_size: keys of a block. Blocks of more than 256 keys are split into blocks of 256, or
            of 128, 64, 32 or 16 if 256 is no divisor of the size. A size without such a divisor
            runs on the backend sdpa only.
        scale: factor of q k^T before the softmax; default 1 / sqrt(Dk).
        cu_seqlens: int32 [documents + 1] on q's device, the first row of each packed document and,
            last, the number of rows of k. By default, the tensors are not packed.
        max_seqlen: host integer, length in tokens of the longest packed document or an upper bound;
            default: the number of rows of k.
        first_query: position of row 0 of q in its sequences, for queries that begin inside a
            sequence, such as a chunk of a prompt or the rows of one rank. k and v then hold all
            keys up to the last query, or more. Packed: the row of the packed axis. By default, q
            holds whole sequences.
        plan: a plan from :func:`plan_block_attention`. By default, a plan is resolved once per
            shape, device and dtype and cached.
        backends: name of the backend, without ``plan``; default: the highest-ranked one that
            supports the call.

    Returns:
        The output [B, S, Hq, Dv] in q's dtype. :func:`block_attention_with_lse` also returns the
        log-sum-exp.

    Raises:
        InvalidInput: an argument is invalid, or the tensors do not fit each other or the plan; the
            message names every problem, and the shape, dtype and device of every tensor.
        Unsupported: no backend supports the call, or forward-mode differentiation is active. The
            message lists each backend with its reasons.
        BackendUnavailable: no backend is usable on this machine.
        NSAError: the backend failed while it ran. The message names it.

    Example:
        >>> import torch
        >>> from nsa_core import block_attention
        >>> q = torch.randn(1, 512, 8, 32)
        >>> k, v = torch.randn(2, 1, 512, 2, 32)
        >>> own = (torch.arange(512) // 64)[None, :, None, None].expand(1, 512, 2, 1)
        >>> blocks = torch.cat([own, own - 1, torch.zeros_like(own)], -1)
        >>> block_attention(q, k, v, blocks, block_size=64).shape
        torch.Size([1, 512, 8, 32])
    """
    return block_attention_with_lse(
        q,
        k,
        v,
        blocks,
        block_size=block_size,
        scale=scale,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        first_query=first_query,
        plan=plan,
        backends=backends,
    ).o


def block_attention_with_lse(
    q: torch.Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: torch.Tensor,  # [B, N, G, Dk]
    v: torch.Tensor,  # [B, N, G, Dv]
    blocks: torch.Tensor,  # any integer dtype, [B, S, G, n]
    *,
    block_size: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,  # int32 [documents + 1]
    max_seqlen: int | None = None,
    first_query: int | None = None,
    plan: BlockPlan | None = None,
    backends: str | None = None,
) -> BlockOutput:
    """Compute :func:`block_attention`, and return the log-sum-exp with it.

    The arguments are those of :func:`block_attention`.

    Returns:
        The named tuple (o, lse): the output [B, S, Hq, Dv] and the log-sum-exp [B, Hq, S]. See
        :class:`BlockOutput`.

    Raises:
        InvalidInput, Unsupported, BackendUnavailable, NSAError: as :func:`block_attention`.

    Example:
        >>> import torch
        >>> from nsa_core import block_attention_with_lse
        >>> q = torch.randn(1, 512, 8, 32)
        >>> k, v = torch.randn(2, 1, 512, 2, 32)
        >>> own = (torch.arange(512) // 64)[None, :, None, None].expand(1, 512, 2, 1)
        >>> o, lse = block_attention_with_lse(q, k, v, own, block_size=64)
        >>> o.shape, lse.shape
        (torch.Size([1, 512, 8, 32]), torch.Size([1, 8, 512]))
    """
    tensors = {"q": q, "k": k, "v": v, "blocks": blocks}
    numbers = (block_size, scale, first_query)
    check_arguments(tensors, *numbers, cu_seqlens, max_seqlen, plan, backends)
    # A conditional expression makes torch.compile guard on symbolic sizes and return a constant.
    partial = (
        True  # noqa: SIM210
        if first_query is not None and (first_query != 0 or k.shape[-3] != q.shape[-3])
        else False
    )
    values = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], block_size, blocks.shape[-1])
    sizes = BlockSizes(*[as_constant(value) for value in (*values, scale)])
    packed = cu_seqlens is not None
    plan = plan_of_call(tensors, sizes, packed, partial, k.shape[1], plan, backends)
    o, lse = plan.kernel(
        q,
        k,
        v,
        split_blocks(blocks, sizes, k.shape[-3]),
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        first_query=first_query if partial else None,
    )
    return BlockOutput(o, lse)


def plan_block_attention(
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    *,
    block_size: int,
    n_blocks: int,
    v_head_dim: int | None = None,
    scale: float | None = None,
    options: PlanOptions | None = None,
    **fields: Any,
) -> BlockPlan:
    """Choose the backend of :func:`block_attention`, or of its decode form.

    Args:
        n_heads: number of query heads, Hq.
        n_kv_heads: number of kv heads, G, a divisor of Hq.
        head_dim: width of a query or key head, Dk.
        block_size: keys of a block, as in :func:`block_attention`.
        n_blocks: number of blocks of a query and kv head, n.
        v_head_dim: width of a value head, Dv; default ``head_dim``.
        scale: softmax scale; default 1 / sqrt(Dk).
        options: the other choices about the plan; ``backends`` is the name of a backend.
        **fields: fields of PlanOptions by name, as in :func:`nsa_core.resolve`: among them
            needs_grad for calls with a gradient, varlen for packed documents and partial for calls
            with first_query. phase="decode" plans :func:`block_attention_decode`; page_size is then
            the rows of a page, None for a contiguous cache.

    Returns:
        A plan; its ``explain()`` lists every backend with its reasons.

    Raises:
        InvalidInput: a size is not an integer >= 1, or as :func:`nsa_core.resolve`.
        BackendUnavailable, Unsupported: as :func:`nsa_core.resolve`.

    Example:
        >>> from nsa_core import plan_block_attention
        >>> plan = plan_block_attention(
        ...     64, 4, 128, block_size=128, n_blocks=16, device="cpu", dtype="float32"
        ... )
        >>> plan.choice.backend
        'sdpa'
    """
    width = head_dim if v_head_dim is None else v_head_dim
    counts = {
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": width,
        "block_size": block_size,
        "n_blocks": n_blocks,
    }
    options = dataclasses.replace(options or PlanOptions(), **fields)
    page = options.page_size if options.phase == "decode" else None
    counts |= {} if page is None else {"page_size": page}
    check_integers(counts)
    sizes = BlockSizes(n_heads, n_kv_heads, head_dim, width, block_size, n_blocks, scale, page)
    return resolve_blocks(sizes, options)
