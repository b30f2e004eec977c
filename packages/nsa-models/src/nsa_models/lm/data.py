"""Training rows: documents packed end to end with their boundaries, in a resumable stream.

A document is read as [end, its tokens, end], so every token and the end token are a target once. A
document that does not fit into the rest of a row continues in the next row as a separate document:
its positions restart, and it does not attend to its beginning.
"""

from __future__ import annotations

import collections
import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from nsa_core.errors import InvalidInput
from nsa_core.limits import integer_problems
from nsa_core.parallel import Shards, pad_to
from nsa_models.lm.corpus import WHOLE, Corpus, Lane
from nsa_models.lm.model import IGNORED
from nsa_models.lm.text_files import TOO_FEW
from nsa_models.lm.tokens import Tokenizer

# The default share holds out at least one of more documents with a probability of 99.9 %.
_FEW_DOCUMENTS = 128


class Row(NamedTuple):
    """One row of a batch."""

    tokens: list[int]  # [length]
    targets: list[int]  # [length]; IGNORED for positions without a target
    documents: list[int]  # lengths of its documents; they sum to length


class Batch(NamedTuple):
    """The inputs of :class:`nsa_models.lm.model.LanguageModel`."""

    tokens: torch.Tensor  # int64 [B, S], or packed [T]
    targets: torch.Tensor  # int64, of the same shape
    # int32 with a power of two + 1 entries; the last documents are empty
    cu_seqlens: torch.Tensor | None
    max_seqlen: int | None
    counted: int  # targets of all ranks that are not IGNORED

    def part(self, ranks: int, rank: int) -> Batch:
        """Return one rank's tokens of a batch that is padded for ``ranks`` ranks.

        The documents stay those of the whole batch.
        """
        if ranks == 1:
            return self
        shards = Shards(self.tokens.shape[-1], ranks, rank)
        return self._replace(
            tokens=shards.take(self.tokens, -1), targets=shards.take(self.targets, -1)
        )

    def to(self, device: torch.device | str) -> Batch:
        """Copy to ``device`` without waiting for the device."""
        bounds = None if self.cu_seqlens is None else _copy_async(self.cu_seqlens, device)
        return self._replace(
            tokens=_copy_async(self.tokens, device),
            targets=_copy_async(self.targets, device),
            cu_seqlens=bounds,
        )


def _copy_async(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    # A copy of more than 64 KiB from pageable memory would wait until the GPU has finished all its
    # queued work.
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def batch_of(rows: Sequence[Row], packed: bool, ranks: int = 1) -> Batch:
    """Build a batch from rows of one length.

    Args:
        rows: The rows.
        ranks: Number of ranks that share the tokens (:meth:`Batch.part`). The tokens are padded to
            a number that they can share: with a document of its own if packed, else at the end of
            each row. Padding has no target.
        packed: Whether rows hold several documents. If so, the batch is packed [T] with
            ``cu_seqlens``, padded with empty documents to a power of two, so that torch.compile
            sees few different shapes. Otherwise it is [B, S].
    """
    tokens, targets = (
        torch.tensor([r.tokens for r in rows]),
        torch.tensor([r.targets for r in rows]),
    )
    counted = int((targets != IGNORED).sum())
    longest = tokens.shape[1]
    if packed:
        tokens, targets = tokens.flatten(), targets.flatten()
    padding = pad_to(tokens.shape[-1], ranks) - tokens.shape[-1] if ranks > 1 else 0
    if padding:
        tokens, targets = F.pad(tokens, (0, padding)), F.pad(targets, (0, padding), value=IGNORED)
    if not packed:
        return Batch(tokens, targets, None, None, counted)
    lengths = [length for row in rows for length in row.documents]
    lengths += [padding] * (padding > 0)
    padded_count = max(8, 1 << (len(lengths) - 1).bit_length())
    bounds = (
        torch.tensor([0, *lengths, *[0] * (padded_count - len(lengths))]).cumsum(0).to(torch.int32)
    )
    return Batch(tokens, targets, bounds, max(longest, padding), counted)


def unigram_entropy(rows: Sequence[Row]) -> float:
    """Return the entropy of the target frequencies, in nats: the best loss without any context."""
    counts = collections.Counter(t for row in rows for t in row.targets if t != IGNORED)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def is_held_out(document: str, share: float) -> bool:
    """Return whether a document is held out; copies of a text always land on the same side."""
    return _place(document) < share


def share_for(corpus: Corpus, share: float) -> float:
    """Return ``share``, or a larger one if it holds out none of a few documents.

    It then holds out one document and its copies.
    """
    if len(corpus) > _FEW_DOCUMENTS:
        return share
    places = sorted({_place(text) for text in corpus.epoch(0, 0) if text})
    return share if len(places) < 2 or places[0] < share else (places[0] + places[1]) / 2


def _place(document: str) -> float:
    """Return the share above which a document is held out, between 0 and 1."""
    digest = hashlib.blake2b(document.encode("utf-8", errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


class TextRows:
    """The documents of a corpus as packed rows, a stream with a position that is saved as JSON.

    Args:
        corpus: The documents.
        tokenizer: Turns text into tokens.
        length: Tokens per row, at least 2.
        held_out: Whether to use the held-out documents or all others.
        share: Share of held-out documents.
        epochs: Number of epochs, after which the rest of the last row has IGNORED targets. None
            repeats the corpus without end; a row may then hold documents of two epochs.

    Raises:
        InvalidInput: ``length`` is out of range; or, when rows are taken, a whole epoch has no
            document on this side of the split.
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
        if problems := integer_problems("length", length, 2):
            raise InvalidInput(problems[0])
        self.corpus, self.tokenizer, self.length = corpus, tokenizer, length
        self._held_out, self._share, self._epochs = held_out, share, epochs
        self._lane = WHOLE
        self.load_state_dict({"epoch": 0, "document": 0, "offset": 0})

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, the document's number, and how many of its positions are consumed."""
        return {"epoch": self._epoch, "document": self._document, "offset": self._offset}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that :meth:`state_dict` returned."""
        self._epoch, self._document, self._offset = (
            int(state[k]) for k in ("epoch", "document", "offset")
        )
        self._sequence: list[int] = []
        self._stream = self._read(self._epoch, self._document)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        tokens: list[int] = []
        targets: list[int] = []
        documents: list[int] = []
        while len(tokens) < self.length and self.begin():
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

    def begin(self) -> bool:
        """Read the next document if the present one is consumed; return whether there is one.

        Raises:
            InvalidInput: The corpus has no document on this side of the split.
        """
        while self._offset >= len(self._sequence) - 1:
            document = next(self._stream, None)
            if document is None:
                return False
            if self._sequence:  # otherwise it is the document at the position loaded last
                self._offset = 0
            self._epoch, self._document, self._sequence = document
        return True

    def lane(self, number: int, count: int) -> TextRows:
        """Return the rows of lane ``number`` of ``count`` from the beginning; lanes share no row.

        Row ``number`` of each step of ``count`` rows comes from this lane, whichever process reads
        it.

        Raises:
            InvalidInput: The corpus has no document on this side of the split.
        """
        self.begin()
        rows = copy.copy(self)
        rows._lane = Lane(number, count)
        rows.load_state_dict({"epoch": 0, "document": 0, "offset": 0})
        return rows

    def _one_sided(self, places: list[float]) -> str:
        """Return the message about documents at ``places``, of which none is on this side."""
        name, count = self.corpus.name, len(places)
        if count < 2:
            return f"{name} {TOO_FEW[count]}"
        side, change = ("held out", "larger") if self._held_out else ("left", "smaller")
        first, second = sorted(places, reverse=not self._held_out)[:2]
        return (
            f"none of the {count} documents of {name} is {side}; held_out must be {change} than"
            f" {self._share:g}, such as {(first + second) / 2:.3g}, or give more documents"
        )

    def _read(self, epoch: int, start: int) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (epoch, number, tokens with both ends) of the documents on this side."""
        end = self.tokenizer.end
        while self._epochs is None or epoch < self._epochs:
            # A lane may have no document in an epoch; `lane` has checked that the corpus has one.
            found = start > 0 or self._lane.count > 1
            other_side: list[float] = []
            texts = self.corpus.epoch(epoch, start, self._lane)
            for number, text in enumerate(texts, start):
                if text and is_held_out(text, self._share) != self._held_out:
                    if not found:
                        other_side.append(_place(text))
                elif text:
                    found = True
                    yield epoch, number, [end, *self.tokenizer.encode(text), end]
            if not found:
                raise InvalidInput(self._one_sided(other_side))
            epoch, start = epoch + 1, 0
