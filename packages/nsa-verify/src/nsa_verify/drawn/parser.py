"""Parse a line of text, such as that of `nsa verify --case`, into what it describes (Drawn)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nsa_core.errors import InvalidInput
from nsa_core.util.text import did_you_mean
from nsa_verify.drawn.caches.history import History, Operation, PoolHistory, read_operation
from nsa_verify.drawn.case import GRADIENTS, SlotCase
from nsa_verify.drawn.line import Drawn, fields_of
from nsa_verify.drawn.step import BlockStep, DecodeStep

KINDS: Mapping[str, type[Drawn]] = {
    **dict.fromkeys(GRADIENTS, SlotCase),
    "decode": DecodeStep,
    "block_attention_decode": BlockStep,
    "cache": History,
    "nsa_decode": PoolHistory,
}


def parse(line: str) -> Drawn:
    """Return what ``line`` describes; ``str()`` of the result is such a line.

    A line is a kind and key=value words, in any order. Keys that are left out have their defaults.
    The operations of a cache run in the order of the line.

    Raises:
        InvalidInput: The kind is missing or unknown, a word is not key=value, a key is unknown or
            occurs twice, a value is wrong, or the values do not fit together.

    Example:
        >>> parse("win w=3 tokens=5").w
        3
    """
    name, *words = line.split() or [""]
    if name not in KINDS:
        raise InvalidInput(
            f"case must begin with one of {', '.join(KINDS)}, such as 'sel l=8 tokens=20', got"
            f" {name!r:.80}{did_you_mean(name, KINDS)}"
        )
    kind = KINDS[name]
    fields = {field.name: field for field in fields_of(kind)}
    known = (*fields, *kind.OPERATIONS)
    values: dict[str, Any] = {}
    operations: list[Operation] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise InvalidInput(f"case: {word!r:.80} must be key=value, such as {known[0]}=...")
        if key not in known:
            raise InvalidInput(
                f"case: {name} has no key {key!r:.80}{did_you_mean(key, known)}; its keys are"
                f" {', '.join(known)}"
            )
        if key in kind.OPERATIONS:
            operations.append(read_operation(key, text))
            continue
        if key in values:
            raise InvalidInput(f"case: {key} stands twice; give it once")
        try:
            values[key] = fields[key].metadata["read"](text)
        except (ValueError, KeyError):
            allowed = fields[key].metadata["allowed"]
            raise InvalidInput(f"case: {key} must be {allowed}, got {text!r:.80}") from None
    if operations:
        values["operations"] = tuple(operations)
    drawn = kind(name, **values)
    drawn.check()
    return drawn


def is_line(text: str) -> bool:
    """Return whether ``text`` looks like a line: a kind and key=value words."""
    name, *words = text.split() or [""]
    return name in KINDS and all("=" in word for word in words)
