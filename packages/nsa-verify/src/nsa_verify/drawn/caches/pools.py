"""Pools: the pages of an owner, who hands them out, shares, moves, frees and reuses them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from nsa_core.decode.pages import PagedKV
from nsa_core.dtypes import as_bytes
from nsa_verify.drawn.caches.contents import read_rows
from nsa_verify.drawn.caches.history import PoolHistory
from nsa_verify.problems.step_data import page_of

NOWHERE = 2**30  # a table entry without a page


class Pool:
    """The pages of one branch. A key of a page is its column in the block table.

    Attributes:
        k, v: Keys and values [P, page, G, D], NaN where no sequence has a row, -128 in int8.
        scales: Scales [P, G, 2] of quantized pages. If each page has its own, those of a free page
            are NaN.
        columns: Columns of the block table.
    """

    def __init__(
        self,
        history: PoolHistory,
        rows: int,
        tokens: int,
        device: str,
        rng: random.Random,
        quantized: bool,
    ) -> None:
        self.rows, self.columns = rows, max(1, -(-tokens // rows))
        self._pages: list[dict[int, int]] = [{} for _ in range(history.batch)]
        total = 2 * history.batch * self.columns + 1
        self._users, self._rng = [0] * total, rng
        self._history, groups = history, history.groups
        dtype = history.kv_dtype if quantized else None
        self._poison = -128 if dtype == torch.int8 else torch.nan
        self.k, self.v = (
            torch.full((total, groups, rows, width), self._poison, device=device)
            .to(dtype or history.torch_dtype)
            .transpose(1, 2)
            .clone(
                memory_format=torch.preserve_format
                if history.layout == "hnd"
                else torch.contiguous_format
            )
            for width in (history.dk, history.dv)
        )
        self._own_scales = dtype is not None and history.kv.endswith("-pages")
        self.scales: torch.Tensor | None = None
        if dtype is not None:
            self.scales = self._new_scales().expand(total, -1, -1)
        if self._own_scales:
            self.scales = torch.full((total, groups, 2), torch.nan, device=device)

    def paged(self) -> PagedKV:
        """Return the pages and the block table for a call."""
        table = torch.full((len(self._pages), self.columns), NOWHERE, dtype=torch.int32)
        for b, pages in enumerate(self._pages):
            for column, page in pages.items():
                table[b, column] = page
        return PagedKV(self.k, self.v, table.to(self.k.device), self.scales)

    def read(self, kind: str, rows: range, b: int, table: torch.Tensor) -> torch.Tensor:
        """Return rows of keys ("k") or values of sequence ``b`` on the CPU, dequantized."""
        store = self.k if kind == "k" else self.v
        x = read_rows(as_bytes(store), rows, b, table).view(store.dtype).cpu()
        if self.scales is None:
            return x
        exact = x.double() * self._scales_of(kind, rows, b, table)
        return exact.to(self._history.torch_dtype)

    def rounded(
        self, kind: str, x: torch.Tensor, rows: range, b: int, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of x [S, G, D] as the pages hold them, and the error bound of any rounding.

        The bound is that of x with an error of its dtype.
        """
        x = x[rows.start : rows.stop].cpu()
        if self.scales is None:
            return x, torch.zeros_like(x)
        scales, is_int = self._scales_of(kind, rows, b, table), self.k.dtype == torch.int8
        limit = 127 if is_int else 448
        codes = (x.float() / scales.float()).clamp(-limit, limit)
        codes = codes.round() if is_int else codes.to(self.k.dtype)
        size = x.double().abs()
        bound = (scales / 2 if is_int else size / 16 + scales / 1024) + size / 64
        bound += (size - limit * scales).clamp(min=0)
        return (codes.double() * scales).to(x.dtype), bound

    def _scales_of(self, kind: str, rows: range, b: int, table: torch.Tensor) -> torch.Tensor:
        """Return the scales [len(rows), G, 1] of rows, on the CPU."""
        assert self.scales is not None  # the pages are quantized
        pages = page_of(table[b].cpu(), torch.arange(rows.start, rows.stop), self.rows)
        return self.scales.cpu()[pages][..., "kv".index(kind), None].double()

    def _new_scales(self) -> torch.Tensor:
        """Return scales [G, 2] with which some keys and values saturate.

        A code times a scale is exact in the dtype of the layer.
        """
        is_int, narrow = self.k.dtype == torch.int8, self._history.torch_dtype.itemsize == 2
        parts, low = (1 if is_int and narrow else 8), (-6 if is_int else -8)
        values = [
            (1 + self._rng.randrange(parts) / 8) * 2.0 ** self._rng.randint(low, low + 2)
            for _ in range(2 * self._history.groups)
        ]
        return torch.tensor(values, device=self.k.device).view(-1, 2)

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
        """Overwrite every row that is not one of the ``live`` rows of a sequence, mostly by NaN."""
        unused = self.unused(live)
        for store in (self.k, self.v):
            poison = torch.tensor(self._poison).to(store.dtype)
            as_bytes(store)[unused] = as_bytes(poison).to(store.device)
        if self._own_scales and self.scales is not None:
            self.scales[[page for page, users in enumerate(self._users) if not users]] = torch.nan

    def is_erased(self, kind: str, rows: torch.Tensor) -> bool:
        """Return whether all ``rows``, a mask [P, page], are as :meth:`erase` leaves them."""
        store = self.k if kind == "k" else self.v
        x = as_bytes(store)[rows].view(store.dtype).float()
        return bool((x.isnan() | (x == self._poison)).all())

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
            for store in (self.k, self.v):
                as_bytes(store)[page] = as_bytes(store)[former].clone()
        if self._own_scales and self.scales is not None:
            scales = self._new_scales() if former is None else self.scales[former].clone()
            self.scales[page] = scales
        return page
