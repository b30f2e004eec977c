"""The config of an nsa_attention call that passes block sizes as keywords instead of a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from nsa_core.config import NSAConfig
from nsa_core.plan.default_plan import ObjectCache, as_constant, constant_result

Result = TypeVar("Result")

# The keywords of nsa_attention that are fields of NSAConfig, in the order of ``numbers``.
NUMBERS = (
    "compress_block_size",
    "compress_stride",
    "select_block_size",
    "num_selected_blocks",
    "init_blocks",
    "local_blocks",
    "window_size",
    "scale",
)
Numbers = tuple[Any, ...]  # the values of NUMBERS; None: not passed


def any_passed(numbers: Numbers) -> bool:
    """Return whether the caller passed one of :data:`NUMBERS`."""
    for number in numbers:  # noqa: SIM110  every call runs it, and any() takes three times as long
        if number is not None:
            return True
    return False


def short_config(numbers: Numbers, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> NSAConfig:
    """Return the config with ``numbers`` and the head counts and widths of checked tensors.

    It is cached per tuple of values.

    Args:
        numbers: the arguments :data:`NUMBERS`.
        q: queries [..., Hq, Dk].
        k: keys [..., G, Dk] of one branch.
        v: values [..., G, Dv] of one branch.

    Raises:
        InvalidInput: a number is invalid.
    """
    values: Numbers = (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], *numbers)
    if torch.compiler.is_compiling():
        name = _config_name(*[as_constant(value) for value in values])
        built: NSAConfig = getattr(_configs, name)
        return built
    return _cached(_configs.get, values)


@constant_result  # torch.compile cannot trace the construction
def _config_name(*values: Any) -> str:
    """Return the name of the attribute of ``_configs`` that holds the config of ``values``."""
    return _cached(_configs.name_of, values)


def _cached(look_up: Callable[..., Result], values: Numbers) -> Result:
    try:
        return look_up(*values)
    except TypeError:  # a value is not hashable, hence invalid
        build_config(*values)
        raise


def build_config(heads: int, groups: int, qk_dim: int, v_dim: int, *numbers: Any) -> NSAConfig:
    """Return the config of these head counts and widths; ``numbers`` that are None keep defaults.

    Raises:
        InvalidInput: a value is invalid, or the values do not fit each other.
    """
    passed = {name: value for name, value in zip(NUMBERS, numbers) if value is not None}
    return NSAConfig(heads * qk_dim, heads, groups, qk_dim, v_dim, rope=False, **passed)


_configs = ObjectCache(lambda *values: build_config(*values), typed=True)
