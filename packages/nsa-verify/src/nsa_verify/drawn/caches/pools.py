"""Pools: the pages of an owner, who hands them out, shares, moves, frees and reuses them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from nsa_core.decode.pages import PagedKV
from nsa_verify.drawn.caches.history import PoolHistory

NOWHERE = 2**30  # a table entry without a page


class Pool:
    """The pages of one branch. A key of a page is its column in the block table.

    Attributes:
        k, v: Keys and values [P, page, G, D], NaN where no sequence has a row.
        columns: Columns of the block table.
    """

    def __init__(
        self, history: PoolHistory, rows: int, tokens: int, device: str, rng: random.Random
    ) -> None:
        self.rows, self.columns = rows, max(1, -(-tokens // rows))
        self._pages: list[dict[int, int]] = [{} for _ in range(history.batch)]
        total = 2 * history.batch * self.columns + 1
        self._users, self._rng = [0] * total, rng
        dtype, groups = history.torch_dtype, history.groups
        self.k, self.v = (
            torch.full((total, groups, rows, width), torch.nan, dtype=dtype, device=device)
            .transpose(1, 2)
            .clone(
                memory_format=torch.preserve_format
                if history.layout == "hnd"
                else torch.contiguous_format
            )
            for width in (history.dk, history.dv)
        )

    def paged(self) -> PagedKV:
        """Return the pages and the block table for a call."""
        table = torch.full((len(self._pages), self.columns), NOWHERE, dtype=torch.int32)
        for b, pages in enumerate(self._pages):
            for column, page in pages.items():
                table[b, column] = page
        return PagedKV(self.k, self.v, table.to(self.k.device))

    def own(self, b: int, rows: range) -> None:
        """Give a sequence pages of its own for ``rows``; shared ones are copied."""
        pages = self._pages[b]
        for column in self._keys(rows):
            former = pages.get(column)
            if former is None or self._users[former] > 1:
                pages[column] = self._new(former)

    def keep(self, b: int, rows: range) -> None:
        """Free the pages of a sequence that have none of ``rows``."""
        keys = set(self._keys(rows))
        for column in self._pages[b].keys() - keys:
            self._users[self._pages[b].pop(column)] -= 1

    def fork(self, source: int, target: int) -> None:
        """Let ``target`` share the pages of ``source`` instead of its own."""
        for page in self._pages[source].values():
            self._users[page] += 1
        for page in self._pages[target].values():
            self._users[page] -= 1
        self._pages[target] = dict(self._pages[source])

    def move(self, b: int) -> None:
        """Copy the pages of a sequence to other pages."""
        for column, page in list(self._pages[b].items()):
            self._pages[b][column] = self._new(page)

    def erase(self, live: Sequence[range]) -> None:
        """Fill every row with NaN that is not one of the ``live`` rows of a sequence."""
        unused = self.unused(live)
        self.k[unused] = torch.nan
        self.v[unused] = torch.nan

    def unused(self, live: Sequence[range]) -> torch.Tensor:
        """Return the mask [P, page] of the rows that are not live."""
        unused = torch.ones(self.k.shape[:2], dtype=torch.bool, device=self.k.device)
        for b, rows in enumerate(live):
            for t in rows:
                unused[self._pages[b][t // self.rows % self.columns], t % self.rows] = False
        return unused

    def _keys(self, rows: range) -> Iterator[int]:
        """Yield the columns of ``rows``, each once."""
        seen = {t // self.rows % self.columns for t in rows}
        yield from sorted(seen)

    def _new(self, former: int | None) -> int:
        """Return a free page, with the content of the page ``former``, which loses a user."""
        page = self._rng.choice([p for p, users in enumerate(self._users) if not users])
        self._users[page] = 1
        if former is not None:
            self._users[former] -= 1
            self.k[page], self.v[page] = self.k[former].clone(), self.v[former].clone()
        return page
