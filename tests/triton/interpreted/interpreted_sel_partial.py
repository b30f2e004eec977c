"""sel for queries that begin inside a sequence, against the whole call and the oracle.

A piece has the queries of a few rows of a whole call, and their keys. Keys after its last query are
NaN, new tensors begin as NaN, and the strict interpreter reports accesses outside a tensor.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from interpreted_sel_forward import EVEN, GEOMETRY, LONG, ODD, problem, tuned
from launches import filled
from nsa_backend_triton.host import configs, launch_cache
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel import backward as sel_backward
from nsa_backend_triton.sel import forward as sel_forward
from nsa_backend_triton.sel import runs
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle

# Bounds of documents: 0, 0, 11, 12, 12, 29, 29.
DOCUMENTS = [0, 11, 1, 0, 17, 0]
CUTS = {
    "inside one document": (14, 22),
    "from a start": (12, 17),
    "up to an end": (5, 11),
    "a whole document": (11, 12),
    "the front of the first": (0, 4),
    "over several documents": (7, 20),
    "one row at an end": (28, 29),
    "one row at a start": (12, 13),
    "all rows": (0, 29),
}
QUICK_CUTS = ("over several documents", "one row at an end")


@pytest.fixture(autouse=True)
def new_tensors_hold_nan() -> Iterator[None]:
    """Fill new tensors, so that no result depends on memory that nothing wrote."""
    with filled():
        yield


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows first .. stop - 1 of the queries of a whole call.

    Attributes:
        x: q, k, v and blocks of the whole call.
        whole: the whole call.
        do: the gradient of the whole output.
        first: the piece's first row of q.
        stop: the end of its rows.
        extra: keys after its last query, in a dense call; a packed call has the keys of all
            documents.
    """

    x: dict[str, Tensor]
    whole: SlotCall
    do: Tensor
    first: int
    stop: int
    extra: int = 0

    @property
    def call(self) -> SlotCall:
        return dataclasses.replace(self.whole, first_query=self.first)

    @property
    def num_keys(self) -> int:
        rows = self.x["k"].shape[-3]
        return rows if self.whole.cu_seqlens is not None else min(rows, self.stop + self.extra)

    def rows(self, x: Tensor) -> Tensor:
        """Return the piece's rows of x [.., S, heads, width], a tensor like q."""
        return x[..., self.first : self.stop, :, :].clone()

    def inputs(self) -> dict[str, Tensor]:
        """Return q, k, v and blocks of the piece."""
        keys = {name: self.x[name][..., : self.num_keys, :, :].clone() for name in "kv"}
        for x in keys.values():
            x[..., self.stop :, :, :] = torch.nan
        return {"q": self.rows(self.x["q"]), **keys, "blocks": self.rows(self.x["blocks"])}

    def truth(self) -> oracle.Truth:
        """Return the oracle's results of the whole call, whose do is 0 outside the piece."""
        do = torch.zeros_like(self.do)
        do[..., self.first : self.stop, :, :] = self.rows(self.do)
        call = self.whole
        return oracle.sel(
            **self.x, geometry=call.geometry, scale=call.scale, cu_seqlens=call.cu_seqlens, do=do
        )

    def assert_forward(self, settings: sel_forward.Settings) -> tuple[Tensor, Tensor]:
        """Check o and lse against the oracle, and return them."""
        o, lse = sel_forward.forward(**self.inputs(), call=self.call, tuned=settings)
        truth = self.truth()
        assert truth.lse is not None
        torch.testing.assert_close(o, self.rows(truth.o), rtol=1e-13, atol=1e-14)
        expected = truth.lse[..., self.first : self.stop]
        torch.testing.assert_close(lse, expected, rtol=1e-13, atol=1e-14)
        return o, lse

    def gradients(self, deterministic: bool) -> list[Tensor]:
        """Return dq, dk and dv of the piece, for the oracle's o and lse."""
        truth, call = self.truth(), dataclasses.replace(self.call, deterministic=deterministic)
        assert truth.lse is not None
        o, lse = self.rows(truth.o), truth.lse[..., self.first : self.stop].clone()
        x = self.inputs()
        return list(sel_backward.backward(self.rows(self.do), *x.values(), o, lse, call=call))

    def assert_gradients(self, deterministic: bool) -> None:
        """Check dq, dk and dv against the oracle; unseen keys have gradients of exactly 0."""
        dq, dk, dv = self.gradients(deterministic)
        expected_dq, *of_keys = self.truth().grads.values()
        torch.testing.assert_close(dq, self.rows(expected_dq), rtol=1e-11, atol=1e-13)
        for x, expected in zip((dk, dv), of_keys, strict=True):
            assert x.shape[-3] == self.num_keys
            assert not x[..., self.stop :, :, :].any()
            torch.testing.assert_close(
                x, expected[..., : self.num_keys, :, :], rtol=1e-11, atol=1e-13
            )


def piece(
    first: int,
    stop: int,
    *,
    lengths: tuple[int, ...] = (29,),
    packed: bool = False,
    groups: int = 1,
    heads: int = 2,
    width: int = 8,
    geometry: BlockGeometry = GEOMETRY,
    extra: int = 0,
) -> Piece:
    """Return a piece of a call whose blocks are unsorted, repeated, negative, future and far."""
    x, call = problem(list(lengths), packed, groups, heads, width, width, geometry)
    do = torch.randn(x["q"].shape, dtype=torch.float64)
    return Piece(x, call, do, first, stop, extra)


def document_piece(name: str, **changes: int) -> Piece:
    """Return a piece of packed documents by the name of its cut."""
    return piece(*CUTS[name], lengths=tuple(DOCUMENTS), packed=True, **changes)


def quick(names: dict[str, tuple[int, int]]) -> list[object]:
    return [
        name if name in QUICK_CUTS else pytest.param(name, marks=pytest.mark.slow) for name in names
    ]


@pytest.mark.parametrize("min_sharing", [1, 2])
@pytest.mark.parametrize("name", quick(CUTS))
def test_output_of_cut_documents_equals_the_oracle(name: str, min_sharing: int) -> None:
    document_piece(name).assert_forward(tuned(min_sharing))


@pytest.mark.few_cases("over several documents-unordered", "one row at an end-unordered")
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("name", quick(CUTS))
def test_gradients_of_cut_documents_equal_the_oracle(name: str, deterministic: bool) -> None:
    document_piece(name).assert_gradients(deterministic)


# l' = 8: every residue of the first query, with pieces inside a block and over the next one.
@pytest.mark.parametrize("first", range(8, 16))
def test_output_for_every_residue_equals_the_oracle(first: int) -> None:
    piece(first, first + 5, lengths=(21,), extra=1).assert_forward(tuned(1 + first % 2))


@pytest.mark.parametrize("first", [9, *(pytest.param(f, marks=pytest.mark.slow) for f in range(8))])
@pytest.mark.parametrize("deterministic", [False, True], ids=["unordered", "ordered"])
def test_gradients_for_every_residue_equal_the_oracle(first: int, deterministic: bool) -> None:
    piece(first, first + 9, lengths=(21,), heads=1, extra=2).assert_gradients(deterministic)


@pytest.mark.few_cases("one key tile-1")
@pytest.mark.parametrize("min_sharing", [1, 2])
@pytest.mark.parametrize("geometry", [EVEN, ODD], ids=["one key tile", "two key tiles"])
def test_batch_of_pieces(geometry: BlockGeometry, min_sharing: int) -> None:
    """Sequences of a batch have other strides for queries than for keys."""
    part = piece(18, 23, lengths=(29, 29), geometry=geometry, extra=3)
    part.assert_forward(tuned(min_sharing))
    part.assert_gradients(min_sharing == 1)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_pieces_over_the_end_of_a_block_of_256(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = dict(configs.table(0))
    for kernel in ("sel_block_backward", "sel_tile_backward"):
        rows[kernel] = [({}, {**rows[kernel][0][1], "BLOCK_N": 64})]
    monkeypatch.setattr(configs, "table", lambda _: rows)
    part = piece(254, 258, lengths=(261, 2) if packed else (261,), packed=packed, geometry=LONG)
    for min_sharing in (1, 2):
        part.assert_forward(tuned(min_sharing, block_n=64))
    part.assert_gradients(False)
    part.assert_gradients(True)


def test_more_keys_than_queries_of_whole_sequences() -> None:
    """The queries begin at 0; only the number of keys says that the call is partial."""
    part = piece(0, 11, lengths=(19, 19), extra=8)
    part.assert_forward(tuned(2))
    part.assert_gradients(False)
    part.assert_gradients(True)


@pytest.mark.parametrize("packed", [False, True])
def test_aligned_piece_has_the_bits_of_the_whole_call(packed: bool) -> None:
    """Tiles of 8 tokens: a piece that begins on a tile has the whole call's tiles."""
    part = piece(8, 29, packed=packed)
    o, lse = sel_forward.forward(**part.x, call=part.whole, tuned=tuned(1))
    o2, lse2 = part.assert_forward(tuned(1))
    assert torch.equal(o2, part.rows(o))
    assert torch.equal(lse2, lse[..., 8:])


@pytest.mark.few_cases("False")
@pytest.mark.parametrize("packed", [False, True])
def test_partial_outputs_in_several_runs(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PARTIAL_BYTES", 5 * 4 * 2 * 8 * 8)  # 5 rows at a time
    monkeypatch.setattr(runs, "MAX_RUNS", 100)
    lengths = (3, 10, 16) if packed else (15, 15)
    piece(2, 14, lengths=lengths, packed=packed).assert_forward(tuned(7))


@pytest.mark.slow
def test_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read whole key tiles, of which the keys after the last query must be zeros."""
    part = piece(17, 30, lengths=(37, 37), groups=2, width=16, geometry=EVEN, extra=7)
    settings = {**tuned(2), "sel_forward": {**tuned(2)["sel_forward"], "USE_TMA": 1}}
    part.assert_forward(settings)
    rows = dict(configs.table(0))
    rows["sel_tile_backward"] = [({}, {**rows["sel_tile_backward"][0][1], "USE_TMA": 1})]
    monkeypatch.setattr(configs, "table", lambda _: rows)
    part.assert_gradients(deterministic=True)


@pytest.mark.slow
def test_many_segments() -> None:
    """A long sequence has several segments of tokens, of which a piece fills the last ones."""
    geometry = BlockGeometry(4, 2, 8, 2, 1, 1, 8)
    part = piece(150, 290, lengths=(291,), heads=1, geometry=geometry, extra=1)
    part.assert_gradients(deterministic=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounds", [(0, 28, 10, 10, 30), (0, 9, 70, 30), (0, -20, 11, 30), (6, 11, 20, 30)]
)
def test_malformed_boundaries_lead_to_no_access_outside_a_tensor(bounds: tuple[int, ...]) -> None:
    """The strict interpreter reports such an access."""
    part = piece(3, 24, lengths=(30,), packed=True, geometry=BlockGeometry(4, 2, 4, 4, 1, 1, 8))
    cu = torch.tensor(bounds, dtype=torch.int32)
    x, call = part.inputs(), dataclasses.replace(part.call, cu_seqlens=cu, max_seqlen=30)
    o, lse = sel_forward.forward(**x, call=call, tuned=tuned(2))
    # Rows of no document are undefined.
    o, lse = (torch.nan_to_num(t, 0.0, 0.0, 0.0) for t in (o, lse))
    for deterministic in (False, True):
        call = dataclasses.replace(call, deterministic=deterministic)
        sel_backward.backward(part.rows(part.do), *x.values(), o, lse, call=call)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_piece_equals_the_oracle(seed: int) -> None:
    draw = random.Random(seed)
    packed = draw.random() < 0.6
    count = draw.randint(1, 5) if packed else draw.randint(1, 2)
    equal = draw.randint(1, 40)
    lengths = (equal,) * count
    if packed:
        lengths = tuple(draw.choice([0, 1, draw.randint(1, 25)]) for _ in range(count))
    if not sum(lengths):
        lengths = (*lengths, 3)
    total = sum(lengths) if packed else equal
    first = draw.randrange(total)
    part = piece(
        first,
        draw.randint(first + 1, total),
        lengths=lengths,
        packed=packed,
        groups=draw.randint(1, 2),
        heads=draw.choice([1, 2, 3, 8]),
        geometry=draw.choice([GEOMETRY, EVEN, ODD]),
        extra=draw.choice([0, 1, 40]),
    )
    part.assert_forward(tuned(draw.choice([1, 2, 3])))
    part.assert_gradients(deterministic=draw.random() < 0.5)


@pytest.mark.parametrize(("first", "int64"), [(2**31 // 48 - 3, False), (2**31 // 48 - 2, True)])
def test_offsets_are_int64_from_the_last_position(first: int, int64: bool) -> None:
    """Offsets count from the start of the sequence, not from the first query."""

    def new(tokens: int, heads: int) -> Tensor:
        return torch.empty(1, device="meta").expand(1, tokens, heads, 12)

    q, k = new(3, 4), new(first + 3, 2)
    call = SlotCall(BlockGeometry(), 1.0, first_query=first)
    problem = sel_backward.Problem(q, q, k, k, q, q, Sequences.of(q, k, call), call)
    assert sel_backward._needs_int64_offsets(problem) == int64


def test_cached_launches_distinguish_the_first_query() -> None:
    calls = [SlotCall(GEOMETRY, 1.0, first_query=first) for first in (0, 3)]
    assert launch_cache._metadata(calls[0]) != launch_cache._metadata(calls[1])
    q, k = torch.empty(1, 2, 2, 8), torch.empty(1, 9, 2, 8)
    keys = {launch_cache._metadata(Sequences.of(q, k, call)) for call in calls}
    keys.add(launch_cache._metadata(Sequences.of(q, q, calls[0])))
    assert len(keys) == 3
