"""The content of a cache: rows that visible tokens own, compared with the rows of a prefill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_verify.checks.decode_fused import judge_rotated
from nsa_verify.drawn.caches.layers import Rows, exact_k_cmp, exact_k_rows, exact_v_cmp
from nsa_verify.problems.findings import bits
from nsa_verify.problems.step_data import page_of

if TYPE_CHECKING:
    from nsa_core.cache.cache import NSACache


_ROUNDING = 2.0**-40  # of the largest number, in float64


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
                actual = read_rows(store, rows, b, pages.table).cpu()
                key = f"{kind}_{name}"
                yield from row_faults(cache.config, key, actual, expected[b], rows, b, fused)


def _has_one_value(config: NSAConfig, name: str, kind: str) -> bool:
    """Return whether the rows of a buffer have one right value."""
    if kind == "v":
        return name != "cmp" or exact_v_cmp(config)
    return exact_k_cmp(config) if name == "cmp" else exact_k_rows(config)


def row_faults(
    config: NSAConfig,
    key: str,
    actual: torch.Tensor,  # [len(rows), heads, D], on the CPU
    expected: Rows,
    rows: range,
    sequence: int,
    fused: bool,
) -> Iterator[Fault]:
    """Compare ``rows`` of a sequence with those of a prefill.

    Rows that have no one right value may differ by rounding in float64, and are not compared in
    other dtypes: the results are judged given these rows. ``key`` is k or v, an underscore and the
    branch; ``fused`` is as in :func:`content_faults`.
    """
    right, (kind, name) = expected[key][rows.start : rows.stop].cpu(), key.split("_")
    if not len(right):
        return
    wrong = bits(actual) != bits(right)
    if not _has_one_value(config, name, kind):
        if actual.dtype != torch.float64:
            return
        wrong = ~((actual - right).abs() <= _ROUNDING * right.abs().max())
    differ = wrong.flatten(1).any(1)
    is_rotated = kind == "k" and config.rope and (name != "raw" or config.rope_before_compress)
    if not bool(differ.any()) or (
        fused and is_rotated and judge_rotated(actual, right, actual.dtype)
    ):
        return
    first = rows.start + int(differ.nonzero()[0, 0])
    unit = "compressed token" if name == "cmp" else "token"
    detail = f"{int(differ.sum())} of {len(rows)} rows are wrong, first that of {unit} {first}"
    yield Fault("", key, f"{detail} of sequence {sequence}")
