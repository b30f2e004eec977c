"""Queries that begin inside a sequence, compared with the oracle on the whole sequences."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import random

import pytest
import torch

from fa2_problems import SLOTS, SMALL, Piece, Problem
from fa2_standin import PROVIDERS, Library, make
from nsa_backend_fa2 import providers
from nsa_backend_fa2.plugin import nsa_register_backends
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle

# Empty documents at the start, in the middle and at the end; documents shorter than l, of exactly l
# tokens, and with an incomplete last run.
LENGTHS = (0, 17, 1, 0, 7, 8, 14, 0)
PROBLEMS = {
    "one": Problem((29,), batch=1),
    "batch": Problem(
        (26,), batch=2, heads=3, groups=1, Dk=5, Dv=9, geometry=BlockGeometry(6, 3, 9, 3, 1, 1, 4)
    ),
    "packed": Problem(LENGTHS, batch=None),
}
MORE = {
    "one-wide-window": Problem((27,), batch=1, geometry=BlockGeometry(8, 4, 16, 3, 1, 1, 100)),
    "one-l-is-d": Problem((22,), batch=1, Dv=5, geometry=BlockGeometry(4, 4, 8, 4, 1, 2, 1)),
    "batch-d-is-1": Problem((19,), geometry=BlockGeometry(4, 1, 8, 3, 1, 1, 5)),
    "packed-d-is-1": Problem(LENGTHS, batch=None, geometry=BlockGeometry(3, 1, 4, 3, 1, 1, 30)),
    "packed-l-is-3d": Problem(
        (9, 31, 2, 10), batch=None, heads=3, groups=1, geometry=BlockGeometry(12, 4, 12, 3, 1, 1, 7)
    ),
    "packed-negative-scale": Problem(LENGTHS, batch=None, scale=-0.3, Dk=5, Dv=9),
}


class Whole:
    """The inputs of a slot for whole sequences, on which pieces are compared with the oracle."""

    def __init__(self, slot: str, problem: Problem) -> None:
        self.slot, self.problem = slot, problem
        self.inputs, self.do, self.cu = problem.inputs(slot, torch.float32)

    @property
    def total(self) -> int:
        return sum(self.problem.lengths)

    def check(self, piece: Piece) -> None:
        """Run the piece, and compare o, lse and all gradients with the oracle."""
        outputs = piece.run(self.slot, self.inputs, self.do, self.cu)
        actual = piece.in_whole(outputs, self.inputs)
        rows = range(piece.first, piece.stop)
        truth = getattr(oracle, self.slot)(
            *self.inputs.values(),
            self.problem.geometry,
            self.problem.factor,
            cu_seqlens=self.cu,
            do=piece.outside(self.do),
            rows=rows,
        )
        expected = {"o": truth.o, "lse": truth.lse, **truth.grads}
        assert expected.keys() == actual.keys()
        for name, value in actual.items():
            golden, message = expected[name], f"{self.slot} {name} of {piece}"
            if name == "lse":
                value, golden = value[..., rows], golden[..., rows]
            error = (value.double() - golden).nan_to_num(nan=torch.inf, posinf=torch.inf)
            error.masked_fill_(value.double() == golden, 0)  # -inf
            assert error.abs().max() <= 2e-5, (message, float(error.abs().max()))
        dk, dv = (name for name in actual if name[:2] in ("dk", "dv"))
        unseen = (expected[dv] == 0).all(-1)
        assert not actual[dk][unseen].any()
        assert not actual[dv][unseen].any()


def piece_at(problem: Problem, first: int, stop: int, generator: random.Random) -> Piece:
    """Return the piece with no, some or all of the keys behind it."""
    return Piece(problem, first, stop, generator.choice([0, generator.randint(1, 5), None]))


@pytest.mark.few_cases("one-cmp", "batch-win")
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_pieces_from_every_first_query_match_the_oracle(
    name: str, slot: str, library: Library
) -> None:
    """Every residue of d and l', cuts inside, at and between documents, one row and more."""
    whole, generator = Whole(slot, PROBLEMS[name]), random.Random(1)
    for first in range(whole.total):
        stop = generator.choice([first + 1, generator.randint(first + 1, whole.total), whole.total])
        whole.check(piece_at(whole.problem, first, stop, generator))


@pytest.mark.slow
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", PROBLEMS | MORE)
def test_random_pieces_match_the_oracle(name: str, slot: str, library: Library) -> None:
    whole, generator = Whole(slot, (PROBLEMS | MORE)[name]), random.Random(2)
    all_pieces = list(itertools.combinations(range(whole.total + 1), 2))
    for first, stop in generator.sample(all_pieces, 80):
        whole.check(piece_at(whole.problem, first, stop, generator))


@pytest.mark.slow
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("library", PROVIDERS, indirect=True)
def test_random_pieces_match_the_oracle_with_every_provider(library: Library, slot: str) -> None:
    generator = random.Random(3)
    for problem in (PROBLEMS | MORE).values():
        whole = Whole(slot, problem)
        for _ in range(8):
            first, stop = sorted(generator.sample(range(whole.total + 1), 2))
            whole.check(piece_at(problem, first, stop, generator))


@pytest.mark.few_cases
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("library", PROVIDERS, indirect=True)
def test_every_provider_gives_bitwise_equal_results(
    library: Library, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above compare the provider 2.8.3 with the oracle."""
    for name, first, stop in (("one", 13, 27), ("batch", 10, 26), ("packed", 5, 41)):
        problem = PROBLEMS[name]
        inputs, do, cu = problem.inputs(slot, torch.float32)
        piece = Piece(problem, first, stop)
        outputs = piece.run(slot, inputs, do, cu)
        with monkeypatch.context() as context:
            context.setattr(providers, "active_provider", lambda: make("2.8.3", Library()))
            for key, value in piece.run(slot, inputs, do, cu).items():
                assert torch.equal(outputs[key], value), key
    assert {call["direction"] for call in library.calls} == {"forward", "backward"}


def test_win_is_one_call_over_the_keys_of_its_windows(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands, forward = [], library.forward
    monkeypatch.setattr(
        library,
        "forward",
        lambda q, k, v, **options: (operands.append((q, k, v)), forward(q, k, v, **options))[1],
    )
    for name in PROBLEMS:
        library.calls.clear()
        operands.clear()
        problem = dataclasses.replace(PROBLEMS[name], Dk=8, Dv=8)
        inputs, do, cu = problem.inputs("win", torch.float32)
        Piece(problem, 13, 21).run("win", inputs, do, cu)
        assert [call["direction"] for call in library.calls] == ["forward", "backward"]
        window = problem.geometry.window_size
        for call in library.calls:
            assert call["k"][-3] == 21 - 13 + window - 1
        for x, source in zip(operands[0], inputs):
            assert x.untyped_storage().data_ptr() == inputs[source].untyped_storage().data_ptr()


@pytest.mark.parametrize("first", [13, 15, 16, 18])
def test_cmp_is_one_causal_call_over_the_keys_that_the_last_query_sees(
    first: int, library: Library
) -> None:
    """Tokens 7, 11, 15 and 19 begin a run. One sequence has further calls for incomplete runs."""
    for batch, causal in ((1, first < 16), (2, True)):
        library.calls.clear()
        problem = Problem((37,), batch=batch)
        inputs, do, cu = problem.inputs("cmp", torch.float32)
        Piece(problem, first, 26).run("cmp", inputs, do, cu)
        keys = SMALL.num_compressed(26)
        forward = [call for call in library.calls if call["direction"] == "forward"]
        assert max(call["k"][1] for call in forward) == keys == 5
        assert [call["causal"] for call in forward if call["causal"]] == [True]
        if batch == 2:
            assert len(forward) == 1
        else:
            incomplete = (first != 15) + 1  # token 26 lies inside a run
            assert len(forward) == 1 + incomplete, causal


def test_packed_cmp_is_one_varlen_call(library: Library) -> None:
    problem = PROBLEMS["packed"]
    inputs, do, cu = problem.inputs("cmp", torch.float32)
    Piece(problem, 10, 40).run("cmp", inputs, do, cu)
    assert [call["direction"] for call in library.calls] == ["forward", "backward"]
    # Document 1 has three runs, and token 10 lies in its first one; documents 5 and 6 have one run
    # each before row 40.
    assert library.calls[0]["cu_q"].tolist() == [0, 0, 3, 3, 3, 3, 4, 4, 4]


def test_cmp_of_queries_that_see_no_key_does_not_call_the_library(library: Library) -> None:
    for problem in (Problem((29,), batch=1), Problem((29,)), Problem((7, 3), batch=None)):
        whole = Whole("cmp", problem)
        for first, stop in ((0, 7), (0, 1), (2, 5), (6, 7)):
            whole.check(Piece(problem, first, stop))
    assert not library.calls


@pytest.mark.parametrize("slot", SLOTS)
def test_row_17_malformed_boundaries_cause_no_invalid_access(slot: str, library: Library) -> None:
    """The fake library raises where the library would read out of bounds."""
    problem = Problem((30,), batch=None)
    inputs, do, _ = problem.inputs(slot, torch.float32)
    module = importlib.import_module(f"nsa_backend_fa2.{slot}")
    for bounds in ([0, 50, 20, 30], [0, -5, 30], [7, 3, 2**31 - 1], [0, 0, 0], [20, 25, 26]):
        for first, stop in ((5, 17), (11, 30), (29, 30)):
            piece = Piece(problem, first, stop).inputs(slot, inputs)
            cu = torch.tensor(bounds, dtype=torch.int32)
            call = SlotCall(SMALL, 0.3, cu, 30, first_query=first)
            o, lse = module.forward(*piece.values(), call=call)
            module.backward(do[first:stop], *piece.values(), o, lse, call=call)


def test_every_slot_declares_partial() -> None:
    assert all(spec.partial for spec in nsa_register_backends().slots.values())
