"""NSACache: the keys and values that one attention layer has seen, sequence by sequence."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from nsa_core.cache.sizes import integers
from nsa_core.cache.state import CacheState
from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput

_Rows = tuple[torch.Tensor, torch.Tensor]


class Snapshot:
    """A sequence at one point in time, from :meth:`NSACache.snapshot`. :meth:`NSACache.load`
    restores it any number of times.

    Attributes:
        length: its tokens.
        release: call it to give back the pages that the snapshot holds. This also happens when the
            snapshot is garbage-collected.
    """

    def __init__(
        self, cache: NSACache, length: int, peak: int, rows: list[_Rows], pages: list[int]
    ) -> None:
        self.cache, self.length, self.peak, self.rows, self.pages = cache, length, peak, rows, pages
        self.release = weakref.finalize(self, cache.pages.release if cache.pages else list, pages)
        self.release.atexit = False


class NSACache(CacheState):
    """The keys and values of ``batch`` sequences of up to ``max_len`` tokens, for one layer; made
    by the layer's ``new_cache``.

    ``attn(x, cache=cache)`` appends the tokens of x. All memory is allocated here: a cache never
    grows. The host knows the lengths, and a step that does not fit is refused before anything is
    written. The replay of a CUDA graph moves the lengths on the device only: tokens that do not fit
    are left out, and :meth:`check` reports them.

    Attributes:
        lengths: int32 [B] on the device, tokens of each sequence; read-only.
        plan: the decode plan that steps run.
    """

    def __repr__(self) -> str:
        pages = (
            ""
            if self.pages is None
            else f", page_size={self.page_size}, {self.pages.free} free pages"
        )
        size = f"batch={self.batch}, max_len={self.max_len}{pages}"
        return f"NSACache({size}, {dtype_name(self.dtype)} on {self.device}, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.nbytes for x in self.stores.tensors())

    def check(self) -> None:
        """Raise if a replayed graph had more tokens than fit; synchronises. Every overflow is
        reported once.

        Raises:
            InvalidInput: tokens were left out; the message names the sequences.
        """
        full = [b for b, flag in enumerate(self.overflowed.tolist()) if flag]
        if full:
            self.overflowed.zero_()
            lengths = self.host_lengths()
            text = "; ".join(
                f"sequence {b} has {lengths[b]} tokens and room for {self.table.room[b]}"
                for b in full
            )
            hint = "" if self.pages is None else "; reserve() pages before a replay"
            raise InvalidInput(
                f"a replayed step was past the end and wrote nothing: {text}, max_len"
                f" {self.max_len}{hint}"
            )

    def crop(self, lengths: int | Sequence[int] | torch.Tensor) -> None:
        """Take back the last tokens of sequences.

        At most ``max_rollback`` tokens may go, counted from the most that the sequence has had.
        Pages that are no longer needed become free.

        Args:
            lengths: tokens that stay, one number for all sequences or one for each. A tensor on a
                GPU synchronises.

        Raises:
            InvalidInput: more tokens would go, or more stay than there are; the cache is unchanged.
        """
        wanted = self._per_sequence("lengths", lengths)
        before, wrong = self.host_lengths(), []
        for b, (n, to) in enumerate(zip(before, wanted)):
            if not 0 <= to <= n:
                wrong.append(f"sequence {b} has {n} tokens, not {to}")
            elif to < n and self._peaks[b] - to > self.max_rollback:
                wrong.append(
                    f"sequence {b} has had {self._peaks[b]} tokens and {to} would be"
                    f" {self._peaks[b] - to} fewer, max_rollback is {self.max_rollback}"
                )
        if wrong:
            raise InvalidInput("crop: " + "; ".join(wrong))
        self.bounds = wanted
        self.lengths.copy_(self._tensor(wanted, torch.int32))
        self.table.trim({b: to for b, (n, to) in enumerate(zip(before, wanted)) if to < n})

    def reset(self, indices: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """Empty the sequences ``indices``, or all. Their pages become free, and their overflows are
        forgotten.
        """
        sequences = range(self.batch) if indices is None else self._indices(indices)
        for b in sequences:
            self.bounds[b] = self._peaks[b] = 0
        self.table.trim(dict.fromkeys(sequences, 0))
        index = self._tensor(list(sequences), torch.int64)
        self.lengths.index_fill_(0, index, 0)
        self.overflowed.index_fill_(0, index, False)

    def reorder(self, indices: Sequence[int] | torch.Tensor) -> None:
        """Replace each sequence b by the former sequence ``indices[b]``, for beam search. Pages are
        shared, everything else is copied.

        Raises:
            InvalidInput: there is not one index for each sequence.
        """
        order = self._indices(indices)
        if len(order) != self.batch:
            raise InvalidInput(f"reorder: {self.batch} indices are needed, got {len(order)}")
        lengths = self.host_lengths()
        index, rings = self._tensor(order, torch.int64), [self.stores.win, self.stores.raw]
        for buffer in rings if self.pages else [*rings, self.stores.sel, self.stores.cmp]:
            buffer.move(index, self.stores.count[: self.batch])
        self.bounds, self._peaks = [lengths[b] for b in order], [self._peaks[b] for b in order]
        self.lengths.copy_(self.lengths[index])
        if self.pages is not None:
            former = self.pages.rows
            self.table.replace(
                {b: former[old] for b, old in enumerate(order)}, dict(enumerate(self.bounds))
            )

    def snapshot(self, index: int) -> Snapshot:
        """The present state of sequence ``index``. Pages are shared by reference, and copied when
        someone writes to them; a cache without pages copies the sequence.
        """
        (b,) = self._indices(index, one=True)
        length = self.host_lengths()[b]
        rows = [self.stores.win.taken(b), self.stores.raw.taken(b)]
        pages = self.table.share(b, length)
        if self.pages is None:
            compressed = self.config.geometry.num_compressed(length)
            rows += [self.stores.sel.taken(b, length), self.stores.cmp.taken(b, compressed)]
        return Snapshot(self, length, self._peaks[b], rows, pages)

    def load(self, snapshot: Snapshot, index: int) -> None:
        """Replace sequence ``index`` by the one in ``snapshot``.

        Raises:
            InvalidInput: there is no such sequence, or the snapshot is another cache's, or was
                released.
        """
        (b,) = self._indices(index, one=True)
        if not isinstance(snapshot, Snapshot):
            raise InvalidInput(
                f"load: snapshot must be what snapshot() gave, got {type(snapshot).__name__}"
            )
        if snapshot.cache is not self or not snapshot.release.alive:
            why = "was released" if snapshot.cache is self else "is of another cache"
            raise InvalidInput(f"load: the snapshot {why}")
        self.table.replace({b: snapshot.pages}, {b: snapshot.length})
        for buffer, rows in zip(
            (self.stores.win, self.stores.raw, self.stores.sel, self.stores.cmp), snapshot.rows
        ):
            buffer.put(b, rows)
        self.bounds[b], self._peaks[b] = snapshot.length, snapshot.peak
        self.lengths[b] = snapshot.length

    def reserve(self, tokens: int | Sequence[int] | torch.Tensor) -> None:
        """Give sequences pages of their own for ``tokens`` tokens in total, ahead of a replay.

        The pages stay until the sequence is cropped, reset, reordered, loaded, or a snapshot of it
        is taken.

        Args:
            tokens: one number for all sequences or one for each.

        Raises:
            InvalidInput: more than max_len, or too few pages are free; the cache is unchanged.
        """
        wanted = self._per_sequence("tokens", tokens)
        if max(wanted) > self.max_len:
            raise InvalidInput(
                f"reserve: {max(wanted)} tokens are more than max_len {self.max_len}"
            )
        lengths = self.host_lengths()
        self.table.own(
            {b: (lengths[b], max(lengths[b], n)) for b, n in enumerate(wanted)}, self.stores
        )

    def reserve_workspace(self, rows: int = 1) -> None:
        """Run a step of ``rows`` tokens per sequence on full sequences, which writes nothing.

        Afterwards torch's allocator has all the memory that steps take beside the cache, and
        kernels that compile have compiled. Tokens and results stay as they are. A step of more than
        ``max_step`` rows cannot be captured; run eagerly, it takes more memory.

        Raises:
            InvalidInput: ``rows`` is not an integer from 1 to ``max_step``.
        """
        from nsa_core.cache.step import rehearse  # imports the compiler

        rehearse(self, rows)

    def _per_sequence(self, name: str, argument: int | Sequence[int] | torch.Tensor) -> list[int]:
        values = integers(argument, self.batch)
        if values is None or len(values) != self.batch or min(values) < 0:
            raise InvalidInput(
                f"{name} must be an integer >= 0, or {self.batch} of them, got {argument!r}"
            )
        return values

    def _indices(
        self, argument: int | Sequence[int] | torch.Tensor, one: bool = False
    ) -> list[int]:
        values = integers(argument)
        if values is None or any(not 0 <= b < self.batch for b in values):
            raise InvalidInput(f"sequences are numbered 0 to {self.batch - 1}, got {argument!r}")
        if one and len(values) != 1:
            raise InvalidInput(f"expected one sequence index, got {argument!r}")
        return values

    def _tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    def __copy__(self) -> NoReturn:
        raise InvalidInput(
            "an NSACache is not copied or pickled: take a snapshot() of a sequence and load() it"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        self.__copy__()
