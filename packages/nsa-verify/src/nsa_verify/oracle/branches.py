"""Oracle of cmp, sel, win and combine (docs/explanation/semantics.md, "The three branches")."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_core.layout import BlockGeometry
from nsa_verify.oracle.rows import (
    Keys,
    Truth,
    Visibility,
    attend,
    compressed_bounds,
    documents,
    f64,
    queries_of,
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
    first_query: int | None = None,
) -> Truth:
    """Attend to the compressed tokens; token i is visible to t if i*d + l - 1 <= t.

    Args:
        q: Queries [B, S, Hq, Dk], packed [T, Hq, Dk].
        k_cmp: Compressed keys [B, n_c, G, Dk], packed [T // d, G, Dk].
        v_cmp: Compressed values [B, n_c, G, Dv], packed [T // d, G, Dv].
        geometry: Block sizes.
        scale: Softmax scale.
        cu_seqlens: Document bounds, int32 [documents + 1]; None if dense.
        do: Gradient of o, [B, S, Hq, Dv]. With it, the result has the gradients of all inputs.
        rows: Rows of q to evaluate; None evaluates all. Other rows of the result are 0.
        first_query: Position of row 0 of q, if q holds only some rows: see "Queries inside a
            sequence" in nsa_core.contract. None: whole sequences.

    Returns:
        o, lse, and with ``do`` the gradients dq, dk_cmp and dv_cmp.

    Raises:
        InvalidInput: The scores exceed the size limit of the oracle; pass ``rows``.
    """
    size, stride = geometry.compress_block_size, geometry.compress_stride

    def visible(t: int, g: int) -> Keys:
        return slice(0, len(range(size - 1, t + 1, stride)))  # blocks whose last token is <= t

    o, lse, grads = attend(
        q,
        k_cmp,
        v_cmp,
        lambda _: visible,
        scale,
        queries=queries_of(q, cu_seqlens, first_query),
        key_bounds=compressed_bounds(token_bounds(cu_seqlens), geometry),
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
    first_query: int | None = None,
) -> Truth:
    """Attend to the keys t-w+1 .. t.

    The arguments after v, and the errors, are those of :func:`cmp`.

    Args:
        q: Queries [B, S, Hq, Dk], packed [T, Hq, Dk].
        k: Keys [B, S, G, Dk], packed [T, G, Dk].
        v: Values [B, S, G, Dv], packed [T, G, Dv].

    Returns:
        o, lse, and with ``do`` the gradients dq, dk and dv.
    """

    def visible(t: int, g: int) -> Keys:
        return slice(max(0, t - geometry.window_size + 1), t + 1)

    o, lse, grads = attend(
        q,
        k,
        v,
        lambda _: visible,
        scale,
        queries=queries_of(q, cu_seqlens, first_query),
        key_bounds=token_bounds(cu_seqlens),
        do=do,
        rows=rows,
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
    first_query: int | None = None,
) -> Truth:
    """Attend to the keys <= t in the union of the selected blocks.

    The arguments after blocks, and the errors, are those of :func:`cmp`.

    Args:
        q: Queries [B, S, Hq, Dk], packed [T, Hq, Dk].
        k: Keys [B, S, G, Dk], packed [T, G, Dk].
        v: Values [B, S, G, Dv], packed [T, G, Dv].
        blocks: Selected blocks, int [B, S, G, n], packed [T, G, n], local to the document. They may
            have any order. Duplicates count once. Entries of -1 and blocks that are out of range or
            in the future are ignored.

    Returns:
        o, lse, and with ``do`` the gradients dq, dk and dv.
    """
    size, queries = geometry.select_block_size, queries_of(q, cu_seqlens, first_query)
    per_document = documents(blocks.detach().cpu(), queries.bounds)

    def visible_in(document: int) -> Visibility:
        block_lists, first = per_document[document].tolist(), queries.first[document]

        def visible(t: int, g: int) -> Keys:
            selected = block_lists[t - first][g]
            distinct = sorted({int(j) for j in selected if j >= 0 and j * size <= t})
            spans = [torch.arange(j * size, min((j + 1) * size, t + 1)) for j in distinct]
            return torch.cat(spans) if spans else slice(0, 0)

        return visible

    o, lse, grads = attend(
        q,
        k,
        v,
        visible_in,
        scale,
        queries=queries,
        key_bounds=token_bounds(cu_seqlens),
        do=do,
        rows=rows,
    )
    return Truth(o, lse, dict(zip(("dq", "dk", "dv"), grads)))


def combine(
    gates: torch.Tensor,  # [.., S, Hq, 3] in the order cmp, sel, win
    o_cmp: torch.Tensor,  # [.., S, Hq, Dv]
    o_sel: torch.Tensor,
    o_win: torch.Tensor,
    do: torch.Tensor | None = None,
) -> Truth:
    """Compute the gated sum o = g_cmp o_cmp + g_sel o_sel + g_win o_win (Eq. 5).

    Args:
        gates: Gates of cmp, sel and win, [B, S, Hq, 3].
        o_cmp: Output of cmp [B, S, Hq, Dv].
        o_sel: Output of sel, same shape.
        o_win: Output of win, same shape.
        do: Gradient of o, same shape. With it, the result has the gradients of all inputs.

    Returns:
        o, and with ``do`` the gradients dgates, do_cmp, do_sel and do_win. ``lse`` is None.
    """
    g, branches = f64(gates), [f64(x) for x in (o_cmp, o_sel, o_win)]
    o = sum((g[..., c, None] * x for c, x in enumerate(branches)), torch.zeros_like(branches[0]))
    if do is None:
        return Truth(o, None, {})
    d = f64(do)
    grads = {"dgates": torch.stack([(d * x).sum(-1) for x in branches], -1)}
    grads |= {f"do_{name}": g[..., c, None] * d for c, name in enumerate(("cmp", "sel", "win"))}
    return Truth(o, None, grads)
