"""Copy a cache to one of another size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_core.cache.cache import NSACache
from nsa_core.cache.new_cache import make_cache
from nsa_core.cache.sizes import CacheSizes
from nsa_core.errors import InvalidInput


@torch.no_grad()
def resized(cache: NSACache, max_len: int, sequences: Sequence[int] | None = None) -> NSACache:
    """Return a new cache with the tokens of ``cache`` and room for ``max_len`` tokens.

    The old cache is unchanged. The plan of the new one is resolved again from the backends of the
    layer, for the new size.

    Args:
        cache: a cache without pages.
        max_len: maximum number of tokens per sequence of the new cache.
        sequences: the sequences to copy, in order; duplicates are allowed. Default: all.

    Raises:
        InvalidInput: the cache has pages, a sequence does not exist, or a sequence has more than
            ``max_len`` tokens.
    """
    if cache.pages is not None:
        raise InvalidInput(
            "resized: a cache with pages cannot be copied; use snapshot() and load()"
        )
    order = list(range(cache.batch)) if sequences is None else list(sequences)
    if not order or any(not 0 <= b < cache.batch for b in order):
        raise InvalidInput(f"sequences are numbered 0 to {cache.batch - 1}, got {order}")
    all_lengths = cache.host_lengths()
    lengths = [all_lengths[b] for b in order]
    if max(lengths) > max_len:
        raise InvalidInput(f"resized: {max(lengths)} tokens are more than max_len {max_len}")
    sizes = CacheSizes(len(order), max_len, None, None, cache.max_rollback, cache.max_step)
    copied = make_cache(cache.attn, sizes, cache.dtype, cache.device, None)
    index = torch.tensor(order).to(cache.device, non_blocking=True)
    compressed = cache.config.geometry.num_compressed(max(lengths))
    rows = {"sel": max(lengths), "cmp": compressed, "win": None, "raw": None}
    for name, count in rows.items():
        old, new = getattr(cache.kv, name), getattr(copied.kv, name)
        for source, target in ((old.k, new.k), (old.v, new.v)):
            target[:, :count].copy_(source[:, :count].index_select(0, index))
    copied.lengths.copy_(cache.lengths.index_select(0, index))
    copied.overflowed.copy_(cache.overflowed.index_select(0, index))
    copied.bounds, copied.peaks = lengths, [cache.peaks[b] for b in order]
    return copied
