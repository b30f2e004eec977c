"""The fold: causal attention over folded queries equals masked compressed attention."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from nsa_core import BlockGeometry
from nsa_core.fold import PackedFold, Residues, fold, partial_fold, unfold
from nsa_core.packing import compressed_cu_seqlens

GEOMETRIES = {
    "l=8 d=4": BlockGeometry(8, 4, 16, 4),
    "d=1": BlockGeometry(4, 1, 8, 4),
    "l=d": BlockGeometry(4, 4, 8, 4),
}
EACH = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
LENGTHS = range(8, 24)


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of q [..., S, h, D] over k, v [..., I, D] under a mask ``seen`` bool [S, I].

    Rows without a visible key are 0.
    """
    scores = torch.einsum("...shd,...id->...shi", q, k).masked_fill(~seen[:, None], -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v.unsqueeze(-3)


def compressed_attention(q: Tensor, k: Tensor, v: Tensor, geometry: BlockGeometry) -> Tensor:
    """Attention of [S, Hq, D] over [I, G, D] under the visibility rule i * d + l - 1 <= t."""
    token, block = torch.arange(len(q))[:, None], torch.arange(len(k))
    seen = block * geometry.compress_stride + geometry.compress_block_size - 1 <= token
    grouped = q.unflatten(1, (k.shape[1], -1)).transpose(0, 1)
    return attend(grouped, k.transpose(0, 1), v.transpose(0, 1), seen).transpose(0, 1).flatten(1, 2)


def causal(runs: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of folded queries [I, G, d, h, D] over [I, G, D]: run r sees keys 0 .. r."""
    rows = runs.flatten(2, 3).transpose(0, 1)
    seen = torch.ones(len(k), len(k), dtype=torch.bool).tril()
    o = attend(rows, k.transpose(0, 1), v.transpose(0, 1), seen)
    return o.transpose(0, 1).unflatten(2, runs.shape[2:4])


@pytest.mark.few_cases
@EACH
@pytest.mark.parametrize("group_major", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_causal_attention_over_folded_queries(
    length: int, group_major: bool, geometry: BlockGeometry
) -> None:
    count = geometry.num_compressed(length)
    q, k, v = values(2, length, 6, 5), values(2, count, 2, 5), values(2, count, 2, 5)
    runs = fold(q, 2, geometry, group_major=group_major)
    assert runs.transpose(1, 2).is_contiguous() == group_major or count == 1
    o = torch.stack([causal(*sequence) for sequence in zip(runs, k, v)])
    expected = torch.stack([compressed_attention(*x, geometry) for x in zip(q, k, v)])
    torch.testing.assert_close(unfold(o, length, geometry), expected)
    out = q.new_full((2, 6, length, 5), torch.nan).transpose(1, 2)  # any strides
    assert unfold(o, length, geometry, blank=7.0, out=out) is out
    assert (out[:, : geometry.compress_block_size - 1] == 7).all()
    assert torch.equal(
        out[:, geometry.compress_block_size - 1 :],
        unfold(o, length, geometry)[:, geometry.compress_block_size - 1 :],
    )


@EACH
@pytest.mark.parametrize("first_query", range(14))
def test_fold_of_queries_inside_a_sequence(first_query: int, geometry: BlockGeometry) -> None:
    """Each run holds the rows of the whole fold that are given, and 0 elsewhere."""
    x = values(2, 24, 4, 3) + 9  # no zeros
    for end in range(first_query + 1, 25):
        part = partial_fold(first_query, end - first_query, geometry)
        rows = x[:, first_query:end]
        expected = torch.full_like(rows, 7.0)
        if part.first < part.stop:
            runs = fold(rows, 2, geometry, first_query=first_query)
            given = torch.zeros_like(x)
            given[:, first_query:end] = rows
            whole = fold(given[:, :end], 2, geometry)
            assert torch.equal(runs, whole[:, part.first : part.stop])
            assert not whole[:, : part.first].any()
            unfolded = unfold(runs, end - first_query, geometry, first_query=first_query, blank=7.0)
            expected[:, part.blank :] = rows[:, part.blank :]
            assert torch.equal(unfolded, expected)
        hidden = geometry.compress_block_size - 1
        assert part.blank == len(range(first_query, min(end, hidden)))


@EACH
@pytest.mark.parametrize("length", LENGTHS)
def test_entries_without_a_token_are_zero(length: int, geometry: BlockGeometry) -> None:
    runs = fold(values(1, length, 2, 3), 1, geometry)
    seen = length - (geometry.compress_block_size - 1)
    assert not runs.transpose(2, 3).flatten(1, 2)[:, seen:].any()


@EACH
@pytest.mark.parametrize("lengths", [(9, 14, 30), (0, 3, 17, 0), (23,), (3, 8)])
def test_packed_fold_equals_compressed_attention_per_document(
    lengths: tuple[int, ...], geometry: BlockGeometry
) -> None:
    total = sum(lengths)
    bounds = [0, *itertools.accumulate(lengths)]
    packed = PackedFold.of(torch.tensor(bounds, dtype=torch.int32), total, geometry)
    rows = geometry.max_compressed(total)
    q, k, v = values(total, 6, 5), values(rows, 2, 5), values(rows, 2, 5)
    runs, expected, o = packed.fold(q, 2), torch.zeros_like(q), values(rows, 2, 1, 1, 5)
    o = o.expand(*runs.shape).clone()  # runs of no document are not 0
    for first, last, key, end in zip(bounds, bounds[1:], packed.cu, packed.cu[1:]):
        if key < end:
            expected[first:last] = compressed_attention(
                q[first:last], k[key:end], v[key:end], geometry
            )
            o[key:end] = causal(runs[key:end], k[key:end], v[key:end])
    torch.testing.assert_close(packed.unfold(o), expected)
    assert packed.is_tail(rows).tolist() == [row >= packed.cu[-1] for row in range(rows)]
    assert int((~packed.empty[: packed.cu[-1]]).sum()) == int((~packed.blank).sum())


@pytest.mark.few_cases
@EACH
@pytest.mark.parametrize("first_query", range(27))
def test_packed_fold_of_rows_inside_the_packed_axis(
    first_query: int, geometry: BlockGeometry
) -> None:
    """Causal attention of the runs, aligned at the last key, equals rows of the whole result."""
    lengths = (0, 9, 3, 0, 14, 1)
    bounds = [0, *itertools.accumulate(lengths)]
    q = values(bounds[-1], 4, 3)
    rows = geometry.max_compressed(bounds[-1])
    k, v = values(rows, 2, 3), values(rows, 2, 3) + 1
    cu = torch.tensor(bounds, dtype=torch.int32)
    starts = compressed_cu_seqlens(cu, geometry).tolist()
    expected = torch.zeros_like(q)
    for (first, last), key in zip(itertools.pairwise(bounds), starts):
        count = geometry.num_compressed(last - first)
        document_k, document_v = k[key : key + count], v[key : key + count]
        if count:
            expected[first:last] = compressed_attention(
                q[first:last], document_k, document_v, geometry
            )
    # Before row l, no document has a compressed token.
    for stop in range(max(first_query + 1, geometry.compress_block_size), bounds[-1] + 1):
        total = stop - first_query
        part = PackedFold.of(cu.clamp(max=stop), total, geometry, first_query)
        runs = part.fold(q[first_query:stop], 2)
        o = torch.full_like(runs, torch.nan)
        for i in range(len(lengths)):
            run, key = (
                slice(part.cu[i], part.cu[i + 1]),
                slice(part.cu_keys[i], part.cu_keys[i + 1]),
            )
            count, keys = run.stop - run.start, key.stop - key.start
            if not count:
                continue
            assert key.start == starts[i]
            before = runs.new_zeros((keys - count, *runs.shape[1:]))
            aligned = causal(torch.cat([before, runs[run]]), k[key], v[key])
            o[run] = aligned[keys - count :]
        assert part.cu[-1] <= len(runs) == PackedFold.max_runs(total, geometry, first_query)
        torch.testing.assert_close(part.unfold(o), expected[first_query:stop])
        entries = part.empty[: part.cu[-1]]
        assert int((~entries).sum()) == int((~part.blank).sum())


def test_residues_are_views() -> None:
    geometry, x = GEOMETRIES["l=8 d=4"], values(40, 3, 2)[2:, :, :]
    part = Residues(first=7 + 1, residues=3, runs=5, keys=4, stride=4)
    view = part.queries(x)
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    for j, r in itertools.product(range(3), range(5)):
        assert torch.equal(view[j, r], x[8 + j + r * geometry.compress_stride])
    keys = part.shared(x)
    assert keys.shape == (3, 4, 3, 2)
    assert keys.stride(0) == 0
    assert torch.equal(keys[2], x[:4])
