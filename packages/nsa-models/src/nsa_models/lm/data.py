"""Rows of tokens to train on: documents packed end to end with their boundaries, from a position
that can be kept.

A document is read as [end, its tokens, end]: every token and the end are a target once, and nothing
is cut off. One that does not fit in what is left of a row goes on in the next row, as a document of
its own: its positions begin anew, and its attention does not reach back.
"""

from __future__ import annotations

import collections
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from nsa_core.errors import InvalidInput
from nsa_models.lm.corpus import Corpus
from nsa_models.lm.model import IGNORED
from nsa_models.lm.tokens import Tokenizer


class Row(NamedTuple):
    """One row of a batch."""

    tokens: list[int]  # [length]
    targets: list[int]  # [length], IGNORED where there is none
    documents: list[int]  # lengths of the documents in it; their sum is length


class Batch(NamedTuple):
    """What :class:`nsa_models.lm.model.LanguageModel` takes."""

    tokens: torch.Tensor  # int64 [B, S], or packed [T]
    targets: torch.Tensor  # int64, of the same shape
    # int32, a power of two + 1 entries: the last documents are empty
    cu_seqlens: torch.Tensor | None
    max_seqlen: int | None
    counted: int  # targets that are not IGNORED

    def to(self, device: torch.device | str) -> Batch:
        """On ``device``, without waiting for what that does."""
        bounds = None if self.cu_seqlens is None else _sent(self.cu_seqlens, device)
        return Batch(
            _sent(self.tokens, device),
            _sent(self.targets, device),
            bounds,
            self.max_seqlen,
            self.counted,
        )


def _sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    # A copy from pageable memory, if it is of more than 64 KiB, waits until the GPU has done all
    # that it was given.
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Rows(Protocol):
    """A stream of rows. ``state_dict`` is its position, as JSON; a stream that has loaded it goes
    on from there.
    """

    length: int
    packed: bool  # rows hold several documents

    def __next__(self) -> Row: ...

    def state_dict(self) -> dict[str, int]:
        """The position behind the last row."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        ...


def batch_of(rows: Sequence[Row], packed: bool) -> Batch:
    """Rows of one length: as [B, S] where each holds one document, else end to end with their
    boundaries.

    The number of boundaries is a power of two (and one), the rest of them empty documents, so that
    torch.compile sees few different shapes.
    """
    tokens, targets = (
        torch.tensor([r.tokens for r in rows]),
        torch.tensor([r.targets for r in rows]),
    )
    counted = int((targets != IGNORED).sum())
    if not packed:
        return Batch(tokens, targets, None, None, counted)
    lengths = [n for row in rows for n in row.documents]
    places = max(8, 1 << (len(lengths) - 1).bit_length())
    bounds = torch.tensor([0, *lengths, *[0] * (places - len(lengths))]).cumsum(0).to(torch.int32)
    return Batch(tokens.flatten(), targets.flatten(), bounds, tokens.shape[1], counted)


def unigram_entropy(rows: Sequence[Row]) -> float:
    """Nats per target of who knows how often each token comes, and nothing of what came before
    it.
    """
    counts = collections.Counter(t for row in rows for t in row.targets if t != IGNORED)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def is_held_out(document: str, share: float) -> bool:
    """Whether a document is kept from training: a property of its text alone, so that copies stay
    together.
    """
    digest = hashlib.blake2b(document.encode("utf-8", errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


class TextRows:
    """The documents of a corpus as rows: those held out, or all others.

    ``epochs`` None goes round without end, an epoch's first document behind the last of the one
    before, in one row. With a number the stream ends, and what is left of its last row has IGNORED
    targets.

    Raises:
        InvalidInput: ``length`` is below 2; when rows are taken, a whole epoch has no document for
            this side of the split.
    """

    packed = True

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        length: int,
        *,
        held_out: bool = False,
        share: float = 0.05,
        epochs: int | None = None,
    ) -> None:
        if length < 2:
            raise InvalidInput(f"length must be at least 2, got {length}")
        self.corpus, self.tokenizer, self.length = corpus, tokenizer, length
        self._held_out, self._share, self._epochs = held_out, share, epochs
        self.load_state_dict({"epoch": 0, "document": 0, "offset": 0})

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        tokens: list[int] = []
        targets: list[int] = []
        documents: list[int] = []
        while len(tokens) < self.length and self._has_document():
            part = self._sequence[self._offset : self._offset + self.length - len(tokens) + 1]
            tokens += part[:-1]
            targets += part[1:]
            documents.append(len(part) - 1)
            self._offset += len(part) - 1
        if not tokens:
            raise StopIteration
        if left := self.length - len(tokens):
            tokens += [self.tokenizer.end] * left
            targets += [IGNORED] * left
            documents.append(left)
        return Row(tokens, targets, documents)

    def begin(self) -> None:
        """Read the first document, which the next row begins with.

        Raises:
            InvalidInput: there is none.
        """
        self._has_document()

    def state_dict(self) -> dict[str, int]:
        """Epoch, number of the document in it, and how many of its positions are used up."""
        return {"epoch": self._epoch, "document": self._document, "offset": self._offset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that :meth:`state_dict` gave."""
        self._epoch, self._document, self._offset = (
            int(state[k]) for k in ("epoch", "document", "offset")
        )
        self._sequence: list[int] = []
        self._documents = self.corpus.epoch(self._epoch, self._document)
        self._found = self._epoch > 0 or self._document > 0

    def _has_document(self) -> bool:
        """Whether there is something at ``_offset``, after moving on to the next document where one
        is used up.
        """
        if not self._sequence:
            if self._epochs is not None and self._epoch >= self._epochs:
                return False
            offset = self._offset
            self._load_next()
            self._offset = offset
        while self._sequence and self._offset >= len(self._sequence) - 1:
            self._document, self._offset = self._document + 1, 0
            self._load_next()
        return bool(self._sequence)

    def _load_next(self) -> None:
        """The document at ``_document``, or the next one of this side behind it; nothing when the
        epochs are over.
        """
        self._sequence, count = [], 0
        while not self._sequence:
            for text in self._documents:
                count += bool(text)
                if text and is_held_out(text, self._share) == self._held_out:
                    end = self.tokenizer.end
                    self._sequence, self._found = [end, *self.tokenizer.encode(text), end], True
                    return
                self._document += 1
            if not count and not self._found:
                raise InvalidInput(f"{self.corpus.name} holds no text")
            if not self._found:
                side = (
                    f"held out at a share of {self._share:g}"
                    if self._held_out
                    else "left to train on"
                )
                raise InvalidInput(
                    f"{self.corpus.name} has no document {side}, of {count} in all; "
                    "give more documents, or another share"
                )
            self._epoch, self._document = self._epoch + 1, 0
            if self._epochs is not None and self._epoch >= self._epochs:
                return
            self._documents = self.corpus.epoch(self._epoch, 0)
