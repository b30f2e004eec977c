"""Spans: the tokens of a text with the characters that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nsa_models.lm.tokens import Tokenizer

_MAX_PENDING = 6  # tokens of one character; invalid text is shown after as many


class TextSpan(NamedTuple):
    """Tokens ``first`` to ``end - 1``, whose text is ``text``.

    A span has several tokens if one character does, as in UTF-8.
    """

    first: int
    end: int
    text: str


def split_text(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> tuple[TextSpan, ...]:
    """Split tokens into the shortest spans that decode to whole characters.

    Args:
        tokenizer: The tokenizer; None shows the ids themselves.
        tokens: Token ids.
    """
    if tokenizer is None:
        return tuple(TextSpan(i, i + 1, f"{token} ") for i, token in enumerate(tokens))
    spans: list[TextSpan] = []
    first = context = 0  # tokens from `context` on are decoded, those from `first` on are new
    for i, token in enumerate(tokens):
        if token == tokenizer.end:
            if first < i:
                spans.append(TextSpan(first, i, _new_text(tokenizer, tokens, context, first, i)))
            spans.append(TextSpan(i, i + 1, "⟨document⟩"))
            first = context = i + 1
            continue
        text = _new_text(tokenizer, tokens, context, first, i + 1)
        if not text.endswith("\ufffd") or i + 1 - first >= _MAX_PENDING:
            spans.append(TextSpan(first, i + 1, text))
            first, context = i + 1, first
    if first < len(tokens):
        text = _new_text(tokenizer, tokens, context, first, len(tokens))
        spans.append(TextSpan(first, len(tokens), text))
    return tuple(spans)


def _new_text(
    tokenizer: Tokenizer, tokens: Sequence[int], context: int, first: int, end: int
) -> str:
    """Decode tokens[first:end] after tokens[context:first], because spaces depend on them."""
    before = tokenizer.decode(tokens[context:first])
    return tokenizer.decode(tokens[context:end])[len(before) :]
