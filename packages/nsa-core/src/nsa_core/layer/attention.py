"""nsa_attention: Native Sparse Attention over queries, keys, values and gates (arXiv 2502.11089,
section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from nsa_core.config import NSAConfig
from nsa_core.dispatch.default_plan import default_plan, is_long
from nsa_core.errors import InvalidInput
from nsa_core.layer.input_checks import check_inputs, check_plan
from nsa_core.layer.phi.chunks import packed_blocks
from nsa_core.layer.phi.kinds import mean_compress
from nsa_core.torch_ops.tensor_checks import checked_boundaries

if TYPE_CHECKING:
    from nsa_core.dispatch.plan import Plan

KV = torch.Tensor | Sequence[torch.Tensor | None]


@overload
def nsa_attention(
    q: torch.Tensor,
    k: KV,
    v: KV,
    gates: torch.Tensor,
    *,
    config: NSAConfig,
    k_cmp: torch.Tensor | None = None,
    v_cmp: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    blocks: torch.Tensor | None = None,
    plan: Plan | None = None,
    return_lse: Literal[False] = False,
    return_blocks: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def nsa_attention(
    q: torch.Tensor,
    k: KV,
    v: KV,
    gates: torch.Tensor,
    *,
    config: NSAConfig,
    k_cmp: torch.Tensor | None = None,
    v_cmp: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    blocks: torch.Tensor | None = None,
    plan: Plan | None = None,
    return_lse: bool = False,
    return_blocks: bool = False,
) -> Any: ...


def nsa_attention(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k: KV,  # [B, S, G, Dk], or three of them: cmp, sel, win
    v: KV,  # [B, S, G, Dv], or three of them: cmp, sel, win
    gates: torch.Tensor,  # [B, S, Hq, 3], fp32 (fp64 beside fp64), in the order cmp, sel, win
    *,
    config: NSAConfig,
    k_cmp: torch.Tensor | None = None,  # [B, n_c, G, Dk]
    v_cmp: torch.Tensor | None = None,  # [B, n_c, G, Dv]
    cu_seqlens: torch.Tensor | None = None,  # int32 [documents + 1]
    max_seqlen: int | None = None,
    blocks: torch.Tensor | None = None,  # any integer dtype [B, S, G, any number]
    plan: Plan | None = None,
    return_lse: bool = False,
    return_blocks: bool = False,
) -> Any:
    """o_t = sum over c in {cmp, sel, win} of g_t^c Attn(q_t, K_t^c, V_t^c) (Eq. 5), [B, S, Hq, Dv]
    in q's dtype.

    Packed documents drop B: tensors are [T, ...], compressed ones [T // d, ...]. For tensors laid
    out [B, H, S, D] pass ``x.transpose(1, 2)``: any strides are taken if the last axis is
    contiguous. No gradient flows through the selection.

    Args:
        q: queries [B, S, Hq, Dk].
        k, v: keys [B, S, G, Dk] and values [B, S, G, Dv] of all branches, or three tensors for cmp,
            sel and win. The cmp entries are not read beside ``k_cmp`` and ``v_cmp``, and may then
            be None.
        gates: [B, S, Hq, 3] in the order cmp, sel, win; fp32 (fp64 beside fp64).
        config: head counts, widths and block geometry.
        k_cmp, v_cmp: compressed tokens [B, n_c, G, D]. Without them the cmp entries of k and v are
            averaged over each compression block.
        cu_seqlens: int32 [documents + 1] on q's device, first row of each packed document and T.
        max_seqlen: bound of the documents' lengths (default T). A smaller value gives wrong rows,
            and an error only on the CPU or with NSA_CHECK=1.
        blocks: replaces the selection: integers [B, S, G, any number], local to the document, in
            any order. -1, duplicates, future and out-of-range entries do no harm.
        plan: the kernels, of phase "prefill". Without it, the plan is that of
            :func:`nsa_core.resolve` for these tensors, resolved once (another from
            contract.LONG_SEQUENCE tokens on). It can train wherever some backend can.
        return_lse: also return the LSE of cmp, sel and win.
        return_blocks: also return the blocks.

    Returns:
        o; or a tuple of o, with ``return_lse`` the LSE of cmp, sel and win (each fp32 [B, Hq, S],
        natural log, -inf where no key is visible, no gradient), and with ``return_blocks`` the
        blocks.

    Raises:
        InvalidInput: tensors that do not fit each other, the config or the plan; all faults, and
            all shapes.
        Unsupported: no backend takes the request; a line per backend with its reasons.
    """
    (k_raw, k_sel, k_win), (v_raw, v_sel, v_win) = _three("k", k, k_cmp), _three("v", v, v_cmp)
    inputs: dict[str, Any] = {"q": q, "k_cmp": k_cmp, "v_cmp": v_cmp, "gates": gates}
    inputs |= {"blocks": blocks, "k[cmp]": k_raw, "k[sel]": k_sel, "k[win]": k_win}
    inputs |= {"v[cmp]": v_raw, "v[sel]": v_sel, "v[win]": v_win}
    wants_grad, varlen = (
        check_inputs(inputs, config, cu_seqlens, max_seqlen),
        cu_seqlens is not None,
    )
    if plan is None:
        long = is_long(q.shape[1], varlen)
        plan = default_plan(config, q.device, q.dtype, varlen, wants_grad, None, long)
    else:
        check_plan(plan, config, q, varlen, wants_grad)
    if k_cmp is None or v_cmp is None:
        packed = None
        if cu_seqlens is not None:
            packed = packed_blocks(cu_seqlens, q.shape[0], config.geometry)
        k_cmp, v_cmp = (mean_compress(x, config.geometry, packed) for x in (k_raw, v_raw))

    packing: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    with checked_boundaries(cu_seqlens, q.shape[0], max_seqlen):
        o_cmp, lse_cmp = plan.cmp(q, k_cmp, v_cmp, **packing)
        if blocks is None:
            blocks = plan.select(q, k_cmp, lse_cmp, **packing)
        o_sel, lse_sel = plan.sel(q, k_sel, v_sel, _wide(blocks), **packing)
        o_win, lse_win = plan.win(q, k_win, v_win, **packing)
        o = plan.combine(gates, o_cmp, o_sel, o_win, **packing)

    extras: list[Any] = [(lse_cmp, lse_sel, lse_win)] if return_lse else []
    extras += [blocks] if return_blocks else []
    return (o, *extras) if extras else o


def _three(name: str, x: KV, compressed: torch.Tensor | None) -> tuple[Any, Any, Any]:
    """The (cmp, sel, win) entries of k or v; the cmp entry is None where the compressed tensor
    replaces it.
    """
    if isinstance(x, torch.Tensor):
        return (None if compressed is not None else x), x, x
    if not isinstance(x, (tuple, list)) or len(x) != 3:
        size = f" of {len(x)}" if isinstance(x, (tuple, list)) else ""
        raise InvalidInput(
            f"{name} must be one tensor or three (cmp, sel, win), got {type(x).__name__}{size}"
        )
    missing = [
        b
        for b, t in zip(("cmp", "sel", "win"), x)
        if t is None and not (b == "cmp" and compressed is not None)
    ]
    if missing:
        raise InvalidInput(
            f"{name} lacks its {', '.join(missing)} entry (only cmp may be None, and only beside"
            f" {name}_cmp)"
        )
    return (None if compressed is not None else x[0]), x[1], x[2]


def _wide(blocks: torch.Tensor) -> torch.Tensor:
    """``blocks`` as int32 or int64. Other integers are widened, so that no value wraps around into
    the range of blocks.
    """
    return blocks if blocks.dtype in (torch.int32, torch.int64) else blocks.to(torch.int64)
