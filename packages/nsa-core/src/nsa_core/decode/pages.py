"""Pages of keys and values: where a token's row is, and how rows are read and written.

    token t of sequence s is row t % page of the page table[s, t // page % columns]

A table that covers a whole sequence never wraps around. A table of fewer columns does, and keeps
the newest columns * page tokens; with one column, a page is a ring.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_core.contract import BlockTables


class PagedKV(NamedTuple):
    """Keys and values of one branch in pages, and the block table that leads to them.

    Attributes:
        k: keys [P, page, G, Dk] of any strides but that of the last axis, for example a transposed
            [P, G, page, Dk].
        v: values [P, page, G, Dv], likewise.
        table: int32 [sequences, columns] on the device, indices of pages.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor

    @property
    def rows(self) -> int:
        """Tokens per page."""
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that the table has room for."""
        return self.table.shape[1] * self.rows

    def locate(
        self, tokens: torch.Tensor, sequences: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the page and the row of tokens, integers [B, m].

        Args:
            tokens: int64 [B, m], positions in their sequences.
            sequences: [B], the rows of the table; None means all of them. Nobody may have checked
                them, nor their pages: the result is inside the pool.
        """
        table = self.table
        if sequences is not None:
            table = table.index_select(0, sequences.clamp(0, len(table) - 1))
            table = table.clamp_(0, len(self.k) - 1)
        if table.shape[1] == 1:
            return table.expand_as(tokens), tokens % self.rows
        column = tokens // self.rows % table.shape[1]
        return table.gather(1, column), tokens % self.rows

    def read(
        self, tokens: torch.Tensor, sequences: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [B, m, G, D]; those of a token without a page are arbitrary."""
        page, row = self.locate(tokens, sequences)
        return self.k[page, row], self.v[page, row]

    def write(
        self,
        tokens: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        absent: torch.Tensor | None = None,
        sequences: torch.Tensor | None = None,
    ) -> None:
        """Write k and v [B, m, G, D] to the rows of tokens.

        The shapes of a write do not depend on values on the device. A row that is not written
        repeats the write of the first one that is; if there is none, it writes back what is there.

        Args:
            tokens: int64 [B, m], positions in their sequences.
            k: keys.
            v: values.
            absent: bool [B, m], the rows that are not written; None means none.
            sequences: as in :meth:`locate`.
        """
        if not tokens.numel():
            return
        page, row = self.locate(tokens, sequences)
        if absent is None:
            self.k.index_put_((page, row), k)
            self.v.index_put_((page, row), v)
            return
        flat = absent.flatten()
        source = torch.arange(len(flat), device=flat.device)
        source = torch.where(flat, flat.to(torch.uint8).argmin(), source)
        page, row, none = page.flatten()[source], row.flatten()[source], flat.all()
        for store, new in ((self.k, k), (self.v, v)):
            rows = torch.where(none, store[page, row], new.flatten(0, 1)[source])
            store.index_put_((page, row), rows)


class LayerPages(NamedTuple):
    """The pages of one layer. Each branch has its own page size, pool and block table.

    Attributes:
        cmp: compressed tokens, of the blocks that are complete.
        sel: all tokens. Its page size is a multiple of l', and its table does not wrap around.
        win: at least the newest w tokens before each new token.
        raw: at least the newest l inputs of phi before and with each new token, not rotated unless
            ``rope_before_compress``.
    """

    cmp: PagedKV
    sel: PagedKV
    win: PagedKV
    raw: PagedKV

    @property
    def tables(self) -> BlockTables:
        """The block tables."""
        return BlockTables(*(pages.table for pages in self))
