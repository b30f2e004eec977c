"""Make a cache: check its sizes and resolve the plan that its steps run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_core.cache.cache import NSACache
from nsa_core.cache.sizes import CacheSizes
from nsa_core.cache.state import check_plan
from nsa_core.errors import InvalidInput
from nsa_core.layer.plain_linear import dtype_and_device_from

if TYPE_CHECKING:
    from nsa_core.dispatch.plan import Plan
    from nsa_core.layer.projection import NSAProjections


def make_cache(
    attn: NSAProjections,
    sizes: CacheSizes,
    dtype: torch.dtype,
    device: str | torch.device | None,
    plan: Plan | None,
) -> NSACache:
    """An empty cache for the layer ``attn``; see NSAttention.new_cache."""
    from nsa_core.dispatch.candidates import known_device
    from nsa_core.dispatch.plan import resolve

    sizes.check()
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(f"dtype must be a torch.dtype, as torch.float32, or None, got {dtype!r}")
    chosen = dtype_and_device_from(attn.out).device if device is None else device
    place = torch.empty(0, device=known_device(chosen)).device
    backends = dict(attn.backends) if isinstance(attn.backends, tuple) else attn.backends
    if plan is None:
        plan = resolve(
            attn.config,
            device=place,
            dtype=dtype,
            backends=backends,
            phase="decode",
            batch=sizes.batch,
            seq_len=sizes.max_len,
            page_size=sizes.page_size,
        )
    cache = NSACache(attn, plan, sizes, dtype, place)
    check_plan(cache, plan)
    return cache
