"""The search of the longest sequence that fits: doubling, then halving the interval twice."""

from __future__ import annotations

_STEP = 4096  # tokens; lengths that are tried are multiples of it, or of the first length
_HALVINGS = 2


class Search:
    """The state of a search.

    Args:
        fits: A length that fits; 0 if none is known.
        failed: A longer one that does not; None if none is known.
        first: The first length to try if none is known.

    Attributes:
        fits: The longest length that fits so far.
        failed: The shortest one that does not.
    """

    def __init__(self, fits: int, failed: int | None, first: int) -> None:
        self.fits, self.failed, self._first = fits, failed, first
        self._step = min(_STEP, first)
        self._halvings = 0

    def next_length(self) -> int | None:
        """Return the next length to try; None at the end of the search."""
        if self.failed is None:
            return 2 * self.fits if self.fits else self._first
        if not self.fits or self._halvings == _HALVINGS:
            return None
        middle = (self.fits + self.failed) // 2 // self._step * self._step
        return middle if middle > self.fits else None

    def add(self, length: int, fits: bool) -> None:
        """Record whether a length fits."""
        self._halvings += self.failed is not None
        if fits:
            self.fits = length
        else:
            self.failed = length
