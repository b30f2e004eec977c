"""The share of dense attention's probability inside the selected blocks, per row and per layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.layer.module import NSAttention
from nsa_core.layer.projection import Projected
from nsa_core.packing import TokenPositions, token_positions
from nsa_core.torch_ops.torch_state import no_autocast
from nsa_models.lm.model import Block, LanguageModel

ROWS_AT_ONCE = 16


class RowMass(NamedTuple):
    """Dense attention's probability p = softmax(q k_sel) over all keys <= t, by query row.

    p is averaged over the query heads of a kv head. Tensors are fp32 unless stated otherwise, for R
    rows, G kv heads and C blocks, the number of blocks up to the last one that a key lies in.

    Attributes:
        selected: [R, G], share of p inside the selected blocks.
        forced: [R, G], share of p inside the forced blocks, that is initial or local.
        random: [R, G], expected share of p inside the forced blocks and as many blocks chosen at
            random as the layer chose itself.
        best: [R, G], the same with the blocks that hold most of p instead of random ones.
        keys: [R, G], share of the keys <= t inside the selected blocks.
        window: [R, G], share of p inside the window.
        blocks: [R, G, C], share of p inside each block.
        best_blocks: bool [R, G, C], the blocks of ``best`` that are not forced.
    """

    selected: torch.Tensor
    forced: torch.Tensor
    random: torch.Tensor
    best: torch.Tensor
    keys: torch.Tensor
    window: torch.Tensor
    blocks: torch.Tensor
    best_blocks: torch.Tensor


class Mass(NamedTuple):
    """Means over query heads and over rows with more than n candidate blocks."""

    selected: float  # share of softmax(q k_sel) over all keys <= t inside the selected blocks
    keys: float  # share of these keys inside the selected blocks
    random: float  # the share if the blocks that are not forced were chosen at random
    best: float  # the share if they were the blocks with most of it
    window: float  # the share inside the window


@torch.no_grad()
def selected_mass(
    model: LanguageModel,
    tokens: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    rows: int = 256,
) -> list[Mass]:
    """Measure the mass of the selected blocks in every layer with NSA.

    Args:
        model: A model with NSA.
        tokens: Integer [T], packed.
        cu_seqlens: int32 [documents + 1]; None for one document.
        rows: Maximum number of query rows, spread evenly over the tokens.

    Returns:
        One entry per layer with NSA.

    Raises:
        InvalidInput: The model's attention is dense, or no row has more candidate blocks than it
            selects.
    """
    layer = model.config.layer
    if model.config.attention != "nsa":
        raise InvalidInput(
            f"model must have attention 'nsa'; attention {model.config.attention!r} selects no"
            " blocks"
        )
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, len(tokens)], dtype=torch.int32, device=tokens.device)
    query_rows = measured_rows(layer, cu_seqlens, len(tokens), rows)
    masses, longest = [], int(cu_seqlens.diff().max())
    x = model.embed(tokens)
    for block in model.blocks:
        assert isinstance(block, Block)  # LanguageModel builds them
        if isinstance(block.attn, NSAttention):
            x_norm = block.attn_norm(x)
            masses.append(layer_mass(block.attn, x_norm, cu_seqlens, longest, query_rows))
        x = block(x, cu_seqlens, longest)
    return masses


def measured_rows(
    layer: NSAConfig, cu_seqlens: torch.Tensor, total: int, limit: int
) -> torch.Tensor:
    """Return at most ``limit`` query rows with more candidate blocks than a layer selects.

    They are spread evenly over the tokens.

    Args:
        layer: The layer's sizes.
        cu_seqlens: int32 [documents + 1] boundaries of packed documents.
        total: Number of tokens.
        limit: Maximum number of rows.

    Raises:
        InvalidInput: There is no such row.
    """
    selected_tokens = layer.num_selected_blocks * layer.select_block_size
    positions = token_positions(cu_seqlens, total)
    rows = (positions.position >= selected_tokens).nonzero().flatten()
    if not len(rows):
        raise InvalidInput(
            "tokens must hold a document longer than num_selected_blocks blocks,"
            f" {selected_tokens} tokens"
        )
    spread = torch.linspace(0, len(rows) - 1, min(limit, len(rows))).long()
    return rows[spread.to(rows.device)]


@torch.no_grad()
def layer_mass(
    attn: NSAttention, x: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, rows: torch.Tensor
) -> Mass:
    """Measure the mass of the blocks that a layer selects.

    Args:
        attn: The layer.
        x: Its input, packed [T, dim].
        cu_seqlens: int32 [documents + 1] boundaries of packed documents.
        longest: Length of the longest document, or an upper bound.
        rows: Integer [R], the query rows, from :func:`measured_rows`.
    """
    projected, blocks = select_blocks(attn, x, cu_seqlens, longest)
    k, positions = projected.k[1], token_positions(cu_seqlens, len(x))
    chunks = [
        row_mass(attn.config, projected.q, k, blocks, positions, chunk)
        for chunk in rows.split(ROWS_AT_ONCE)
    ]
    shares = (torch.cat([getattr(chunk, name) for chunk in chunks]) for name in Mass._fields)
    return Mass(*torch.stack([share.mean() for share in shares]).tolist())


def select_blocks(
    attn: NSAttention,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> tuple[Projected, torch.Tensor]:
    """Project a layer's input and select its blocks, as a forward of the layer does.

    Args:
        attn: The layer.
        x: Its input, [B, S, dim] or packed [T, dim].
        cu_seqlens: int32 [documents + 1] boundaries of packed documents.
        max_seqlen: Length of the longest packed document, or an upper bound.

    Returns:
        The projections and the selected blocks, int32 [B, S, G, n] or packed [T, G, n].
    """
    projected = attn.project(x, cu_seqlens)
    plan = attn.resolve_plan(x, projected.q, cu_seqlens is not None)
    packing = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
    _, lse = plan.cmp(projected.q, projected.k_cmp, projected.v_cmp, **packing)
    return projected, plan.select(projected.q, projected.k_cmp, lse, **packing)


def row_mass(
    config: NSAConfig,
    q: torch.Tensor,
    k: torch.Tensor,
    blocks: torch.Tensor,
    positions: TokenPositions,
    rows: torch.Tensor,
) -> RowMass:
    """Measure the mass of the selected blocks for some query rows.

    Args:
        config: The layer's sizes.
        q: Packed queries [T, Hq, Dk].
        k: Packed keys of sel, [T, G, Dk].
        blocks: Selected blocks [T, G, n], distinct, padded with -1.
        positions: Document and position of each of the T rows.
        rows: Integer [R], the query rows to measure.
    """
    size = config.select_block_size
    block_of_key, position = positions.position // size, positions.position[rows]
    count = int(block_of_key.max()) + 1
    same_document = positions.document == positions.document[rows, None]
    visible = same_document & (positions.position <= position[:, None])  # [R, T]
    queries = q[rows].float().unflatten(1, (config.n_kv_heads, -1))  # [R, G, h, Dk]
    with no_autocast(q.device):  # which would round the scores to its dtype
        scores = torch.einsum("rghd,tgd->rght", queries, k.float()) * config.softmax_scale
    p = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1).mean(2)  # [R, G, T]
    mass = p.new_zeros(*p.shape[:2], count).index_add_(-1, block_of_key, p)
    keys = p.new_zeros(len(rows), count).index_add_(-1, block_of_key, visible.float())[:, None]

    in_window = positions.position > (position - config.window_size)[:, None]
    forced, free = block_kinds(config, position, count)
    chosen = selection_mask(blocks[rows], count)
    chosen_free = (chosen & free).sum(-1)  # [R, G]
    # The rank of every block by mass; blocks that are not free rank last.
    order = mass.masked_fill(~free, -1.0).argsort(dim=-1, descending=True, stable=True)
    best_blocks = (order.argsort(dim=-1) < chosen_free[..., None]) & free
    forced_mass = (mass * forced).sum(-1)
    chance = chosen_free / free.sum(-1).clamp(min=1)
    return RowMass(
        selected=(mass * chosen).sum(-1),
        forced=forced_mass,
        random=forced_mass + chance * (mass * free).sum(-1),
        best=forced_mass + (mass * best_blocks).sum(-1),
        keys=(keys * chosen).sum(-1) / visible.sum(-1, keepdim=True),
        window=(p * in_window[:, None]).sum(-1),
        blocks=mass,
        best_blocks=best_blocks,
    )


def block_kinds(
    config: NSAConfig, position: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of ``count`` blocks are forced, and which the layer may choose.

    Args:
        config: The layer's sizes.
        position: Integer [R], position of each query in its document.
        count: Number of blocks, C.

    Returns:
        Two bool tensors [R, 1, C]; both are False for blocks after the query.
    """
    block = torch.arange(count, device=position.device)
    current = (position // config.select_block_size)[:, None, None]
    visible = block <= current
    forced = visible & ((block < config.init_blocks) | (block > current - config.local_blocks))
    return forced, visible & ~forced


def selection_mask(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """Return bool [..., count]: whether each block is among ``blocks`` [..., n]; -1 is no block."""
    mask = blocks.new_zeros(*blocks.shape[:-1], count + 1, dtype=torch.bool)
    slots = torch.where(blocks < 0, count, blocks).long()
    return mask.scatter_(-1, slots, True)[..., :count]
