"""Checks of the arguments of nsa_decode: metadata always, values if they can be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import DecodeCall
from nsa_core.decode.pages import LayerPages, PagedKV
from nsa_core.dtypes import QUANTIZED
from nsa_core.errors import InvalidInput
from nsa_core.layer.input_checks import request_problems
from nsa_core.limits import as_integers, integer_problems, shown
from nsa_core.plan.default_plan import check_is_plan
from nsa_core.torch_ops.tensor_checks import Sizes, call_problems, raise_problems
from nsa_core.torch_ops.tensor_kinds import check_types
from nsa_core.torch_ops.torch_state import checks_values

if TYPE_CHECKING:
    from nsa_core.decode.chunks import Chunk
    from nsa_core.plan.plan import Plan


def check_metadata(
    tensors: Mapping[str, torch.Tensor], pages: LayerPages, config: NSAConfig, max_len: int | None
) -> int:
    """Check what is known without reading values, and return the upper bound of the lengths.

    It is ``max_len``; else the number of tokens that the table of ``pages.sel`` has room for.

    Raises:
        InvalidInput: an argument is invalid. The message has a sentence per problem, and the shape,
            dtype and device of every tensor.
    """
    check_types(tensors)
    problems = call_problems("nsa_decode", tensors, Sizes(config=config))
    if not problems:
        problems = [*_empty_problems(pages)]
    raise_problems(problems, tensors)
    bound = pages.sel.capacity if max_len is None else max_len
    problems = [
        *_layout_problems(pages),
        *_scale_problems(pages),
        *_capacity_problems(pages, config, bound),
    ]
    if not problems and "rope.cos" in tensors:
        positions, half = tensors["rope.cos"].shape
        if 2 * half != config.qk_dim or positions < bound:
            problems.append(
                f"rope must be cos and sin [positions, {config.qk_dim // 2}] of at least max_len"
                f" {bound} positions, got {[positions, half]}"
            )
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()):
        names = ", ".join(name for name, t in tensors.items() if t.requires_grad)
        problems.append(
            f"{names} requires grad, but nsa_decode has no gradient: call it under torch.no_grad()"
        )
    raise_problems(problems, tensors)
    return bound


def _empty_problems(pages: LayerPages) -> Iterator[str]:
    """Yield which branches have no page, or a block table without entries."""
    for branch, x in pages._asdict().items():
        if not len(x.k):
            yield f"pages.{branch}.k has no page"
        elif 0 in (x.rows, *x.table.shape):
            yield (
                f"pages.{branch} has no room for a token: k is {[*x.k.shape]}, and the table"
                f" {[*x.table.shape]}"
            )


def _layout_problems(pages: LayerPages) -> Iterator[str]:
    for branch, part in pages._asdict().items():
        for name, x in part._asdict().items():
            if x is not None and x.stride(-1) != 1 and x.numel():
                yield (
                    f"the columns of pages.{branch}.{name} must be contiguous, its strides are"
                    f" {x.stride()}: pass pages with the layout [..., width]"
                )


def _scale_problems(pages: LayerPages) -> Iterator[str]:
    """Yield problems of the dtypes of quantized pages, and which branches lack scales."""
    dtypes = {x.dtype for part in pages[:3] for x in part[:2]}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        yield f"pages.cmp, pages.sel and pages.win must have one dtype, got {names}"
        return
    for branch, part in pages._asdict().items():
        quantized = branch != "raw" and part.k.dtype in QUANTIZED
        if quantized != (part.scales is not None):
            kind = "float32 [P, G, 2], from nsa_core.kv_scale," if quantized else "None"
            yield f"pages.{branch}.scales must be {kind} beside pages of {part.k.dtype}"
        elif part.scales is not None and part.scales.stride()[1:] != (2, 1):
            yield (
                f"pages.{branch}.scales must be contiguous but for the first axis, its strides are"
                f" {part.scales.stride()}"
            )
        for name, x in zip("kv", part[:2] if quantized else ()):
            offset = 0 if torch.compiler.is_compiling() else x.storage_offset()
            if x.shape[3] % 2 == 0 and any(n % 2 for n in (offset, *x.stride()[:3])):
                yield (
                    f"rows of pages.{branch}.{name} must begin at even addresses, its offset is"
                    f" {offset}, its strides are {x.stride()}"
                )


def _capacity_problems(pages: LayerPages, config: NSAConfig, max_len: Any) -> Iterator[str]:
    geometry, block = config.geometry, config.select_block_size
    if pages.sel.rows % block:
        yield (
            f"a page of sel must hold a multiple of select_block_size {block} tokens, pages.sel.k"
            f" has {pages.sel.rows}"
        )
    if not isinstance(max_len, torch.SymInt) and (
        problems := integer_problems("max_len", max_len, 1)
    ):
        yield from problems
        return
    needed = {
        "sel": max_len,
        "cmp": geometry.num_compressed(max_len),
        "win": min(max_len, config.window_size),
        "raw": min(max_len, config.compress_block_size),
    }
    for branch, count in needed.items():
        part: PagedKV = getattr(pages, branch)
        if part.capacity < count:
            what = "compressed tokens" if branch == "cmp" else "tokens"
            yield (
                f"pages.{branch} has room for {part.capacity} {what} a sequence"
                f" ({part.table.shape[1]} columns of {part.rows}), max_len {max_len} needs {count}:"
                " pass a table with more columns, or a smaller max_len"
            )


def check_sequences(cu_seqlens: torch.Tensor, lengths: torch.Tensor, rows: int) -> None:
    """Check the arguments of :func:`nsa_core.decode_rows`.

    Raises:
        InvalidInput: a type, shape, dtype or device is wrong, or a value, where it can be read.
    """
    check_types({"cu_seqlens": cu_seqlens, "lengths": lengths})
    shapes = [list(cu_seqlens.shape), list(lengths.shape)]
    if len(shapes[1]) != 1 or shapes[0] != [shapes[1][0] + 1] or not shapes[1][0]:
        raise InvalidInput(
            "cu_seqlens must be [B + 1] and lengths [B] for B >= 1 sequences, got"
            f" {shapes[0]} and {shapes[1]}"
        )
    for name, x in (("cu_seqlens", cu_seqlens), ("lengths", lengths)):
        if x.dtype != torch.int32:
            raise InvalidInput(f"{name} must be int32, got {x.dtype}: pass {name}.int()")
    if cu_seqlens.device != lengths.device:
        raise InvalidInput(
            f"cu_seqlens is on {cu_seqlens.device}, but lengths is on {lengths.device}"
        )
    if not isinstance(rows, torch.SymInt) and (problems := integer_problems("rows", rows, 0)):
        raise InvalidInput("; ".join(problems))
    if torch.compiler.is_compiling() or not checks_values(lengths):
        return
    new = cu_seqlens.diff()
    raise_at(cu_seqlens[:1] != 0, cu_seqlens, "cu_seqlens must begin with 0")
    raise_at(new < 0, new, "cu_seqlens must not fall, its differences are the new tokens")
    raise_at(lengths < new, lengths, "lengths must be at least the new tokens, which they include")
    raise_at(cu_seqlens > rows, cu_seqlens, f"cu_seqlens must be at most rows = {rows}")


def checked_host_integers(on_host: object, batch: int, rows: int) -> tuple[list[int], list[int]]:
    """Return the argument ``on_host`` of :func:`nsa_core.decode_rows` as lists.

    Raises:
        InvalidInput: it is no pair of integers that are possible for ``batch`` sequences.
    """
    cu_seqlens = lengths = None
    if isinstance(on_host, Sequence) and len(on_host) == 2:
        cu_seqlens, lengths = map(as_integers, on_host)
    if (
        cu_seqlens is None
        or lengths is None
        or [len(cu_seqlens) - 1, len(lengths)] != [batch, batch]
        or cu_seqlens[0] != 0
        or cu_seqlens[-1] > rows
        or not all(0 <= b - a <= n for a, b, n in zip(cu_seqlens, cu_seqlens[1:], lengths))
    ):
        raise InvalidInput(
            f"on_host must be the values of cu_seqlens and lengths for {batch} sequences and {rows}"
            f" rows as host integers, got {shown(on_host)}"
        )
    return cu_seqlens, lengths


def check_plan(
    plan: Plan, config: NSAConfig, x: torch.Tensor, page_size: int | None, kv_dtype: str | None
) -> None:
    """Check that ``plan`` fits steps of a layer.

    Args:
        plan: the plan.
        config: the sizes of the layer.
        x: a tensor with the dtype of q, on its device.
        page_size: tokens of a page of sel; None: sel has no pages.
        kv_dtype: the dtype of quantized pages.

    Raises:
        InvalidInput: it does not; the message names what the plan is for and what the steps need.
    """
    check_is_plan(plan)
    request = plan.requests["cmp"]
    problems = request_problems(request, "decode", x, {})
    if plan.config != config:
        problems.append(f"plan is for {plan.config}, but the call has {config}")
    for name, needed in (("page_size", page_size), ("kv_dtype", kv_dtype)):
        if (actual := getattr(request, name)) != needed:
            problems.append(f"plan is for {name} {actual}, but that of the pages is {needed}")
    if problems:
        raise InvalidInput("; ".join(problems))


class _Span(NamedTuple):
    """Rows that a step uses in one branch, int64 [sequences] each.

    Attributes:
        low: the first row that it reads or writes.
        new: the first row that it writes.
        end: one past the last row.
    """

    low: torch.Tensor
    new: torch.Tensor
    end: torch.Tensor


def check_values(
    pages: LayerPages,
    call: DecodeCall,
    chunks: Sequence[Chunk],
    sources: Mapping[str, Iterable[torch.Tensor | None]],
) -> None:
    """Check the positions of the rows, the entries of the tables, and who owns the pages.

    The check runs for tensors on the CPU, because reading a GPU's values synchronises; NSA_CHECK=1
    enables it for all devices.

    Args:
        pages: the pages.
        call: the call of the step.
        chunks: the rows that attend together.
        sources: for each branch the tensors whose rows its k and v get; None: other rows.

    Raises:
        InvalidInput: a row or an entry is out of range, a chunk has other rows, a table is too
            short, or a page that the step writes is used twice; the message names the sequence.
    """
    assert call.sequences is not None  # nsa_decode passes them
    if not checks_values(call.starts):
        return
    rows, starts, lengths = (x.long() for x in (call.sequences, call.starts, call.lengths))
    count = len(pages.sel.table)
    raise_at((rows < 0) | (rows >= count), rows, f"rows.sequences must be from 0 to {count - 1}")
    raise_at((starts < 0) | (lengths < starts), starts, "rows.starts must be from 0 to lengths")
    raise_at(lengths > starts + 1, lengths, "rows.lengths must be rows.starts, or one more")
    raise_at(
        lengths > call.max_len, lengths, f"rows.lengths must be at most max_len {call.max_len}"
    )
    _check_chunks(call, chunks)
    present = lengths > starts
    rows, starts = rows[present], starts[present]
    end = starts.new_zeros(count).scatter_reduce(0, rows, starts + 1, "amax")
    new = rows.bincount(minlength=count)
    places = rows * (call.max_len + 1) + starts
    if len(places.unique()) < len(places) or bool((starts < (end - new)[rows]).any()):
        raise InvalidInput(
            "the rows of a sequence must be its tokens lengths - new to lengths - 1, each once:"
            " make them with nsa_core.decode_rows"
        )
    first, geometry = end - new, call.geometry
    size, stride = geometry.compress_block_size, geometry.compress_stride
    past, complete = ((x - size + stride).div(stride, rounding_mode="floor") for x in (first, end))
    past, complete = past.clamp(min=0), complete.clamp(min=0)
    spans = {
        "cmp": _Span(torch.zeros_like(past), past, complete),
        "sel": _Span(torch.zeros_like(first), first, end),
        "win": _Span((first - geometry.window_size + 1).clamp(min=0), first, end),
        "raw": _Span(past * stride, first, end),
    }
    for branch, span in spans.items():
        _check_entries(branch, getattr(pages, branch), _Span(*(x * (new > 0) for x in span)))
    counts = (complete - past).clamp(min=0)
    ends = counts.cumsum(0)
    blocks = torch.arange(int(counts.sum()), device=ends.device)
    owners = torch.repeat_interleave(counts)
    blocks = blocks - (ends - counts - past)[owners]
    written = {b: (blocks, owners) if b == "cmp" else (starts, rows) for b in spans}
    _check_apart(pages, written, sources)


def _check_chunks(call: DecodeCall, chunks: Sequence[Chunk]) -> None:
    """Check that the rows of each chunk are its tokens."""
    assert call.sequences is not None  # nsa_decode passes them
    actual = (call.sequences, call.starts, call.lengths)
    for chunk in chunks:
        count = torch.arange(chunk.rows, device=call.starts.device)
        starts = chunk.start + count
        expected = (torch.full_like(count, chunk.sequence), starts, starts + 1)
        part = slice(chunk.row, chunk.row + chunk.rows)
        if not all(torch.equal(x[part], y.int()) for x, y in zip(actual, expected)):
            raise InvalidInput(
                f"rows.chunks has {chunk}, but its rows are other tokens: pass the values of"
                " cu_seqlens and lengths to decode_rows as on_host"
            )


def _check_entries(branch: str, pages: PagedKV, span: _Span) -> None:
    """Check the entries of one table that a step uses."""
    name, columns = f"pages.{branch}.table", pages.table.shape[1]
    too_many = span.end - span.low > pages.capacity
    raise_at(
        too_many,
        span.end - span.low,
        f"{name} has {columns} columns of {pages.rows} rows, too few for the rows that a step uses",
    )
    used, written = (_columns(low, span.end, pages) for low in (span.low, span.new))
    outside = used & ((pages.table < 0) | (pages.table >= len(pages.k)))
    raise_at(outside, pages.table, f"{name} must name one of {len(pages.k)} pages")
    # A sequence may begin after pages that another one fills in this step: all is written first.
    entries = pages.table.clamp(0, len(pages.k) - 1).long()
    if pages.scales is not None:
        is_used = used.new_zeros((len(pages.k), 1, 1)).index_fill_(0, entries[used], True)
        wrong = is_used & ~((pages.scales > 0) & pages.scales.isfinite())
        problem = f"pages.{branch}.scales must be finite and > 0 in each page that a step uses"
        raise_at(wrong, pages.scales, problem)
    places = entries * columns + torch.arange(columns, device=entries.device)
    # Numbers of the entries, because a pool may have far more pages than the table.
    entries, places = (x.unique(return_inverse=True)[1] for x in (entries, places))
    count = entries.numel()
    users, writers = (entries[x].bincount(minlength=count)[entries] for x in (used, written))
    here = places[used].bincount(minlength=count)[places]
    left_open = _columns(span.end - span.end % pages.rows, span.end, pages)
    shared = (writers > 1) | (users > here) | left_open & (users > 1)
    raise_at(
        written & shared,
        pages.table,
        f"{name}: the step writes to a page that is used twice; copy it first",
    )


def _check_apart(
    pages: LayerPages,
    written: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    sources: Mapping[str, Iterable[torch.Tensor | None]],
) -> None:
    """Check that no two rows that a step writes share memory, unless they are the same rows.

    Args:
        pages: the pages.
        written: the tokens that the step writes to each branch, and their sequences.
        sources: as in :func:`check_values`.
    """
    stores, begins, ends = [], [], []
    seen: dict[Any, torch.Tensor] = {}
    for branch, (tokens, sequences) in written.items():
        part: PagedKV = getattr(pages, branch)
        page, row = (x.long() for x in part.locate(tokens[:, None], sequences))
        for name, store, x in zip("kv", (part.k, part.v), sources[branch]):
            heads = torch.arange(store.shape[2], device=page.device) * store.stride(2)
            offsets = (page * store.stride(0) + row * store.stride(1) + heads).flatten()
            begin = store.data_ptr() + offsets * store.itemsize
            if x is not None:
                scales = None if part.scales is None else part.scales.data_ptr()
                first = seen.setdefault((name, x.data_ptr(), x.shape, x.stride(), scales), begin)
                if first is not begin and torch.equal(first, begin):
                    continue
            stores += [f"pages.{branch}.{name}"]
            begins.append(begin)
            ends.append(begin + store.shape[3] * store.itemsize)
    counts = torch.tensor([len(x) for x in begins], device="cpu")
    owner = torch.repeat_interleave(counts).to(begins[0].device)
    begin, order = torch.cat(begins).sort()
    shared = (begin[1:] < torch.cat(ends)[order][:-1]).nonzero()
    if len(shared):
        first, second = sorted(owner[order][int(shared[0]) :][:2].tolist())
        raise InvalidInput(
            f"rows that the step writes to {stores[first]} and {stores[second]} share memory: give"
            " the keys and the values of each branch pages of their own"
        )


def _columns(low: torch.Tensor, end: torch.Tensor, pages: PagedKV) -> torch.Tensor:
    """Return which columns of the table the rows low .. end - 1 use, bool [sequences, columns]."""
    count = pages.table.shape[1]
    first, last = low // pages.rows, (end - 1).div(pages.rows, rounding_mode="floor")
    column = torch.arange(count, device=low.device)
    offset = (column - first[:, None]) % count
    return (offset <= (last - first)[:, None]) & (low < end)[:, None]


def raise_at(wrong: torch.Tensor, values: torch.Tensor, problem: str) -> None:
    """Raise ``problem`` with the first wrong value and its index, if there is one."""
    if bool(wrong.any()):
        index = wrong.nonzero()[0].tolist()
        raise InvalidInput(f"{problem}, got {shown(values[tuple(index)].item())} at {index}")
