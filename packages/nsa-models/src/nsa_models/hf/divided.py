"""Calls of a model whose attention layers a style of nsa_core.parallel divided over ranks."""

from __future__ import annotations

from typing import Any

from nsa_core.errors import InvalidInput, Unsupported
from nsa_core.layer.module import NSAttention
from nsa_core.parallel.context import DividedSequence
from nsa_core.parallel.head_parallel import DividedHeads


def check_divided_layer(layer: NSAttention) -> None:
    """Check that the style of a layer supports its parameters.

    Raises:
        Unsupported: The heads are divided, and a projection has a bias.
    """
    if not isinstance(layer.parallel, DividedHeads):
        return
    if biased := [n for n in ("qkv", "out") if getattr(layer, n).bias is not None]:
        raise Unsupported(
            f"HeadParallel does not divide biases, and the layer has one in {' and '.join(biased)}:"
            " use ContextParallel, or a model without biases of the attention, such as Qwen3"
        )


def check_divided_call(
    layer: NSAttention, arguments: dict[str, Any], options: dict[str, Any]
) -> None:
    """Check a call of a model whose layers hold a part of each sequence.

    The check does not depend on the values of tensors, so that all ranks raise the error or none.

    Args:
        layer: An attention layer of the model.
        arguments: Arguments of the call by name.
        options: Its other arguments.

    Raises:
        InvalidInput: An argument describes the rows of this rank as a whole sequence.
        Unsupported: The call has a cache.
    """
    if not isinstance(layer.parallel, DividedSequence):
        return
    if arguments["past_key_values"] is not None:
        layer.parallel.refuse("a call with a cache")
    problems = {
        "attention_mask": "pad each sequence at its end, or pack the documents and pass"
        " cu_seq_lens_q",
        "position_ids": "leave them out; for packed documents pass cu_seq_lens_q and max_length_q"
        " of the whole row, the same on all ranks",
    }
    packed = options.get("cu_seq_lens_q") is not None
    for name, fix in problems.items():
        # DataCollatorWithFlattening adds positions to the boundaries, which are used then.
        if arguments[name] is not None and not (packed and name == "position_ids"):
            raise InvalidInput(
                f"{name} must be None for layers with the style ContextParallel, which cannot see"
                f" the rows of other ranks: {fix}"
            )
    if arguments["labels"] is not None and options.get("shift_labels") is None:
        raise InvalidInput(
            "labels would be shifted within the rows of this rank, because the layers have the"
            " style ContextParallel: shift the labels of the whole sequence, and pass this rank's"
            " rows of them as shift_labels=shards.take(shifted, 1), with num_items_in_batch"
        )
