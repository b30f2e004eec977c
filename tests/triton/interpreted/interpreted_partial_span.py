"""cmp, win and select on queries that begin inside a sequence (contract 1.1)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random

import pytest
import torch
from torch import Tensor

import interpreted_span
from interpreted_span import KEYS, MALFORMED, MODULES, inside_the_tensors
from nsa_backend_triton.host import launch_cache
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.select import forward as select
from nsa_backend_triton.span import cmp
from nsa_backend_triton.strict.interpreter import strict
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from slot_results import assert_slot_correct

GEOMETRY = BlockGeometry(8, 4, 16, 2, 0, 1, 18)
#  documents at 0, 0, 5, 25, 26, 26 and 46
LENGTHS = (0, 5, 20, 1, 0, 20, 0)
BOTH = pytest.mark.parametrize("slot", MODULES)
TILE = {"BLOCK_M": 16, "BLOCK_H": 2, "BLOCK_N": 16}  # 8 tokens
TILES = {"span_forward": TILE, "span_dq": TILE, "span_dkdv": {"BLOCK_M": 16, "BLOCK_N": 16}}


@dataclasses.dataclass(frozen=True)
class Whole:
    """A call on whole sequences; several ``lengths`` are packed documents."""

    slot: str
    lengths: tuple[int, ...]
    batch: int = 1
    heads: int = 2
    geometry: BlockGeometry = GEOMETRY
    scale: float = 0.25
    dtype: torch.dtype = torch.float64

    @property
    def packed(self) -> bool:
        return len(self.lengths) > 1

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the slot's keys and values."""
        return KEYS.get(self.slot, ("k_cmp",))

    def call(self) -> SlotCall:
        bounds = [0, *itertools.accumulate(self.lengths)]
        cu = torch.tensor(bounds, dtype=torch.int32) if self.packed else None
        return SlotCall(self.geometry, self.scale, cu, max(self.lengths))

    def num_keys(self, length: int) -> int:
        """Rows of k or k_cmp for ``length`` tokens."""
        if self.slot == "win":
            return length
        g = self.geometry
        return g.max_compressed(length) if self.packed else g.num_compressed(length)

    def tensors(self) -> dict[str, Tensor]:
        """Return q, the keys, do, and for select the lse."""
        generator, lead = torch.Generator().manual_seed(5), () if self.packed else (self.batch,)
        shapes = {"q": (self.total, self.heads), "do": (self.total, self.heads)}
        shapes |= dict.fromkeys(self.keys, (self.num_keys(self.total), 1))
        x = {
            name: torch.randn(*lead, *shape, 16, generator=generator, dtype=self.dtype)
            for name, shape in shapes.items()
        }
        if self.slot == "select":
            x["lse"] = cmp.forward(x["q"], x["k_cmp"], x["k_cmp"], call=self.call())[1]
        return x


@dataclasses.dataclass(frozen=True)
class Piece:
    """The rows first .. end - 1 of q of a whole call; ``extra``: with all of its keys."""

    whole: Whole
    first: int
    end: int
    extra: bool = True

    def rows(self, name: str, x: Tensor) -> Tensor:
        """Return the piece's rows of ``x``, which has the rows of q."""
        axis = -1 if name == "lse" else -3
        return x.narrow(axis, self.first, self.end - self.first)

    def call(self) -> SlotCall:
        call = self.whole.call()
        cu, longest = call.cu_seqlens, call.max_seqlen
        if not self.extra:
            cu = None if cu is None else cu.clamp(max=self.end)
            longest = self.end if cu is None else int(cu.diff().max())
        return dataclasses.replace(call, cu_seqlens=cu, max_seqlen=longest, first_query=self.first)

    def tensors(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the piece's part of the whole call's tensors."""
        num_keys = self.whole.num_keys(self.whole.total if self.extra else self.end)
        return {
            name: y.narrow(-3, 0, num_keys) if name in self.whole.keys else self.rows(name, y)
            for name, y in x.items()
        }


def run(slot: str, call: SlotCall, x: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return o, lse and the gradients, or the blocks of select."""
    if slot == "select":
        with strict(seed):
            return {"blocks": select.forward(x["q"], x["k_cmp"], x["lse"], call=call)}
    return interpreted_span.run(slot, call, x, seed)


@functools.cache
def whole_results(whole: Whole) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors and the results of the whole call."""
    x = whole.tensors()
    return x, run(whole.slot, whole.call(), x)


def assert_right(piece: Piece, results: dict[str, Tensor]) -> None:
    """Check o, lse, dq, dk and dv against the oracle, whose dO is 0 outside the piece."""
    whole, expected = piece.whole, piece.whole.call()
    x, _ = whole_results(whole)
    do = torch.zeros_like(x["do"])
    piece.rows("do", do).copy_(piece.rows("do", x["do"]))
    shapes = {"o": x["q"].shape, "lse": (*x["q"].shape[:-3], whole.heads, whole.total)}
    full = {}
    for name, result in results.items():
        like = shapes[name] if name in shapes else x[name[1:]].shape
        full[name] = result.new_zeros(like)
        if name[1:] in whole.keys:
            full[name].narrow(-3, 0, result.shape[-3]).copy_(result)
        else:
            piece.rows(name, full[name]).copy_(result)
    inputs = {name: x[name] for name in ("q", *whole.keys)}
    rows, cu = range(piece.first, piece.end), expected.cu_seqlens
    sizes = (whole.geometry, whole.scale)
    assert_slot_correct(whole.slot, inputs, full, *sizes, cu_seqlens=cu, do=do, rows=rows)


def check(piece: Piece, *, bits: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Run the piece and check its results; those named in ``bits`` equal the whole call's."""
    x, whole = whole_results(piece.whole)
    results = run(piece.whole.slot, piece.call(), piece.tensors(x), seed=piece.first)
    for name in bits:
        assert torch.equal(results[name], piece.rows(name, whole[name])), (piece, name)
    if piece.whole.slot != "select":
        assert_right(piece, results)
    return results


def cuts(total: int, seed: int, at: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """Return pieces of 0 .. total: two random cuts, and those of ``at``."""
    inner = {*random.Random(seed).sample(range(1, total), 2), *at}
    return list(itertools.pairwise([0, *sorted(inner), total]))


def check_cut(whole: Whole, pieces: list[tuple[int, int]], *, extra: bool) -> None:
    bits = ("blocks",) if whole.slot == "select" else ()
    for first, end in pieces:
        check(Piece(whole, first, end, extra), bits=bits)


SLOTS = ("cmp", "select", "win")
DENSE, PACKED = (37,), LENGTHS
CUT_AT = (5, 26)  # between documents; with all keys, pieces span documents


@pytest.mark.few_cases("select-dense")
@pytest.mark.parametrize(
    ("lengths", "extra"),
    [
        pytest.param(DENSE, True, id="dense"),
        pytest.param(PACKED, True, id="packed"),
        pytest.param(DENSE, False, id="dense, fewest keys"),
        pytest.param(PACKED, False, id="packed, fewest keys", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("slot", SLOTS)
def test_pieces_of_a_random_cut(slot: str, lengths: tuple[int, ...], extra: bool) -> None:
    whole = Whole(slot, lengths, batch=1 if extra or len(lengths) > 1 else 2)
    between = CUT_AT if whole.packed and not extra else ()
    check_cut(whole, cuts(whole.total, 3, between), extra=extra)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lengths", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("slot", SLOTS)
def test_pieces_of_more_random_cuts(slot: str, lengths: tuple[int, ...], seed: int) -> None:
    heads, geometry = (1, 3, 4, 2)[seed], dataclasses.replace(GEOMETRY, window_size=7 * seed + 1)
    whole = Whole(slot, lengths, heads=heads, geometry=geometry, scale=(-1) ** seed * 0.3)
    check_cut(whole, cuts(whole.total, 10 + seed), extra=seed % 2 == 0)


FIRST = range(11, 11 + GEOMETRY.select_block_size)  # all residues mod l', and so mod d


@pytest.mark.few_cases("cmp")
@pytest.mark.parametrize("slot", SLOTS)
def test_one_row_at_every_residue(slot: str) -> None:
    whole = Whole(slot, DENSE, heads=1)
    x, expected = whole_results(whole)
    for first in FIRST:
        piece = Piece(whole, first, first + 1)
        part, call = piece.tensors(x), piece.call()
        if slot == "select":
            check(piece, bits=("blocks",))
            continue
        o, lse = MODULES[slot].forward(*(part[name] for name in ("q", *whole.keys)), call=call)
        for name, result in (("o", o), ("lse", lse)):
            torch.testing.assert_close(
                result, piece.rows(name, expected[name]), rtol=1e-12, atol=1e-14
            )


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [DENSE, (3, 34)], ids=["dense", "packed"])
@pytest.mark.parametrize("slot", SLOTS)
def test_pieces_of_seven_rows_at_every_residue(slot: str, lengths: tuple[int, ...]) -> None:
    whole = Whole(slot, lengths, heads=1)
    for first in FIRST:
        check(Piece(whole, first, first + 7), bits=("blocks",) if slot == "select" else ())


@pytest.mark.few_cases("cmp-descriptors")
@pytest.mark.parametrize(
    "settings", [{"QUERY_SPLITS": 3}, {"USE_TMA": 1}], ids=["pointers", "descriptors"]
)
@BOTH
def test_pieces_for_other_settings(
    slot: str, settings: dict[str, int], tiles: dict[str, dict[str, int]]
) -> None:
    """Rows of q and tokens differ by no multiple of 4, at which descriptors read statistics.

    A NaN in keys behind the last query changes nothing, and whole tiles have equal bits.
    """
    tiles |= {kernel: {**tile, **settings} for kernel, tile in TILES.items()}
    whole = Whole(slot, (45,), batch=2, dtype=torch.float32)
    x = whole.tensors()
    expected = run(slot, whole.call(), x)
    for first, end, names in [(13, 34, ()), (16, 32, ("o", "lse", "dq"))]:
        piece = Piece(whole, first, end)
        part = piece.tensors(x)
        num_keys = whole.num_keys(end)
        for name in whole.keys:
            part[name] = part[name].clone()
            part[name][:, num_keys:] = torch.nan
        results = run(slot, piece.call(), part)
        assert_right(piece, results)
        for name in names:
            assert torch.equal(results[name], piece.rows(name, expected[name])), (first, name)


@pytest.mark.few_cases("cmp-3")
@pytest.mark.parametrize("first", [0, 3])
@BOTH
def test_queries_without_keys(slot: str, first: int) -> None:
    """Tokens 0 .. 6 see no compressed key; dk and dv are 0 in every row that none sees."""
    for lengths in (DENSE, (3, 34)):
        results = check(Piece(Whole(slot, lengths), first, 7))
        for name in KEYS[slot]:
            assert not results[f"d{name}"][..., 7:, :, :].any()


def test_first_rows_of_the_packed_axis_with_as_many_compressed_rows() -> None:
    """11 tokens and their first 8 have 2 compressed rows, but no query sees the second key."""
    geometry = BlockGeometry(4, 4, 4, 2, 0, 1, 5)
    piece = Piece(Whole("cmp", (5, 6), geometry=geometry), 0, 8)
    results = check(piece)
    for name in KEYS["cmp"]:
        assert results[f"d{name}"].shape[0] == 2
        assert not results[f"d{name}"][1].any()


@pytest.mark.few_cases
@pytest.mark.parametrize("bounds", MALFORMED)
@pytest.mark.parametrize("slot", SLOTS)
def test_malformed_boundaries_stay_inside_the_tensors(slot: str, bounds: tuple[int, ...]) -> None:
    whole = Whole(slot, (10, 10, 20), geometry=BlockGeometry(4, 2, 4, 2, 0, 1, 9))
    x, piece = whole.tensors(), Piece(whole, 13, 31)
    cu = torch.tensor(bounds, dtype=torch.int32)
    call = dataclasses.replace(piece.call(), cu_seqlens=cu, max_seqlen=40)
    with inside_the_tensors():
        run(slot, call, piece.tensors(x))


def test_cached_launches_distinguish_the_first_query() -> None:
    call = SlotCall(GEOMETRY, 0.25)
    later = dataclasses.replace(call, first_query=5)
    q, k = torch.empty(1, 4, 2, 16), torch.empty(1, 9, 1, 16)
    for a, b in [(call, later), (Sequences.of(q, k, call), Sequences.of(q, k, later))]:
        read = launch_cache.METADATA[type(a)]
        assert read(a) == read(a)
        assert read(a) != read(b)
    assert Sequences.of(q, k, call) != Sequences.of(q, k[:, :4], call)
