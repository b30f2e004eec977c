"""The tensors of a cache: pages and rings of keys and values, and access to their rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nsa_core.config import NSAConfig
from nsa_core.dtypes import stats_dtype
from nsa_core.layer.rope import RopeTable, rope_table

if TYPE_CHECKING:
    from nsa_core.cache.undo import Undo

Tables = TypeVar("Tables")


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


class Positions:
    """Tensors indexed by position; see the attributes of :class:`KVStore`."""

    def __init__(
        self,
        block_size: int,
        stride: int,
        rotary: tuple[Any, ...] | None,  # arguments of rope_table
        max_len: int,
        longest: int,
        device: torch.device,
    ) -> None:
        self.count = torch.arange(longest, device=device)
        past = self.count[: max_len + 1] - block_size + stride
        self.compressed = past.div(stride, rounding_mode="floor").clamp(min=0)
        self.rope: RopeTable | None = None
        if rotary is not None:
            self.rope = rope_table(self.count, *rotary)


class BlockLocations:
    """Location in the cache of the compression block that a step completes.

    A lookup takes fewer operators than the computation of the location.

    Attributes:
        blocks: int64 [C + 1, 4], one row per compressed token of a full sequence, and one more. The
            columns are the column in the block table, the row in the page, the sequence length that
            completes the block, and the ring row of the block's first token.
        ring: int64 [R, G * l], for each ring row the flat rows (ring row, kv head) of the l tokens
            that start there, heads outermost.
        firsts: int64 [B, 1], the first row of each sequence in the flat ring.
        angles: [C + 1, 2 * Dk], (cos, cos, -sin, sin) of each compressed token; None if k_cmp is
            not rotated after phi.
    """

    def __init__(
        self,
        config: NSAConfig,
        batch: int,
        max_len: int,
        page: int,  # compressed tokens per page
        ring: int,  # rows of the ring of phi's inputs
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size, stride, heads = config.compress_block_size, config.compress_stride, config.n_kv_heads
        block = torch.arange(config.geometry.num_compressed(max_len) + 1, device=device)
        pages = -(-max_len // (page * stride))
        column = (block // page).clamp(max=pages - 1)
        self.blocks = torch.stack(
            [column, block % page, block * stride + size, block * stride % ring], 1
        )
        token = torch.arange(ring, device=device)[:, None, None] + torch.arange(size, device=device)
        self.ring = (token % ring * heads + torch.arange(heads, device=device)[:, None]).flatten(1)
        self.firsts = torch.arange(batch, device=device)[:, None] * (ring * heads)
        self.angles: torch.Tensor | None = None
        if config.rope and not config.rope_before_compress:
            table = rope_table(block * stride, config.qk_dim, config.frequencies, dtype)
            self.angles = torch.cat(table.wide(), -1).squeeze(1)


_tables: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


def shared(tables: Callable[..., Tables], *arguments: Any) -> Tables:
    """Return ``tables(*arguments)``, one object for the caches of all layers of a model."""
    key = (tables, *arguments)
    known: Tables | None = _tables.get(key)
    if known is None:
        known = _tables[key] = tables(*arguments)
    return known


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
        self.locations = shared(
            BlockLocations, config, batch, max_len, self.cmp.rows, rings[1], dtype, device
        )
        self.max_num_compressed = config.geometry.num_compressed(max_len)
        block = (config.compress_block_size, config.compress_stride)
        rotary = (config.qk_dim, config.frequencies, stats_dtype(dtype)) if config.rope else None
        self._positions = shared(Positions, *block, rotary, max_len, longest, device)
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
