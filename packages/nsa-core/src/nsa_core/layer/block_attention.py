"""block_attention: attention of each query to the blocks of keys chosen for it.

It is the selected branch of Native Sparse Attention (arXiv 2502.11089, Eq. 12) alone, for models
that choose blocks by other scores: MiniMax-M3, InfLLM-v2, MoBA.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, overload

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import LONG_SEQUENCE
from nsa_core.dispatch.default_plan import constant_result, frozen_backends, is_long
from nsa_core.dispatch.options import PlanOptions
from nsa_core.dispatch.plan import SlotPlan, resolve_slot
from nsa_core.errors import InvalidInput, Unsupported
from nsa_core.layer.short_config import as_constant
from nsa_core.torch_ops.tensor_checks import is_tensor

# Larger blocks are split into blocks of this many keys, which fit the kernels.
LARGEST_BLOCK = 128


@overload
def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    *,
    block_size: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    first_query: int = 0,
    plan: SlotPlan | None = None,
    backends: str | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: torch.Tensor,
    *,
    block_size: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    first_query: int = 0,
    plan: SlotPlan | None = None,
    backends: str | None = None,
    return_lse: bool = False,
) -> Any: ...


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
    first_query: int = 0,
    plan: SlotPlan | None = None,
    backends: str | None = None,
    return_lse: bool = False,
) -> Any:
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
        block_size: keys of a block. A size above 128 must be a multiple of 128: the kernels then
            read blocks of 128 keys.
        scale: factor of q k^T before the softmax; default 1 / sqrt(Dk).
        cu_seqlens: int32 [documents + 1] on q's device, the first row of each packed document and,
            last, the number of rows of k. By default, the tensors are not packed.
        max_seqlen: host integer, length in tokens of the longest packed document or an upper bound;
            default: the number of rows of k.
        first_query: position of row 0 of q in its sequences, for queries that begin inside a
            sequence, such as a chunk of a prompt or the rows of one rank. k and v then hold all
            keys up to the last query, or more. Packed: the row of the packed axis.
        plan: a plan from :func:`plan_block_attention`. By default, a plan is resolved once per
            shape, device and dtype and cached.
        backends: name of the backend; default: the highest-ranked one that supports the call.
        return_lse: also return the log-sum-exp.

    Returns:
        The output o [B, S, Hq, Dv] in q's dtype. With ``return_lse`` the tuple (o, lse): lse
        [B, Hq, S], float32 (float64 for float64 q), natural logarithm, -inf where no key is
        visible, without gradient.

    Raises:
        InvalidInput: an argument is invalid, or the tensors do not fit each other or the plan; the
            message names every problem, and the shape, dtype and device of every tensor.
        Unsupported: no backend supports the call. The message lists each backend with its reasons.
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
    tensors = {"q": q, "k": k, "v": v, "blocks": blocks}
    _check_arguments(tensors, block_size, first_query, cu_seqlens, backends)
    blocks, size = _split(blocks, block_size)
    # A conditional expression makes torch.compile guard on symbolic sizes and return a constant.
    partial = True if first_query != 0 or k.shape[-3] != q.shape[-3] else False  # noqa: SIM210
    values = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], size, blocks.shape[-1], scale)
    sizes = _Sizes(*[as_constant(value) for value in values])
    if plan is None:
        wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        name = _plan_name(
            tuple(sizes), q.device, q.dtype,
            cu_seqlens is not None, partial, wants_grad, backends,
            is_long(k.shape[1], cu_seqlens is not None),
        )  # fmt: skip
        plan = getattr(_plans, name)
    else:
        _check_plan(plan, sizes, partial)
    o, lse = plan.kernel(
        q,
        k,
        v,
        blocks,
        cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
        first_query=first_query if partial else None,
    )
    return (o, lse) if return_lse else o


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
) -> SlotPlan:
    """Choose the backend of :func:`block_attention`.

    Args:
        n_heads: number of query heads, Hq.
        n_kv_heads: number of kv heads, G, a divisor of Hq.
        head_dim: width of a query or key head, Dk.
        block_size: keys of a block.
        n_blocks: number of blocks of a query and kv head, n.
        v_head_dim: width of a value head, Dv; default ``head_dim``.
        scale: softmax scale; default 1 / sqrt(Dk).
        options: The other choices about the plan; ``backends`` is the name of a backend.
        **fields: fields of PlanOptions by name, as in :func:`nsa_core.resolve`.

    Returns:
        A plan; its ``explain()`` lists every backend with its reasons.

    Raises:
        InvalidInput, BackendUnavailable, Unsupported: as :func:`nsa_core.resolve`.

    Example:
        >>> from nsa_core import plan_block_attention
        >>> plan = plan_block_attention(
        ...     64, 4, 128, block_size=128, n_blocks=16, device="cpu", dtype="float32"
        ... )
        >>> plan.choice.backend
        'sdpa'
    """
    size = _kernel_block(block_size)
    count = n_blocks * (block_size // size)
    sizes = _Sizes(n_heads, n_kv_heads, head_dim, v_head_dim or head_dim, size, count, scale)
    return resolve_slot(sizes.config(), "sel", options, **fields)


class _Sizes(NamedTuple):
    """The sizes of a call that its plan depends on, after large blocks are split."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    block_size: int
    n_blocks: int
    scale: float | None

    def config(self) -> NSAConfig:
        """Return a config whose selected branch is the call; the other branches are not planned."""
        return NSAConfig(
            self.n_heads * self.head_dim,
            self.n_heads,
            self.n_kv_heads,
            self.head_dim,
            self.v_head_dim,
            compress_block_size=self.block_size,
            compress_stride=self.block_size,
            select_block_size=self.block_size,
            num_selected_blocks=max(1, self.n_blocks),
            init_blocks=0,
            local_blocks=0,
            window_size=1,
            rope=False,
            scale=self.scale,
        )


def _kernel_block(block_size: int) -> int:
    """Return the keys of a block as the kernels see it.

    Raises:
        InvalidInput: ``block_size`` is no size of a block.
    """
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise InvalidInput(f"block_size must be an integer >= 1, got {block_size!r}")
    if block_size <= LARGEST_BLOCK:
        return block_size
    if block_size % LARGEST_BLOCK:
        raise InvalidInput(
            f"block_size above {LARGEST_BLOCK} must be a multiple of {LARGEST_BLOCK}, got"
            f" {block_size}"
        )
    return LARGEST_BLOCK


def _split(blocks: torch.Tensor, block_size: int) -> tuple[torch.Tensor, int]:
    """Return ``blocks`` as int32 or int64, as indices of the blocks that the kernels see."""
    size = _kernel_block(block_size)
    if blocks.dtype not in (torch.int32, torch.int64):  # no value may wrap around
        blocks = blocks.to(torch.int64)
    parts = block_size // size
    if parts == 1:
        return blocks, size
    first = blocks.to(torch.int64).clamp(-1, 2**40)[..., None] * parts
    inner = first + torch.arange(parts, device=blocks.device)
    return torch.where(first < 0, -1, inner).flatten(-2), size


def _check_arguments(
    tensors: dict[str, Any],
    block_size: int,
    first_query: int,
    cu_seqlens: object,
    backends: object,
) -> None:
    """Check what the operator of the slot does not.

    Raises:
        InvalidInput: an argument has a wrong type or number of axes.
    """
    problems = [
        f"{name} must be a tensor, got {type(x).__name__}"
        for name, x in tensors.items()
        if not is_tensor(x)
    ]
    if isinstance(first_query, bool) or not isinstance(first_query, int) or first_query < 0:
        problems.append(f"first_query must be an integer >= 0, got {first_query!r}")
    if not (backends is None or isinstance(backends, str)):
        problems.append(f"backends must be None or the name of a backend, got {backends!r}")
    if not problems:
        axes = 4 - (cu_seqlens is not None)
        layout = "[T, heads, width]" if axes == 3 else "[B, S, heads, width]"
        problems += [
            f"{name} must have {axes} axes {layout}, got {list(x.shape)}"
            for name, x in tensors.items()
            if x.dim() != axes
        ]
        if tensors["blocks"].is_floating_point() or tensors["blocks"].dtype == torch.bool:
            problems.append(f"blocks must be integers, got {tensors['blocks'].dtype}")
    if problems:
        raise InvalidInput("; ".join(problems))
    _kernel_block(block_size)


def _check_plan(plan: object, sizes: _Sizes, partial: bool) -> None:
    """Check that ``plan`` is for a call of these sizes.

    Raises:
        InvalidInput: it is not; the message names what differs.
    """
    if not isinstance(plan, SlotPlan) or plan.request.slot != "sel":
        raise InvalidInput(
            f"plan must be what nsa_core.plan_block_attention() returns, got {type(plan).__name__}"
        )
    request, geometry = plan.request, plan.request.geometry
    pairs = {
        "query heads": (request.n_heads, sizes.n_heads),
        "kv heads": (request.n_kv_heads, sizes.n_kv_heads),
        "columns of k": (request.head_dim, sizes.head_dim),
        "columns of v": (request.v_head_dim, sizes.v_head_dim),
        "keys a block": (geometry.select_block_size, sizes.block_size),
        "blocks": (geometry.num_selected_blocks, max(1, sizes.n_blocks)),
    }
    problems = [
        f"plan is for {theirs} {name}, the call has {ours}"
        for name, (theirs, ours) in pairs.items()
        if theirs != ours
    ]
    wanted = sizes.head_dim**-0.5 if sizes.scale is None else sizes.scale
    if plan.kernel.scale != wanted:
        problems.append(f"plan is for the scale {plan.kernel.scale}, the call has {wanted}")
    if partial and not request.partial:
        problems.append(
            "plan is for whole sequences, but q begins inside them or k has more rows: resolve it"
            " with partial=True"
        )
    if problems:
        raise InvalidInput("; ".join(problems))


class _Plans:
    """Holds every default plan as an attribute, which torch.compile can read and guard on."""


_plans = _Plans()


@constant_result  # planning calls plugin code, which torch.compile must not trace
def _plan_name(
    sizes: tuple[Any, ...],
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    partial: bool,
    wants_grad: bool,
    backends: str | None,
    long: bool,
) -> str:
    """Return the name of the attribute of ``_plans`` that holds the plan of these calls.

    The plan supports gradients if a backend does, so that a call runs the same kernels with and
    without grad mode.
    """
    device = torch.device("cpu") if device.type == "meta" else device
    frozen_backends(backends)  # an unknown name is refused before any probe runs
    deterministic = torch.are_deterministic_algorithms_enabled()
    rest = (sizes, device, dtype, varlen, partial, deterministic, backends, long)
    try:
        return _store_plan(True, *rest)
    except Unsupported:
        if wants_grad:
            raise
        return _store_plan(False, *rest)


@functools.cache
def _store_plan(
    needs_grad: bool,
    sizes: tuple[Any, ...],
    device: torch.device,
    dtype: torch.dtype,
    varlen: bool,
    partial: bool,
    deterministic: bool,
    backends: str | None,
    long: bool,
) -> str:
    """Resolve a plan and set it as an attribute of ``_plans``; return the attribute's name."""
    options = PlanOptions(
        device=device,
        dtype=dtype,
        backends=backends,
        needs_grad=needs_grad,
        deterministic=deterministic,
        varlen=varlen,
        partial=partial,
        seq_len=LONG_SEQUENCE if long else None,
    )
    plan = resolve_slot(_Sizes(*sizes).config(), "sel", options)
    name = f"plan_{len(vars(_plans))}"
    setattr(_plans, name, plan)
    return name
