"""Steps of more rows than the rings of a cache have room for: chunks of a long prompt.

The rings of a cache hold the newest w or l tokens, and a few more. A chunk uses longer temporary
rings, which begin with the tokens visible to its first row. Afterwards, the newest tokens are
copied back to the rings of the cache.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from nsa_core.cache.kv_store import KVBuffer, KVStore

if TYPE_CHECKING:
    from nsa_core.cache.state import CacheState


def chunk_store(cache: CacheState, rows: int) -> KVStore:
    """Return the cache's store with rings for ``rows`` more tokens from ``cache.starts`` on."""
    geometry, store = cache.config.geometry, copy.copy(cache.kv)
    store.win = _chunk_ring(cache, cache.kv.win, geometry.window_size - 1, rows)
    store.raw = _chunk_ring(cache, cache.kv.raw, geometry.compress_block_size - 1, rows)
    return store


def _chunk_ring(cache: CacheState, ring: KVBuffer, before: int, rows: int) -> KVBuffer:
    """Return a ring for ``before + rows`` tokens, the first ``before`` copied from ``ring``."""
    heads, widths = ring.k.shape[2], (ring.k.shape[3], ring.v.shape[3])
    longer = KVBuffer(cache.batch, before + rows, heads, widths, cache.dtype, cache.device)
    for buffer in longer.flat:
        # Rows without a token are masked, not skipped, so they must be finite.
        buffer.zero_()
    tokens = cache.starts[:, None] - before + cache.kv.count[:before]
    longer.write(longer.in_ring(tokens, tokens < 0), *ring.read(ring.in_ring(tokens, None)))
    return longer


def write_back_newest(cache: CacheState, chunk: KVStore, rows: int) -> None:
    """Copy the newest tokens of a chunk of ``rows`` rows to the cache's rings.

    The rings have the tokens before ``cache.starts`` already.
    """
    for ring, longer in ((cache.kv.win, chunk.win), (cache.kv.raw, chunk.raw)):
        count = min(ring.rows, rows)
        tokens = cache.lengths[:, None] - count + cache.kv.count[:count]
        index = ring.in_ring(tokens, tokens < cache.starts[:, None])
        ring.write(index, *longer.read(longer.in_ring(tokens, None)))
