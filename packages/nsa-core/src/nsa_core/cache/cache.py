"""NSACache: the keys and values that one attention layer has seen, sequence by sequence, for
decoding.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from nsa_core.cache.block_table import BlockTable
from nsa_core.cache.kv_store import Stores
from nsa_core.cache.new_tokens import integers
from nsa_core.cache.pages import Pages
from nsa_core.contract import DecodeCall
from nsa_core.errors import InvalidInput
from nsa_core.util.text import dtype_name

if TYPE_CHECKING:
    from nsa_core.cache.new_cache import CacheSizes
    from nsa_core.dispatch.plan import Plan
    from nsa_core.layer.module import NSAttention

_Rows = tuple[torch.Tensor, torch.Tensor]


class Snapshot:
    """A sequence as it was: made by :meth:`NSACache.snapshot`, taken up by :meth:`NSACache.load`,
    any number of times.

    Attributes:
        length: its tokens.
        release: call it to give back the pages that it holds; done anyway when nobody refers to the
            snapshot.
    """

    def __init__(
        self, cache: NSACache, length: int, peak: int, rows: list[_Rows], pages: list[int]
    ) -> None:
        self.cache, self.length, self.peak, self.rows, self.pages = cache, length, peak, rows, pages
        self.release = weakref.finalize(self, cache.pages.release if cache.pages else list, pages)
        self.release.atexit = False


class NSACache:
    """What one NSAttention layer keeps of ``batch`` sequences of up to ``max_len`` tokens; made by
    its ``new_cache``.

    ``attn(x, cache=cache)`` appends the tokens of x. All memory is taken here: a cache never grows.
    The host knows the lengths, and what does not fit is refused before anything is written. A CUDA
    graph of a step moves them unseen: what it cannot write is left out, and :meth:`check` tells.

    Attributes:
        lengths: int32 [B] on the device, tokens of each sequence; to be read, not written.
        plan: the decode plan that steps run.
    """

    def __init__(
        self,
        attn: NSAttention,
        plan: Plan,
        sizes: CacheSizes,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.attn, self.config, self.plan, self.dtype, self.device = (
            attn,
            attn.config,
            plan,
            dtype,
            device,
        )
        self.batch, self.max_len, self.page_size, num_pages, self.max_rollback, self.max_step = (
            sizes
        )
        batch, max_len = self.batch, self.max_len
        geometry, further = self.config.geometry, max(self.max_rollback, self.max_step - 1)
        page = self.page_size or geometry.num_select_blocks(max_len) * geometry.select_block_size
        if self.page_size is not None and num_pages is None:
            num_pages = batch * -(-max_len // page)
        rings = (geometry.window_size + further, geometry.compress_block_size + further)
        with torch.inference_mode(False):  # a cache may outlive the mode that it is made in
            self.table = BlockTable(geometry, batch, max_len, page, num_pages, device)
            pages = (batch if num_pages is None else num_pages, page)
            self.stores = Stores(
                self.config, batch, pages, rings, max_len, self.max_step, self.dtype, device
            )
            self.lengths, self.starts = (
                torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(2)
            )
            self.overflowed = torch.zeros(batch, dtype=torch.bool, device=device)
        self.bounds = [0] * batch  # what the host knows of the lengths: they are at most this,
        self.exact = True  # or just this
        self.captured = False  # a graph may move the lengths at any time
        self._peaks = [0] * batch  # most tokens that each sequence has had: its rings end there

    def __repr__(self) -> str:
        pages = (
            ""
            if self.pages is None
            else f", page_size={self.page_size}, {self.pages.free} free pages"
        )
        size = f"batch={self.batch}, max_len={self.max_len}{pages}"
        return f"NSACache({size}, {dtype_name(self.dtype)} on {self.device}, {self.nbytes} bytes)"

    @property
    def pages(self) -> Pages | None:
        """Who holds which page; None without pages."""
        return self.table.pages

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.nbytes for x in self.stores.tensors())

    def host_lengths(self) -> list[int]:
        """Tokens of each sequence; synchronises where only the device knows them."""
        if self.captured or not self.exact:
            self.bounds, self.exact = self.lengths.tolist(), True
            self._peaks = list(map(max, self._peaks, self.bounds))
        return list(self.bounds)

    def check(self) -> None:
        """Ask the device whether a replayed graph had more tokens than fit; synchronises, and asks
        about each once.

        Raises:
            InvalidInput: it had, and left them out; names the sequences.
        """
        full = [b for b, flag in enumerate(self.overflowed.tolist()) if flag]
        if full:
            self.overflowed.zero_()
            lengths = self.host_lengths()
            said = "; ".join(
                f"sequence {b} has {lengths[b]} tokens and room for {self.table.room[b]}"
                for b in full
            )
            hint = "" if self.pages is None else "; reserve() pages before a replay"
            raise InvalidInput(
                f"a replayed step was past the end and wrote nothing: {said}, max_len"
                f" {self.max_len}{hint}"
            )

    def admit(self, counts: Sequence[int]) -> None:
        """Make sure that ``counts`` more tokens fit, and give them pages; nothing is written yet.

        Raises:
            InvalidInput: some sequence has no room, or no page is free; the cache is as it was.
        """
        if self.captured:
            self.host_lengths()
        if all(n + c <= room for n, c, room in zip(self.bounds, counts, self.table.room)):
            return
        lengths = self.host_lengths()
        grown = [n + c for n, c in zip(lengths, counts)]
        over = [b for b, n in enumerate(grown) if n > self.max_len]
        if over:
            said = "; ".join(
                f"sequence {b} has {lengths[b]} tokens, {counts[b]} more do not fit" for b in over
            )
            raise InvalidInput(f"{said}: max_len is {self.max_len}")
        wanted = {b: (lengths[b], n) for b, n in enumerate(grown) if n > self.table.room[b]}
        self.table.own(wanted, self.stores)

    def advance(
        self, rows: int, counts: Sequence[int] | None, new: torch.Tensor | None, exact: bool
    ) -> DecodeCall:
        """Lengths grow by ``new`` int32 [B] (None: ``rows``); ``counts`` is what the host knows of
        it, None in a graph.

        ``exact``: it knows all. The stores are the caller's to write.
        """
        self.starts.copy_(self.lengths)
        if counts is None:
            grown = self.lengths + (rows if new is None else new)
            self.overflowed.logical_or_(grown > self.table.device_room)
            torch.maximum(
                self.lengths, torch.minimum(grown, self.table.device_room), out=self.lengths
            )
            longest = self.max_len
        else:
            self.lengths.add_(rows if new is None else new)
            self.bounds = [n + c for n, c in zip(self.bounds, counts)]
            self.exact = self.exact and exact
            if self.exact:
                self._peaks = list(map(max, self._peaks, self.bounds))
            longest = max(self.bounds)
        geometry, scale = self.config.geometry, self.config.softmax_scale
        return DecodeCall(geometry, scale, self.starts, self.lengths, self.table.entries, longest)

    def unless_done(self) -> contextlib.ExitStack:
        """A block that sets the lengths back when it is left, by an error, before its
        ``pop_all()``.
        """
        undo = contextlib.ExitStack()
        undo.callback(self._retreat, self.bounds, self.exact)
        return undo

    def _retreat(self, bounds: list[int], exact: bool) -> None:
        self.lengths.copy_(self.starts)
        self.bounds, self.exact = bounds, exact

    def crop(self, lengths: int | Sequence[int] | torch.Tensor) -> None:
        """Take back the last tokens of sequences: ``lengths`` of them stay, one number for all or
        one each.

        At most ``max_rollback`` tokens, counted from the longest that a sequence has been. A tensor
        on a GPU synchronises. Pages that are not needed become free.

        Raises:
            InvalidInput: more than that, or more than there are; the cache is as it was.
        """
        wanted = self._per_sequence("lengths", lengths)
        had, wrong = self.host_lengths(), []
        for b, (n, to) in enumerate(zip(had, wanted)):
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
        self.table.trim({b: to for b, (n, to) in enumerate(zip(had, wanted)) if to < n})

    def reset(self, indices: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """Empty the sequences ``indices``, or all; their pages become free, and overflows of theirs
        are forgotten.
        """
        which = range(self.batch) if indices is None else self._indices(indices)
        for b in which:
            self.bounds[b] = self._peaks[b] = 0
        self.table.trim(dict.fromkeys(which, 0))
        index = self._tensor(list(which), torch.int64)
        self.lengths.index_fill_(0, index, 0)
        self.overflowed.index_fill_(0, index, False)

    def reorder(self, indices: Sequence[int] | torch.Tensor) -> None:
        """Sequence b becomes what ``indices[b]`` was, as beam search wants it; pages are shared,
        all else is copied.

        Raises:
            InvalidInput: not one index for each sequence.
        """
        order = self._indices(indices)
        if len(order) != self.batch:
            raise InvalidInput(f"reorder: {self.batch} indices are needed, got {len(order)}")
        lengths = self.host_lengths()
        index, rings = self._tensor(order, torch.int64), [self.stores.win, self.stores.raw]
        for pair in rings if self.pages else [*rings, self.stores.sel, self.stores.cmp]:
            pair.move(index, self.stores.count[: self.batch])
        self.bounds, self._peaks = [lengths[b] for b in order], [self._peaks[b] for b in order]
        self.lengths.copy_(self.lengths[index])
        if self.pages is not None:
            held = self.pages.rows
            self.table.replace(
                {b: held[old] for b, old in enumerate(order)}, dict(enumerate(self.bounds))
            )

    def snapshot(self, index: int) -> Snapshot:
        """Sequence ``index`` as it is now: with pages, shared by reference (a writer gets a copy);
        else a copy.
        """
        (b,) = self._indices(index, one=True)
        length = self.host_lengths()[b]
        rows, pages = (
            [self.stores.win.taken(b), self.stores.raw.taken(b)],
            self.table.share(b, length),
        )
        if self.pages is None:
            compressed = self.config.geometry.num_compressed(length)
            rows += [self.stores.sel.taken(b, length), self.stores.cmp.taken(b, compressed)]
        return Snapshot(self, length, self._peaks[b], rows, pages)

    def load(self, snapshot: Snapshot, index: int) -> None:
        """Sequence ``index`` becomes what ``snapshot`` holds.

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
        for pair, rows in zip(
            (self.stores.win, self.stores.raw, self.stores.sel, self.stores.cmp), snapshot.rows
        ):
            pair.put(b, rows)
        self.bounds[b], self._peaks[b] = snapshot.length, snapshot.peak
        self.lengths[b] = snapshot.length

    def reserve(self, tokens: int | Sequence[int] | torch.Tensor) -> None:
        """Give sequences pages of their own for ``tokens`` tokens in all, one number or one each,
        ahead of a replay.

        They stay until the sequence is cropped, reset, reordered, loaded or a snapshot of it is
        taken.

        Raises:
            InvalidInput: more than max_len, or too few pages are free; the cache is as it was.
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
        """Run a step of ``rows`` tokens a sequence that writes nothing, over as many tokens as any
        step can have.

        What steps take beside the cache comes from torch's allocator; after this one it has all
        that they need, and kernels that compile have compiled. Tokens and results are as without
        it. A longer step than ``max_step`` rows cannot be captured; an eager one takes more memory
        while it runs.

        Raises:
            InvalidInput: ``rows`` is no integer from 1 to ``max_step``.
        """
        from nsa_core.cache.step import rehearse

        rehearse(self, rows)

    def _per_sequence(self, name: str, given: int | Sequence[int] | torch.Tensor) -> list[int]:
        values = integers(given, self.batch)
        if values is None or len(values) != self.batch or min(values) < 0:
            raise InvalidInput(
                f"{name} must be an integer >= 0, or {self.batch} of them, got {given!r}"
            )
        return values

    def _indices(self, given: int | Sequence[int] | torch.Tensor, one: bool = False) -> list[int]:
        values = integers(given)
        if values is None or any(not 0 <= b < self.batch for b in values):
            raise InvalidInput(f"sequences are numbered 0 to {self.batch - 1}, got {given!r}")
        if one and len(values) != 1:
            raise InvalidInput(f"one sequence is meant, got {given!r}")
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
