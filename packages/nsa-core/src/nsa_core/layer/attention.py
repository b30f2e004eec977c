"""nsa_attention: Native Sparse Attention on queries, keys, values and gates.

Source: arXiv 2502.11089, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.layer.input_checks import check_inputs, check_plan
from nsa_core.layer.phi.chunks import packed_blocks
from nsa_core.layer.phi.kinds import mean_compress
from nsa_core.layer.short_config import Numbers
from nsa_core.plan.default_plan import default_plan, planned_length
from nsa_core.torch_ops.core_kernels import CoreInputs
from nsa_core.torch_ops.core_node import CoreResults, run_core
from nsa_core.torch_ops.packing_checks import checked_boundaries
from nsa_core.torch_ops.tensor_checks import check_nonnegative

if TYPE_CHECKING:
    from nsa_core.plan.plan import Plan

KV = torch.Tensor | Sequence[torch.Tensor | None]


class NSAOutput(NamedTuple):
    """The results of :func:`nsa_attention_with_lse`; only ``o`` has a gradient.

    Attributes:
        o: the output [B, S, Hq, Dv] in q's dtype.
        lse: the log-sum-exps of cmp, sel and win, each [B, Hq, S], float32 (float64 for float64 q),
            natural logarithm, -inf where no key is visible.
        blocks: the selected blocks, int32 [B, S, G, n], ascending, padded with -1; or the argument
            ``blocks`` as passed.
    """

    o: torch.Tensor
    lse: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    blocks: torch.Tensor


def nsa_attention(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k: KV,  # [B, S, G, Dk], or three tensors (cmp, sel, win)
    v: KV,  # [B, S, G, Dv], or three tensors (cmp, sel, win)
    gates: torch.Tensor,  # [B, S, Hq, 3], fp32 (fp64 for fp64 q), in the order cmp, sel, win
    *,
    config: NSAConfig | None = None,
    compress_block_size: int | None = None,
    compress_stride: int | None = None,
    select_block_size: int | None = None,
    num_selected_blocks: int | None = None,
    init_blocks: int | None = None,
    local_blocks: int | None = None,
    window_size: int | None = None,
    scale: float | None = None,
    k_cmp: torch.Tensor | None = None,  # [B, n_c, G, Dk]
    v_cmp: torch.Tensor | None = None,  # [B, n_c, G, Dv]
    cu_seqlens: torch.Tensor | None = None,  # int32 [documents + 1]
    max_seqlen: int | None = None,
    blocks: torch.Tensor | None = None,  # any integer dtype, [B, S, G, any length]
    plan: Plan | None = None,
    recompute: bool = False,
    nonnegative_gates: bool = False,
) -> torch.Tensor:
    """Compute Native Sparse Attention, the gated sum of three attention branches (Eq. 5).

    For query token t and each query head,

        o_t = sum over c in {cmp, sel, win} of g_t^c Attn(q_t, K_t^c, V_t^c)          (Eq. 5)

    where the keys and values of a branch are

        cmp  the compressed tokens k_cmp[i], v_cmp[i] = phi(tokens i*d .. i*d + l - 1)  (Eq. 7)
             with i*d + l - 1 <= t;
        sel  the tokens up to t of the n selected blocks of l' tokens (Eq. 11, 12). Blocks are
             ranked by the softmax of q_t k_cmp (Eq. 8), mapped to blocks by overlap (Eq. 9) and
             summed over the query heads of a kv head (Eq. 10);
        win  the tokens t - w + 1 .. t.

    A branch without a visible key contributes exactly 0. Gradients flow to q, k, v, gates, k_cmp
    and v_cmp; the selection itself has no gradient. docs/explanation/semantics.md defines every
    detail.

    Sizes: B sequences of S tokens, Hq query heads, G kv heads (G divides Hq), head widths Dk and
    Dv; they are the shapes of q, k and v. l, d, l', n and w are keywords with the paper's sizes as
    defaults. There are n_c = max(0, floor((S - l) / d) + 1) compressed tokens.

    Packed documents drop the axis B: tensors are [T, ...], LSEs [Hq, T], and k_cmp and v_cmp have
    T // d rows (see ``nsa_core.contract``). Attention, positions and block indices stay inside a
    document. For tensors of layout [B, H, S, D], pass ``x.transpose(1, 2)``: any strides are
    accepted. Only tensors whose last axis is not contiguous are copied; ``cu_seqlens`` and
    ``blocks`` also if another axis is not.

    Use the keywords for calls of the function alone. Pass ``config`` if an NSAConfig exists, for
    example that of a layer: then the shapes are checked against it.

    Args:
        q: queries [B, S, Hq, Dk], bfloat16, float16, float32 or float64, already rotated if rotary
            embedding is used.
        k: keys [B, S, G, Dk] of q's dtype, one tensor for all branches or three tensors
            (cmp, sel, win). With ``k_cmp`` the cmp entry is not read and may be None.
        v: values [B, S, G, Dv] of q's dtype, one tensor or three, as for ``k``.
        gates: factors of the branches [B, S, Hq, 3] in the order cmp, sel, win; float32, or float64
            for float64 q. They need not lie in [0, 1]; see ``nonnegative_gates``.
        config: head counts, head widths, block sizes and softmax scale, instead of the eight
            keywords below. The fields of the projections, such as ``dim``, ``compress`` and
            ``rope``, are not used. Without ``config`` and the keywords, a ``plan`` brings its own.
        compress_block_size: l, tokens per compression block; default 32.
        compress_stride: d, tokens between the starts of two compression blocks; divides l and l';
            default 16.
        select_block_size: l', tokens per selection block; at least l; default 64.
        num_selected_blocks: n, blocks selected per token and kv head, forced blocks included; at
            least ``init_blocks + local_blocks``; default 16.
        init_blocks: number of blocks at the start of the document that are always selected;
            default 1.
        local_blocks: number of blocks up to the current one that are always selected; default 2.
        window_size: w, keys of the sliding window, the token itself included; default 512.
        scale: factor of q k^T before the softmax; default 1 / sqrt(Dk).
        k_cmp: compressed keys [B, n_c, G, Dk] of q's dtype. By default, the cmp keys are averaged
            over each compression block. Pass ``k_cmp`` and ``v_cmp`` together.
        v_cmp: compressed values [B, n_c, G, Dv] of q's dtype, as for ``k_cmp``.
        cu_seqlens: int32 [documents + 1] on q's device, the first row of each packed document and,
            last, the number of rows T. By default, the tensors are not packed.
        max_seqlen: host integer, length in tokens of the longest packed document or an upper bound;
            default T. A value below the longest document gives wrong results; it is an error on the
            CPU, and on a GPU with NSA_CHECK=1.
        blocks: block indices [B, S, G, any length], any integer dtype, that replace the selection;
            local to the document, in any order. -1, duplicates, future blocks and indices out of
            range have no effect.
        plan: a plan of phase "prefill" from :func:`nsa_core.resolve`. By default, a plan is
            resolved once per config, device and dtype and cached. It includes the backward if some
            backend supports it. Unpacked calls of 32768 tokens or more have their own cached
            plans (``contract.PLANNED_LENGTHS``).
        recompute: keep only the inputs and the blocks for the backward, which then runs the three
            branches again: a third of the memory, about a quarter more time, the same bits
            (docs/explanation/performance.md). Exported calls and torch.func transforms ignore it.
        nonnegative_gates: state that no gate is negative, as gates from a sigmoid are. The backward
            then takes less time and memory if the plan has a fused backward (``plan.fused``), and
            all of q, k, v and gates need a gradient. A negative gate is an error on the CPU, and on
            a GPU with NSA_CHECK=1; else it gives gradients of NaN.

    Returns:
        The output o, [B, S, Hq, Dv] in q's dtype. :func:`nsa_attention_with_lse` also returns the
        log-sum-exps and the selected blocks.

    Raises:
        InvalidInput: tensors do not fit each other, the config or the plan; or ``config`` and one
            of its fields are passed. The message has one sentence per cause, and the shape, dtype
            and device of every tensor.
        Unsupported: no backend supports the request, or forward-mode differentiation is active. The
            message lists each backend with its reasons.
        BackendUnavailable: no backend is usable on this machine.
        NSAError: a backend failed while it ran. The message names the backend and the slot.

    Example:
        >>> import torch
        >>> from nsa_core import nsa_attention
        >>> q = torch.randn(1, 1024, 8, 32)
        >>> k, v = torch.randn(2, 1, 1024, 2, 32)
        >>> gates = torch.rand(1, 1024, 8, 3)
        >>> nsa_attention(q, k, v, gates, window_size=256).shape
        torch.Size([1, 1024, 8, 32])
    """
    tensors = (q, k, v, gates, k_cmp, v_cmp, blocks)
    blocking = (compress_block_size, compress_stride, select_block_size, num_selected_blocks)
    numbers = (*blocking, init_blocks, local_blocks, window_size, scale)
    options = (cu_seqlens, max_seqlen, plan, recompute, nonnegative_gates)
    return _attend(*tensors, config, numbers, *options).o


def nsa_attention_with_lse(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k: KV,  # [B, S, G, Dk], or three tensors (cmp, sel, win)
    v: KV,  # [B, S, G, Dv], or three tensors (cmp, sel, win)
    gates: torch.Tensor,  # [B, S, Hq, 3], fp32 (fp64 for fp64 q), in the order cmp, sel, win
    *,
    config: NSAConfig | None = None,
    compress_block_size: int | None = None,
    compress_stride: int | None = None,
    select_block_size: int | None = None,
    num_selected_blocks: int | None = None,
    init_blocks: int | None = None,
    local_blocks: int | None = None,
    window_size: int | None = None,
    scale: float | None = None,
    k_cmp: torch.Tensor | None = None,  # [B, n_c, G, Dk]
    v_cmp: torch.Tensor | None = None,  # [B, n_c, G, Dv]
    cu_seqlens: torch.Tensor | None = None,  # int32 [documents + 1]
    max_seqlen: int | None = None,
    blocks: torch.Tensor | None = None,  # any integer dtype, [B, S, G, any length]
    plan: Plan | None = None,
    recompute: bool = False,
    nonnegative_gates: bool = False,
) -> NSAOutput:
    """Compute :func:`nsa_attention`, and return the log-sum-exps and the selected blocks with it.

    The arguments are those of :func:`nsa_attention`, and so are the bits of the output and its
    gradients. In sequences of at most n l' tokens, where sel is causal attention, the selection
    runs for ``blocks`` alone.

    Returns:
        The named tuple (o, lse, blocks): the output [B, S, Hq, Dv]; the log-sum-exps of cmp, sel
        and win, a tuple of three tensors [B, Hq, S]; and the blocks [B, S, G, n]. See
        :class:`NSAOutput`.

    Raises:
        InvalidInput, Unsupported, BackendUnavailable, NSAError: as :func:`nsa_attention`.

    Example:
        >>> import torch
        >>> from nsa_core import nsa_attention_with_lse
        >>> q = torch.randn(1, 2048, 8, 32)
        >>> k, v = torch.randn(2, 1, 2048, 2, 32)
        >>> gates = torch.rand(1, 2048, 8, 3)
        >>> o, (lse_cmp, lse_sel, lse_win), blocks = nsa_attention_with_lse(q, k, v, gates)
        >>> lse_win.shape, blocks.shape
        (torch.Size([1, 8, 2048]), torch.Size([1, 2048, 2, 16]))
    """
    tensors = (q, k, v, gates, k_cmp, v_cmp, blocks)
    blocking = (compress_block_size, compress_stride, select_block_size, num_selected_blocks)
    numbers = (*blocking, init_blocks, local_blocks, window_size, scale)
    options = (cu_seqlens, max_seqlen, plan, recompute, nonnegative_gates)
    core = _attend(*tensors, config, numbers, *options, needs_blocks=True)
    used: Any = core.blocks if blocks is None else blocks
    return NSAOutput(core.o, core.lse, used)


def _attend(
    q: torch.Tensor,
    k: KV,
    v: KV,
    gates: torch.Tensor,
    k_cmp: torch.Tensor | None,
    v_cmp: torch.Tensor | None,
    blocks: torch.Tensor | None,
    config: NSAConfig | None,
    numbers: Numbers,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    plan: Plan | None,
    recompute: bool,
    nonnegative_gates: bool,
    needs_blocks: bool = False,
) -> CoreResults:
    """Check the arguments of :func:`nsa_attention`, and run the core.

    Args:
        numbers: The keywords :data:`nsa_core.layer.short_config.NUMBERS`.
        needs_blocks: Whether to run select also where sel needs no selection.
    """
    k_raw, k_sel, k_win = _per_branch("k", k, k_cmp)
    v_raw, v_sel, v_win = _per_branch("v", v, v_cmp)
    tensors: dict[str, Any] = {"q": q, **_named("k", k, k_raw), **_named("v", v, v_raw)}
    tensors["gates"] = gates
    optional = {"k_cmp": k_cmp, "v_cmp": v_cmp, "blocks": blocks}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    config = check_inputs(tensors, config, numbers, plan, cu_seqlens, max_seqlen)
    if nonnegative_gates:
        check_nonnegative(gates)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
    varlen = cu_seqlens is not None
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.contiguous()  # one copy for all slots and their backwards
    if plan is None:
        length = planned_length(q.shape[1], varlen)
        plan = default_plan(config, q.device, q.dtype, varlen, needs_grad, None, length)
    else:
        check_plan(plan, config, q, varlen, needs_grad)
    if k_cmp is None or v_cmp is None:
        packed = None
        if cu_seqlens is not None:
            packed = packed_blocks(cu_seqlens, q.shape[0], config.geometry)
        k_cmp, v_cmp = (mean_compress(x, config.geometry, packed) for x in (k_raw, v_raw))

    inputs = CoreInputs(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    with checked_boundaries(cu_seqlens, q.shape[0], max_seqlen):
        if blocks is not None and blocks.dtype not in (torch.int32, torch.int64):
            blocks = blocks.long()  # no value may wrap around into the range of valid indices
        given = None if blocks is None else blocks.contiguous()
        core = run_core(plan, inputs, given, cu_seqlens, max_seqlen, recompute, nonnegative_gates)
        if core.blocks is None and needs_blocks:  # sel was causal attention, without select
            packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
            core = CoreResults(core.o, core.lse, plan.select(q, k_cmp, core.lse[0], **packing))
    return core


def _per_branch(name: str, x: KV, compressed: torch.Tensor | None) -> tuple[Any, Any, Any]:
    """Return the tensors (cmp, sel, win) of ``x``, which is k or v.

    The cmp entry is None if ``compressed`` replaces it.
    """
    if isinstance(x, torch.Tensor):
        return (None if compressed is not None else x), x, x
    if not isinstance(x, (tuple, list)) or len(x) != 3:
        length = f" of length {len(x)}" if isinstance(x, (tuple, list)) else ""
        numpy = f": pass torch.from_numpy({name})" * (type(x).__name__ == "ndarray")
        raise InvalidInput(
            f"{name} must be one tensor or three (cmp, sel, win), got {type(x).__name__}{length}"
            f"{numpy}"
        )
    missing = [
        branch
        for branch, tensor in zip(("cmp", "sel", "win"), x)
        if tensor is None and not (branch == "cmp" and compressed is not None)
    ]
    if missing:
        raise InvalidInput(
            f"{name} lacks its {', '.join(missing)} entry: pass a tensor (only the cmp entry may be"
            f" None, and only with {name}_cmp)"
        )
    return (None if compressed is not None else x[0]), x[1], x[2]


def _named(name: str, x: KV, of_cmp: torch.Tensor | None) -> dict[str, Any]:
    """Return the tensors of ``x``, which is k or v, by the names that errors give them."""
    if isinstance(x, torch.Tensor):
        return {name: x}
    named = {f"{name}[cmp]": of_cmp, f"{name}[sel]": x[1], f"{name}[win]": x[2]}
    return {name: tensor for name, tensor in named.items() if tensor is not None}
