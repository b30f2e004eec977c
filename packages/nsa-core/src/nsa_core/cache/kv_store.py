"""The tensors of a cache: pages and rings of keys and values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import KNOWN_METADATA
from nsa_core.decode.layer_step import Rope
from nsa_core.decode.pages import LayerPages, PagedKV
from nsa_core.dtypes import as_bytes, stats_dtype
from nsa_core.layer.rope import rope_table

if TYPE_CHECKING:
    from nsa_core.cache.undo import Undo
    from nsa_core.contract import PageScales

Tables = TypeVar("Tables")


def move(
    pages: PagedKV,
    source: torch.Tensor,
    target: torch.Tensor,
    rows: int | None = None,
    undo: Undo | None = None,
) -> None:
    """Copy the pages ``source`` onto ``target``, both int64 [N].

    Args:
        pages: the pages.
        source: all of them are read before ``target`` is written.
        target: as above.
        rows: number of rows of each page to copy; None means all.
        undo: the record that copies the former rows of ``target`` first; None if nothing reads
            them.
    """
    for store in (as_bytes(x)[:, :rows] for x in pages[:2]):
        if undo is not None:
            undo.save_rows(store, target)
        store.index_copy_(0, target, store.index_select(0, source))


class Positions:
    """Tensors indexed by position; see the attributes of :class:`KVStore`."""

    def __init__(
        self,
        rotary: tuple[Any, ...] | None,  # arguments of rope_table
        longest: int,
        device: torch.device,
    ) -> None:
        self.count = torch.arange(longest, device=device)
        self.rope: Rope | None = None
        if rotary is not None:
            cos, sin = rope_table(self.count, *rotary)
            self.rope = cos[:, 0], sin[:, 0]


_tables: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


def shared(tables: Callable[..., Tables], *arguments: Any) -> Tables:
    """Return ``tables(*arguments)``, one object for the caches of all layers of a model."""
    key = (tables, *arguments)
    known: Tables | None = _tables.get(key)
    if known is None:
        known = _tables[key] = tables(*arguments)
    return known


class KVStore:
    """All keys and values of a cache.

    Attributes:
        pages: the pages of the four branches. sel and cmp share one block table, cmp with pages of
            page / d compressed tokens. win and raw are rings, with one page per sequence.
        rope: angles of every possible position of a step, padding included; None without rotary
            embedding.
        count: int64 [0, 1, 2, ...], at least as long as any list of positions.
    """

    def __init__(
        self,
        config: NSAConfig,
        table: torch.Tensor,  # block table of sel and cmp
        pages: tuple[int, int],  # number of pages, tokens per page
        rings: tuple[int, int],  # rows of the rings win and raw
        max_len: int,
        max_step: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None,
        kv_scales: PageScales | None,  # [G, 2] each
    ) -> None:
        batch, (number, page) = len(table), pages
        sequence = torch.arange(batch, dtype=torch.int32, device=table.device)[:, None]
        kind, scales = kv_dtype or dtype, kv_scales or (None, None, None)
        self.pages = LayerPages(
            new_pages(config, number, page // config.compress_stride, table, kind, scales[0]),
            new_pages(config, number, page, table, kind, scales[1]),
            new_pages(config, batch, rings[0], sequence, kind, scales[2]),
            new_pages(config, batch, rings[1], sequence, dtype),
        )
        longest = max(max_len + max(max_step, config.compress_block_size), *rings, batch)
        rotary = (config.qk_dim, config.frequencies, stats_dtype(dtype)) if config.rope else None
        tables = rotary, longest, table.device
        is_fake = type(table) is not torch.Tensor
        self._positions = Positions(*tables) if is_fake else shared(Positions, *tables)
        self.count, self.rope = self._positions.count, self._positions.rope
        for x in (*self.tensors(), *self.pages.tables, *(self.rope or ())):
            setattr(x, KNOWN_METADATA, (x.shape, x.stride(), x.dtype))

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of keys and values."""
        return [x for pages in self.pages for x in (pages.k, pages.v)]

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages of keys, values and compressed tokens, given as (source, target) pairs."""
        if not copies:
            return
        on_host = torch.tensor(copies, device="cpu")
        source, target = on_host.T.to(self.count.device, non_blocking=True)
        for pages in (self.pages.sel, self.pages.cmp):
            move(pages, source, target)


class OwnPages(PagedKV):
    """Pages whose memory ends with one more row, which is never read.

    Rows that must not be written go there. It takes half the operators of repeating another write.
    """

    __slots__ = ()

    def write(
        self,
        tokens: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        absent: torch.Tensor | None = None,
        sequences: torch.Tensor | None = None,
    ) -> None:
        """See :meth:`PagedKV.write`."""
        if absent is None:
            return super().write(tokens, k, v, None, sequences)
        page, row = self.locate(tokens, sequences)
        unread = len(self.k) * self.rows
        index = torch.add(row, page, alpha=self.rows).masked_fill(absent, unread).flatten()
        for i, (store, new) in enumerate(((self.k, k), (self.v, v))):
            rows = as_bytes(store).as_strided((unread + 1, *store.shape[2:]), store.stride()[1:])
            rows.index_copy_(0, index, self._codes(i, new, page).flatten(0, 1))
        return None


def new_pages(
    config: NSAConfig,
    number: int,
    rows: int,
    table: torch.Tensor,
    dtype: torch.dtype,
    scales: torch.Tensor | None = None,
) -> OwnPages:
    """Allocate ``number`` pages of ``rows`` rows for a block table, all with ``scales`` [G, 2]."""
    lead, device = (number * rows + 1, config.n_kv_heads), table.device
    stores = (
        torch.empty((*lead, x), dtype=dtype, device=device) for x in (config.qk_dim, config.v_dim)
    )
    k, v = (x[:-1].unflatten(0, (number, rows)) for x in stores)
    return OwnPages(k, v, table, None if scales is None else scales.expand(number, -1, -1))
