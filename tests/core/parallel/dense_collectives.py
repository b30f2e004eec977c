"""Collectives that accept what NCCL accepts, for processes on gloo.

gloo takes tensors of any strides; NCCL takes contiguous ones only. A call that a test on the CPU
accepts would end a run on GPUs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from nsa_core.parallel import collectives

# Where the packages, FSDP2 and DTensor find the functions of torch.distributed that move tensors.
_FUNCTIONS = [
    *((dist, name) for name in ("all_reduce", "all_to_all_single", "batch_isend_irecv")),
    *((dist, name) for name in ("broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")),
    *((collectives, name) for name in ("_all_gather", "_reduce_scatter")),
]


def _check(argument: Any) -> None:
    if isinstance(argument, (list, tuple)):
        for each in argument:
            _check(each)
    elif isinstance(argument, dist.P2POp):
        _check(argument.tensor)
    elif isinstance(argument, torch.Tensor) and not argument.is_contiguous():
        raise ValueError(f"Tensors must be contiguous, got strides {argument.stride()}")


def _strict(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check([*args, *kwargs.values()])
        return function(*args, **kwargs)

    return checked


@contextlib.contextmanager
def dense_collectives() -> Iterator[None]:
    """Refuse tensors that are not contiguous in collectives, as NCCL does."""
    with contextlib.ExitStack() as stack:
        for module, name in _FUNCTIONS:
            stack.enter_context(mock.patch.object(module, name, _strict(getattr(module, name))))
        yield
