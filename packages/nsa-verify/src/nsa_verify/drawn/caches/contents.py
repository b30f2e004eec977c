"""The content of a cache: rows that visible tokens own, compared with the rows of a prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import DecodeCall
from nsa_verify.checks.decode_fused import judge_rotated
from nsa_verify.drawn.caches.layers import Rows, exact_k_cmp, exact_k_rows, exact_v_cmp
from nsa_verify.problems.findings import bits
from nsa_verify.problems.step_data import page_of

if TYPE_CHECKING:
    from nsa_core.cache.cache import NSACache


class Fault(NamedTuple):
    """A difference from what a cache must hold or a step must return.

    Attributes:
        slot: The slot whose result is wrong, or "".
        quantity: The wrong quantity.
        detail: What differs, and where.
    """

    slot: str
    quantity: str
    detail: str


def owned(config: NSAConfig, length: int, first: int | None = None) -> dict[str, range]:
    """Return the rows of each buffer that a sequence of ``length`` tokens needs.

    Args:
        config: Configuration of the layer.
        length: Length of the sequence.
        first: Its oldest token that may still be a query; None: the next token is the oldest.
    """
    geometry, first = config.geometry, length if first is None else first
    complete, complete_at_first = geometry.num_compressed(length), geometry.num_compressed(first)
    oldest = first - config.window_size + 1
    return {
        "raw": range(complete_at_first * config.compress_stride, length),
        "sel": range(length),
        "win": range(max(0, oldest), length),
        "cmp": range(complete),
    }


def read_rows(
    store: torch.Tensor,  # [pages, rows, heads, D]
    rows: range,
    b: int,
    table: torch.Tensor,  # int32 [B, columns]
) -> torch.Tensor:
    """Return rows of sequence ``b`` of a buffer, [len(rows), heads, D]."""
    index, size = torch.arange(rows.start, rows.stop, device=store.device), store.shape[1]
    return store[page_of(table[b], index, size), index % size]


def content_faults(
    cache: NSACache, expected: Sequence[Rows], spans: Sequence[tuple[int, int]], fused: bool
) -> Iterator[Fault]:
    """Compare every row that a step may read, now or after a crop, with the row of a prefill.

    Args:
        cache: The cache.
        expected: The rows of each sequence.
        spans: The least length to which each sequence can be cropped, and its length.
        fused: Whether the backend writes the rows of a step, and may round rotated rows once less.
    """
    host, lengths = cache.host_lengths(), [length for _, length in spans]
    if not host == cache.lengths.tolist() == lengths:
        detail = f"{cache.lengths.tolist()} on the device, {host} on the host, expected {lengths}"
        yield Fault("", "lengths", detail)
        return
    for b, (least, length) in enumerate(spans):
        for name, rows in owned(cache.config, length, least).items():
            pages = getattr(cache.kv.pages, name)
            for kind in "kv":
                store = getattr(pages, kind)
                if not _is_comparable(cache.config, name, kind, fused):
                    continue
                actual = read_rows(store, rows, b, pages.table)
                detail = _difference(
                    cache.config, name, kind, actual, expected[b][f"{kind}_{name}"], rows, fused
                )
                if detail:
                    yield Fault("", f"{kind}_{name}", f"{detail} of sequence {b}")


def _is_comparable(config: NSAConfig, name: str, kind: str, fused: bool) -> bool:
    """Return whether the rows of a buffer have one right value."""
    if kind == "v":
        return name != "cmp" or exact_v_cmp(config)
    return exact_k_cmp(config) if name == "cmp" else exact_k_rows(config)


def _difference(
    config: NSAConfig,
    name: str,
    kind: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    rows: range,
    fused: bool,
) -> str:
    """Describe the first wrong row; "" if there is none."""
    expected = expected[rows.start : rows.stop]
    if not len(expected):
        return ""
    differ = (bits(actual) != bits(expected)).flatten(1).any(1)
    is_rotated = kind in "kq" and config.rope and (name != "raw" or config.rope_before_compress)
    if not bool(differ.any()) or (
        fused and is_rotated and judge_rotated(actual, expected, actual.dtype)
    ):
        return ""
    first = rows.start + int(differ.nonzero()[0, 0])
    unit = "compressed token" if name == "cmp" else "token"
    return f"{int(differ.sum())} of {len(rows)} rows are wrong, first that of {unit} {first}"


Dense = dict[str, torch.Tensor]  # q, k_ and v_ of cmp, sel and win, [B, longest, heads, D]


def received(
    config: NSAConfig,
    q: torch.Tensor,  # [B, m, Hq, Dk]
    stores: dict[str, torch.Tensor],
    call: DecodeCall,
    spans: Sequence[tuple[int, int]],  # start and length of each sequence
) -> Dense:
    """Return, as whole sequences on the CPU, the tensors that the decode forms received.

    Rows that no query of the step sees are 0.
    """
    longest = max(length for _, length in spans)
    batch, rows = len(spans), config.geometry.num_compressed(longest)
    dense = {"q": torch.zeros((batch, longest, *q.shape[2:]), dtype=q.dtype)}
    for b, (start, length) in enumerate(spans):
        dense["q"][b, start:length] = q[b, : length - start].cpu()
    for name, store in stores.items():
        number = rows if name.endswith("_cmp") else longest
        dense[name] = torch.zeros((batch, number, *store.shape[2:]), dtype=q.dtype)
        table = getattr(call.tables, name[2:])
        for b, (start, length) in enumerate(spans):
            visible = owned(config, length, start)[name[2:]]
            dense[name][b, visible.start : visible.stop] = read_rows(store, visible, b, table).cpu()
    return dense


def received_faults(
    config: NSAConfig,
    dense: Dense,
    expected: Sequence[Rows],
    spans: Sequence[tuple[int, int]],
    fused: bool,
) -> Iterator[Fault]:
    """Compare the tensors that the decode forms received with the rows of a prefill."""
    for b, (start, length) in enumerate(spans):
        if start == length:
            continue
        visible = owned(config, length, start)
        for name, tensor in dense.items():
            rows = range(start, length) if name == "q" else visible[name[2:]]
            part = tensor[b, rows.start : rows.stop]
            yield from row_faults(config, name, part, expected[b], rows, b, fused)


def row_faults(
    config: NSAConfig,
    name: str,
    actual: torch.Tensor,  # [len(rows), heads, D], on the CPU
    expected: Rows,
    rows: range,
    sequence: int,
    fused: bool = False,
) -> Iterator[Fault]:
    """Compare ``rows`` of a tensor that a kernel received with those of a prefill.

    ``name`` is q, or k or v, an underscore and sel, win or cmp.
    """
    branch, kind = ("q", "k") if name == "q" else (name[2:], name[0])
    if not _is_comparable(config, branch, kind, fused):
        return
    detail = _difference(config, branch, name[0], actual, expected[name].cpu(), rows, fused)
    if detail:
        yield Fault("", f"{name} of a step", f"{detail} of sequence {sequence}")
