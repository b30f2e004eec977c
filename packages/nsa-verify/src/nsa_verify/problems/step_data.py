"""The tensors of a decode step, and its sequences as packed documents.

The caches are filled with NaN before the tokens of the sequences are written: to pages in a random
order, and to the ring positions that the contract defines. Table entries of unused pages are -1. So
a kernel that reads memory outside a sequence returns a visible error.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from nsa_core.contract import BlockTables, DecodeCall
from nsa_verify.problems.steps import Step


@dataclasses.dataclass(frozen=True)
class StepData:
    """The tensors of a decode step.

    Attributes:
        q: Queries of the step [B, m, Hq, Dk].
        gates: Gates of the step [B, m, Hq, 3].
        dense: All tensors of the sequences [B, S, ...], for the oracle.
        stores: Cached keys and values by name, for the decode forms.
        call: Arguments of the decode forms.
    """

    q: torch.Tensor
    gates: torch.Tensor
    dense: dict[str, torch.Tensor]
    stores: dict[str, torch.Tensor]
    call: DecodeCall


def step_data(
    step: Step, dtype: torch.dtype, device: torch.device | str = "cpu", order: int = 0
) -> StepData:
    """Create the tensors of ``step``.

    The values depend on ``step`` and ``dtype``, but not on ``device`` and ``order``.

    Args:
        step: The decode step.
        dtype: Dtype of q, keys and values.
        device: Device of the tensors; ``dense`` stays on the CPU.
        order: Seed of the page order.
    """
    longest, batch = max(step.lengths), len(step.lengths)
    case = dataclasses.replace(step.case, batch=batch, lengths=(longest,))
    config, geometry, data = case.config, case.config.geometry, case.data(dtype)
    lengths = torch.tensor(step.lengths, dtype=torch.int32)
    starts = lengths - torch.tensor(step.new, dtype=torch.int32)
    size = step.page_size or -(-longest // geometry.select_block_size) * geometry.select_block_size
    pages = -(-longest // size)
    generator = torch.Generator().manual_seed(case.seed + order)
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages).int()
    for b, length in enumerate(step.lengths):
        table[b, -(-length // size) :] = -1  # never read
    tables = {"cmp": table, "sel": table}
    # A ring may be longer than required; steps with pages test this.
    default_spare = 3 if step.page_size else 0
    spare = default_spare if step.spare_ring is None else step.spare_ring
    # Steps with pages have rings of several pages.
    columns = 3 if step.page_size else 1
    ring = -(-(config.window_size + step.rows - 1 + spare) // columns)
    for name in ("win", "raw"):
        pages_of_ring = torch.randperm(batch * columns, generator=generator)
        tables[name] = pages_of_ring.view(batch, columns).int()
    dense = {
        name: getattr(data, name)
        for name in ("q", "gates", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
    }
    if step.wide_gates:
        dense["gates"] = 5 * dense["gates"] - 2
    positions = (starts[:, None] + torch.arange(step.rows)).clamp(max=longest - 1).long()
    sequences = torch.arange(batch)[:, None]
    stores = {}
    for name, x in dense.items():
        if name in ("q", "gates"):
            continue
        rows = (
            ring
            if name.endswith("_win")
            else size
            if name.endswith("_sel")
            else size // geometry.compress_stride
        )
        branch = tables[name[2:]]
        store = x.new_full((branch.numel(), rows, *x.shape[2:]), torch.nan)
        for b, length in enumerate(step.lengths):
            owned = geometry.num_compressed(length) if name.endswith("_cmp") else length
            token = torch.arange(owned)
            if name.endswith("_win"):
                token = token[-rows * columns :]
            store[page_of(branch[b], token, rows), token % rows] = x[b, token]
        stores[name] = store.to(device)
    starts, lengths, *tensors = (x.to(device) for x in (starts, lengths, *tables.values()))
    if step.strided:
        starts, lengths = column_of_table(starts), column_of_table(lengths)
        tensors = [x.T.contiguous().T for x in tensors]
    call = DecodeCall(
        geometry, config.softmax_scale, starts, lengths, BlockTables(*tensors), max_len=longest
    )
    q, gates = (dense[name][sequences, positions].to(device) for name in ("q", "gates"))
    return StepData(q, gates, dense, stores, call)


def page_of(table: torch.Tensor, tokens: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the pages of tokens, int64 [N].

    Args:
        table: Row of a block table, [columns].
        tokens: Positions, [N].
        rows: Tokens per page.
    """
    return table[tokens // rows % len(table)].long()


def column_of_table(metadata: torch.Tensor) -> torch.Tensor:
    """Return integers as a column of a table: between two of the last axis is another number."""
    table = torch.stack([metadata, metadata.flip(-1) // 2 + 1], -1)
    return table[..., 0]


@dataclasses.dataclass(frozen=True)
class PackedStep:
    """The sequences of a step, concatenated as packed documents.

    The rows of a step are judged together. The bias rule needs many rows: the error of a single row
    is biased towards its largest weight.

    Attributes:
        tensors: Tensors of the sequences [T, ...]; k_cmp and v_cmp [T // d, ...].
        lengths: Tokens of each sequence after the step.
        new: New tokens of each sequence.
    """

    tensors: dict[str, torch.Tensor]
    lengths: Sequence[int]
    new: Sequence[int]

    @functools.cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """Document bounds."""
        return torch.tensor([0, *self.lengths]).cumsum(0).int()

    @functools.cached_property
    def places(self) -> list[tuple[int, int]]:
        """(sequence, row of the step) of each new token."""
        return [(b, r) for b, new in enumerate(self.new) for r in range(new)]

    @functools.cached_property
    def rows(self) -> list[int]:
        """Packed index of each new token."""
        ends = self.cu_seqlens[1:].tolist()
        return [ends[b] - self.new[b] + r for b, r in self.places]

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """Return the new tokens of [B, m, ...] on the CPU, [N, ...]."""
        sequences, rows = zip(*self.places) if self.places else ((), ())
        return x.cpu()[list(sequences), list(rows)]

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Scatter the new tokens [N, ...] to [T, ...], with zeros elsewhere."""
        scattered = torch.zeros((int(self.cu_seqlens[-1]), *x.shape[1:]), dtype=x.dtype)
        scattered[self.rows] = x
        return scattered

    def describe(self, where: tuple[int, ...]) -> str:
        """Name the sequence and row of the packed token ``where``, for a message."""
        matches = [place for token, place in zip(self.rows, self.places) if where == (token,)]
        return f" (row {matches[0][1]} of sequence {matches[0][0]})" if matches else ""


def packed(step: Step, data: StepData) -> PackedStep:
    """Concatenate the sequences of ``step`` as packed documents on the CPU."""
    geometry, tensors = step.case.config.geometry, {}
    for name, x in data.dense.items():
        owned = [
            geometry.num_compressed(length) if name.endswith("_cmp") else length
            for length in step.lengths
        ]
        parts = [x[b, :count].cpu() for b, count in enumerate(owned)]
        if name.endswith("_cmp"):  # the contract allocates T // d rows; the tail is never read
            parts.append(
                parts[0].new_full(
                    (sum(step.lengths) // geometry.compress_stride - sum(owned), *x.shape[2:]), 0.0
                )
            )
        tensors[name] = torch.cat(parts)
    return PackedStep(tensors, step.lengths, step.new)
