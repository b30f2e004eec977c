"""Creation of a cache: check its sizes and resolve the plan of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nsa_core.cache.cache import NSACache
from nsa_core.cache.sizes import CacheSizes
from nsa_core.cache.state import check_plan
from nsa_core.errors import InvalidInput
from nsa_core.layer.plain_linear import dtype_and_device_from

if TYPE_CHECKING:
    from nsa_core.layer.projection import NSAProjections
    from nsa_core.plan.plan import Plan


def make_cache(
    attn: NSAProjections,
    sizes: CacheSizes,
    dtype: torch.dtype,
    device: str | torch.device | None,
    plan: Plan | None,
) -> NSACache:
    """Create an empty cache for the layer ``attn``; see NSAttention.new_cache."""
    from nsa_core.plan.options import PlanOptions, usable_device
    from nsa_core.plan.plan import resolve

    sizes.check()
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(
            f"dtype must be a torch.dtype such as torch.float32, or None, got {dtype!r}"
        )
    requested = dtype_and_device_from(attn.out).device if device is None else device
    cache_device = torch.empty(0, device=usable_device(requested)).device
    backends = dict(attn.backends) if isinstance(attn.backends, tuple) else attn.backends
    if plan is None:
        options = PlanOptions(
            device=cache_device,
            dtype=dtype,
            backends=backends,
            phase="decode",
            batch=sizes.batch,
            seq_len=sizes.max_len,
            page_size=sizes.page_size,
        )
        plan = resolve(attn.config, options)
    cache = NSACache(attn, plan, sizes, dtype, cache_device)
    check_plan(cache, plan)
    return cache
