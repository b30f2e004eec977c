"""The tensors of a cache: pages and rings of keys and values, and how rows are put into them and
taken out.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from nsa_core.cache.compress_step import block_places
from nsa_core.config import NSAConfig
from nsa_core.layer.rope import RopeTable, rope_table
from nsa_core.torch_ops.slot_op import stats_dtype


class Pair:
    """Keys [outer, rows, G, Dk] and values [outer, rows, G, Dv], ``outer`` pages or sequences.

    Behind the last row lies one more that nobody reads: what a step must not write goes there, so
    that a write has the same shape whatever the lengths on the device are.
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
        self.rows, self.nowhere = rows, outer * rows
        self.flat = tuple(
            torch.empty((outer * rows + 1, heads, width), dtype=dtype, device=device)
            for width in widths
        )
        self._first = torch.arange(0, outer * rows, rows, device=device)[:, None]
        self.k, self.v = (x[:-1].view(outer, rows, heads, -1) for x in self.flat)

    def write(self, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rows k, v [..., G, D] at ``index`` int64 [...] of the flat rows."""
        index = index.flatten()
        for store, rows in zip(self.flat, (k, v)):
            store.index_copy_(0, index, rows.reshape(-1, *rows.shape[-2:]))

    def in_pages(
        self, rows: torch.Tensor, table: torch.Tensor, absent: torch.Tensor | None
    ) -> torch.Tensor:
        """Flat index of rows int64 [b, m] of sequences with block table ``table`` int32 [b, pages];
        of pages.

        Nowhere for those that are ``absent``, bool [b, m]; None: none is.
        """
        if table.shape[1] == 1:
            index = rows + table * self.rows
        else:
            place = (rows // self.rows).clamp(max=table.shape[1] - 1)
            index = rows % self.rows + table.gather(1, place) * self.rows
        return index if absent is None else index.masked_fill(absent, self.nowhere)

    def in_ring(
        self,
        tokens: torch.Tensor,
        absent: torch.Tensor | None,
        sequences: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Flat index of tokens int64 [b, m] of ``sequences`` int64 [b] (None: all); of a ring.
        Nowhere likewise.
        """
        first = self._first if sequences is None else self._first[sequences]
        index = tokens % self.rows + first
        return index if absent is None else index.masked_fill(absent, self.nowhere)

    def read(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [..., G, D] of keys and values at ``index`` int64 [...]."""
        return self.flat[0][index], self.flat[1][index]

    def taken(self, outer: int, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the first ``rows`` (None: all) rows of sequence or page ``outer``."""
        return self.k[outer, :rows].clone(), self.v[outer, :rows].clone()

    def put(self, outer: int, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        """What :meth:`taken` gave, at ``outer``."""
        for store, rows in zip((self.k, self.v), saved):
            store[outer, : len(rows)] = rows

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy pages or sequences ``source`` onto ``target``, both int64 [N]."""
        for store in (self.k, self.v):
            store[target] = store[source]


class _Positions:
    """See :class:`Stores`; the same tensors for the caches of all layers of a model."""

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
            self.rope = rope_table(self.count, config.qk_dim, config.rope_base, dtype)


_known: weakref.WeakValueDictionary[tuple[Any, ...], _Positions] = weakref.WeakValueDictionary()


def _positions(
    config: NSAConfig, max_len: int, longest: int, dtype: torch.dtype, device: torch.device
) -> _Positions:
    rotary = (config.qk_dim, config.rope_base, stats_dtype(dtype)) if config.rope else None
    key = (config.compress_block_size, config.compress_stride, rotary, max_len, longest, device)
    found = _known.get(key)
    if found is None:
        found = _known[key] = _Positions(config, max_len, longest, dtype, device)
    return found


class Stores:
    """Every store of a cache, all with one block table.

    Attributes:
        sel, cmp: pages of ``page`` tokens, and of ``page`` / d compressed tokens.
        win, raw: rings, token t at row t % rows; ``raw`` holds what phi takes.
        rope: angles of every position that a step can name, padding's too; None without rotary.
        count: int64 [0, 1, 2, ...] as long as any row of positions.
        places: where the next block of each sequence lies.
        compressed: int64 [max_len + 1], num_compressed() of every length; ``most_compressed`` that
            of max_len.
    """

    def __init__(
        self,
        config: NSAConfig,
        batch: int,
        pages: tuple[int, int],  # how many, of how many tokens
        rings: tuple[int, int],  # tokens of win's and of raw's
        max_len: int,
        max_step: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        number, page = pages
        heads, widths = config.n_kv_heads, (config.qk_dim, config.v_dim)
        self.sel = Pair(number, page, heads, widths, dtype, device)
        self.cmp = Pair(number, page // config.compress_stride, heads, widths, dtype, device)
        self.win = Pair(batch, rings[0], heads, widths, dtype, device)
        self.raw = Pair(batch, rings[1], heads, widths, dtype, device)
        longest = max(max_len + max(max_step, config.compress_block_size), *rings, batch)
        shared = _positions(config, max_len, longest, dtype, device)
        self.places = block_places(config, batch, max_len, self.cmp.rows, rings[1], dtype, device)
        self.most_compressed = config.geometry.num_compressed(max_len)
        self._shared, self.count, self.compressed, self.rope = (
            shared,
            shared.count,
            shared.compressed,
            shared.rope,
        )

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of keys and values, with its unread row."""
        return [x for pair in (self.sel, self.cmp, self.win, self.raw) for x in pair.flat]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Keys, values and compressed tokens of each (from, to)."""
        if not copies:
            return
        source, target = torch.tensor(copies).T.to(self.count.device, non_blocking=True)
        for pair in (self.sel, self.cmp):
            pair.move(source, target)
