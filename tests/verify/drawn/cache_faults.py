"""Faults of NSACache, planted by changing the source of one function."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any
from unittest import mock

from nsa_core.cache import cache, kv_store, pages, prompt, state, step
from nsa_core.decode import pages as decode_pages


@dataclasses.dataclass(frozen=True)
class CacheFault:
    """One fault.

    Attributes:
        name: Description of the fault.
        owner: The class of the function, or the module that calls it.
        function: Name of the function.
        old: Source text that occurs exactly once in the function.
        new: Its faulty replacement.
    """

    name: str
    owner: Any
    function: str
    old: str
    new: str

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Replace the function by the faulty one."""
        original = getattr(self.owner, self.function)
        source = textwrap.dedent(inspect.getsource(original))
        count = source.count(self.old)
        assert count == 1, f"{self.name}: {self.old!r} occurs {count} times, expected once"
        namespace: dict[str, Any] = {}
        text = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(text, vars(inspect.getmodule(original)) | {}, namespace)
        with mock.patch.object(self.owner, self.function, namespace[self.function]):
            yield


Paged, Pages, Table = decode_pages.PagedKV, pages.Pages, pages.BlockTable
Cache, State = cache.NSACache, state.CacheState
FAULTS = [
    CacheFault(
        "the ring index is off by one after a wrap",
        Paged,
        "locate",
        "table.expand_as(tokens), tokens % self.rows",
        "table.expand_as(tokens), (tokens + tokens // self.rows) % self.rows",
    ),
    CacheFault(
        "a crop finds tokens of the raw ring overwritten",
        State,
        "__init__",
        "geometry.compress_block_size + spare",
        "geometry.compress_block_size + self.max_step - 1",
    ),
    CacheFault(
        "a crop finds tokens of the window ring overwritten",
        State,
        "__init__",
        "geometry.window_size + spare",
        "geometry.window_size + self.max_step - 1",
    ),
    CacheFault(
        "a crop removes one token more than max_rollback",
        Cache,
        "crop",
        "> self.max_rollback:",
        "> self.max_rollback + 1:",
    ),
    CacheFault(
        "reorder forgets the raw ring",
        Cache,
        "reorder",
        "in self.own_pages(max(lengths))",
        "in [x for i, x in enumerate(self.own_pages(max(lengths))) if i != 1]",
    ),
    CacheFault(
        "reorder forgets the lengths on the device",
        Cache,
        "reorder",
        "self.lengths.copy_(self.lengths[index])",
        "pass",
    ),
    CacheFault(
        "reorder forgets the largest lengths",
        Cache,
        "reorder",
        "[self.peaks[b] for b in order]",
        "self.peaks",
    ),
    CacheFault(
        "reorder shares pages without owning them",
        Pages,
        "replace",
        "counts.refs[page] += 1",
        "pass",
    ),
    CacheFault(
        "the block table on the device is old after a reorder",
        Table,
        "replace",
        "self._update_device(self.pages.replace(rows))",
        "self.pages.replace(rows)",
    ),
    CacheFault(
        "a snapshot aliases the cache",
        Cache,
        "snapshot",
        "(k.clone(), v.clone())",
        "(k, v)",
    ),
    CacheFault(
        "a snapshot does not own its pages",
        Pages,
        "hold",
        "self._held[holder] = pages",
        "pass",
    ),
    CacheFault(
        "a released snapshot keeps its pages",
        Pages,
        "drop",
        "self._held.pop(holder, None)",
        "pass",
    ),
    CacheFault(
        "a snapshot has one compressed token too few",
        State,
        "own_pages",
        "num_compressed(length)",
        "num_compressed(length - 1)",
    ),
    CacheFault(
        "load forgets the raw ring",
        Cache,
        "load",
        "zip(self._rows(b, snapshot.length), snapshot.rows)",
        "[p for i, p in enumerate(zip(self._rows(b, snapshot.length), snapshot.rows)) if i != 1]",
    ),
    CacheFault(
        "reset keeps the lengths on the device",
        Cache,
        "reset",
        "self.lengths.index_fill_(0, index, 0)",
        "pass",
    ),
    CacheFault(
        "reset keeps the largest lengths",
        Cache,
        "reset",
        "dict.fromkeys(sequences, (0, 0))",
        "{b: (0, self.peaks[b]) for b in sequences}",
    ),
    CacheFault("a crop loses its pages", Pages, "trim", "counts.release(rows[b][keep:])", "pass"),
    CacheFault(
        "a crop frees a page that still has tokens",
        Pages,
        "trim",
        "keep = self.pages_of(length)",
        "keep = length // self.size",
    ),
    CacheFault(
        "a shared page is not copied for its writer",
        Pages,
        "own",
        "changes.copies.append((row[column], page))",
        "pass",
    ),
    CacheFault(
        "a copied page has no compressed tokens",
        kv_store.KVStore,
        "copy_pages",
        "(self.pages.sel, self.pages.cmp)",
        "(self.pages.sel,)",
    ),
    CacheFault(
        "compressed tokens are written to a shared page",
        Table,
        "own",
        "self._geometry.num_compressed(length) * d // self.page",
        "length // self.page",
    ),
    CacheFault(
        "a prefill fills the ring from its first tokens",
        prompt,
        "_fill",
        "(ends.long() - ring.rows).clamp(min=0)",
        "(ends.long() - ring.rows).clamp(min=0) * 0",
    ),
    CacheFault(
        "a ragged prefill compresses padding",
        prompt,
        "_fill",
        "+ geometry.compress_block_size > ends",
        "> ends",
    ),
    CacheFault(
        "positions of a step come from the longest sequence",
        step,
        "append",
        "call.starts.long()[:, None], None",
        "(call.starts.max() + 0 * call.starts).long()[:, None], None",
    ),
    CacheFault(
        "a cut step counts one token of its last piece twice",
        state.NewTokens,
        "part",
        "(on_device - first).clamp(0, rows)",
        "(on_device - first + 1).clamp(0, rows)",
    ),
    CacheFault(
        "a chunk begins with tokens one position too late",
        prompt,
        "_chunk_ring",
        "cache.starts[:, None] - before + cache.kv.count[:before]",
        "cache.starts[:, None] - before + 1 + cache.kv.count[:before]",
    ),
    CacheFault(
        "a chunk writes one token too few back",
        step,
        "write_back_newest",
        "min(ring.rows, rows)",
        "min(ring.rows, rows) - 1",
    ),
    CacheFault(
        "a compressed token is written one step late",
        step,
        "compress",
        "starts + size > call.lengths[:, None]",
        "starts + size >= call.lengths[:, None]",
    ),
    CacheFault(
        "a step takes all of its blocks for complete",
        step,
        "compress",
        "if partly else None",
        "if False else None",
    ),
    CacheFault(
        "compressed keys are rotated at the next token",
        step,
        "compress",
        "_angles(rope, starts, call)",
        "_angles(rope, starts + 1, call)",
    ),
    CacheFault(
        "a row without a token is written",
        step,
        "append",
        "positions >= call.lengths[:, None]",
        "positions > call.lengths[:, None]",
    ),
]
