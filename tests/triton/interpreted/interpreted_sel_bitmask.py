"""The bitmask form of the backward of sel against the oracle, and the calls that it serves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import interpreted_core
import interpreted_sel_backward
from interpreted_sel_backward import Problem, assert_gradients_equal_the_oracle, gradients
from interpreted_sel_partial import CUTS, document_piece, piece, quick
from launches import filled
from nsa_backend_triton import probe
from nsa_backend_triton.host import configs, strides
from nsa_backend_triton.host.parts import head_parts
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel import backward as sel_backward
from nsa_backend_triton.sel import bitmask
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry

# 64 blocks of two keys: the last one is the sign bit.
ALL_BITS = BlockGeometry(2, 2, 2, 5, 0, 1, 5)
SHARED = ("batch", "h7", "h20", "four-tokens", "narrow-v", "wide-v", "two-key-tiles", "odd-block")
SHARED += ("zero-scale", "negative-scale", "documents", "packed")
PROBLEMS = {
    **{name: interpreted_sel_backward.PROBLEMS[name] for name in SHARED},
    "64-blocks": Problem((128,), heads=1, groups=1, geometry=ALL_BITS),
    "block-of-200": Problem(
        (213,), heads=1, groups=1, geometry=BlockGeometry(8, 4, 200, 2, 1, 1, 5)
    ),
    "block-of-256": Problem(
        (40, 261), batch=None, heads=1, groups=1, geometry=BlockGeometry(8, 4, 256, 2, 1, 1, 5)
    ),
}
QUICK = {"four-tokens", "wide-v", "documents", "negative-scale"}
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROBLEMS]


@pytest.fixture(autouse=True)
def new_tensors_hold_nan() -> Iterator[None]:
    """Fill new tensors, so that no result depends on memory that nothing wrote."""
    with filled():
        yield


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """A function that lets sequences of MAX_LEN tokens take the bitmask form, and counts calls."""

    def change(max_len: int = 4096, programs_per_sm: int = 3, busy_tokens: int = 4096) -> list[int]:
        rows, calls, stock = dict(configs.table(0)), [], bitmask.gradients
        limits = {"MAX_LEN": max_len, "BUSY_TOKENS": busy_tokens, "BUSY_MAX_LEN": 20}
        for kernel, changed in (
            ("sel_bitmask_dq", limits),
            ("sel_bitmask_dkdv", {"PROGRAMS_PER_SM": programs_per_sm}),
        ):
            rows[kernel] = [({}, {**rows[kernel][0][1], **changed})]

        def counted(problem: Any, blocks: Tensor, *fork: Any) -> Any:
            calls.append(bitmask._prepare(problem, blocks).partial_shapes)
            return stock(problem, blocks, *fork)

        monkeypatch.setattr(configs, "table", lambda _: rows)
        monkeypatch.setattr(bitmask, "gradients", counted)
        return calls

    return change


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_the_oracle(name: str, use: Callable[..., list[int]]) -> None:
    calls = use()
    assert_gradients_equal_the_oracle(PROBLEMS[name])
    assert len(calls) == 1


@pytest.mark.few_cases("1-1")
@pytest.mark.parametrize(("programs_per_sm", "parts"), [(1, 1), (2, 2), (3, 3), (99, 6)])
def test_few_programs_divide_the_heads_of_a_group(
    programs_per_sm: int, parts: int, use: Callable[..., list[int]]
) -> None:
    """Two blocks of two kv heads are 4 programs; the interpreter has 3 multiprocessors."""
    calls = use(programs_per_sm=programs_per_sm)
    assert_gradients_equal_the_oracle(Problem((30,), heads=6))
    assert calls == [((parts, 1, 30, 2, 16),) * 2 if parts > 1 else ()]


@pytest.mark.few_cases("problem0-60-True")
@pytest.mark.parametrize(
    ("problem", "busy_tokens", "fits"),
    [
        (Problem((30,), batch=2, heads=1), 60, True),
        (Problem((30,), batch=2, heads=1), 59, False),
        (Problem((20,), batch=3, heads=1), 59, True),
        (Problem((18, 20, 9), batch=None, heads=1), 46, True),
        (Problem((18, 21, 9), batch=None, heads=1), 48, True),
        (Problem((18, 21, 9), batch=None, heads=1), 47, False),
    ],
)
def test_many_tokens_lower_the_longest_sequence(
    problem: Problem, busy_tokens: int, fits: bool, use: Callable[..., list[int]]
) -> None:
    """Up to ``busy_tokens`` in all sequences, they may have 4096 tokens each, beyond it 20."""
    calls = use(busy_tokens=busy_tokens)
    assert_gradients_equal_the_oracle(problem)
    assert len(calls) == fits


@pytest.mark.slow
def test_deterministic_bits_do_not_depend_on_other_batch_entries(
    use: Callable[..., list[Any]],
) -> None:
    """Three entries have too many tokens for the form that one takes, and fewer parts."""
    calls = use(busy_tokens=59)
    problem = Problem((30,), batch=3)
    inputs, call, do = problem.inputs()
    truth = problem.truth(inputs, call, do)
    assert truth.lse is not None
    call = dataclasses.replace(call, deterministic=True)
    tensors = [do, *inputs.values(), truth.o, truth.lse]
    tensors = [x.float() if x.is_floating_point() else x for x in tensors]
    batch = sel_backward.backward(*tensors, call=call)
    alone = sel_backward.backward(*(x[1:2] for x in tensors), call=call)
    for x, entry in zip(batch, alone, strict=True):
        assert torch.equal(x[1:2], entry)
    assert calls == [((3, n, 30, 2, 16),) * 2 for n in (3, 1)]


def test_divisors_are_the_parts_of_a_group() -> None:
    assert [head_parts(12, 10, least) for least in (0, 10, 11, 31, 41, 61, 999)] == [
        1,
        1,
        2,
        4,
        6,
        12,
        12,
    ]


def test_blocks_in_64_bits_and_apart_in_memory(use: Callable[..., list[int]]) -> None:
    calls, problem = use(), Problem((20,), batch=2, heads=2)
    blocks = problem.inputs()[0]["blocks"].long()
    blocks[0, 17, :, 0] = 2**32  # block 0 in 32 bits
    blocks[0, 17, :, 1:] = 1
    apart = torch.full((2, 23, 5, 4), -7)[:, 2:22, 1:3]
    assert_gradients_equal_the_oracle(problem, blocks=apart.copy_(blocks))
    assert len(calls) == 1


def test_equal_inputs_give_equal_bits_whether_or_not_deterministic(
    use: Callable[..., list[int]],
) -> None:
    calls = use()
    inputs, call, do = PROBLEMS["documents"].inputs()
    truth = PROBLEMS["documents"].truth(inputs, call, do)
    first, second = (gradients(inputs, call, do, truth, deterministic=d) for d in (False, True))
    assert all(map(torch.equal, first, second))
    assert len(calls) == 2


@pytest.mark.parametrize("name", quick(CUTS))
def test_gradients_of_cut_documents_equal_the_oracle(
    name: str, use: Callable[..., list[int]]
) -> None:
    calls = use()
    document_piece(name).assert_gradients(False)
    assert len(calls) == 1


@pytest.mark.parametrize("programs_per_sm", [1, 99])
@pytest.mark.parametrize("first", [3, 8, pytest.param(13, marks=pytest.mark.slow)])
def test_gradients_of_pieces_equal_the_oracle(
    first: int, programs_per_sm: int, use: Callable[..., list[int]]
) -> None:
    calls = use(programs_per_sm=programs_per_sm)
    piece(first, first + 6, lengths=(21, 21)[: 1 + first % 2], extra=2).assert_gradients(False)
    assert len(calls) == 1


@pytest.mark.parametrize("lengths", [(9,), pytest.param((0, 5, 16, 1), marks=pytest.mark.slow)])
def test_the_backward_of_the_core_gives_its_statistics(
    lengths: tuple[int, ...], use: Callable[..., list[int]]
) -> None:
    """The log-sum-exp has the gate in it, and delta is the gradient of the gate."""
    calls = use()
    cu = None
    if len(lengths) > 1:
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    call = SlotCall(interpreted_core.GEOMETRY, 0.3, cu, max(lengths))
    x = interpreted_core.tensors(call, sum(lengths), 1, (2, 1), (8, 8))
    expected = interpreted_core.by_slots(x, call)
    for name, gradient in interpreted_core.by_core(x, call).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)
    assert len(calls) == 2


def problem(
    tokens: int = 40, n: int = 4, select_block: int = 16, packed: bool = False, **changes: Any
) -> tuple[sel_backward.Problem, Tensor]:
    """Return a problem without data, and its blocks."""

    def new(heads: int, width: int, stride: int = 0) -> Tensor:
        row = stride or heads * width
        shape, strides = (1, tokens, heads, width), (0, row, width, 1)
        x = torch.empty_strided(shape, strides, dtype=torch.float64, device="meta")
        return x[0] if packed else x

    first_query = changes.pop("first_query", 0)
    max_seqlen = changes.pop("max_seqlen", tokens)
    q, do, k, v = new(4, 8, **changes), new(4, 8), new(2, 8), new(2, 8)
    seqs = Sequences(q, q, 1, tokens, packed, first_query, first_query > 0)
    call = SlotCall(BlockGeometry(8, 4, select_block, n, 1, 1, 5), 1.0, None, max_seqlen)
    blocks = torch.empty((*q.shape[:-2], 2, n), dtype=torch.int32, device="meta")
    return sel_backward.Problem(do, q, k, v, q, q, seqs, call), blocks


@pytest.mark.parametrize(
    ("sizes", "fits"),
    [
        ({"tokens": 100}, True),
        ({"tokens": 101}, False),  # MAX_LEN
        ({"tokens": 60, "first_query": 40}, True),
        ({"tokens": 60, "first_query": 41}, False),
        ({"tokens": 500, "packed": True, "max_seqlen": 100}, True),
        ({"tokens": 500, "packed": True, "max_seqlen": 101}, False),
        ({"n": 64}, True),
        ({"n": 65}, False),
        ({"stride": 2**31 // 40}, True),
        ({"stride": 2**31 // 40 + 1}, False),
    ],
)
def test_the_condition(sizes: dict[str, Any], fits: bool, use: Callable[..., list[int]]) -> None:
    use(100)
    assert bitmask.fits(*problem(**sizes)) is fits


@pytest.mark.parametrize("size", [16, 200, 256])
def test_sequences_of_more_than_64_blocks_take_lists(
    size: int, use: Callable[..., list[int]]
) -> None:
    use(20000, busy_tokens=20000)
    fitting, one_more = (problem(64 * size + more, select_block=size) for more in (0, 1))
    assert (bitmask.fits(*fitting), bitmask.fits(*one_more)) == (True, False)


@pytest.mark.parametrize("size", [200, 256])
def test_keys_of_a_long_block_lie_within_32_bits(size: int, use: Callable[..., list[int]]) -> None:
    """Kernels compute the offset of a key in its block in 32 bits."""
    use()
    assert probe.SELECT_BLOCKS["sel"][1] <= strides.MAX_TILE_TOKENS
    limit = 2**31 // strides.MAX_TILE_TOKENS
    near, far = (problem(500, select_block=size, stride=x) for x in (limit - 1, limit))
    assert (bitmask.fits(*near), bitmask.fits(*far)) == (True, False)


def test_longer_sequences_take_lists(use: Callable[..., list[int]]) -> None:
    calls = use(34)
    assert_gradients_equal_the_oracle(dataclasses.replace(PROBLEMS["batch"], heads=1, groups=1))
    assert calls == []
