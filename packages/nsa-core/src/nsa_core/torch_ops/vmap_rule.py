"""torch.func.vmap over slot operators: the mapped axis becomes part of the batch axis.

Without a rule, vmap would call the operator once per sample. Per-sample gradients,
``torch.func.vmap(torch.func.grad(...))``, run the rule of the forward and of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nsa_core.errors import Unsupported

PACKED_UNDER_VMAP = (
    "packed documents (cu_seqlens) are not supported under torch.func.vmap: map over x"
    " [B, S, dim] without cu_seqlens, or call the function once per sample in a loop"
)
TAIL_LENGTH = 6  # cu_seqlens, max_seqlen, scale, geometry, deterministic and first_query


def is_mapped(tensor: object) -> bool:
    """Return whether ``tensor`` has a mapped axis of vmap at some level of the transforms."""
    functorch = torch._C._functorch
    while isinstance(tensor, torch.Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _fold(tensor: torch.Tensor, axis: int | None, size: int) -> torch.Tensor:
    """Return the samples of ``tensor`` as one batch [size * B, ...].

    Args:
        tensor: [B, ...], with the mapped axis in addition if ``axis`` is not None.
        axis: position of the mapped axis; None if all samples share the tensor.
        size: number of samples.
    """
    if axis is None:
        samples = tensor.unsqueeze(0).expand(size, *tensor.shape)
    else:
        samples = tensor.movedim(axis, 0)
    return samples.flatten(0, 1)


def folding_rule(op: Any) -> Callable[..., tuple[Any, Any]]:
    """Return the vmap rule of an operator whose tensors and results all begin with the axis B.

    Args:
        op: the operator; after its tensors it takes the arguments of a slot call.

    Returns:
        A rule for torch.library.register_vmap.
    """

    def rule(info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        tensors, tail = arguments[:-TAIL_LENGTH], arguments[-TAIL_LENGTH:]
        if tail[0] is not None:
            raise Unsupported(PACKED_UNDER_VMAP)
        size, axes = info.batch_size, in_dims[: len(tensors)]
        batch = tensors[0].shape[0 if axes[0] is None or axes[0] > 0 else 1]
        results = op(*[_fold(t, axis, size) for t, axis in zip(tensors, axes)], *tail)
        if isinstance(results, torch.Tensor):
            return results.unflatten(0, (size, batch)), 0
        return tuple([r.unflatten(0, (size, batch)) for r in results]), (0,) * len(results)

    return rule
