"""The run of a checked call of nsa_decode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from nsa_core.config import NSAConfig
from nsa_core.contract import DecodeCall
from nsa_core.decode.checks import check_values
from nsa_core.decode.chunks import Chunk, attend_chunk
from nsa_core.decode.layer_step import Branches, Rope, append, attend, compress
from nsa_core.decode.pages import LayerPages
from nsa_core.errors import InvalidInput
from nsa_core.plan.default_plan import CACHED, Backends, backends_of, partial_plan
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.plan import Plan, resolve
from nsa_core.torch_ops.torch_state import is_capturing

# Bytes. Longer calls are split, so that a prompt of many rows does not need memory for all at once.
PART_BYTES = 2**28

_Part: TypeAlias = tuple[torch.Tensor, torch.Tensor, DecodeCall, Chunk | None]


class DecodeRows(NamedTuple):
    """The sequence and the position of each row of a step, made once for all layers.

    Attributes:
        sequences: int32 [T], the row of the block tables.
        starts: int32 [T], the position of the row's token.
        lengths: int32 [T], starts + 1, or starts for a row without a token.
        chunks: the rows that attend together.
    """

    sequences: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    chunks: tuple[Chunk, ...] = ()


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
    """Run :func:`nsa_decode` on checked metadata.

    Raises:
        InvalidInput: the values of an argument are wrong, or a CUDA graph would keep its chunks.
    """
    if rows.chunks and is_capturing(q.device):
        raise InvalidInput(
            "rows has chunks, which a CUDA graph would keep: make it with decode_rows without"
            " on_host"
        )
    sizes, span = (plan.config.geometry, plan.config.softmax_scale), (rows.starts, rows.lengths)
    call = DecodeCall(*sizes, *span, pages.tables, max_len, rows.sequences, pages.scales)
    raw_key = keys[0] if rope is None or plan.config.rope_before_compress else None
    new_keys = (None, keys[1], keys[2], raw_key)
    new_values = (None, values[1], values[2], values[0])
    check_values(pages, call, rows.chunks, dict(zip(LayerPages._fields, zip(new_keys, new_values))))
    if not len(q):
        return q.new_zeros((*q.shape[:2], values[1].shape[-1]))
    each_run = [x.unsqueeze(1) for x in (q, *keys, *values, gates)]  # of one row
    q_runs, gate_runs = each_run[0], each_run[-1]
    new: tuple[Branches, Branches] = tuple(each_run[1:4]), tuple(each_run[4:7])  # type: ignore[assignment]
    q_runs = append(plan, pages, q_runs, *new, rope, call, padded=True)
    partial, count = None, _runs_per_part(plan, q, pages, max_len)
    if rows.chunks:  # without such a plan, the decode forms serve
        deterministic = plan.requests["cmp"].deterministic
        partial = partial_plan(plan.config, q.device, q.dtype, backends_of(plan), deterministic)
    chunks = () if partial is None else rows.chunks
    parts: list[_Part] = [(q_runs, gate_runs, call, None)]
    if chunks or q.shape[0] > count:
        parts = [*_parts(q_runs, gate_runs, call, chunks, count)]
    for *_, part_call, chunk in parts:
        compress(plan, pages, phis, rope, part_call, chunk.rows if chunk else 1, partly=True)
    outputs = []
    for q_part, gate_part, part_call, chunk in parts:
        if chunk is None or partial is None:
            o = attend(plan, pages, q_part, gate_part, part_call).squeeze(1)
        else:
            run = q_part.transpose(0, 1), gate_part.transpose(0, 1)
            sequences = slice(chunk.sequence, chunk.sequence + 1)
            o = attend_chunk(partial, pages, *run, sequences, chunk.start)[0]
        outputs.append(o)
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
    q: torch.Tensor, gates: torch.Tensor, call: DecodeCall, chunks: Sequence[Chunk], count: int
) -> Iterator[_Part]:
    """Yield q, the gates and a call of each chunk, and of at most ``count`` other rows.

    The call of a chunk has one run, that of other rows a run for each of them.
    """
    end = 0
    for chunk in (*chunks, Chunk(len(q), 0, 0, 0)):
        for row in range(end, chunk.row, count):
            part = slice(row, min(row + count, chunk.row))
            yield q[part], gates[part], _runs(call, part, part), None
        part = slice(chunk.row, end := chunk.row + chunk.rows)
        if chunk.rows:
            run = _runs(call, slice(chunk.row, chunk.row + 1), slice(end - 1, end))
            yield q[part], gates[part], run, chunk


def _runs(call: DecodeCall, first: slice, last: slice) -> DecodeCall:
    """Return a call of runs that begin in the rows ``first`` and end in the rows ``last``."""
    assert call.sequences is not None  # nsa_decode passes them
    starts, sequences, lengths = call.starts[first], call.sequences[first], call.lengths[last]
    return dataclasses.replace(call, starts=starts, lengths=lengths, sequences=sequences)


@functools.lru_cache(maxsize=CACHED)
def default_plan(
    config: NSAConfig,
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    kv_dtype: str | None,
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
        kv_dtype=kv_dtype,
    )
    return resolve(config, options)
