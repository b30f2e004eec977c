"""nsa_attention: Native Sparse Attention of given queries, keys, values and gates (arXiv
2502.11089, section 3).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.autograd import forward_ad

from nsa_core.config import NSAConfig, must_be_config
from nsa_core.dispatch.default_plan import default_plan, is_long, must_be_plan
from nsa_core.errors import InvalidInput, Unsupported
from nsa_core.layer.phi.chunks import packed_blocks
from nsa_core.layer.phi.kinds import mean_compress
from nsa_core.torch_ops.tensor_checks import (
    Described,
    Metadata,
    check_cu_seqlens,
    describe,
    dtype_problems,
    is_tensor,
    packing_problems,
    tensor_problems,
)
from nsa_core.util.text import dtype_name

if TYPE_CHECKING:
    from nsa_core.dispatch.plan import Plan

KV = torch.Tensor | Sequence[torch.Tensor | None]
_INTEGERS = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)


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

    Packed documents drop B ([T, ...], compressed tensors [T // d, ...]) and carry ``cu_seqlens`` on
    the same device; ``max_seqlen`` bounds their lengths (default T; too small: wrong rows, and an
    error only on the CPU or with NSA_CHECK=1). Of tensors laid out [B, H, S, D] pass
    ``x.transpose(1, 2)``: any strides, the last axis contiguous.

    Without ``k_cmp`` and ``v_cmp`` the cmp entries of k and v are averaged over each compression
    block; with them those entries are not read and may be None. ``blocks`` given (local to the
    document, any order; -1, duplicates, future and out-of-range entries are harmless) replaces the
    selection. No gradient flows through the selection.

    The kernels are ``plan``'s, which is for prefill. Without one, the plan is that of
    :func:`nsa_core.resolve` for these tensors, made once (another from contract.LONG_SEQUENCE
    tokens on); it can train wherever some backend can.

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
    given: dict[str, Any] = {
        "q": q,
        "k_cmp": k_cmp,
        "v_cmp": v_cmp,
        "gates": gates,
        "blocks": blocks,
    }
    given |= {
        "k[cmp]": k_raw,
        "k[sel]": k_sel,
        "k[win]": k_win,
        "v[cmp]": v_raw,
        "v[sel]": v_sel,
        "v[win]": v_win,
    }
    wants_grad = _check_inputs(given, config, cu_seqlens, max_seqlen)
    if plan is None:
        varlen = cu_seqlens is not None
        plan = default_plan(
            config, q.device, q.dtype, varlen, wants_grad, None, is_long(q.shape[1], varlen)
        )
    else:
        _check_plan(plan, config, q, cu_seqlens is not None, wants_grad)
    if k_cmp is None or v_cmp is None:
        places = (
            None if cu_seqlens is None else packed_blocks(cu_seqlens, q.shape[0], config.geometry)
        )
        k_cmp, v_cmp = (mean_compress(x, config.geometry, places) for x in (k_raw, v_raw))

    where: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    o_cmp, lse_cmp = plan.cmp(q, k_cmp, v_cmp, **where)
    if blocks is None:
        blocks = plan.select(q, k_cmp, lse_cmp, **where)
    o_sel, lse_sel = plan.sel(q, k_sel, v_sel, _wide(blocks), **where)
    o_win, lse_win = plan.win(q, k_win, v_win, **where)
    o = plan.combine(gates, o_cmp, o_sel, o_win, **where)

    extras = ([(lse_cmp, lse_sel, lse_win)] if return_lse else []) + (
        [blocks] if return_blocks else []
    )
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


def _check_inputs(
    given: dict[str, Any],
    config: NSAConfig,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> bool:
    """Refuse what no backend could take; True if a gradient will be wanted. All but q and gates may
    be None.
    """
    must_be_config(config)
    given = {n: t for n, t in given.items() if t is not None or n in ("q", "gates")}
    _check_kinds(given)
    packing = _packing_problems(given["q"], cu_seqlens, max_seqlen)
    compiling = torch.compiler.is_compiling()
    if compiling:
        wrong = _problems(config, tuple(given), tuple(given.values()), cu_seqlens is not None)
    else:
        known = tuple([(t.shape, t.dtype, t.device) for t in given.values()])
        wrong = _known_problems(config, tuple(given), known, cu_seqlens is not None)
    if wrong := [*wrong, *packing]:
        raise InvalidInput("; ".join(wrong) + f" ({describe(list(given), list(given.values()))})")
    return torch.is_grad_enabled() and any(t.requires_grad for t in given.values())


def _problems(
    config: NSAConfig, names: tuple[str, ...], tensors: tuple[Described, ...], packed: bool
) -> list[str]:
    """What does not fit among the inputs by their metadata alone."""
    given = dict(zip(names, tensors))
    axes: dict[str, tuple[str | int, ...]] = {
        "q": ("B", "S", "Hq", "Dk"),
        "gates": ("B", "S", "Hq", 3),
    }
    axes |= {
        "k_cmp": ("B", "C", "G", "Dk"),
        "v_cmp": ("B", "C", "G", "Dv"),
        "blocks": ("B", "S", "G", "n"),
    }
    shapes = [axes.get(n) or ("B", "S", "G", "Dk" if n[0] == "k" else "Dv") for n in given]
    sizes = {"Hq": config.n_heads, "G": config.n_kv_heads, "Dk": config.qk_dim, "Dv": config.v_dim}
    if given["q"].dim() == 4 - packed:
        length = given["q"].shape[-3]
        sizes["S"] = length
        sizes["C"] = (
            config.geometry.max_compressed(length)
            if packed
            else config.geometry.num_compressed(length)
        )
    wrong = tensor_problems(names, tensors, shapes, packed, sizes)
    floats = {n: t for n, t in given.items() if n not in ("gates", "blocks")}
    wrong += dtype_problems(floats, {"gates": given["gates"]})
    if "blocks" in given and given["blocks"].dtype not in _INTEGERS:
        wrong.append("blocks must be integers")
    if ("k_cmp" in given) != ("v_cmp" in given):
        wrong.append("k_cmp and v_cmp go together: give both or neither")
    return wrong


@functools.lru_cache(maxsize=1024)
def _known_problems(
    config: NSAConfig, names: tuple[str, ...], known: tuple[tuple[Any, ...], ...], packed: bool
) -> list[str]:
    """:func:`_problems`, remembered; ``known`` are the fields of each tensor's Metadata."""
    return _problems(config, names, tuple(Metadata(*fields) for fields in known), packed)


def _check_kinds(given: dict[str, torch.Tensor]) -> None:
    """Refuse what is no plain tensor, and what the operators would silently take for one."""
    strangers = [
        f"{n} must be a tensor, got {type(t).__name__}"
        for n, t in given.items()
        if not is_tensor(t)
    ]
    if strangers:
        raise InvalidInput(
            "; ".join(strangers) + " (a DTensor: pass its to_local())" * ("DTensor" in strangers[0])
        )
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(t).tangent is not None for t in given.values()
    ):
        raise Unsupported(
            "forward-mode differentiation (jvp, jacfwd) of NSA is not supported; use backward"
        )


def _packing_problems(
    q: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int | None
) -> list[str]:
    wrong = packing_problems(cu_seqlens, max_seqlen, q.device)
    if (
        wrong or torch.compiler.is_compiling() or type(cu_seqlens) is not torch.Tensor
    ):  # a fake tensor has no values
        return wrong
    try:
        check_cu_seqlens(cu_seqlens, q.shape[0], max_seqlen)
    except InvalidInput as error:
        return [str(error)]
    return []


def _check_plan(
    plan: Plan, config: NSAConfig, q: torch.Tensor, packed: bool, wants_grad: bool
) -> None:
    must_be_plan(plan)
    request, wrong = plan.requests["cmp"], []
    if request.phase != "prefill":
        wrong.append(
            f"plan is for {request.phase}, not prefill, as this call and the first tokens of a"
            " cache are"
        )
    if plan.config is not config and plan.config.values != config.values:
        wrong.append(f"plan is for {plan.config}, not for {config}")
    if wants_grad and not request.needs_grad:
        wrong.append(
            "plan was made without needs_grad=True, but a gradient is wanted: plan again, or use"
            " no_grad"
        )
    if packed and not request.varlen:
        wrong.append("plan was made without varlen=True, but cu_seqlens is given")
    dtype, device = dtype_name(q.dtype), q.device.type
    if dtype != request.dtype or device not in (request.device, "meta"):
        wrong.append(
            f"plan is for {request.dtype} on {request.device}, the tensors are {dtype} on {device}"
        )
    if wrong:
        raise InvalidInput("; ".join(wrong))


def _wide(blocks: torch.Tensor) -> torch.Tensor:
    """int32 and int64 as they are; other integers widened, so that no value wraps round into
    range.
    """
    return blocks if blocks.dtype in (torch.int32, torch.int64) else blocks.to(torch.int64)
