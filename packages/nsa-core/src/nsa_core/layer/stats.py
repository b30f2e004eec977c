"""Statistics of an NSA layer on an input: its gates and its selected blocks."""

from __future__ import annotations

import dataclasses

import torch

from nsa_core.contract import BRANCHES
from nsa_core.layout import BlockGeometry
from nsa_core.packing import token_places


@dataclasses.dataclass(frozen=True)
class NSAStats:
    """Averages over tokens and heads (gates) or groups (blocks); 0 where there is nothing to
    average.
    """

    gate_mean: dict[str, float]  # per branch
    # per branch, of the gate read as a probability: ln 2 at 0.5, 0 when it is stuck
    gate_entropy: dict[str, float]
    # of the three gates divided by their sum: ln 3 when balanced, 0 when one branch is left
    mixture_entropy: float
    blocks_per_token: float
    forced_share: (
        float  # of the chosen blocks, those chosen whatever their score (initial and local)
    )
    mean_distance: float  # in tokens, from a token back to the first token of a chosen block
    distinct_blocks: float  # per document and group: different blocks chosen by any of its tokens
    neighbour_overlap: (
        float  # |A and B| / |A or B| of the blocks of a token and of the token before it
    )


def summarize(
    gates: torch.Tensor,  # [B, S, Hq, 3] or packed [T, Hq, 3]
    blocks: torch.Tensor,  # [B, S, G, n] or packed [T, G, n], distinct, -1 where there is none
    geometry: BlockGeometry,
    cu_seqlens: torch.Tensor | None = None,
) -> NSAStats:
    """Statistics of one call of a layer. Synchronises."""
    if cu_seqlens is None:
        batch, length = blocks.shape[:2]
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=blocks.device) * length
        blocks = blocks.flatten(0, 1)
    places = token_places(cu_seqlens, blocks.shape[0])
    position, chosen = places.position[:, None, None], blocks >= 0
    current = position // geometry.select_block_size
    forced = chosen & ((blocks < geometry.init_blocks) | (blocks > current - geometry.local_blocks))
    distance = position - blocks * geometry.select_block_size
    groups = torch.arange(blocks.shape[1], device=blocks.device)[None, :, None]
    keys = torch.stack(torch.broadcast_tensors(places.document[:, None, None], groups, blocks), -1)
    documents = int((cu_seqlens.diff() > 0).sum()) * blocks.shape[1]

    gates = gates.double().flatten(0, -2)
    mixture = gates / gates.sum(-1, keepdim=True)
    entropy = torch.special.entr(gates) + torch.special.entr(1 - gates)
    return NSAStats(
        gate_mean=_per_branch(gates),
        gate_entropy=_per_branch(entropy),
        mixture_entropy=_mean(torch.special.entr(mixture).sum(-1)),
        blocks_per_token=_mean(chosen.sum(-1)),
        forced_share=_mean(forced[chosen]),
        mean_distance=_mean(distance[chosen]),
        distinct_blocks=len(keys[chosen].unique(dim=0)) / documents if documents else 0.0,
        neighbour_overlap=_overlap(blocks, places.document),
    )


def _overlap(blocks: torch.Tensor, document: torch.Tensor) -> float:
    same = document[1:] == document[:-1]
    now, before = blocks[1:][same], blocks[:-1][same]
    both = ((now[..., :, None] == before[..., None, :]) & (now >= 0)[..., None]).sum((-1, -2))
    either = (now >= 0).sum(-1) + (before >= 0).sum(-1) - both
    return _mean(both / either)


def _per_branch(x: torch.Tensor) -> dict[str, float]:
    return {branch: _mean(x[:, index]) for index, branch in enumerate(BRANCHES)}


def _mean(x: torch.Tensor) -> float:
    return float(x.double().mean()) if x.numel() else 0.0
