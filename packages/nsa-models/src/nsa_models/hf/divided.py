"""Calls of a model whose attention layers a style of nsa_core.parallel divided over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from nsa_core.errors import InvalidInput
from nsa_core.layer.module import NSAttention
from nsa_core.parallel import whole_parameters
from nsa_core.parallel.context import DividedSequence
from nsa_core.parallel.head_parallel import DividedHeads
from nsa_models.hf.packed import Call
from nsa_models.lm.head_shards import unshard


def check_divided_call(layer: NSAttention, has_dense: bool, call: Call) -> bool:
    """Check a call of a decoder whose layers hold a part of each sequence.

    The check does not depend on the values of tensors, so that all ranks raise the error or none.

    Args:
        layer: The first NSA layer of the decoder.
        has_dense: Whether other layers of the decoder are dense.
        call: The call.

    Returns:
        Whether the layers hold a part of each sequence. Positions have no use then.

    Raises:
        InvalidInput: An argument describes the rows of this rank as a whole sequence.
        Unsupported: The decoder has dense layers, or the call has a cache.
    """
    if not isinstance(layer.parallel, DividedSequence):
        return False
    if has_dense:
        layer.parallel.refuse("a model with dense layers (nsa_layers)")
    if call.cache is not None:
        layer.parallel.refuse("a call with a cache")
    packed = call.boundaries is not None
    problems = (
        (
            call.attention_mask is not None,
            "attention_mask must be None",
            "pad each sequence at its end, or pack the documents and pass cu_seq_lens_q",
        ),
        (  # DataCollatorWithFlattening adds positions to the boundaries, which are used then
            call.position_ids is not None and not packed,
            "position_ids must be None",
            "leave them out; for packed documents pass cu_seq_lens_q and max_length_q of the whole"
            " row, the same on all ranks",
        ),
        (
            packed and call.size[0] != 1,
            f"cu_seq_lens_q needs an input of one row, got {call.size[0]} rows,",
            "pack all documents in one row",
        ),
    )
    for is_wrong, problem, fix in problems:
        if is_wrong:
            raise InvalidInput(
                f"{problem} for layers with the style ContextParallel, which cannot see the rows of"
                f" other ranks: {fix}"
            )
    return True


def check_divided_labels(layer: NSAttention) -> None:
    """Check that the layers of a model may shift labels.

    Raises:
        InvalidInput: The layers hold a part of each sequence.
    """
    if isinstance(layer.parallel, DividedSequence):
        raise InvalidInput(
            "labels would be shifted within the rows of this rank, because the layers have the"
            " style ContextParallel: shift the labels of the whole sequence, and pass this rank's"
            " rows of them as shift_labels=shards.take(shifted, 1), with num_items_in_batch"
        )


def divided_heads_of(model: nn.Module) -> DividedHeads | None:
    """Return how :class:`nsa_core.parallel.HeadParallel` divided a model; None if it did not."""
    layers = (m.parallel for m in model.modules() if isinstance(m, NSAttention))
    return next((divided for divided in layers if isinstance(divided, DividedHeads)), None)


def whole_state(
    model: nn.Module, state_dict: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Return the state_dict that a model with divided heads would have on one process, on the CPU.

    All ranks must call this, those over which ``fully_shard`` shards the model included.

    Args:
        model: The model.
        state_dict: The state_dict with which a checkpoint is saved; None for the model's own.

    Raises:
        InvalidInput: ``state_dict`` is passed.
    """
    if state_dict is not None:
        raise InvalidInput(
            "state_dict must be None for a model whose heads HeadParallel divides, because"
            " model.state_dict() has the heads of one rank: save_pretrained gathers all of them"
        )
    state = {name: unshard(x).cpu() for name, x in model.state_dict().items()}
    for prefix, layer in model.named_modules():
        if isinstance(layer, NSAttention):
            state |= {f"{prefix}.{n}": x.cpu() for n, x in whole_parameters(layer).items()}
    return state
