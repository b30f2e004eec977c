"""Rows of real text in which key-value pairs are hidden, with a question for each pair at the end.

The text is the source code of Python's own library, so no data set is needed. Bytes are the tokens
0 to 255, and keys and values are tokens of their own. A row tests both sides of a language model:
the loss on the text, and the recall of pairs that lie up to a row's length in the past.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch

from nsa_models.lm.data import Row, is_held_out
from nsa_models.lm.model import IGNORED
from nsa_models.lm.synthetic import NumberedRows, SyntheticRows

VALUES = 64
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


@functools.cache
def library_sources() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of the library's source files, uint8 [N]: to train on, and held out."""
    root = Path(sysconfig.get_path("stdlib"))
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED & set(path.relative_to(root).parts):
            continue
        content = path.read_bytes()
        sides[is_held_out(content.decode(errors="replace"), 0.05)].append(content)
    training, held_out = (
        torch.frombuffer(bytearray(b"".join(side)), dtype=torch.uint8) for side in sides
    )
    return training, held_out


class TextWithPairs(SyntheticRows):
    """Text with pairs (key, value) at random places, then every key with its value.

    Targets are the values after the keys at the end, and the next bytes of the text.

    Args:
        text: Bytes, uint8 [N]; a row takes a random part.
        length: Tokens of a row.
        pairs: Number of pairs in a row, at most length / 4; the rest of the row is text.
        keys: Number of keys in the vocabulary, at least ``pairs``.
        text_share: Share of the bytes of the text that are targets.
        seed: Seed of the rows.
        held_out: Selects other random numbers.
    """

    def __init__(
        self,
        text: torch.Tensor,
        length: int,
        pairs: int,
        keys: int,
        text_share: float = 1.0,
        *,
        seed: int = 0,
        held_out: bool = False,
    ) -> None:
        super().__init__(256 + keys + VALUES, length, seed=seed, held_out=held_out)
        self.text, self.pairs, self.keys, self.text_share = text, pairs, keys, text_share

    def make(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets."""
        body = self.length - 2 * self.pairs  # the text with its pairs
        count = body - 2 * self.pairs
        start = int(torch.randint(len(self.text) - count, (), generator=generator))
        text = self.text[start : start + count].long()
        keys = 256 + torch.randperm(self.keys, generator=generator)[: self.pairs]
        values = 256 + self.keys + torch.randint(VALUES, (self.pairs,), generator=generator)
        # The i-th pair stands after places[i] bytes of the text, and after i other pairs.
        places = torch.randint(count + 1, (self.pairs,), generator=generator).sort().values
        first = places + 2 * torch.arange(self.pairs)
        is_text = torch.ones(body, dtype=torch.bool)
        is_text[first] = is_text[first + 1] = False
        tokens = torch.empty(self.length, dtype=torch.long)
        tokens[:body][is_text] = text
        tokens[first], tokens[first + 1] = keys, values
        order = torch.randperm(self.pairs, generator=generator)
        tokens[body::2], tokens[body + 1 :: 2] = keys[order], values[order]
        targets = torch.full_like(tokens, IGNORED)
        next_is_text = is_text[1:].nonzero().flatten()
        is_target = torch.rand(len(next_is_text), generator=generator) < self.text_share
        targets[next_is_text[is_target]] = tokens[next_is_text[is_target] + 1]
        targets[body::2] = values[order]
        return tokens, targets


class PairRows(NumberedRows):
    """Rows of pairs only, without text: every pair, then every key with its value in a new order.

    All rows are made at once and repeat after the last one, because making a short row alone takes
    longer than training on it. Targets are the values after the keys at the end.

    Args:
        pairs: Number of pairs in a row, which has 4 tokens for each.
        keys: Number of keys in the vocabulary, at least ``pairs``.
        count: Number of rows.
        seed: Seed of the rows.
    """

    def __init__(self, pairs: int, keys: int, count: int = 1 << 15, *, seed: int = 0) -> None:
        super().__init__(4 * pairs)
        generator = torch.Generator().manual_seed(seed)
        key = 256 + torch.rand(count, keys, generator=generator).argsort(1)[:, :pairs]
        value = 256 + keys + torch.randint(VALUES, (count, pairs), generator=generator)
        order = torch.rand(count, pairs, generator=generator).argsort(1)
        stated = torch.stack((key, value), 2).flatten(1)
        asked = torch.stack((key.gather(1, order), value.gather(1, order)), 2).flatten(1)
        targets = torch.full((count, self.length), IGNORED)
        targets[:, 2 * pairs :: 2] = asked[:, 1::2]
        self._tokens = torch.cat((stated, asked), 1).tolist()
        self._targets = targets.tolist()

    def row(self, number: int) -> Row:
        """Return the row with this number."""
        index = number % len(self._tokens)
        return Row(self._tokens[index], self._targets[index], [self.length])


def distances(tokens: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return how many tokens before its question each pair of a row stands.

    Args:
        tokens: A row of :class:`TextWithPairs`, [S].
        answers: Places of the keys at the end of the row, [P].
    """
    body = int(answers[0])
    place = torch.zeros(int(tokens.max()) + 1, dtype=torch.long, device=tokens.device)
    place[tokens[:body]] = torch.arange(body, device=tokens.device)
    return answers - place[tokens[answers]]
