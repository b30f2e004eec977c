"""What a new cache needs to know: its sizes, checked, and the plan that its steps run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from nsa_core.cache.cache import NSACache
from nsa_core.dispatch.default_plan import must_be_plan
from nsa_core.errors import InvalidInput
from nsa_core.layer.plain_linear import dtype_and_device_from
from nsa_core.util.text import dtype_name

if TYPE_CHECKING:
    from nsa_core.dispatch.plan import Plan
    from nsa_core.layer.module import NSAttention


class CacheSizes(NamedTuple):
    """Arguments of NSAttention.new_cache."""

    batch: int
    max_len: int
    page_size: int | None = None
    num_pages: int | None = None
    max_rollback: int = 0
    max_step: int = 64

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            InvalidInput: all that is, by name.
        """
        wrong = []
        for name, value in self._asdict().items():
            least = int(name != "max_rollback")
            if value is None and name in ("page_size", "num_pages"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                wrong.append(f"{name} must be an integer >= {least}, got {value!r}")
        if self.num_pages is not None and self.page_size is None:
            wrong.append(f"num_pages {self.num_pages} goes with page_size, which is None")
        if wrong:
            raise InvalidInput("; ".join(wrong))


def make_cache(
    attn: NSAttention,
    sizes: CacheSizes,
    dtype: torch.dtype,
    device: str | torch.device | None,
    plan: Plan | None,
) -> NSACache:
    """NSAttention.new_cache."""
    from nsa_core.dispatch.device import known_device
    from nsa_core.dispatch.options import PlanOptions
    from nsa_core.dispatch.plan import resolve

    sizes.check()
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(f"dtype must be a torch.dtype, as torch.float32, or None, got {dtype!r}")
    wanted = dtype_and_device_from(attn.out).device if device is None else device
    place = torch.empty(0, device=known_device(wanted)).device
    backends = dict(attn.backends) if isinstance(attn.backends, tuple) else attn.backends
    if plan is None:
        options = PlanOptions(
            device=place,
            dtype=dtype,
            backends=backends,
            phase="decode",
            batch=sizes.batch,
            seq_len=sizes.max_len,
            page_size=sizes.page_size,
        )
        plan = resolve(attn.config, options)
    cache = NSACache(attn, plan, sizes, dtype, place)
    check_plan(cache, plan)
    return cache


def check_plan(cache: NSACache, plan: Plan) -> None:
    """Refuse a plan that is not for steps over ``cache``.

    Raises:
        InvalidInput: what the plan is for, and what the cache is.
    """
    must_be_plan(plan)
    asked, dtype = plan.requests["cmp"], dtype_name(cache.dtype)
    named = {
        "phase": "decode",
        "dtype": dtype,
        "device": cache.device.type,
        "page_size": cache.page_size,
    }
    wrong = [
        f"{n} is {got!r}, not {due!r}"
        for n, due in named.items()
        if (got := getattr(asked, n)) != due
    ]
    if plan.config != cache.config:
        wrong.append(f"it is for {plan.config}, not {cache.config}")
    if wrong:
        raise InvalidInput(f"the plan does not fit the cache: {'; '.join(wrong)}")
