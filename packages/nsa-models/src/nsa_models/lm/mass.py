"""How much of dense attention's probability lies inside the blocks that a layer chooses, layer by
layer.
"""

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
    """Means over query heads and those rows that have more candidates than places."""

    selected: float  # of softmax(q k_sel) over all keys <= t, what the chosen blocks hold
    keys: float  # of those keys, how many the chosen blocks hold: what a choice at random would


@torch.no_grad()
def selected_mass(
    model: LanguageModel,
    tokens: torch.Tensor,  # integer [T], packed
    cu_seqlens: torch.Tensor | None = None,  # int32 [documents + 1]; None: one document
    rows: int = 256,
) -> list[Mass]:
    """One entry a layer, from up to ``rows`` rows evenly spread over the tokens.

    Raises:
        InvalidInput: the model's attention is dense, or every row chooses all the blocks it has.
    """
    layer = model.config.layer
    if model.config.attention != "nsa":
        raise InvalidInput(f"a model with attention {model.config.attention!r} chooses no blocks")
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, len(tokens)], dtype=torch.int32, device=tokens.device)
    places, reach = (
        token_places(cu_seqlens, len(tokens)),
        layer.num_selected_blocks * layer.select_block_size,
    )
    chosen = (places.position >= reach).nonzero().flatten()
    if not len(chosen):
        raise InvalidInput(
            f"tokens must hold a document longer than num_selected_blocks blocks, {reach} tokens"
        )
    chosen = chosen[
        torch.linspace(0, len(chosen) - 1, min(rows, len(chosen))).long().to(chosen.device)
    ]
    found, longest = [], int(cu_seqlens.diff().max())
    x = model.embed(tokens)
    for block in model.blocks:
        assert isinstance(block, Block)  # as LanguageModel made it
        found.append(_of_layer(block, x, cu_seqlens, longest, places, chosen))
        x = block(x, cu_seqlens, longest)
    return found


def _of_layer(
    block: Block,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    places: TokenPlaces,
    rows: torch.Tensor,
) -> Mass:
    attn = block.attn
    assert isinstance(attn, NSAttention)  # the caller's choice
    x = block.attn_norm(x)
    made = attn.project(x, cu_seqlens)
    _, blocks = nsa_attention(
        made.q,
        made.k,
        made.v,
        attn.gate(x),
        k_cmp=made.k_cmp,
        v_cmp=made.v_cmp,
        config=attn.config,
        cu_seqlens=cu_seqlens,
        max_seqlen=longest,
        return_blocks=True,
        plan=default_plan(attn.config, x.device, made.q.dtype, True, False, attn.backends),
    )
    parts = [
        _of_rows(attn.config, made, blocks, places, part) for part in rows.split(_ROWS_AT_ONCE)
    ]
    selected, keys = torch.cat(parts).mean(0).tolist()
    return Mass(selected, keys)


def _of_rows(
    config: NSAConfig,
    made: Projected,
    blocks: torch.Tensor,
    places: TokenPlaces,
    rows: torch.Tensor,
) -> torch.Tensor:
    """[rows, 2]: the mean over heads of each row's mass, and its share of the keys."""
    q, k = made.q[rows].float(), made.k[1]
    assert k is not None  # that of sel
    q = q.unflatten(1, (config.n_kv_heads, -1))  # [R, G, h, Dk]
    same = places.document == places.document[rows, None]
    visible = same & (places.position <= places.position[rows, None])  # [R, T]
    scores = torch.einsum("rghd,tgd->rght", q, k.float()) * config.softmax_scale
    p = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    home = places.position // config.select_block_size
    inside = (blocks[rows][..., None] == home).any(-2) & visible[:, None]  # [R, G, T]
    mass = (p * inside[:, :, None]).sum(-1).mean((1, 2))
    return torch.stack((mass, inside.sum(-1).float().mean(1) / visible.sum(-1)), dim=1)
