"""The tensors of a cache: pages and rings of keys and values, and access to their rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nsa_core.cache.block_locations import block_locations
from nsa_core.config import NSAConfig
from nsa_core.dtypes import stats_dtype
from nsa_core.layer.rope import RopeTable, rope_table

if TYPE_CHECKING:
    from nsa_core.cache.undo import Undo


class KVBuffer:
    """Keys [outer, rows, G, Dk] and values [outer, rows, G, Dv] of one branch.

    ``outer`` is the number of pages, or the batch size for a ring. Both tensors end with one more
    row, which is never read. Rows that must not be written go there, so the shape of a write does
    not depend on the lengths on the device.

    Attributes:
        k, v: the keys and the values, without the unread row.
        flat: keys and values as [outer * rows + 1, G, D].
        rows: tokens per page, or rows of a ring.
        unread: index of the unread row in ``flat``.
    """

    def __init__(
        self,
        outer: int,
        rows: int,
        heads: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows, self.unread = rows, outer * rows
        self.flat = tuple(
            torch.empty((outer * rows + 1, heads, width), dtype=dtype, device=device)
            for width in widths
        )
        self._first = torch.arange(0, outer * rows, rows, device=device)[:, None]
        self.k, self.v = (x[:-1].view(outer, rows, heads, -1) for x in self.flat)

    def write(self, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [..., G, D] to the flat rows ``index`` int64 [...]."""
        index = index.flatten()
        for buffer, rows in zip(self.flat, (k, v)):
            buffer.index_copy_(0, index, rows.reshape(-1, *rows.shape[-2:]))

    def in_pages(
        self, rows: torch.Tensor, table: torch.Tensor, absent: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the flat indices of rows in a buffer of pages.

        Args:
            rows: int64 [b, m], row numbers relative to the start of each sequence.
            table: int32 [b, pages], the block table of these sequences.
            absent: bool [b, m], rows that get the index of the unread row; None means none.
        """
        if table.shape[1] == 1:
            index = rows + table * self.rows
        else:
            column = (rows // self.rows).clamp(max=table.shape[1] - 1)
            index = rows % self.rows + table.gather(1, column) * self.rows
        return index if absent is None else index.masked_fill(absent, self.unread)

    def in_ring(
        self,
        tokens: torch.Tensor,
        absent: torch.Tensor | None,
        sequences: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the flat indices of tokens in a ring.

        Args:
            tokens: int64 [b, m], token positions in the sequence.
            absent: bool [b, m], tokens that get the index of the unread row; None means none.
            sequences: int64 [b], the sequences; None means all sequences of the batch.
        """
        first = self._first if sequences is None else self._first[sequences]
        index = tokens % self.rows + first
        return index if absent is None else index.masked_fill(absent, self.unread)

    def read(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [..., G, D] of the flat rows ``index`` int64 [...]."""
        return self.flat[0][index], self.flat[1][index]

    def move(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        rows: int | None = None,
        undo: Undo | None = None,
    ) -> None:
        """Copy the pages or sequences ``source`` onto ``target``, both int64 [N].

        Args:
            source, target: indices; all of ``source`` is read before ``target`` is written.
            rows: number of rows of each to copy; None means all.
            undo: the record that copies the former rows of ``target`` first; None if nothing reads
                them.
        """
        for buffer in (self.k[:, :rows], self.v[:, :rows]):
            if undo is not None:
                undo.save_rows(buffer, target)
            buffer.index_copy_(0, target, buffer.index_select(0, source))


class _Positions:
    """Tensors indexed by position; see the attributes of :class:`KVStore`."""

    def __init__(
        self,
        config: NSAConfig,
        max_len: int,
        longest: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.count = torch.arange(longest, device=device)
        past = self.count[: max_len + 1] - config.compress_block_size + config.compress_stride
        self.compressed = past.div(config.compress_stride, rounding_mode="floor").clamp(min=0)
        self.rope: RopeTable | None = None
        if config.rope:
            self.rope = rope_table(self.count, config.qk_dim, config.frequencies, dtype)


_shared: weakref.WeakValueDictionary[tuple[Any, ...], _Positions] = weakref.WeakValueDictionary()


def _positions(
    config: NSAConfig, max_len: int, longest: int, dtype: torch.dtype, device: torch.device
) -> _Positions:
    """Return position tensors, shared by the caches of all layers of a model."""
    rotary = (config.qk_dim, config.frequencies, stats_dtype(dtype)) if config.rope else None
    key = (config.compress_block_size, config.compress_stride, rotary, max_len, longest, device)
    positions = _shared.get(key)
    if positions is None:
        positions = _shared[key] = _Positions(config, max_len, longest, dtype, device)
    return positions


class KVStore:
    """All buffers of a cache. The buffers of pages share one block table.

    Attributes:
        sel: pages of ``page`` tokens with all tokens of a sequence.
        cmp: pages of ``page`` / d compressed tokens.
        win: a ring of the newest tokens; token t is in row t % rows.
        raw: a ring of the newest inputs of phi.
        rope: angles of every possible position of a step, padding included; None without rotary
            embedding.
        count: int64 [0, 1, 2, ...], at least as long as any list of positions.
        locations: location of the next compression block of each sequence.
        compressed: int64 [max_len + 1], num_compressed() of every length.
        max_num_compressed: num_compressed(max_len).
    """

    def __init__(
        self,
        config: NSAConfig,
        batch: int,
        pages: tuple[int, int],  # number of pages, tokens per page
        rings: tuple[int, int],  # rows of the rings win and raw
        max_len: int,
        max_step: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        number, page = pages
        heads, widths = config.n_kv_heads, (config.qk_dim, config.v_dim)
        self.sel = KVBuffer(number, page, heads, widths, dtype, device)
        self.cmp = KVBuffer(number, page // config.compress_stride, heads, widths, dtype, device)
        self.win = KVBuffer(batch, rings[0], heads, widths, dtype, device)
        self.raw = KVBuffer(batch, rings[1], heads, widths, dtype, device)
        longest = max(max_len + max(max_step, config.compress_block_size), *rings, batch)
        self.locations = block_locations(
            config, batch, max_len, self.cmp.rows, rings[1], dtype, device
        )
        self.max_num_compressed = config.geometry.num_compressed(max_len)
        self._positions = _positions(config, max_len, longest, dtype, device)
        self.count, self.compressed = self._positions.count, self._positions.compressed
        self.rope = self._positions.rope

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of keys and values, with their unread rows."""
        return [x for buffer in (self.sel, self.cmp, self.win, self.raw) for x in buffer.flat]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages of keys, values and compressed tokens, given as (source, target) pairs."""
        if not copies:
            return
        source, target = torch.tensor(copies).T.to(self.count.device, non_blocking=True)
        for buffer in (self.sel, self.cmp):
            buffer.move(source, target)
