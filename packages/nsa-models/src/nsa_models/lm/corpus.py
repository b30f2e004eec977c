"""A corpus: documents in an order of their own for each epoch, dealt to lanes.

The seed fixes the order of an epoch's documents. An epoch is dealt to lanes, one per row of a step,
and a lane can start at any of its documents, which arithmetic finds. A position in a lane is
therefore two integers, and a process reads the documents of its own lanes only.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from nsa_models.lm.fingerprint import Documents, Fingerprint, fingerprint_of_texts

# Whole groups are dealt to lanes if each lane gets at least so many.
_GROUPS_PER_LANE = 4


@dataclasses.dataclass(frozen=True)
class Lane:
    """Lane ``number`` of ``count`` lanes, to which the documents of an epoch are dealt.

    A lane takes every ``count``-th item of a shuffled order. Its first item moves with the epoch,
    so that every lane has documents in some epochs, even of a corpus with fewer items than lanes.
    """

    number: int = 0
    count: int = 1

    def items(self, epoch: int) -> slice:
        """Return which positions of an order belong to this lane."""
        return slice((self.number - epoch) % self.count, None, self.count)


WHOLE = Lane()


class Group(NamedTuple):
    """Documents that are read together, such as a row group of parquet."""

    size: int
    load: Callable[[], Callable[[int], str]]  # reads the group; the result gives a document of it


class Corpus:
    """Documents in epochs, each with an order of its own.

    Groups follow each other in a shuffled order, and documents are shuffled within their group.
    Lanes get whole groups, or, if there are too few for that, documents of every group.

    Args:
        documents: Documents that are cheap to read at random; lanes share them.
        name: Name of the corpus in messages.
        seed: Seed of the order.
        groups: More documents, which are expensive to read at random.
        fingerprint: Returns the fingerprint of the corpus; by default that of ``documents``.
    """

    def __init__(
        self,
        documents: Documents,
        name: str,
        seed: int = 0,
        groups: Sequence[Group] = (),
        fingerprint: Callable[[], Fingerprint] | None = None,
    ) -> None:
        self.name, self.seed = name, seed
        self.fingerprint = fingerprint or functools.partial(fingerprint_of_texts, name, documents)
        self._groups = [Group(len(documents), lambda: documents.__getitem__), *groups]

    def __len__(self) -> int:
        return sum(group.size for group in self._groups)

    def epoch(self, epoch: int, start: int, lane: Lane = WHOLE) -> Iterator[str]:
        """Yield a lane's documents of an epoch in their order, beginning with number ``start``."""
        for number, rows in self._dealt(epoch, lane):
            group = self._groups[number]
            size = len(range(group.size)[rows])
            if start < size:
                seeds = (epoch, number) if number else (epoch,)
                order = permutation(group.size, self.seed, *seeds)[rows]
                yield from map(group.load(), order[start:].tolist())
            start = max(0, start - size)

    def _dealt(self, epoch: int, lane: Lane) -> Iterator[tuple[int, slice]]:
        """Yield a lane's groups in their order, each with the shuffled documents that it gets."""
        whole_groups = len(self._groups) > _GROUPS_PER_LANE * lane.count
        turn = 0
        for number in permutation(len(self._groups), self.seed, epoch).tolist():
            if not number or not whole_groups:
                yield number, lane.items(epoch)
                continue
            if (turn + epoch) % lane.count == lane.number:
                yield number, slice(None)
            turn += 1


def permutation(count: int, *seeds: int) -> torch.Tensor:
    """Return 0 .. count-1 in an order that the seeds determine."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(combine_seeds(*seeds)))


def combine_seeds(*seeds: int | str) -> int:
    """Hash several seeds into one."""
    return int.from_bytes(hashlib.blake2b(repr(seeds).encode(), digest_size=7).digest(), "little")
