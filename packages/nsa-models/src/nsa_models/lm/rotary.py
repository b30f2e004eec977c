"""Rotary frequencies of the models of transformers, which is imported when they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nsa_core.errors import InvalidInput
from nsa_core.util.extras import require_module
from nsa_core.util.text import describe_error

# Their frequencies depend on the length of the input. Keys in a cache are rotated already.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


def frequencies_of(values: Mapping[str, Any]) -> tuple[tuple[float, ...] | None, float]:
    """Return :func:`rotary_frequencies` of the values of a config.json.

    Raises:
        InvalidInput: The rotary embedding is not supported, or its values are invalid.
        BackendUnavailable: transformers is not installed.
    """
    library = require_module("transformers", "scaled rotary embeddings need", "nsa-models[hf]")
    kind = str(values["model_type"]).removeprefix("nsa_")
    names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    try:
        return rotary_frequencies(
            library.AutoConfig.for_model(
                kind,
                rope_parameters=dict(values["rope_parameters"]),
                **{name: values[name] for name in names if values.get(name) is not None},
            )
        )
    except InvalidInput:
        raise
    except Exception as error:  # the checks of transformers raise errors of several libraries
        raise InvalidInput(f"rope_parameters: {describe_error(error)}") from error


def rotary_frequencies(config: Any) -> tuple[tuple[float, ...] | None, float]:
    """Return the rotary frequencies of a model and the factor of its cosines and sines.

    Args:
        config: The configuration of the model.

    Returns:
        The frequencies in radians per token, or None for powers of ``rope_theta``; and the factor.

    Raises:
        InvalidInput: The kind of rotary embedding is not supported; the message names it.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope: Any = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind == "default" and not any(isinstance(value, Mapping) for value in rope.values()):
        return None, 1.0
    supported = [name for name in ROPE_INIT_FUNCTIONS if name not in _LENGTH_DEPENDENT]
    if kind not in supported or any(isinstance(value, Mapping) for value in rope.values()):
        reason = "its frequencies depend on the length, but a cache holds rotated keys"
        if kind not in _LENGTH_DEPENDENT:
            reason = "the frequencies must be the same in every layer"
        raise InvalidInput(
            f"rope_parameters: rope_type {kind!r} is not supported, because {reason}; supported are"
            f" default, {', '.join(supported)}. For longer inputs use yarn"
        )
    with torch.device("cpu"):  # a model may be built on the meta device
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(frequencies.tolist()), float(factor)
