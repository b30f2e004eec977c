"""NSACache: the keys and values of the tokens that one attention layer has processed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from nsa_core.cache.kv_store import move
from nsa_core.cache.state import CacheSizes, CacheState, check_plan
from nsa_core.cache.undo import Undo, undone_on_error
from nsa_core.contract import PageScales
from nsa_core.decode.pages import check_kv_dtype, kv_scale
from nsa_core.dtypes import as_bytes, dtype_name
from nsa_core.errors import InvalidInput
from nsa_core.limits import as_integers, shown, too_large

if TYPE_CHECKING:
    from nsa_core.layer.projection import NSAProjections
    from nsa_core.plan.plan import Plan

_Rows = tuple[torch.Tensor, torch.Tensor]


class Snapshot:
    """The state of a sequence at one point in time, created by :meth:`NSACache.snapshot`.

    :meth:`NSACache.load` restores it any number of times.

    Attributes:
        length: number of tokens of the sequence.
        release: call it to free the pages of the snapshot. Garbage collection of the snapshot frees
            them too.
    """

    def __init__(
        self, cache: NSACache, length: int, peak: int, rows: list[_Rows], pages: list[int]
    ) -> None:
        self.cache, self.length, self.peak, self.rows, self.pages = cache, length, peak, rows, pages
        holder = object()
        self.release = weakref.finalize(self, cache.pages.drop if cache.pages else id, holder)
        self.release.atexit = False
        if cache.pages:
            cache.pages.hold(holder, pages)


class NSACache(CacheState):
    """The keys and values of ``batch`` sequences of up to ``max_len`` tokens, for one layer.

    Create a cache with :meth:`nsa_core.NSAttention.new_cache`. ``attn(x, cache=cache)`` appends the
    tokens of x and returns the layer's output for them. All memory is allocated on creation, and a
    cache never grows.

    A step, crop, reset, reorder, snapshot, load or reserve that raises, for example because memory
    runs out or a hook fails, leaves the cache as it was, so it can be repeated. The same holds for
    an interrupt. The replay of a CUDA graph is the exception: it changes the lengths on the device
    only, tokens that do not fit are dropped, and :meth:`check` reports them. After an error on the
    device during a replay, :meth:`reset` the sequences, or create a new cache.

    Attributes:
        lengths: int32 [B] on the device, number of tokens of each sequence; read-only.
        plan: the decode plan of the steps.
        batch: number of sequences, B.
        max_len: maximum number of tokens per sequence.
        page_size: tokens per page; None if each sequence is contiguous.
        max_rollback: maximum number of tokens that :meth:`crop` can remove.
        max_step: maximum number of rows of a captured step.
        dtype, device: dtype and device of the keys and values.
        kv_dtype: dtype of quantized keys and values; None if they are not quantized.

    Example:
        >>> cache = attn.new_cache(batch=2, max_len=2048)
        >>> y = attn(prompt, cache=cache)  # prompt [2, 1000, dim]
        >>> y = attn(token, cache=cache)  # token [2, 1, dim]
        >>> cache.host_lengths()
        [1001, 1001]
    """

    def __repr__(self) -> str:
        pages = ""
        if self.pages is not None:
            pages = f", page_size={self.page_size}, {self.pages.free} free pages"
        size = f"batch={self.batch}, max_len={self.max_len}{pages}"
        dtype = dtype_name(self.kv_dtype or self.dtype)
        return f"NSACache({size}, {dtype} on {self.device}, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Size of all keys and values in bytes."""
        return sum(x.nbytes for x in self.kv.tensors())

    def check(self) -> None:
        """Raise an error if a replayed CUDA graph dropped tokens. Synchronises.

        Every overflow is reported once.

        Raises:
            InvalidInput: tokens were dropped; the message names the sequences.
        """
        full = [b for b, flag in enumerate(self.overflowed.tolist()) if flag]
        if full:
            lengths = self.host_lengths()
            text = "; ".join(
                f"sequence {b} has {lengths[b]} tokens and room for {self.table.room[b]}"
                for b in full
            )
            hint = "" if self.pages is None else "; call reserve() before a replay"
            self.overflowed.zero_()
            raise InvalidInput(
                "the tokens of a replayed step did not fit and were not written:"
                f" {text}, max_len {self.max_len}{hint}"
            )

    @undone_on_error
    def crop(self, lengths: int | Sequence[int] | torch.Tensor) -> None:
        """Remove the last tokens of sequences.

        A sequence can be cropped to at most ``max_rollback`` tokens below its maximum length so
        far. Pages that are no longer needed are freed.

        Args:
            lengths: new number of tokens, one integer for all sequences or one per sequence. A GPU
                tensor synchronises.

        Raises:
            InvalidInput: a new length is negative, above the current length, or more than
                ``max_rollback`` below the maximum; the cache is unchanged.
        """
        new_lengths = self._per_sequence("lengths", lengths)
        old_lengths, problems = self.host_lengths(), []
        for b, (old, new) in enumerate(zip(old_lengths, new_lengths)):
            if not 0 <= new <= old:
                problems.append(f"sequence {b} has {old} tokens, cannot crop to {new}")
            elif new < old and self.peaks[b] - new > self.max_rollback:
                problems.append(
                    f"sequence {b} has had {self.peaks[b]} tokens and {new} would be"
                    f" {self.peaks[b] - new} fewer, max_rollback is {self.max_rollback}"
                )
        if problems:
            raise InvalidInput("crop: " + "; ".join(problems))
        device_lengths = self._tensor(new_lengths, torch.int32)
        self._opened().save(self.lengths)
        self.bounds = new_lengths
        self.lengths.copy_(device_lengths)
        cropped = zip(old_lengths, new_lengths)
        self.table.trim({b: new for b, (old, new) in enumerate(cropped) if new < old})

    @undone_on_error
    def reset(self, indices: int | Sequence[int] | torch.Tensor | None = None) -> None:
        """Remove all tokens of sequences, free their pages and clear their overflows.

        Args:
            indices: index or indices of sequences; default: all.

        Raises:
            InvalidInput: a sequence does not exist.
        """
        sequences = range(self.batch) if indices is None else self._indices(indices)
        index = self._tensor(list(sequences), torch.int64)
        self._opened().save(self.lengths, self.overflowed)
        self._set_lengths(dict.fromkeys(sequences, (0, 0)))
        self.table.trim(dict.fromkeys(sequences, 0))
        self.lengths.index_fill_(0, index, 0)
        self.overflowed.index_fill_(0, index, False)

    @undone_on_error
    def reorder(self, indices: Sequence[int] | torch.Tensor) -> None:
        """Replace each sequence b by the former sequence ``indices[b]``, for beam search.

        Pages are shared, everything else is copied.

        Args:
            indices: B indices of sequences, in which duplicates are allowed.

        Raises:
            InvalidInput: the number of indices is not B, or a sequence does not exist.
        """
        order = self._indices(indices)
        if len(order) != self.batch:
            raise InvalidInput(
                f"reorder: {self.batch} indices are needed, one per sequence, got {len(order)}"
            )
        lengths = self.host_lengths()
        changed = [b for b, source in enumerate(order) if b != source]
        if not changed:
            return
        target, source, index = (
            self._tensor(rows, torch.int64)
            for rows in (changed, [order[b] for b in changed], order)
        )
        undo = self._opened()
        for pages, rows in self.own_pages(max(lengths)):
            move(pages, source, target, rows, undo)
        self.bounds, self.peaks = [lengths[b] for b in order], [self.peaks[b] for b in order]
        undo.save(self.lengths)
        self.lengths.copy_(self.lengths[index])
        if self.pages is not None:
            former = self.pages.rows
            self.table.replace(
                {b: former[old] for b, old in enumerate(order)}, dict(enumerate(self.bounds))
            )

    @undone_on_error
    def snapshot(self, index: int) -> Snapshot:
        """Return the current state of sequence ``index``.

        Pages are shared by reference and copied on write. A cache without pages copies the
        sequence.

        Args:
            index: index of the sequence.

        Raises:
            InvalidInput: the sequence does not exist.
        """
        (b,) = self._indices(index, one=True)
        length = self.host_lengths()[b]
        rows = [(k.clone(), v.clone()) for k, v in self._rows(b, length)]
        return Snapshot(self, length, self.peaks[b], rows, self.table.share(b, length))

    @undone_on_error
    def load(self, snapshot: Snapshot, index: int) -> None:
        """Replace sequence ``index`` by the one in ``snapshot``.

        Args:
            snapshot: a result of :meth:`snapshot` of this cache.
            index: index of the sequence.

        Raises:
            InvalidInput: the sequence does not exist; or the snapshot is of another cache, or was
                released.
        """
        (b,) = self._indices(index, one=True)
        if not isinstance(snapshot, Snapshot):
            raise InvalidInput(
                f"load: snapshot must be a result of snapshot(), got {type(snapshot).__name__}"
            )
        if snapshot.cache is not self or not snapshot.release.alive:
            why = "was released" if snapshot.cache is self else "is of another cache"
            raise InvalidInput(f"load: the snapshot {why}; take one with snapshot() of this cache")
        former = self.max_len if self.captured else min(self.bounds[b], self.max_len)
        undo = self._opened()
        undo.save(self.lengths, *(x for pair in self._rows(b, former) for x in pair))
        self.table.replace({b: snapshot.pages}, {b: snapshot.length})
        for targets, copies in zip(self._rows(b, snapshot.length), snapshot.rows):
            for target, copy in zip(targets, copies):
                target.copy_(copy)
        self._set_lengths({b: (snapshot.length, snapshot.peak)})
        self.lengths[b] = snapshot.length

    @undone_on_error
    def reserve(self, tokens: int | Sequence[int] | torch.Tensor) -> None:
        """Give sequences pages of their own for ``tokens`` tokens, before a CUDA graph replay.

        A sequence keeps the pages until it is cropped, reset, reordered or loaded, or until a
        snapshot of it is taken.

        Args:
            tokens: total number of tokens of a sequence, one integer for all or one per sequence.

        Raises:
            InvalidInput: ``tokens`` exceeds max_len, or not enough pages are free; the cache is
                unchanged.
        """
        totals = self._per_sequence("tokens", tokens)
        if max(totals) > self.max_len:
            raise InvalidInput(
                f"reserve: {max(totals)} tokens are more than max_len {self.max_len}"
            )
        lengths = self.host_lengths()
        self.table.own({b: (lengths[b], max(lengths[b], n)) for b, n in enumerate(totals)}, self.kv)

    def reserve_workspace(self, rows: int = 1) -> None:
        """Run a step of ``rows`` tokens per sequence that writes nothing, to allocate and compile.

        Afterwards, torch's allocator has reserved all memory that steps allocate besides the cache,
        and kernels are compiled. Tokens and results do not change. A longer step than ``max_step``
        cannot be captured; run eagerly, it allocates more memory.

        Args:
            rows: number of rows of the step.

        Raises:
            InvalidInput: ``rows`` is not an integer from 1 to ``max_step``.
        """
        from nsa_core.cache.step import rehearse  # imported here, because it imports the compiler

        rehearse(self, rows)

    @torch.no_grad()
    def kv_scales(self, kv_dtype: torch.dtype, margin: float = 1.0) -> PageScales:
        """Return scales for caches of ``kv_dtype``, from the tokens of this one. Synchronises.

        Args:
            kv_dtype: torch.float8_e4m3fn or torch.int8.
            margin: as of :func:`nsa_core.kv_scale`.

        Returns:
            The argument ``kv_scales`` of :meth:`nsa_core.NSAttention.new_cache`.

        Raises:
            InvalidInput: kv_dtype or margin is invalid, or no sequence has a compressed token.
        """
        check_kv_dtype(kv_dtype)
        scales: tuple[list[torch.Tensor], ...] = ([], [], [])
        geometry, count = self.config.geometry, self.kv.count
        for b, length in enumerate(self.host_lengths()):
            newest = count[max(0, length - geometry.window_size) : length]
            each = count[: geometry.num_compressed(length)], count[:length], newest
            for pages, tokens, of_branch in zip(self.kv.pages, each, scales):
                if len(tokens):
                    kv = pages.read(tokens[None], count[b : b + 1])
                    of_branch.append(torch.stack([kv_scale(x, kv_dtype, margin) for x in kv], -1))
        if not scales[0]:
            size = geometry.compress_block_size
            raise InvalidInput(
                f"kv_scales: a sequence needs at least compress_block_size {size} tokens, the"
                f" lengths are {self.host_lengths()}"
            )
        return PageScales(*(torch.stack(x).amax(0) for x in scales))

    def _rows(self, b: int, length: int) -> list[_Rows]:
        """Return views of the rings of sequence b, and without pages of its first tokens too."""
        return [(x.k[b, :rows], x.v[b, :rows]) for x, rows in self.own_pages(length)]

    def _opened(self) -> Undo:
        """Return the record of the operation that runs."""
        assert self.undo is not None  # undone_on_error opens it
        return self.undo

    def _set_lengths(self, sequences: Mapping[int, tuple[int, int]]) -> None:
        """Set the length and the maximum length so far of sequences on the host."""
        bounds, peaks = list(self.bounds), list(self.peaks)
        for b, (length, peak) in sequences.items():
            bounds[b], peaks[b] = length, peak
        self.bounds, self.peaks = bounds, peaks

    def _per_sequence(self, name: str, argument: int | Sequence[int] | torch.Tensor) -> list[int]:
        """``argument`` as one integer >= 0 per sequence."""
        values = as_integers(argument, self.batch)
        if values is None or len(values) != self.batch or min(values) < 0:
            raise InvalidInput(
                f"{name} must be an integer >= 0, or {self.batch} of them, got {shown(argument)}"
            )
        if problems := too_large(name, max(values)):
            raise InvalidInput(problems[0])
        return values

    def _indices(
        self, argument: int | Sequence[int] | torch.Tensor, one: bool = False
    ) -> list[int]:
        """``argument`` as a list of valid sequence indices, of length 1 if ``one``."""
        values = as_integers(argument)
        if values is None or any(not 0 <= b < self.batch for b in values):
            raise InvalidInput(
                f"sequences are numbered 0 to {self.batch - 1}, got {shown(argument)}"
            )
        if one and len(values) != 1:
            raise InvalidInput(f"expected one sequence index, got {shown(argument)}")
        return values

    def _tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        on_host = torch.tensor(values, dtype=dtype, device="cpu")  # whatever the default device
        return on_host.to(self.device, non_blocking=True)

    def __reduce__(self) -> NoReturn:  # of copy and pickle
        raise InvalidInput(
            "an NSACache is not copied or pickled, because it belongs to its layer: use snapshot()"
            " and load() to copy a sequence; another process must run the tokens again"
        )


def make_cache(
    attn: NSAProjections,
    sizes: CacheSizes,
    dtype: torch.dtype,
    device: str | torch.device | None,
    plan: Plan | None,
    kv_dtype: torch.dtype | None = None,
    kv_scales: Sequence[torch.Tensor] | None = None,
) -> NSACache:
    """Create an empty cache for the layer ``attn``; see NSAttention.new_cache."""
    from nsa_core.plan.options import PlanOptions, usable_device
    from nsa_core.plan.plan import resolve

    sizes.check()
    if not isinstance(dtype, torch.dtype):
        raise InvalidInput(
            f"dtype must be a torch.dtype such as torch.float32, or None, got {dtype!r}"
        )
    requested = attn.reference.device if device is None else device
    cache_device = torch.empty(0, device=usable_device(requested)).device
    scales = _checked_scales(attn.config.n_kv_heads, kv_dtype, kv_scales, cache_device)
    backends = dict(attn.backends) if isinstance(attn.backends, tuple) else attn.backends
    if plan is None:
        options = PlanOptions(
            device=cache_device,
            dtype=dtype,
            backends=backends,
            phase="decode",
            batch=sizes.batch,
            seq_len=sizes.max_len,
            page_size=sizes.page_size,
            kv_dtype=kv_dtype,
        )
        plan = resolve(attn.config, options)
    cache = NSACache(attn, plan, sizes, dtype, cache_device, kv_dtype, scales)
    check_plan(cache, plan)
    return cache


def _checked_scales(
    groups: int,
    kv_dtype: torch.dtype | None,
    kv_scales: Sequence[torch.Tensor] | None,
    device: torch.device,
) -> PageScales | None:
    """Return the scales [groups, 2] of a new cache on its device; None if it is not quantized.

    Raises:
        InvalidInput: kv_dtype and kv_scales do not fit each other or the layer.
    """
    if kv_dtype is None:
        if kv_scales is not None:
            raise InvalidInput("kv_scales needs kv_dtype, which is None")
        return None
    check_kv_dtype(kv_dtype)
    if kv_scales is None:
        if kv_dtype == torch.int8:
            raise InvalidInput(
                "kv_dtype torch.int8 needs kv_scales: fill a cache without kv_dtype by text of the"
                " model, and pass kv_scales=cache.kv_scales(torch.int8)"
            )
        kv_scales = [torch.ones(groups, 2, device="cpu")] * 3
    given = kv_scales if isinstance(kv_scales, Sequence) else [kv_scales]
    shapes = [[*x.shape] if isinstance(x, torch.Tensor) else x for x in given]
    if shapes != [[groups, 2]] * 3 or not all(((x > 0) & x.isfinite()).all() for x in given):
        raise InvalidInput(
            f"kv_scales must be three tensors [{groups}, 2], of cmp, sel and win, finite and > 0,"
            f" got {shapes}: {kv_scales}"
        )
    # A copy, so that a later change of the caller's tensors does not change what codes mean.
    copies = (torch.tensor(x.tolist(), dtype=torch.float32, device=device) for x in kv_scales)
    return PageScales(*copies)


@torch.no_grad()
def resized(cache: NSACache, max_len: int, sequences: Sequence[int] | None = None) -> NSACache:
    """Return a new cache with the tokens of ``cache`` and room for ``max_len`` tokens.

    The old cache is unchanged. The plan of the new one is resolved again from the backends of the
    layer, for the new size.

    Args:
        cache: a cache without pages.
        max_len: maximum number of tokens per sequence of the new cache.
        sequences: the sequences to copy, in order; duplicates are allowed. Default: all.

    Raises:
        InvalidInput: the cache has pages, a sequence does not exist, or a sequence has more than
            ``max_len`` tokens.
    """
    if cache.pages is not None:
        raise InvalidInput(
            "resized: a cache with pages cannot be copied; use snapshot() and load()"
        )
    order = list(range(cache.batch)) if sequences is None else list(sequences)
    if not order or any(not 0 <= b < cache.batch for b in order):
        raise InvalidInput(f"sequences are numbered 0 to {cache.batch - 1}, got {order}")
    all_lengths = cache.host_lengths()
    lengths = [all_lengths[b] for b in order]
    if max(lengths) > max_len:
        raise InvalidInput(f"resized: {max(lengths)} tokens are more than max_len {max_len}")
    sizes = CacheSizes(len(order), max_len, None, None, cache.max_rollback, cache.max_step)
    scales = cache.kv.pages.scales
    kv = cache.kv_dtype, scales and [x[0] for x in scales]
    copied = make_cache(cache.attn, sizes, cache.dtype, cache.device, None, *kv)
    index = cache._tensor(order, torch.int64)
    branches = (x.own_pages(max(lengths)) for x in (cache, copied))
    for (old, rows), (new, _) in zip(*branches):
        for source, target in ((old.k, new.k), (old.v, new.v)):
            target, source = as_bytes(target), as_bytes(source)
            target[:, :rows].copy_(source[:, :rows].index_select(0, index))
    copied.lengths.copy_(cache.lengths.index_select(0, index))
    copied.overflowed.copy_(cache.overflowed.index_select(0, index))
    copied.bounds, copied.peaks = lengths, [cache.peaks[b] for b in order]
    return copied
