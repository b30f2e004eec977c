"""Statistics of an NSA layer on an input: gates and selected blocks."""

from __future__ import annotations

import dataclasses

import torch

from nsa_core.contract import BRANCHES
from nsa_core.layout import BlockGeometry
from nsa_core.packing import token_positions


@dataclasses.dataclass(frozen=True)
class NSAStats:
    """Averages over tokens and heads (gates) or groups (blocks); 0 if there is nothing to average.

    Attributes:
        gate_mean: mean gate of each branch (cmp, sel, win).
        gate_entropy: mean entropy in nats of each branch's gate, read as a probability: ln 2 at a
            gate of 0.5, 0 at a saturated gate.
        mixture_entropy: mean entropy in nats of the three gates divided by their sum: ln 3 if they
            are equal, 0 if one branch has all the weight.
        blocks_per_token: mean number of selected blocks.
        forced_share: share of the selected blocks that are forced, that is initial or local.
        mean_distance: mean distance in tokens from a token back to the first token of a selected
            block.
        distinct_blocks: number of different blocks that the tokens of a document select, per group.
        neighbour_overlap: mean of |A and B| / |A or B| for the blocks A of a token and B of the
            token before it.
    """

    gate_mean: dict[str, float]
    gate_entropy: dict[str, float]
    mixture_entropy: float
    blocks_per_token: float
    forced_share: float
    mean_distance: float
    distinct_blocks: float
    neighbour_overlap: float


def summarize(
    gates: torch.Tensor,  # [B, S, Hq, 3] or packed [T, Hq, 3]
    blocks: torch.Tensor,  # [B, S, G, n] or packed [T, G, n], distinct, padded with -1
    geometry: BlockGeometry,
    cu_seqlens: torch.Tensor | None = None,
) -> NSAStats:
    """Compute the statistics of one call of a layer. Synchronises."""
    if cu_seqlens is None:
        batch, length = blocks.shape[:2]
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=blocks.device) * length
        blocks = blocks.flatten(0, 1)
    positions = token_positions(cu_seqlens, blocks.shape[0])
    position, selected = positions.position[:, None, None], blocks >= 0
    current = position // geometry.select_block_size
    forced = selected & (
        (blocks < geometry.init_blocks) | (blocks > current - geometry.local_blocks)
    )
    distance = position - blocks * geometry.select_block_size
    groups = torch.arange(blocks.shape[1], device=blocks.device)[None, :, None]
    choices = torch.stack(
        torch.broadcast_tensors(positions.document[:, None, None], groups, blocks), -1
    )
    pairs = int((cu_seqlens.diff() > 0).sum()) * blocks.shape[1]  # (document, group)

    gates = gates.double().flatten(0, -2)
    mixture = gates / gates.sum(-1, keepdim=True)
    entropy = torch.special.entr(gates) + torch.special.entr(1 - gates)
    return NSAStats(
        gate_mean=_per_branch(gates),
        gate_entropy=_per_branch(entropy),
        mixture_entropy=_mean(torch.special.entr(mixture).sum(-1)),
        blocks_per_token=_mean(selected.sum(-1)),
        forced_share=_mean(forced[selected]),
        mean_distance=_mean(distance[selected]),
        distinct_blocks=len(choices[selected].unique(dim=0)) / pairs if pairs else 0.0,
        neighbour_overlap=_overlap(blocks, positions.document),
    )


def _overlap(blocks: torch.Tensor, document: torch.Tensor) -> float:
    """Mean overlap of the blocks of neighbouring tokens in one document."""
    same = document[1:] == document[:-1]
    current, previous = blocks[1:][same], blocks[:-1][same]
    equal = (current[..., :, None] == previous[..., None, :]) & (current >= 0)[..., None]
    intersection = equal.sum((-1, -2))
    union = (current >= 0).sum(-1) + (previous >= 0).sum(-1) - intersection
    return _mean(intersection / union)


def _per_branch(x: torch.Tensor) -> dict[str, float]:
    return {branch: _mean(x[:, index]) for index, branch in enumerate(BRANCHES)}


def _mean(x: torch.Tensor) -> float:
    return float(x.double().mean()) if x.numel() else 0.0
