"""The share of dense attention's probability inside the selected blocks, per layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_core.dispatch.default_plan import default_plan
from nsa_core.errors import InvalidInput
from nsa_core.layer.attention import nsa_attention
from nsa_core.layer.module import NSAttention
from nsa_core.layer.projection import Projected
from nsa_core.packing import TokenPlaces, token_places
from nsa_models.lm.model import Block, LanguageModel

_ROWS_AT_ONCE = 16


class Mass(NamedTuple):
    """Means over query heads and over rows with more than n candidate blocks."""

    selected: float  # share of softmax(q k_sel) over all keys <= t inside the selected blocks
    keys: float  # share of these keys inside the selected blocks: the mass of a random selection


@torch.no_grad()
def selected_mass(
    model: LanguageModel,
    tokens: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    rows: int = 256,
) -> list[Mass]:
    """Measure the mass of the selected blocks in every layer.

    Args:
        model: A model with NSA.
        tokens: Integer [T], packed.
        cu_seqlens: int32 [documents + 1]; None for one document.
        rows: Maximum number of query rows, spread evenly over the tokens.

    Returns:
        One entry per layer.

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
    places, selected_tokens = (
        token_places(cu_seqlens, len(tokens)),
        layer.num_selected_blocks * layer.select_block_size,
    )
    query_rows = (places.position >= selected_tokens).nonzero().flatten()
    if not len(query_rows):
        raise InvalidInput(
            "tokens must hold a document longer than num_selected_blocks blocks,"
            f" {selected_tokens} tokens"
        )
    query_rows = query_rows[
        torch.linspace(0, len(query_rows) - 1, min(rows, len(query_rows)))
        .long()
        .to(query_rows.device)
    ]
    masses, longest = [], int(cu_seqlens.diff().max())
    x = model.embed(tokens)
    for block in model.blocks:
        assert isinstance(block, Block)  # LanguageModel builds them
        masses.append(_layer_mass(block, x, cu_seqlens, longest, places, query_rows))
        x = block(x, cu_seqlens, longest)
    return masses


def _layer_mass(
    block: Block,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    places: TokenPlaces,
    rows: torch.Tensor,
) -> Mass:
    attn = block.attn
    assert isinstance(attn, NSAttention)  # checked by selected_mass
    x = block.attn_norm(x)
    projected = attn.project(x, cu_seqlens)
    _, blocks = nsa_attention(
        projected.q,
        projected.k,
        projected.v,
        attn.gate(x),
        k_cmp=projected.k_cmp,
        v_cmp=projected.v_cmp,
        config=attn.config,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest,
        return_blocks=True,
        plan=default_plan(attn.config, x.device, projected.q.dtype, True, False, attn.backends),
    )
    chunks = [
        _row_mass(attn.config, projected, blocks, places, chunk)
        for chunk in rows.split(_ROWS_AT_ONCE)
    ]
    selected, keys = torch.cat(chunks).mean(0).tolist()
    return Mass(selected, keys)


def _row_mass(
    config: NSAConfig,
    projected: Projected,
    blocks: torch.Tensor,
    places: TokenPlaces,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Return [rows, 2]: each row's mass and share of the keys, averaged over heads."""
    q, k = projected.q[rows].float(), projected.k[1]
    assert k is not None  # k[1] belongs to sel
    q = q.unflatten(1, (config.n_kv_heads, -1))  # [R, G, h, Dk]
    same_document = places.document == places.document[rows, None]
    visible = same_document & (places.position <= places.position[rows, None])  # [R, T]
    scores = torch.einsum("rghd,tgd->rght", q, k.float()) * config.softmax_scale
    p = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    block_of_key = places.position // config.select_block_size
    inside = (blocks[rows][..., None] == block_of_key).any(-2) & visible[:, None]  # [R, G, T]
    mass = (p * inside[:, :, None]).sum(-1).mean((1, 2))
    return torch.stack((mass, inside.sum(-1).float().mean(1) / visible.sum(-1)), dim=1)
