"""The backend ``random``: select chooses blocks at random, not by the compressed branch's scores.

The initial and local blocks are always selected, as in NSA. Blocks come from PyTorch's generator,
so they differ from step to step, also when a CUDA graph is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsa_core.contract import BackendSpec, Reason, Request, SlotCall, SlotSpec, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

_QUERIES_AT_ONCE = 1024


@hookimpl
def nsa_register_backends() -> BackendSpec:
    """Return the specification; the low priority keeps `auto` from choosing it."""
    slot = SlotSpec(forward="random_select:forward")
    return BackendSpec(
        name="random",
        api_version=(1, 1),
        slots={"select": slot},
        probe="random_select:probe",
        priority=-1000,
        summary="blocks at random, for the study of what selection adds",
    )


def probe(request: Request) -> Sequence[Reason]:
    """Return all reasons against ``request``: rows of the study have one document each."""
    if request.varlen or request.partial or request.deterministic:
        return [Reason("study_only", "takes whole rows of one document, without determinism")]
    return []


def forward(q: Tensor, k_cmp: Tensor, lse: Tensor, *, call: SlotCall) -> Tensor:
    """Return blocks int32 [B, S, G, n] for q [B, S, Hq, Dk], ascending, with -1 at the end."""
    import torch  # not while backends are listed

    geometry, (batch, tokens) = call.geometry, q.shape[:2]
    count = geometry.num_select_blocks(tokens)
    n = min(geometry.num_selected_blocks, count)
    block = torch.arange(count, device=q.device)
    parts = []
    for position in torch.arange(tokens, device=q.device).split(_QUERIES_AT_ONCE):
        current = (position // geometry.select_block_size)[:, None, None]
        forced = (block < geometry.init_blocks) | (block > current - geometry.local_blocks)
        rank = torch.rand(batch, len(position), k_cmp.shape[2], count, device=q.device)
        rank = rank.masked_fill(forced, 2.0).masked_fill(block > current, -1.0)
        chosen = rank.topk(n, dim=-1)
        parts.append(chosen.indices.masked_fill(chosen.values < 0, count).sort(-1).values)
    blocks = torch.cat(parts, 1).int()
    blocks = blocks.masked_fill(blocks == count, -1)
    missing = geometry.num_selected_blocks - n
    return torch.nn.functional.pad(blocks, (0, missing), value=-1)
