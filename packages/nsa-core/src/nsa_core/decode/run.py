"""The run of a checked call of nsa_decode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import DecodeCall
from nsa_core.decode.checks import check_values
from nsa_core.decode.layer_step import Branches, Rope, append, attend, compress
from nsa_core.decode.pages import LayerPages
from nsa_core.plan.default_plan import CACHED, Backends
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import resolve

if TYPE_CHECKING:
    from torch import nn

    from nsa_core.plan.plan import Plan

# Bytes. Longer calls are split, so that a prompt of many rows does not need memory for all at once.
PART_BYTES = 2**28


class DecodeRows(NamedTuple):
    """The sequence and the position of each row of a step, made once for all layers.

    Attributes:
        sequences: int32 [T], the row of the block tables.
        starts: int32 [T], the position of the row's token.
        lengths: int32 [T], starts + 1, or starts for a row without a token.
    """

    sequences: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor


@torch.no_grad()
def decode(
    plan: Plan,
    q: torch.Tensor,
    keys: Branches,
    values: Branches,
    gates: torch.Tensor,
    pages: LayerPages,
    rows: DecodeRows,
    phis: tuple[nn.Module, nn.Module],
    rope: Rope | None,
    max_len: int,
) -> torch.Tensor:
    """Run :func:`nsa_decode` on checked metadata."""
    geometry, scale = plan.config.geometry, plan.config.softmax_scale
    call = DecodeCall(
        geometry, scale, rows.starts, rows.lengths, pages.tables, max_len, rows.sequences
    )
    raw_key = keys[0] if rope is None or plan.config.rope_before_compress else None
    new_keys = (None, keys[1], keys[2], raw_key)
    new_values = (None, values[1], values[2], values[0])
    check_values(pages, call, dict(zip(LayerPages._fields, zip(new_keys, new_values))))
    if not len(q):
        return q.new_zeros((*q.shape[:2], values[1].shape[-1]))
    each_run = [x.unsqueeze(1) for x in (q, *keys, *values, gates)]  # of one row
    q_runs, gate_runs = each_run[0], each_run[-1]
    new: tuple[Branches, Branches] = tuple(each_run[1:4]), tuple(each_run[4:7])  # type: ignore[assignment]
    q_runs = append(plan, pages, q_runs, *new, rope, call, padded=True)
    parts, count = [(q_runs, gate_runs, call)], _runs_per_part(plan, q, pages, max_len)
    if q.shape[0] > count:
        parts = [*_parts(q_runs, gate_runs, call, count)]
    for *_, part_call in parts:
        compress(plan, pages, phis, rope, part_call, rows=1, partly=True)
    outputs = [attend(plan, pages, *part).squeeze(1) for part in parts]
    o = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if "step" not in plan.fused:  # the gates of a row without a token may be NaN
        o = o.masked_fill((rows.lengths == rows.starts)[:, None, None], 0)
    return o


def _runs_per_part(plan: Plan, q: torch.Tensor, pages: LayerPages, max_len: int) -> int:
    """Return how many runs of one row take PART_BYTES.

    phi by operators copies l tokens. The fused step keeps two sums of each head over each block.
    Forms of single slots keep probabilities over compressed tokens, or copy the keys that a row
    sees.
    """
    geometry, heads = plan.config.geometry, q.shape[1]
    widths = pages.sel.k.shape[2] * (pages.sel.k.shape[3] + pages.sel.v.shape[3])
    copies = 2 * geometry.compress_block_size * widths
    elements = max(copies, 2 * heads * geometry.num_select_blocks(max_len))
    if "step" not in plan.fused:
        selected = geometry.num_selected_blocks * geometry.select_block_size
        keys = max(selected, geometry.window_size)
        elements = max(copies, heads * geometry.num_compressed(max_len), keys * widths)
    return max(1, PART_BYTES // (elements * max(4, q.itemsize)))


def _parts(
    q: torch.Tensor, gates: torch.Tensor, call: DecodeCall, count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, DecodeCall]]:
    """Yield parts of a ragged batch of at most ``count`` runs: q, the gates and a call of each."""
    assert call.sequences is not None  # nsa_decode passes them
    tensors = (q, gates, call.starts, call.lengths, call.sequences)
    for q_part, gates_part, *positions in zip(*(x.split(count) for x in tensors)):
        names = ("starts", "lengths", "sequences")
        yield q_part, gates_part, dataclasses.replace(call, **dict(zip(names, positions)))


@functools.lru_cache(maxsize=CACHED)
def default_plan(
    config: NSAConfig,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    backends: Backends,
    deterministic: bool,
) -> Plan:
    """Return the cached plan of calls without an explicit plan.

    Raises:
        Unsupported, BackendUnavailable, InvalidInput: As :func:`nsa_core.resolve`.
    """
    options = PlanOptions(
        device=device,
        dtype=dtype,
        backends=dict(backends) if isinstance(backends, tuple) else backends,
        deterministic=deterministic,
        phase="decode",
        page_size=page_size,
    )
    return resolve(config, options)
