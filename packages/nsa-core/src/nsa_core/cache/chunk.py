"""A step of more rows than the cache's rings have room for: a chunk of a long prompt over what came
before.

The rings hold w and l tokens and a few more. A long step has rings of its own, which begin with the
tokens that its first row may see; the cache's take the newest back when it is done.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from nsa_core.cache.kv_store import Pair, Stores

if TYPE_CHECKING:
    from nsa_core.cache.cache import NSACache

MOST_ROWS = 8192  # of one step; more are cut, so that what it takes beside the cache has a bound


def lengthened(cache: NSACache, rows: int) -> Stores:
    """The cache's stores, with rings for ``rows`` tokens from ``cache.starts`` on."""
    stores, geometry = cache.stores, cache.config.geometry
    longer = copy.copy(stores)
    longer.win = _begun(cache, stores.win, geometry.window_size - 1, rows)
    longer.raw = _begun(cache, stores.raw, geometry.compress_block_size - 1, rows)
    return longer


def _begun(cache: NSACache, ring: Pair, before: int, rows: int) -> Pair:
    """A ring of ``before`` + ``rows`` tokens that holds the first of them, from ``ring``."""
    heads, widths = ring.k.shape[2], (ring.k.shape[3], ring.v.shape[3])
    own = Pair(cache.batch, before + rows, heads, widths, cache.dtype, cache.device)
    for store in own.flat:
        # of a sequence with fewer new tokens than rows it has room for older ones, which have no
        # value
        store.zero_()
    tokens = cache.starts[:, None] - before + cache.stores.count[:before]
    own.write(own.in_ring(tokens, tokens < 0), *ring.read(ring.in_ring(tokens, None)))
    return own


def keep_newest(cache: NSACache, longer: Stores, rows: int) -> None:
    """Put the newest tokens of a step of ``rows`` rows into the cache's rings; older ones are
    there.
    """
    for ring, own in ((cache.stores.win, longer.win), (cache.stores.raw, longer.raw)):
        count = min(ring.rows, rows)
        tokens = cache.lengths[:, None] - count + cache.stores.count[:count]
        index = ring.in_ring(tokens, tokens < cache.starts[:, None])
        ring.write(index, *own.read(own.in_ring(tokens, None)))
