"""The calls of the library: their number, tensors and arguments, and that none synchronises."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fa2_problems import (
    PACKED,
    PROBLEMS,
    SLOTS,
    SMALL,
    Piece,
    Problem,
    assert_correct,
    assert_judged,
    run,
)
from fa2_standin import PROVIDERS, Library, make
from nsa_backend_fa2 import providers
from nsa_core.contract import SlotCall
from nsa_core.errors import NSAError


@pytest.mark.few_cases
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", ["plain", "row18-packed-empties"])
@pytest.mark.parametrize("library", PROVIDERS, indirect=True)
def test_every_provider_gives_bitwise_equal_results(
    library: Library, name: str, slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = PROBLEMS[name]
    inputs, do, cu = problem.inputs(slot, torch.float32)
    outputs = run(slot, problem, inputs, do, cu)
    assert {call["direction"] for call in library.calls} == {"forward", "backward"}
    # test_fa2_slots.py compares the results of this provider with the oracle.
    monkeypatch.setattr(providers, "active_provider", lambda: make("2.8.3", Library()))
    for key, value in run(slot, problem, inputs, do, cu).items():
        assert torch.equal(outputs[key], value), key


def test_win_is_one_call_without_copies_of_q_k_v(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem()
    inputs, do, cu = problem.inputs("win", torch.float32)
    operands, forward = [], library.forward
    monkeypatch.setattr(
        library,
        "forward",
        lambda q, k, v, **options: (operands.append((q, k, v)), forward(q, k, v, **options))[1],
    )
    run("win", problem, inputs, do, cu)
    (call, _), ((q, k, v),) = library.calls, operands
    assert (call["left"], call["right"], call["causal"]) == (SMALL.window_size - 1, 0, True)
    assert [x.data_ptr() for x in (q, k, v)] == [inputs[n].data_ptr() for n in ("q", "k", "v")]


@pytest.mark.parametrize("lengths", [(37,), (8,), (41,)])
def test_cmp_of_a_batch_is_one_causal_call_with_as_many_rows_as_keys(
    lengths: tuple[int, ...], library: Library
) -> None:
    problem = Problem(lengths)
    inputs, do, cu = problem.inputs("cmp", torch.float32)
    run("cmp", problem, inputs, do, cu)
    rows = SMALL.num_compressed(lengths[0])
    for call in library.calls:
        assert call["q"][1] == call["k"][1] == rows
        assert call["q"][2] == problem.heads * SMALL.compress_stride
        assert call["k"] == (2, rows, problem.groups, 8)
        assert call["causal"]
        assert call["left"] == -1
    assert [call["direction"] for call in library.calls] == ["forward", "backward"]


@pytest.mark.parametrize("length", [37, 8, 9, 11, 12])
def test_cmp_of_one_sequence_does_not_copy_q_k_v(
    length: int, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem((length,), batch=1)
    inputs, do, cu = problem.inputs("cmp", torch.float32)
    operands = []
    for name in ("forward", "backward"):
        function = getattr(library, name)
        recorded = lambda *x, f=function, **options: (operands.append(x), f(*x, **options))[1]  # noqa: E731
        monkeypatch.setattr(library, name, recorded)
    outputs = run("cmp", problem, inputs, do, cu)
    assert_correct("cmp", problem, inputs, outputs, do, cu)
    complete_runs, remainder = divmod(length - 7, 4)
    assert [call["causal"] for call in library.calls] == (
        [True] * bool(complete_runs) + [False] * bool(remainder)
    ) * 2
    for tensors in operands:
        q, k, v = tensors[-3:] if len(tensors) == 3 else tensors[1:4]
        for x, name in ((q, "q"), (k, "k_cmp"), (v, "v_cmp")):
            assert x.untyped_storage().data_ptr() == inputs[name].untyped_storage().data_ptr(), name


def test_packed_cmp_and_win_are_one_varlen_call(library: Library) -> None:
    for slot in ("cmp", "win"):
        library.calls.clear()
        problem = Problem(PACKED, batch=None)
        inputs, do, cu = problem.inputs(slot, torch.float32)
        run(slot, problem, inputs, do, cu)
        assert [call["direction"] for call in library.calls] == ["forward", "backward"]
        assert library.calls[0]["cu_k"].shape == (len(PACKED) + 1,)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("packed", [False, True])
def test_backward_passes_the_deterministic_flag_to_the_library(
    packed: bool, slot: str, library: Library
) -> None:
    problem = Problem((9, 14), batch=None) if packed else Problem()
    for deterministic in (False, True):
        library.calls.clear()
        run(slot, problem, *problem.inputs(slot, torch.float32), deterministic=deterministic)
        assert {
            call["deterministic"] for call in library.calls if call["direction"] == "backward"
        } == {deterministic}


@pytest.mark.parametrize("keys_per_chunk", [1, 200, 10**9])
def test_sel_in_chunks_of_any_size_matches_the_oracle(
    keys_per_chunk: int, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa_backend_fa2.sel.KEYS_PER_CHUNK", keys_per_chunk)
    for problem in (Problem((19,)), Problem((13, 0, 9), batch=None)):
        assert_judged("sel", problem, torch.float32)


def test_keys_per_chunk_of_sel_do_not_grow_with_the_sequence(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa_backend_fa2.sel.KEYS_PER_CHUNK", 320)
    largest_chunks = []
    for length in (48, 96):
        library.calls.clear()
        problem = Problem((length,), batch=1)
        run("sel", problem, *problem.inputs("sel", torch.float32))
        largest_chunks.append(max(call["k"][0] for call in library.calls))
    assert largest_chunks == [320, 320]


@pytest.mark.parametrize("slot", SLOTS)
def test_row_44_batch_above_the_limit_of_a_call_is_split(
    slot: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem((9,), batch=5, heads=2, groups=1)
    inputs, do, cu = problem.inputs(slot, torch.float32)
    expected = run(slot, problem, inputs, do, cu)
    for module in ("padding", "sel"):
        monkeypatch.setattr(f"nsa_backend_fa2.{module}.MAX_BATCH", 2)
    library.calls.clear()
    outputs = run(slot, problem, inputs, do, cu)
    for call in library.calls:
        assert (call["q"][0] if call["cu_q"] is None else len(call["cu_q"]) - 1) <= 2
    for key, value in expected.items():
        assert torch.equal(outputs[key], value), key


def test_row_44_too_many_packed_documents_raise(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa_backend_fa2.padding.MAX_BATCH", 2)
    problem = Problem((9, 3, 4), batch=None)
    with pytest.raises(NSAError, match="3 documents exceed the 2"):
        run("win", problem, *problem.inputs("win", torch.float32))


class NoSynchronisation(TorchDispatchMode):
    """Fails on operators that make the host wait for a GPU; ``off`` while the fake library runs."""

    READS = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "repeat_interleave.Tensor",
    )
    off = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func).removeprefix("aten.")
        if not self.off:
            assert not name.startswith(self.READS), f"{func} synchronises"
            indices = args[1] if name.startswith(("index.", "index_put")) else ()
            assert not any(i is not None and i.dtype == torch.bool for i in indices), (
                "a bool index synchronises"
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.few_cases
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("first_query", [0, 6])
@pytest.mark.parametrize(
    "problem", [Problem((9,)), Problem((11,), batch=1, Dv=5), Problem((9, 3, 4), batch=None)]
)
@pytest.mark.parametrize(
    ("library", "deterministic"),
    [("2.5.8", False), ("2.8.3.post2", False), ("2.8.3.post2", True), ("aten", False)],
    indirect=["library"],
)
def test_no_call_synchronises(
    deterministic: bool,
    library: Library,
    problem: Problem,
    first_query: int,
    slot: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mode = NoSynchronisation()

    def unchecked(function):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            mode.off = True
            try:
                return function(*args, **kwargs)
            finally:
                mode.off = False

        return call

    for method in ("forward", "backward"):
        monkeypatch.setattr(library, method, unchecked(getattr(library, method)))
    whole_inputs, do, cu = problem.inputs(slot, torch.float32)
    longest = max(problem.lengths)
    call = SlotCall(problem.geometry, problem.factor, cu, longest, deterministic, first_query)
    inputs = Piece(problem, first_query, sum(problem.lengths)).inputs(slot, whole_inputs)
    module = importlib.import_module(f"nsa_backend_fa2.{slot}")
    with mode:
        o, lse = module.forward(*inputs.values(), call=call)
        rows = do[..., first_query:, :, :]
        module.backward(rows, *inputs.values(), o.contiguous(), lse, call=call)
    assert len(library.calls) >= 2


def test_no_synchronisation_mode_detects_reads() -> None:
    for read in (
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.repeat_interleave(x.long()),
    ):
        with pytest.raises(AssertionError, match="synchronises"), NoSynchronisation():
            read(torch.ones(3))


class OperatorNames(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_sel_sums_gradients_with_index_put(
    deterministic: bool, library: Library
) -> None:
    """On CUDA, index_add_ uses atomics; index_put_ sorts first."""
    problem = Problem((9,), batch=1)
    inputs, do, cu = problem.inputs("sel", torch.float32)
    call = SlotCall(problem.geometry, problem.factor, cu, 9, deterministic)
    module = importlib.import_module("nsa_backend_fa2.sel")
    o, lse = module.forward(*inputs.values(), call=call)
    with OperatorNames() as mode:
        module.backward(do, *inputs.values(), o, lse, call=call)
    assert ("index_add_" in mode.names, "index_put_" in mode.names) == (
        not deterministic,
        deterministic,
    )
