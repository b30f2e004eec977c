"""The slots cmp, sel, win and combine (docs/semantics.md, "The three branches"), forward and
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_core.layout import BlockGeometry
from nsa_verify.oracle.rows import (
    Keys,
    See,
    Truth,
    attend,
    compressed_bounds,
    documents,
    f64,
    token_bounds,
)

Rows = Sequence[int] | torch.Tensor | None


def cmp(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k_cmp: torch.Tensor,  # [B, n_c, G, Dk], packed [T // d, G, Dk]
    v_cmp: torch.Tensor,  # [B, n_c, G, Dv]
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    rows: Rows = None,
) -> Truth:
    """Attention over the compressed tokens; i is visible to t iff i*d + l - 1 <= t. grads: dq,
    dk_cmp, dv_cmp.
    """
    size, stride = geometry.compress_block_size, geometry.compress_stride

    def see(t: int, g: int) -> Keys:
        return slice(0, len(range(size - 1, t + 1, stride)))  # the blocks' last tokens up to t

    bounds = token_bounds(cu_seqlens)
    o, lse, grads = attend(
        q,
        k_cmp,
        v_cmp,
        lambda _: see,
        scale,
        bounds=bounds,
        key_bounds=compressed_bounds(bounds, geometry),
        do=do,
        rows=rows,
    )
    return Truth(o, lse, dict(zip(("dq", "dk_cmp", "dv_cmp"), grads)))


def win(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k: torch.Tensor,  # [B, S, G, Dk]
    v: torch.Tensor,  # [B, S, G, Dv]
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    rows: Rows = None,
) -> Truth:
    """Attention over the keys t-w+1 .. t. grads: dq, dk, dv."""

    def see(t: int, g: int) -> Keys:
        return slice(max(0, t - geometry.window_size + 1), t + 1)

    bounds = token_bounds(cu_seqlens)
    o, lse, grads = attend(
        q, k, v, lambda _: see, scale, bounds=bounds, key_bounds=bounds, do=do, rows=rows
    )
    return Truth(o, lse, dict(zip(("dq", "dk", "dv"), grads)))


def sel(
    q: torch.Tensor,  # [B, S, Hq, Dk]
    k: torch.Tensor,  # [B, S, G, Dk]
    v: torch.Tensor,  # [B, S, G, Dv]
    blocks: torch.Tensor,  # int [B, S, G, n], local to the document
    geometry: BlockGeometry,
    scale: float,
    *,
    cu_seqlens: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    rows: Rows = None,
) -> Truth:
    """Attention over the union of the chosen blocks, keys <= t. grads: dq, dk, dv.

    ``blocks`` may come in any order; a duplicate counts once, and -1, a block out of range or in
    the future not at all.
    """
    size, bounds = geometry.select_block_size, token_bounds(cu_seqlens)
    per_document = documents(blocks.detach().cpu(), bounds)

    def see_in(document: int) -> See:
        chosen = per_document[document].tolist()

        def see(t: int, g: int) -> Keys:
            mine = sorted({int(j) for j in chosen[t][g] if j >= 0 and j * size <= t})
            spans = [torch.arange(j * size, min((j + 1) * size, t + 1)) for j in mine]
            return torch.cat(spans) if spans else slice(0, 0)

        return see

    o, lse, grads = attend(
        q, k, v, see_in, scale, bounds=bounds, key_bounds=bounds, do=do, rows=rows
    )
    return Truth(o, lse, dict(zip(("dq", "dk", "dv"), grads)))


def combine(
    gates: torch.Tensor,  # [.., S, Hq, 3] in the order cmp, sel, win
    o_cmp: torch.Tensor,  # [.., S, Hq, Dv]
    o_sel: torch.Tensor,
    o_win: torch.Tensor,
    do: torch.Tensor | None = None,
) -> Truth:
    """o = g_cmp o_cmp + g_sel o_sel + g_win o_win. grads: dgates, do_cmp, do_sel, do_win."""
    g, branches = f64(gates), [f64(x) for x in (o_cmp, o_sel, o_win)]
    o = sum((g[..., c, None] * x for c, x in enumerate(branches)), torch.zeros_like(branches[0]))
    if do is None:
        return Truth(o, None, {})
    d = f64(do)
    grads = {"dgates": torch.stack([(d * x).sum(-1) for x in branches], -1)}
    grads |= {f"do_{name}": g[..., c, None] * d for c, name in enumerate(("cmp", "sel", "win"))}
    return Truth(o, None, grads)
