"""nsa_decode on the Triton backend, with values that nobody checked and with a head-major pool.

Values are not read on a GPU. Wrong ones may give wrong results, but the strict interpreter must see
no access outside the tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from nsa_core import DecodeRows, LayerPages, NSAConfig, PagedKV, decode_rows, nsa_decode
from nsa_core.decode import run
from nsa_core.layer.phi.kinds import make_phi

CONFIG = NSAConfig(
    dim=32, n_heads=4, n_kv_heads=2, head_dim=8, compress="linear", window_size=32, rope=False,
    compress_block_size=16, compress_stride=8, select_block_size=16, num_selected_blocks=3,
)  # fmt: skip
PHI = tuple(make_phi("linear", CONFIG.geometry, 8).requires_grad_(False) for _ in range(2))
COLUMNS, SEQUENCES = 6, 2
MARK = -7.0  # what memory holds that nothing may write to


def new_pages(ring: bool, dtype: torch.dtype | None = None) -> LayerPages:
    """Pages of marks, each of one sequence; win and raw are rings, or have tables like sel.

    With ``dtype``, they are quantized, and each page has scales of its own.
    """

    def part(rows: int, columns: int, dtype: torch.dtype | None = dtype) -> PagedKV:
        number = SEQUENCES * columns
        table = torch.full((SEQUENCES, columns + 1), number, dtype=torch.int32)[:, :columns]
        table.copy_(torch.arange(number).view(SEQUENCES, columns))
        stores = torch.full((2, number, rows, 2, 8), MARK).to(dtype or torch.float32)
        scales = None if dtype is None else torch.full((number, 2, 2), 0.05)
        return PagedKV(stores[0], stores[1], table, scales)

    newest = (COLUMNS * 16, 1) if ring else (16, COLUMNS)
    return LayerPages(part(2, COLUMNS), part(16, COLUMNS), part(*newest), part(*newest, dtype=None))


def unchecked(pages: LayerPages, rows: DecodeRows) -> torch.Tensor:
    count = len(rows.starts)
    torch.manual_seed(0)
    q, (k, v) = torch.randn(count, 4, 8), torch.randn(2, count, 2, 8)
    gates = torch.rand(count, 4, 3)
    with mock.patch.object(run, "check_values"):
        return nsa_decode(q, k, v, gates, pages, rows, config=CONFIG, phi=PHI, backends="triton")


def entry(branch: str, page: int) -> Callable[[LayerPages, DecodeRows], None]:
    """Name ``page`` in every column of sequence 1."""
    return lambda pages, rows: getattr(pages, branch).table[1].fill_(page)


WRONG: dict[str, Callable[[LayerPages, DecodeRows], object]] = {
    **{f"{b}: page 99": entry(b, 99) for b in LayerPages._fields},
    **{f"{b}: page -1": entry(b, -1) for b in LayerPages._fields},
    "starts below 0": lambda pages, rows: (rows.starts[1:].sub_(50), rows.lengths[1:].sub_(50)),
    "starts far below lengths": lambda pages, rows: rows.starts[1:].fill_(-1000),
    "a sequence beyond the tables": lambda pages, rows: rows.sequences[1:].fill_(SEQUENCES),
    "a negative sequence": lambda pages, rows: rows.sequences[1:].fill_(-(2**31)),
    "lengths beyond the tables": lambda pages, rows: rows.lengths[1:].fill_(2**31 - 1),
}


@pytest.mark.parametrize(
    ("name", "ring", "dtype"),
    [
        *((name, False, None) for name in WRONG),
        *((name, True, None) for name in WRONG if name[:3] in ("win", "raw")),
        *((name, False, torch.int8) for name in WRONG if ": page" in name),
    ],
)
def test_wrong_values_stay_inside_the_tensors(
    name: str, ring: bool, dtype: torch.dtype | None
) -> None:
    """Sequence 0 is right, so its output and its pages are those of a right call."""
    cu_seqlens = torch.tensor([0, 1, 3], dtype=torch.int32)
    rows = decode_rows(cu_seqlens, torch.tensor([16, 33], dtype=torch.int32), 3)
    expected_pages, pages = new_pages(ring, dtype), new_pages(ring, dtype)
    expected = unchecked(expected_pages, rows)
    WRONG[name](pages, rows)
    o = unchecked(pages, rows)
    assert torch.equal(o[0], expected[0])
    for part, right in zip(pages, expected_pages):
        own = len(part.k) // SEQUENCES  # pages of sequence 0
        assert torch.equal(part.k[:own], right.k[:own])
        assert torch.equal(part.v[:own], right.v[:own])
    assert (expected_pages.cmp.k != MARK).any()  # a block was complete


@pytest.mark.parametrize("name", [name for name in WRONG if "page" in name])
def test_wrong_pages_of_a_chunk_stay_inside_the_tensors(name: str) -> None:
    """They are gathered by torch, which raises for an index outside."""
    on_host = ([0, 1, 20], [16, 33])
    rows = decode_rows(*(torch.tensor(x, dtype=torch.int32) for x in on_host), 20, on_host)
    assert len(rows.chunks) == 1
    pages = new_pages(False)
    WRONG[name](pages, rows)
    assert unchecked(pages, rows).isfinite().all()


def test_a_page_may_hold_one_compressed_token() -> None:
    """An engine addresses compressed tokens one by one, so that it can share those of a prefix."""
    cu_seqlens = torch.tensor([0, 33, 33], dtype=torch.int32)
    rows = decode_rows(cu_seqlens, torch.tensor([33, 0], dtype=torch.int32), 33)
    pages = new_pages(ring=True)
    cmp = pages.cmp
    table = cmp.table[:, :, None] * 2 + torch.arange(2, dtype=torch.int32)
    stores = (torch.full((2 * len(cmp.k), 1, 2, 8), MARK) for _ in range(2))
    one_by_one = new_pages(ring=True)._replace(cmp=PagedKV(*stores, table.flatten(1)))
    assert torch.equal(unchecked(one_by_one, rows), unchecked(pages, rows))
    assert torch.equal(one_by_one.cmp.k.view_as(cmp.k), cmp.k)
    assert (cmp.k != MARK).any()


def test_the_offset_of_a_head_needs_64_bits() -> None:
    """A pool [heads, pages, rows, width] is a view whose stride of heads may be 2^30 and more."""
    config = dataclasses.replace(CONFIG, n_heads=3, n_kv_heads=3)
    stride, table = 2**30, new_pages(False).sel.table
    memory = torch.empty(2 * stride + 2**17, dtype=torch.float16)  # hardly any of it is touched
    offset, wide, narrow = 0, [], []
    for rows in (2, 16, 16, 16):
        views = []
        for _ in range(2):
            shape, strides = (table.numel(), rows, 3, 8), (rows * 8, 8, stride, 1)
            views.append(memory.as_strided(shape, strides, offset))
            offset += table.numel() * rows * 8
        wide.append(PagedKV(*views, table))
        narrow.append(PagedKV(*(torch.empty(shape, dtype=torch.float16) for _ in "kv"), table))
    cu_seqlens = torch.tensor([0, 17, 20], dtype=torch.int32)
    rows = decode_rows(cu_seqlens, torch.tensor([17, 3], dtype=torch.int32), 20)
    q, k, v = torch.randn(3, 20, 3, 8, dtype=torch.float16)
    gates = torch.ones(20, 3, 3)
    call = {"config": config, "phi": tuple(copy.deepcopy(x).half() for x in PHI)}
    outputs = [
        nsa_decode(q, k, v, gates, LayerPages(*pages), rows, **call, backends="triton")
        for pages in (wide, narrow)
    ]
    assert torch.equal(*outputs)
