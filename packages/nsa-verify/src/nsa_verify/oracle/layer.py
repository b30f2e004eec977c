"""Oracle of nsa_attention and of the layer with its projections, differentiable in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_verify.oracle import branches
from nsa_verify.oracle.phi import compress, compressed_positions, rope, token_positions
from nsa_verify.oracle.rows import Truth
from nsa_verify.oracle.selection import select

PerBranch = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor] | list[torch.Tensor]
_RMS_EPS = 1e-6


class Projected(NamedTuple):
    """The inputs of the slots in float64: projected, normalised, rotated, compressed."""

    q: torch.Tensor  # [B, S, Hq, Dk]
    # [B, S, G, Dk] of cmp (uncompressed input of phi), sel, win
    k: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    v: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # [B, S, G, Dv]
    k_cmp: torch.Tensor  # [B, n_c, G, Dk]
    v_cmp: torch.Tensor  # [B, n_c, G, Dv]
    gates: torch.Tensor  # [B, S, Hq, 3]


class _Slot(torch.autograd.Function):
    """Autograd node of an oracle slot; its backward calls the slot again with ``do``."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Truth], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        return run(*tensors).o

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.run(*ctx.saved_tensors, do=do).grads.values())


def _slot(run: Callable[..., Truth], *tensors: torch.Tensor) -> torch.Tensor:
    apply: Any = _Slot.apply
    out: torch.Tensor = apply(run, *tensors)
    return out


def _per_branch(x: PerBranch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = (x, x, x) if isinstance(x, torch.Tensor) else tuple(x)
    if len(parts) != 3:
        raise InvalidInput(
            f"k and v must be one tensor or three (cmp, sel, win), got {len(parts)} tensors"
        )
    cmp_, sel_, win_ = (part.to("cpu", torch.float64) for part in parts)
    return cmp_, sel_, win_


def _cmp_lse(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    geometry: BlockGeometry,
    scale: float,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    lse = branches.cmp(q, k_cmp, v_cmp, geometry, scale, cu_seqlens=cu_seqlens).lse
    assert lse is not None
    return lse


def attention(
    q: torch.Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: PerBranch,  # [B, S, G, Dk]
    v: PerBranch,  # [B, S, G, Dv]
    gates: torch.Tensor,  # [B, S, Hq, 3]
    config: NSAConfig,
    *,
    k_cmp: torch.Tensor | None = None,  # [B, n_c, G, Dk]
    v_cmp: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,  # int [B, S, G, n]
) -> torch.Tensor:
    """Compute nsa_attention in float64, differentiable in every float tensor.

    Rotary embedding is not applied: q, k and k_cmp are used as passed. No gradient flows through
    the selection of blocks.

    Args:
        q: Queries [B, S, Hq, Dk], packed [T, Hq, Dk].
        k: Keys [B, S, G, Dk]: one tensor for all branches, or three for cmp, sel and win.
        v: Values [B, S, G, Dv], in the same form.
        gates: Gates of cmp, sel and win, [B, S, Hq, 3].
        config: Configuration of the layer.
        k_cmp: Compressed keys [B, n_c, G, Dk]; None compresses the keys of cmp by their mean.
        v_cmp: Compressed values [B, n_c, G, Dv]; None compresses the values of cmp by their mean.
        cu_seqlens: Document bounds, int32 [documents + 1]; None if dense.
        blocks: Selected blocks, int32 [B, S, G, n]; None selects them by Eq. 8 to 12.

    Returns:
        o [B, S, Hq, Dv], packed [T, Hq, Dv] (Eq. 5).

    Raises:
        InvalidInput: ``k`` or ``v`` is a sequence of other than three tensors.
    """
    geometry, scale = config.geometry, config.softmax_scale
    q, gates = q.to("cpu", torch.float64), gates.to("cpu", torch.float64)
    k_c, k_s, k_w = _per_branch(k)
    v_c, v_s, v_w = _per_branch(v)
    k_c = (
        compress("mean", {}, k_c, geometry, cu_seqlens=cu_seqlens)
        if k_cmp is None
        else k_cmp.to("cpu", torch.float64)
    )
    v_c = (
        compress("mean", {}, v_c, geometry, cu_seqlens=cu_seqlens)
        if v_cmp is None
        else v_cmp.to("cpu", torch.float64)
    )
    if blocks is None:
        lse = _cmp_lse(q, k_c, v_c, geometry, scale, cu_seqlens)
        blocks = select(q, k_c, lse, geometry, scale, cu_seqlens=cu_seqlens)
    selected = blocks

    def cmp_(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor | None = None
    ) -> Truth:
        return branches.cmp(q, k, v, geometry, scale, cu_seqlens=cu_seqlens, do=do)

    def sel_(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor | None = None
    ) -> Truth:
        return branches.sel(q, k, v, selected, geometry, scale, cu_seqlens=cu_seqlens, do=do)

    def win_(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor | None = None
    ) -> Truth:
        return branches.win(q, k, v, geometry, scale, cu_seqlens=cu_seqlens, do=do)

    outs = _slot(cmp_, q, k_c, v_c), _slot(sel_, q, k_s, v_s), _slot(win_, q, k_w, v_w)
    return _slot(branches.combine, gates, *outs)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scaled: torch.Tensor = x / ((x * x).mean(-1, keepdim=True) + _RMS_EPS).sqrt() * weight
    return scaled


def _gates(params: Mapping[str, torch.Tensor], x: torch.Tensor, config: NSAConfig) -> torch.Tensor:
    if config.gate == "mlp":
        hidden = _linear(x, params["gate.0.weight"], params["gate.0.bias"])
        logits = _linear(
            hidden * torch.sigmoid(hidden), params["gate.2.weight"], params["gate.2.bias"]
        )
    else:
        logits = _linear(x, params["gate.weight"], params.get("gate.bias"))
    return torch.sigmoid(logits).reshape(*x.shape[:-1], config.n_heads, 3)


def project(
    state: Mapping[str, torch.Tensor],
    x: torch.Tensor,  # [B, S, dim], packed [T, dim]
    config: NSAConfig,
    *,
    cu_seqlens: torch.Tensor | None = None,
) -> Projected:
    """Compute the inputs of the slots of a layer in float64, differentiable.

    Args:
        state: The layer's state_dict.
        x: Input [B, S, dim], packed [T, dim].
        config: Configuration of the layer.
        cu_seqlens: Document bounds, int32 [documents + 1]; None if dense.
    """
    params = {name: value.to("cpu", torch.float64) for name, value in state.items()}
    x, geometry, total = x.to("cpu", torch.float64), config.geometry, x.shape[-2]
    pairs, (hq, groups, dk, dv) = 1 if config.shared_kv else 3, _sizes(config)
    flat = _linear(x, params["qkv.weight"])
    q, *kv = flat.split([hq * dk, *[groups * dk] * pairs, *[groups * dv] * pairs], -1)
    q = q.unflatten(-1, (hq, dk))
    k_raw = [part.unflatten(-1, (groups, dk)) for part in kv[:pairs]] * (3 // pairs)
    v = [part.unflatten(-1, (groups, dv)) for part in kv[pairs:]] * (3 // pairs)
    if config.qk_norm:
        q, k_raw = (
            _norm(q, params["q_norm.weight"]),
            [_norm(k, params["k_norm.weight"]) for k in k_raw],
        )
    positions, positions_cmp = (
        token_positions(total, cu_seqlens),
        compressed_positions(total, geometry, cu_seqlens),
    )

    def rotate(y: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return rope(y, at, config.frequencies) if config.rope else y

    k_phi = rotate(k_raw[0], positions) if config.rope_before_compress else k_raw[0]
    k_cmp = compress(
        config.compress, _with_prefix("phi_k.", params), k_phi, geometry, cu_seqlens=cu_seqlens
    )
    v_cmp = compress(
        config.compress, _with_prefix("phi_v.", params), v[0], geometry, cu_seqlens=cu_seqlens
    )
    if not config.rope_before_compress:
        k_cmp = rotate(k_cmp, positions_cmp)
    k = (k_phi, rotate(k_raw[1], positions), rotate(k_raw[2], positions))
    q, gates = rotate(q, positions), _gates(params, x, config)
    return Projected(q, k, (v[0], v[1], v[2]), k_cmp, v_cmp, gates)


def _sizes(config: NSAConfig) -> tuple[int, int, int, int]:
    """Return (Hq, G, Dk, Dv)."""
    assert config.head_dim is not None  # NSAConfig sets both
    assert config.v_head_dim is not None
    return config.n_heads, config.n_kv_heads, config.head_dim, config.v_head_dim


def _with_prefix(prefix: str, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parameters whose names start with ``prefix``, without the prefix."""
    return {
        name.removeprefix(prefix): value
        for name, value in params.items()
        if name.startswith(prefix)
    }


def layer(
    state: Mapping[str, torch.Tensor],
    x: torch.Tensor,  # [B, S, dim], packed [T, dim]
    config: NSAConfig,
    *,
    cu_seqlens: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a layer in float64, differentiable in ``x`` and every parameter.

    Args:
        state: The layer's state_dict; x, config and cu_seqlens are those of :func:`project`.
        blocks: Selected blocks, int32 [B, S, G, n]; None selects them by Eq. 8 to 12.

    Returns:
        y, in the shape of ``x``.
    """
    p = project(state, x, config, cu_seqlens=cu_seqlens)
    o = attention(
        p.q,
        p.k,
        p.v,
        p.gates,
        config,
        k_cmp=p.k_cmp,
        v_cmp=p.v_cmp,
        cu_seqlens=cu_seqlens,
        blocks=blocks,
    )
    return _linear(o.flatten(-2), state["out.weight"].to("cpu", torch.float64))
