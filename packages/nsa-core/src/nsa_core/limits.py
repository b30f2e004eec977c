"""The largest integers that configurations, command lines, files and caches may hold.

A larger number is a mistake or an attack. It is refused here, before anything is allocated for it.
This module does not import torch.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nsa_core.errors import InvalidInput

_NONE: Mapping[str, object] = MappingProxyType({})

COUNT = 2**31 - 1  # tokens, windows, blocks, cache lengths: kernels index rows in 32 bits
HEADS = 4096
WIDTH = 2**20
LAYERS = 1024
VOCABULARY = 2**24
THREADS = 4096  # OpenMP ends the process if it cannot start a thread
SEED = 2**63 - 1

# Numbers of every other name have the limit COUNT.
_LARGEST = {
    **dict.fromkeys(("n_heads", "n_kv_heads"), HEADS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), HEADS),
    **dict.fromkeys(("dim", "head_dim", "v_head_dim", "mlp_dim"), WIDTH),
    **dict.fromkeys(("hidden_size", "intermediate_size"), WIDTH),
    **dict.fromkeys(("n_layers", "num_hidden_layers"), LAYERS),
    **dict.fromkeys(("vocab_size", "vocab"), VOCABULARY),
    **dict.fromkeys(("threads", "jobs"), THREADS),
    "seed": SEED,
}


def largest(name: str) -> int:
    """Return the largest value of an argument or field called ``name``."""
    return _LARGEST.get(name, COUNT)


def integer_problems(
    name: str, value: object, minimum: int = 1, *, optional: bool = False
) -> list[str]:
    """Return a sentence if ``value`` is not an integer from ``minimum`` to largest(name), else [].

    Args:
        name: name of the argument or field.
        value: the value. Booleans, floats and numpy integers are no integers here.
        minimum: the smallest value.
        optional: whether None is valid too.
    """
    if optional and value is None:
        return []
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        or_none = " or None" * optional
        return [f"{name} must be an integer >= {minimum}{or_none}, got {shown(value)}"]
    return too_large(name, value)


def check_integers(positive: Mapping[str, object], from_zero: Mapping[str, object] = _NONE) -> None:
    """Check arguments by name, those of ``positive`` from 1 on and those of ``from_zero`` from 0.

    Raises:
        InvalidInput: one is no integer in its range; the message names every such argument.
    """
    problems = [p for name, value in positive.items() for p in integer_problems(name, value)]
    problems += [p for name, value in from_zero.items() for p in integer_problems(name, value, 0)]
    if problems:
        raise InvalidInput("; ".join(problems))


def too_large(name: str, value: int) -> list[str]:
    """Return a sentence if the integer ``value`` is above largest(name), else []."""
    if value <= largest(name):
        return []
    return [f"{name} must be <= {largest(name)}, got {shown(value)}"]


def as_integers(argument: object, repeat: int = 1) -> list[int] | None:
    """Return ``argument`` as a list of integers; None if it is neither one nor several integers.

    Args:
        argument: an integer, an iterable of integers, or an array or tensor of integers. A GPU
            tensor synchronises.
        repeat: length of the list for a single integer.
    """
    values: Any = argument
    try:
        values = values.tolist() if hasattr(values, "tolist") else values
        items = list(values) if isinstance(values, Iterable) else [values] * repeat
        if any(isinstance(item, bool) for item in items):
            return None
        return [operator.index(item) for item in items]
    except TypeError:
        return None


def read_at_most(path: Path, most: int) -> bytes:
    """Return the content of a file.

    Args:
        path: the file; a pipe or a device may have no end.
        most: the largest number of bytes, in whole MiB.

    Raises:
        InvalidInput: the file is longer.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        parts = iter(lambda: file.read(1 << 20), b"")  # one read would allocate the largest number
        content = b"".join(itertools.islice(parts, (most >> 20) + 1))
    if len(content) > most:
        raise InvalidInput(f"{path} has more than {most >> 20} MiB; give a shorter file")
    return content


def shown(value: object) -> str:
    """Return ``value`` for an error message; a huge integer as a power of ten.

    Python refuses to print an integer of more than 4300 digits, and a shorter one fills the screen.
    """
    if isinstance(value, int) and value.bit_length() > 128:
        return f"about {'-' * (value < 0)}1e{math.log10(abs(value)):.0f}"
    try:
        return f"{value!r:.80}"
    except ValueError:
        return f"{type(value).__name__} with an integer of more than 4300 digits"
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def as_integer(text: str) -> int | None:
    """Return the integer >= 0 that ``text`` writes in at most 18 digits; None for other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None
