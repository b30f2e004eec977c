"""CacheState: the sizes, tensors and lengths of a cache, which steps read and update."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nsa_core.cache.kv_store import KVStore
from nsa_core.cache.pages import BlockTable, Pages
from nsa_core.cache.undo import Undo
from nsa_core.contract import DecodeCall
from nsa_core.decode.checks import check_plan as check_step_plan
from nsa_core.decode.pages import PagedKV
from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.limits import integer_problems, too_large

if TYPE_CHECKING:
    from nsa_core.contract import PageScales
    from nsa_core.layer.projection import NSAProjections
    from nsa_core.plan.plan import Plan


class CacheSizes(NamedTuple):
    """The sizes of a cache; see NSAttention.new_cache."""

    batch: int
    max_len: int
    page_size: int | None = None
    num_pages: int | None = None
    max_rollback: int = 0
    max_step: int = 64

    def check(self) -> None:
        """Check that all sizes are valid.

        Raises:
            InvalidInput: a size is invalid; the message names every invalid size and its value.
        """
        problems: list[str] = []
        for name, value in self._asdict().items():
            optional = name in ("page_size", "num_pages")
            minimum = int(name != "max_rollback")
            problems += integer_problems(name, value, minimum, optional=optional)
        if self.num_pages is not None and self.page_size is None:
            problems.append(f"num_pages {self.num_pages} needs page_size, which is None")
        if problems:
            raise InvalidInput("; ".join(problems))
        of_pages = self.page_size is not None and self.num_pages is not None
        names = ("num_pages", "page_size") if of_pages else ("batch", "max_len")
        rows = getattr(self, names[0]) * getattr(self, names[1])
        if problems := too_large(" * ".join(names), rows):
            raise InvalidInput(problems[0])


class NewTokens(NamedTuple):
    """The number of rows of a step that are tokens. The rows after them are padding.

    Attributes:
        rows: number of rows of the step, padding included.
        counts: number of tokens of each sequence as known on the host; None in a captured graph.
        on_device: number of tokens of each sequence, int32 [B]; None if every row is a token.
        exact: whether ``counts`` are exact, not only upper bounds.
    """

    rows: int
    counts: list[int] | None
    on_device: torch.Tensor | None
    exact: bool

    def part(self, first: int, size: int) -> NewTokens:
        """Return the new tokens among the rows ``first`` .. ``first + size - 1``."""
        if size >= self.rows:
            return self
        rows, counts, on_device = min(size, self.rows - first), self.counts, self.on_device
        if counts is not None:
            counts = [min(max(n - first, 0), rows) for n in counts]
        if on_device is not None:
            on_device = (on_device - first).clamp(0, rows)
        return NewTokens(rows, counts, on_device, self.exact)


class CacheState:
    """Keys, values and lengths of ``batch`` sequences; base class of :class:`nsa_core.NSACache`.

    Attributes:
        attn: the layer of the cache.
        plan: the decode plan of the steps.
        kv: the keys and values.
        table: the block table, and the page allocation if the cache has pages.
        lengths: int32 [B] on the device, number of tokens of each sequence.
        starts: int32 [B] on the device, the lengths before the last step or piece of a step.
        overflowed: bool [B] on the device, sequences without room in a replayed step.
        bounds: upper bounds of the lengths, on the host; equal to the lengths if ``exact``. This
            list and ``peaks`` are replaced, and never changed.
        exact: whether ``bounds`` are the lengths.
        captured: whether a CUDA graph was captured. Its replays change the lengths on the device
            only.
        peaks: maximum length of each sequence so far, where its rings end.
        undo: the state before the operation that runs, or that raised and could not be undone; None
            between operations.
    """

    def __init__(
        self,
        attn: NSAProjections,
        plan: Plan,
        sizes: CacheSizes,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None,
        kv_scales: PageScales | None,
    ) -> None:
        self.attn, self.config, self.plan = attn, attn.config, plan
        self.dtype, self.kv_dtype, self.device = dtype, kv_dtype, device
        batch, max_len, self.page_size, num_pages, self.max_rollback, self.max_step = sizes
        self.batch, self.max_len = batch, max_len
        # A step that raises has overwritten max_step old rows, which a crop must not reach.
        geometry, spare = self.config.geometry, self.max_rollback + self.max_step - 1
        page = self.page_size or geometry.num_select_blocks(max_len) * geometry.select_block_size
        if self.page_size is not None and num_pages is None:
            num_pages = batch * -(-max_len // page)
        rings = (geometry.window_size + spare, geometry.compress_block_size + spare)
        with torch.inference_mode(False):  # a cache may outlive inference mode
            self.table = BlockTable(geometry, batch, max_len, page, num_pages, device)
            pages = (batch if num_pages is None else num_pages, page)
            lengths, dtypes = (max_len, self.max_step), (dtype, kv_dtype)
            self.kv = KVStore(
                self.config, self.table.entries, pages, rings, *lengths, *dtypes, kv_scales
            )
            self._tables, self._scales = self.kv.pages.tables, self.kv.pages.scales
            self.lengths, self.starts = (
                torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(2)
            )
            self.overflowed = torch.zeros(batch, dtype=torch.bool, device=device)
        self.bounds = [0] * batch
        self.exact = True
        self.captured = False
        self.peaks = [0] * batch
        self.undo: Undo | None = None

    @property
    def pages(self) -> Pages | None:
        """The page allocation; None if every sequence is contiguous."""
        return self.table.pages

    def own_pages(self, length: int) -> list[tuple[PagedKV, int | None]]:
        """Return the branches in which page b belongs to sequence b alone.

        Each is given with the number of rows that ``length`` tokens fill; None means all.
        """
        cmp, sel, win, raw = self.kv.pages
        branches: list[tuple[PagedKV, int | None]] = [(win, None), (raw, None)]
        if self.pages is None:
            compressed = self.config.geometry.num_compressed(length)
            branches += [(sel, length), (cmp, compressed)]
        return branches

    def host_lengths(self) -> list[int]:
        """Return the number of tokens of each sequence; synchronises if only the device has it."""
        if self.captured or not self.exact:
            self.bounds = self.lengths.tolist()
            self.peaks = list(map(max, self.peaks, self.bounds))
            self.exact = True
        return list(self.bounds)

    def admit(self, counts: Sequence[int]) -> None:
        """Check that ``counts`` more tokens fit, and reserve pages for them. Writes no tokens.

        Raises:
            InvalidInput: a sequence has no room, or not enough pages are free; the cache is
                unchanged.
        """
        if self.captured:
            self.host_lengths()
        if all(map(operator.le, map(operator.add, self.bounds, counts), self.table.room)):
            return
        lengths = self.host_lengths()
        grown = [n + c for n, c in zip(lengths, counts)]
        too_long = [b for b, n in enumerate(grown) if n > self.max_len]
        if too_long:
            text = "; ".join(
                f"sequence {b} has {lengths[b]} tokens, {counts[b]} more do not fit"
                for b in too_long
            )
            raise InvalidInput(f"{text}: max_len is {self.max_len}")
        targets = {b: (lengths[b], n) for b, n in enumerate(grown) if n > self.table.room[b]}
        self.table.own(targets, self.kv)

    def advance(self, tokens: NewTokens) -> DecodeCall:
        """Add the tokens of a step to the lengths. The caller then writes their keys and values.

        Returns:
            The call for the decode forms of the step.
        """
        rows, counts, new, exact = tokens
        undo = self.undo
        if undo is not None and undo.lengths is self.starts:  # a later piece of a step
            undo.lengths = self.starts.clone()
        self.starts.copy_(self.lengths)
        if undo is not None and undo.lengths is None and counts is not None:
            undo.lengths = self.starts
        if counts is None:
            grown = self.lengths + (rows if new is None else new)
            self.overflowed.logical_or_(grown > self.table.device_room)
            torch.minimum(grown, self.table.device_room, out=self.lengths)
            longest = self.max_len
        else:
            self.lengths.add_(rows if new is None else new)
            self.bounds = list(map(operator.add, self.bounds, counts))
            self.exact = self.exact and exact
            if self.exact:
                self.peaks = list(map(max, self.peaks, self.bounds))
            longest = max(self.bounds)
        geometry, scale = self.config.geometry, self.config.softmax_scale
        call = geometry, scale, self.starts, self.lengths, self._tables, longest
        return DecodeCall(*call, scales=self._scales)

    def begin(self) -> Undo:
        """Open a record of the current state; see :mod:`nsa_core.cache.undo`."""
        if self.undo is not None:
            self.roll_back()
        rows = None if self.table.pages is None else self.table.pages.rows
        self.undo = undo = Undo(
            self.bounds, self.exact, self.captured, self.peaks, self.table.room, rows
        )
        return undo

    def save_rings(self) -> None:
        """Copy the rings, before a step that overwrites more of their rows than they can spare."""
        if self.undo is not None and not self.undo.saved:
            _, _, win, raw = self.kv.pages
            self.undo.save(win.k, win.v, raw.k, raw.v)

    def roll_back(self) -> None:
        """Return to the state of the open record, if there is one, and close it."""
        if self.undo is not None:
            self._restore(self.undo)
            self.undo = None

    @torch.no_grad()
    def _restore(self, undo: Undo) -> None:
        """Return to a former state. A call that is interrupted can be repeated."""
        for copy_back in reversed(undo.saved):
            copy_back()
        if undo.lengths is not None:
            self.lengths.copy_(undo.lengths)
        self.table.restore(undo.room, undo.page_rows)
        self.bounds, self.exact, self.captured = undo.bounds, undo.exact, undo.captured
        self.peaks = undo.peaks


def check_plan(cache: CacheState, plan: Plan) -> None:
    """Check that ``plan`` fits the steps of ``cache``.

    Raises:
        InvalidInput: it does not; the message names what the plan is for and what the cache needs.
    """
    kv_dtype = None if cache.kv_dtype is None else dtype_name(cache.kv_dtype)
    check_step_plan(plan, cache.config, cache.kv.pages.raw.k, cache.page_size, kv_dtype)
