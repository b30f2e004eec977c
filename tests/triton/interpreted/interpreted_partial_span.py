"""cmp, win and select on queries that begin inside a sequence (contract 1.1).

Most calls are lines of drawn cases: the oracle computes their rows from the whole sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest
import torch

import interpreted_span
from interpreted_span import KEYS, MALFORMED, MODULES, inside_the_tensors
from nsa_backend_triton.host import launch_cache
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.select import forward as select
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.parser import parse
from nsa_verify.drawn.tensors import Problem, problem_of
from nsa_verify.drawn.verdicts import judge_run
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.slot_runs import run_kernel

GEOMETRY = BlockGeometry(8, 4, 16, 2, 0, 1, 18)
SIZES = {"dtype": "float64", "l": 8, "d": 4, "block": 16, "n": 2, "local": 1, "w": 18}
SIZES |= {"h": 2, "groups": 1, "scale": 0.25}
#  documents at 0, 0, 5, 25, 26, 26 and 46
LENGTHS = (0, 5, 20, 1, 0, 20, 0)
BOTH = pytest.mark.parametrize("slot", MODULES)
TILE = {"BLOCK_M": 16, "BLOCK_H": 2, "BLOCK_N": 16}  # 8 tokens
TILES = {"span_forward": TILE, "span_dq": TILE, "span_dkdv": {"BLOCK_M": 16, "BLOCK_N": 16}}


def line(slot: str, lengths: Sequence[int], **fields: object) -> str:
    """Return the line of a call; several ``lengths`` are packed documents."""
    of_tokens = {"tokens": lengths[0]}
    if len(lengths) > 1:
        of_tokens = {"documents": ",".join(map(str, lengths))}
    words = {**SIZES, **of_tokens, **fields}
    return " ".join([slot, *(f"{name}={value}" for name, value in words.items())])


def check(slot: str, lengths: Sequence[int], first: int, end: int, **fields: object) -> None:
    """Judge the rows first .. end - 1 of the queries of a whole call."""
    case = parse(line(slot, lengths, first_query=first, queries=end - first, **fields))
    findings = judge(Combination({slot: "triton"}), case)
    assert findings
    assert not [finding for finding in findings if finding.ok is not True]


def cuts(total: int, seed: int, at: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """Return pieces of 0 .. total: two random cuts, and those of ``at``."""
    inner = {*random.Random(seed).sample(range(1, total), 2), *at}
    return list(itertools.pairwise([0, *sorted(inner), total]))


def up_to(lengths: Sequence[int], end: int) -> list[int]:
    """Return the lengths of the documents up to the row ``end``."""
    starts = itertools.accumulate(lengths, initial=0)
    return [max(0, min(length, end - start)) for length, start in zip(lengths, starts)]


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
    is_packed = len(lengths) > 1
    batch = {} if extra or is_packed else {"batch": 2}
    for first, end in cuts(sum(lengths), 3, CUT_AT if is_packed and not extra else ()):
        check(slot, lengths if extra else up_to(lengths, end), first, end, **batch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lengths", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("slot", SLOTS)
def test_pieces_of_more_random_cuts(slot: str, lengths: tuple[int, ...], seed: int) -> None:
    sizes = {"h": (1, 3, 4, 2)[seed], "w": 7 * seed + 1, "scale": (-1) ** seed * 0.3}
    for first, end in cuts(sum(lengths), 10 + seed):
        check(slot, lengths if seed % 2 == 0 else up_to(lengths, end), first, end, **sizes)


@pytest.mark.few_cases("cmp-1-dense")
@pytest.mark.parametrize("lengths", [DENSE, (3, 34)], ids=["dense", "packed"])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("slot", SLOTS)
def test_rows_at_every_residue(slot: str, rows: int, lengths: tuple[int, ...]) -> None:
    for first in range(11, 11 + GEOMETRY.select_block_size):  # all residues mod l', and so mod d
        check(slot, lengths, first, first + rows, h=1)


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
    whole = parse(line(slot, (45,), batch=2, dtype="float32"))
    problem, target = problem_of(whole), (slot, whole.config, whole.torch_dtype)
    kernel = getattr(Combination({slot: "triton"}).plan_partial(*target), slot)
    expected = run_kernel(kernel, problem.inputs, problem.do, problem).outputs
    for first, end, names in [(13, 34, ()), (16, 32, ("o", "lse", "dq"))]:
        num_keys = end if slot == "win" else GEOMETRY.num_compressed(end)
        inputs = {name: x.clone() for name, x in problem.inputs.items()}
        inputs["q"] = inputs["q"][:, first:end]
        for name in KEYS[slot]:
            inputs[name][:, num_keys:] = torch.nan
        piece = Problem(inputs, problem.do[:, first:end], None, 45, first)
        run = run_kernel(kernel, inputs, piece.do, piece, first)
        case = whole.replace(first_query=first, queries=end - first)
        assert all(finding.ok for finding in judge_run(case, run, piece))
        for name in names:
            rows = (..., slice(first, end)) if name == "lse" else (slice(None), slice(first, end))
            assert torch.equal(run.outputs[name], expected[name][rows]), (first, name)


@pytest.mark.few_cases("cmp-3")
@pytest.mark.parametrize("first", [0, 3])
@BOTH
def test_queries_without_keys(slot: str, first: int) -> None:
    """Tokens 0 .. 6 see no compressed key; dk and dv are 0 in every row that none sees."""
    for lengths in (DENSE, (3, 34)):
        check(slot, lengths, first, 7)


def test_first_rows_of_the_packed_axis_with_as_many_compressed_rows() -> None:
    """11 tokens and their first 8 have 2 compressed rows, but no query sees the second key."""
    check("cmp", (5, 6), 0, 8, l=4, d=4, block=4, w=5)


@pytest.mark.few_cases
@pytest.mark.parametrize("bounds", MALFORMED)
@pytest.mark.parametrize("slot", SLOTS)
def test_malformed_boundaries_stay_inside_the_tensors(slot: str, bounds: tuple[int, ...]) -> None:
    sizes = {"l": 4, "d": 2, "block": 4, "w": 9, "first_query": 13, "queries": 18}
    case = parse(line(slot, (10, 10, 20), **sizes))
    problem, cu = problem_of(case), torch.tensor(bounds, dtype=torch.int32)
    call = SlotCall(case.config.geometry, 0.25, cu, 40, first_query=13)
    with inside_the_tensors():
        if slot == "select":
            select.forward(*problem.inputs.values(), call=call)
        else:
            interpreted_span.run(slot, call, {**problem.inputs, "do": problem.do})


def test_cached_launches_distinguish_the_first_query() -> None:
    call = SlotCall(GEOMETRY, 0.25)
    later = dataclasses.replace(call, first_query=5)
    q, k = torch.empty(1, 4, 2, 16), torch.empty(1, 9, 1, 16)
    for a, b in [(call, later), (Sequences.of(q, k, call), Sequences.of(q, k, later))]:
        read = launch_cache.METADATA[type(a)]
        assert read(a) == read(a)
        assert read(a) != read(b)
    assert Sequences.of(q, k, call) != Sequences.of(q, k[:, :4], call)
