"""The tensors of a cache: pages and rings of keys and values, and how rows are put into them and taken out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_core.config import NSAConfig
from nsa_core.rope import RopeTable, rope_table


class Pair:
    """Keys [outer, rows, G, Dk] and values [outer, rows, G, Dv], ``outer`` pages or sequences.

    Behind the last row lies one more that nobody reads: what a step must not write goes there, so that a write has
    the same shape whatever the lengths on the device are.
    """

    def __init__(
        self, outer: int, rows: int, heads: int, widths: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows, self.nowhere = rows, outer * rows
        self.flat = tuple(torch.empty((outer * rows + 1, heads, width), dtype=dtype, device=device) for width in widths)
        self.k, self.v = (x[:-1].view(outer, rows, heads, -1) for x in self.flat)

    def write(self, index: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Rows k, v [..., G, D] at ``index`` int64 [...] of the flat rows."""
        index = index.flatten()
        for store, rows in zip(self.flat, (k, v)):
            store.index_copy_(0, index, rows.reshape(-1, *rows.shape[-2:]))

    def in_pages(self, rows: torch.Tensor, table: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """Flat index of row ``rows`` int64 [b, m] of sequences with block table ``table`` [b, pages]; of pages.

        Nowhere, where not ``valid`` [b, m].
        """
        if table.shape[1] == 1:
            index = rows + table.long() * self.rows
        else:
            place = (rows // self.rows).clamp(max=table.shape[1] - 1)
            index = table.long().gather(1, place) * self.rows + rows % self.rows
        return index if valid is None else index.masked_fill(~valid, self.nowhere)

    def in_ring(self, tokens: torch.Tensor, sequences: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """Flat index of tokens int64 [b, m] of ``sequences`` int64 [b]; of a ring. Nowhere, where not ``valid``."""
        index = tokens % self.rows + sequences[:, None] * self.rows
        return index if valid is None else index.masked_fill(~valid, self.nowhere)

    def read(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [..., G, D] of keys and values at ``index`` int64 [...]."""
        return self.flat[0][index], self.flat[1][index]

    def taken(self, outer: torch.Tensor | int, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the first ``rows`` (None: all) rows at ``outer``."""
        k, v = self.k[outer, :rows], self.v[outer, :rows]
        return (k.clone(), v.clone()) if isinstance(outer, int) else (k, v)

    def put(self, outer: torch.Tensor | int, saved: tuple[torch.Tensor, torch.Tensor]) -> None:
        """What :meth:`taken` gave, at ``outer``."""
        for store, rows in zip((self.k, self.v), saved):
            store[outer, : rows.shape[-3]] = rows

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy pages or sequences ``source`` onto ``target``, both int64 [N]."""
        for store in (self.k, self.v):
            store[target] = store[source]


class Stores:
    """Every store of a cache, all with one block table.

    Attributes:
        sel, cmp: pages of ``page`` tokens, and of ``page`` / d compressed tokens.
        win, raw: rings, token t at row t % rows; ``raw`` holds what phi takes.
        rope: angles of every position that a step can name; None without rotary.
        count: int64 [0, 1, 2, ...] as long as any row of positions.
    """

    def __init__(
        self,
        config: NSAConfig,
        batch: int,
        pages: tuple[int, int],  # how many, of how many tokens
        rings: tuple[int, int],  # tokens of win's and of raw's
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        number, page = pages
        heads, widths = config.n_kv_heads, (config.qk_dim, config.v_dim)
        stride = config.compress_stride
        self.sel = Pair(number, page, heads, widths, dtype, device)
        self.cmp = Pair(number, page // stride, heads, widths, dtype, device)
        self.win = Pair(batch, rings[0], heads, widths, dtype, device)
        self.raw = Pair(batch, rings[1], heads, widths, dtype, device)
        self.count = torch.arange(max(positions, *rings, batch), device=device)
        self.rope: RopeTable | None = None
        if config.rope:
            self.rope = rope_table(self.count[:positions], config.qk_dim, config.rope_base, dtype)

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
