"""Rotary frequencies of Hugging Face configurations that scale them, without torch.

The formulas are those of position interpolation ("linear", arXiv 2306.15595), of Llama 3.1
("llama3"), of YaRN ("yarn", arXiv 2309.00071), and of heads of which a part is rotated
("proportional").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nsa_core.errors import InvalidInput
from nsa_core.limits import shown
from nsa_core.util.text import describe_error

KINDS = ("linear", "llama3", "yarn", "proportional")


def kind_of(rope: Any) -> str:
    """Return the kind of ``rope_scaling`` or ``rope_parameters``; "default" if it scales nothing.

    It is "per layer" if there is one entry per kind of layer.
    """
    if not isinstance(rope, Mapping):
        return "unknown" if rope else "default"
    if any(isinstance(entry, Mapping) for entry in rope.values()):
        return "per layer"
    return str(rope.get("rope_type") or rope.get("type") or "default")


def scaled_frequencies(
    name: str, rope: Mapping[str, Any], width: int, base: float, longest: Any
) -> tuple[tuple[float, ...], float]:
    """Return the frequencies of a kind in KINDS, and the factor of all cosines and sines.

    Args:
        name: "rope_scaling" or "rope_parameters", for errors.
        rope: its values.
        width: head width D, even.
        base: the base of the plain frequencies.
        longest: max_position_embeddings, which may stand for original_max_position_embeddings.

    Raises:
        InvalidInput: a value is missing, or out of range.
    """
    try:
        plain = [float(base) ** (-2 * i / width) for i in range(width // 2)]
        kind = kind_of(rope)
        if kind == "proportional":
            part = float(rope.get("partial_rotary_factor", 1))
            if not 0 <= part <= 1:
                raise ValueError(f"partial_rotary_factor must be from 0 to 1, got {part:g}")
            rotated = int(part * width // 2)
            factor = float(rope.get("factor", 1))
            return tuple(f / factor if i < rotated else 0.0 for i, f in enumerate(plain)), 1.0
        factor = rope["factor"]
        if kind == "linear":
            return tuple(f / float(factor) for f in plain), 1.0
        trained = float(rope.get("original_max_position_embeddings") or longest)
        factor = float(longest / trained if kind == "yarn" and factor is None else factor)
        if kind == "llama3":
            # turns of the pair over the trained length; few turns are slowed down
            low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            if not 0 < low < high:
                raise ValueError(
                    f"low_freq_factor must be > 0 and below high_freq_factor, got {low:g}, {high:g}"
                )
            turns = [trained * f / (2 * math.pi) for f in plain]
            shares = [min(max((n - low) / (high - low), 0.0), 1.0) for n in turns]
            attention = 1.0
        else:
            shares = _yarn_shares(rope, width, float(base), trained)
            attention = _yarn_attention(rope, factor)
        scaled = tuple(f * share + f / factor * (1 - share) for f, share in zip(plain, shares))
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"{name} = {shown(rope)} gives no rotary frequencies: {describe_error(error)}"
        ) from error
    return scaled, attention


def _yarn_shares(rope: Mapping[str, Any], width: int, base: float, trained: float) -> list[float]:
    """Return the share of the plain frequency for each pair of a head."""

    def pair(turns: float) -> float:
        """Return the pair that turns this often over the trained length."""
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(float(rope.get("beta_fast") or 32)), pair(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 * (low == high)
    return [1 - min(max((i - low) / (high - low), 0.0), 1.0) for i in range(width // 2)]


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> float:
    """Return the factor of all cosines and sines."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    of_all, of_rotated = rope.get("mscale_all_dim"), rope.get("mscale")
    if of_all and of_rotated:
        return magnitude(float(of_rotated)) / magnitude(float(of_all))
    return magnitude(1)
