"""Model: the sequences that a cache must hold after each operation, as lists of token numbers."""

from __future__ import annotations

import dataclasses
import itertools

from nsa_verify.drawn.caches.history import History, LayerHistory, Operation


@dataclasses.dataclass
class Sequence:
    """One sequence, or one snapshot of it.

    Attributes:
        tokens: Number of each token; every appended token has a new number.
        peak: Largest length since the sequence was empty.
        reserved: Tokens for which the sequence may own pages.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    peak: int = 0
    reserved: int = 0

    def copy(self) -> Sequence:
        """Return an independent copy."""
        return Sequence(list(self.tokens), self.peak, self.reserved)


class Model:
    """The state of a cache after some operations of a history, on the host and without tensors.

    Attributes:
        sequences: The sequences of the batch.
        snapshots: The snapshots in the order in which they were taken; None after a release.
    """

    def __init__(self, history: LayerHistory) -> None:
        self._history, self._next = history, 0
        self.sequences = [Sequence() for _ in range(history.batch)]
        self.snapshots: list[Sequence | None] = []

    @property
    def lengths(self) -> list[int]:
        """Length of each sequence."""
        return [len(sequence.tokens) for sequence in self.sequences]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The least length to which each sequence can be cropped, and its length."""
        spare = self._history.max_rollback
        return [(max(0, min(len(s.tokens), s.peak - spare)), len(s.tokens)) for s in self.sequences]

    def exists(self, operation: Operation) -> bool:
        """Return whether the sequences and snapshots that ``operation`` names exist."""
        values, kind = operation.values, operation.kind
        if kind in ("release", "load"):
            number = values[0]
            if not (number < len(self.snapshots) and self.snapshots[number] is not None):
                return False
        indices = dict.fromkeys(("reorder", "reset", "save", "fork", "move"), values)
        indices["load"] = values[1:]
        return all(b < self._history.batch for b in indices.get(kind, ()))

    def refused(self, operation: Operation) -> bool:
        """Return whether a cache must refuse ``operation`` and stay as it is."""
        history = self._history
        if operation.kind == "step":
            grown = zip(self.lengths, operation.values)
            return any(length + new > history.max_len for length, new in grown)
        if operation.kind == "reserve":
            return max(operation.values) > history.max_len
        if operation.kind == "crop":
            return any(
                new > len(sequence.tokens)
                or (new < len(sequence.tokens) and sequence.peak - new > history.max_rollback)
                for sequence, new in zip(self.sequences, operation.values)
            )
        return False

    def may_lack_pages(self, operation: Operation) -> bool:
        """Return whether a cache of pages may have too few for ``operation``.

        It may if sequences and snapshots that share nothing need more pages than there are.
        """
        history = self._history
        if not isinstance(history, History) or not history.page_size:
            return False
        if operation.kind not in ("step", "reserve"):
            return False
        pages = history.num_pages or history.batch * -(-history.max_len // history.page_size)
        tokens = [max(s.reserved, len(s.tokens)) for s in self.snapshots if s is not None]
        for sequence, value in zip(self.sequences, operation.values):
            new = len(sequence.tokens) + value if operation.kind == "step" else value
            tokens.append(max(sequence.reserved, len(sequence.tokens), new))
        return sum(-(-count // history.page_size) for count in tokens) > pages

    def apply(self, operation: Operation) -> None:
        """Change the sequences as ``operation`` does; it exists and is not refused."""
        getattr(self, f"_{operation.kind}")(operation.values)

    def next_tokens(self, new: tuple[int, ...]) -> list[list[int]]:
        """Return the numbers of the tokens that a step appends to each sequence."""
        ends = list(itertools.accumulate(new, initial=self._next))
        return [list(range(first, end)) for first, end in itertools.pairwise(ends)]

    def _step(self, new: tuple[int, ...]) -> None:
        for sequence, tokens in zip(self.sequences, self.next_tokens(new)):
            sequence.tokens += tokens
            self._next += len(tokens)
            sequence.peak = max(sequence.peak, len(sequence.tokens))

    def _crop(self, lengths: tuple[int, ...]) -> None:
        for sequence, length in zip(self.sequences, lengths):
            if length < len(sequence.tokens):
                del sequence.tokens[length:]
                sequence.reserved = 0

    def _reorder(self, order: tuple[int, ...]) -> None:
        self.sequences = [self.sequences[b].copy() for b in order]

    def _reset(self, indices: tuple[int, ...]) -> None:
        for b in indices:
            self.sequences[b] = Sequence()

    def _save(self, indices: tuple[int, ...]) -> None:
        self.snapshots += [self.sequences[b].copy() for b in indices]

    def _load(self, values: tuple[int, ...]) -> None:
        number, b = values
        snapshot = self.snapshots[number]
        assert snapshot is not None
        self.sequences[b] = snapshot.copy()

    def _release(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            self.snapshots[number] = None

    def _fork(self, values: tuple[int, ...]) -> None:
        source, target = values
        self.sequences[target] = self.sequences[source].copy()

    def _move(self, values: tuple[int, ...]) -> None:
        """The pages move, the sequences stay."""

    def _reserve(self, tokens: tuple[int, ...]) -> None:
        for sequence, count in zip(self.sequences, tokens):
            sequence.reserved = max(sequence.reserved, count)
