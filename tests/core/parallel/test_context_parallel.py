"""Several processes compute the layer of one: outputs, gradients, collectives and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import killers
import pytest
import torch

from expected_errors import CALLS, DISAGREEMENTS, FAULTS, REFUSALS
from nsa_verify.judge.tensor import LIMITS, judge
from parallel_cases import FORMS
from rank_processes import run_on_ranks
from sequence_mutants import MUTANTS

LAYOUTS, MODES = ("contiguous", "head_tail"), ("sequence", "heads")
LIMIT = 1e-13  # relative, in float64
OPTIONS: tuple[dict[str, Any], ...] = (
    {"compress": "linear"},
    {"compress": "conv"},
    {"compress": "mean"},
    {"compress": "attn_pool", "gate": "mlp"},
    {"shared_kv": True, "qk_norm": True},
    {"rope_before_compress": True},
    {"rope": False, "window_size": 1},
    {"rope_frequencies": (1.0, 0.3, 0.05, 0.01)},
    {"compress_block_size": 4},
    {"compress_block_size": 1, "compress_stride": 1, "window_size": 1},
)

Case = tuple[str, dict[str, Any]]


def cases_of(world: int) -> list[Case]:
    """Return the cases that every number of ranks runs."""
    modes = MODES[: 1 if world > 2 else 2]  # the layer has two kv heads
    equal = [
        ("equality", {"form": form, "layout": layout, "mode": mode})
        for form, layout, mode in itertools.product(FORMS, LAYOUTS, modes)
    ]
    equal += [
        ("equality", {"form": form, "layout": "head_tail", "mode": mode, **options})
        for form, mode, options in itertools.product(("packed", "batch"), modes, OPTIONS)
    ]
    return equal


CHECKPOINTS: list[Case] = [
    ("equality", {"form": "packed", "layout": layout, "mode": mode, "wrap": "checkpoint"})
    for layout, mode in itertools.product(LAYOUTS, MODES)
]
WRAPPED: list[Case] = [
    ("data_parallel", {"kind": kind, "layout": "head_tail", "mode": mode})
    for kind, mode in itertools.product(("ddp", "fsdp"), MODES)
]
COUNTED: list[Case] = [
    ("counted", {"layout": layout, "mode": mode})
    for layout, mode in itertools.product(LAYOUTS, MODES)
]
NO_ROWS: list[Case] = [
    ("no_rows", {"mode": mode, "shape": shape})
    for mode, shape in itertools.product(MODES, ([0, 24], [2, 0, 24], [0, 8, 24]))
]
COPIED: list[Case] = [("copied", {"layout": layout}) for layout in LAYOUTS]
GATHERED: list[Case] = [("gathered", {"layout": layout}) for layout in LAYOUTS]
ROUNDED: list[Case] = [
    ("rounded", {"dtype": dtype, "layout": layout, "mode": mode})
    for dtype, layout, mode in itertools.product((torch.float32, torch.bfloat16), LAYOUTS, MODES)
]


EXCHANGES = ("to_heads", "to_rows")
OPERATORS = ("gather_rows", "scatter_sum", "sum_ranks", "extend", "extend_back", *EXCHANGES)
ADJOINTS: list[Case] = [("adjoint", {"op": op}) for op in OPERATORS]
PADDED: list[Case] = [
    ("padded", {"mode": mode, "layout": layout})
    for mode, layout in itertools.product(MODES, LAYOUTS)
]
FROZEN: list[Case] = [
    ("frozen", {"names": names, "input_grad": input_grad})
    for names, input_grad in [
        (["nothing"], True),
        (["phi_", "q_norm", "k_norm"], True),
        (["phi_v"], False),
        (["phi_", "q_norm", "k_norm"], False),
    ]
]
WRAPPERS = ("ddp", "fsdp")  # over ranks with other heads
SINGLE: list[Case] = [("single", {"style": style}) for style in ("context", "heads")]
BLOCKS: list[Case] = [("divided_blocks", {"form": "packed", "layout": "head_tail"})]
WAITING: list[Case] = [("one_refuses", {"check": check}) for check in (False, True)]
HEADS: list[Case] = [
    ("head_parallel", {"form": form, **options})
    for form, options in [
        ("packed", {}),
        ("batch", {}),
        ("packed", {"wrap": "fsdp"}),
        ("batch", {"compress": "mean"}),
        ("packed", {"compress": "attn_pool", "gate": "mlp"}),
        ("batch", {"shared_kv": True, "qk_norm": True}),
    ]
]


def named(case: Case) -> str:
    """Return the name of a case, for the tests' identifiers."""
    return ", ".join([case[0], *map(str, case[1].values())])


def disagreement(of: str, about: str) -> Case:
    """Return the case of a call that differs on the last rank."""
    return "disagreement", {"of": of, "about": about}


class Processes:
    """The outcomes of cases on processes that started once."""

    def __init__(self, world: int, cases: list[Case]) -> None:
        self._outcomes = dict(zip(map(named, cases), run_on_ranks(world, cases)))

    def outcomes(self, case: Case) -> list[Any]:
        """Return the result on each rank; fails if a rank raised."""
        outcomes = self._outcomes[named(case)]
        assert not [o for o in outcomes if isinstance(o, str) and o.startswith("raised")], outcomes
        return outcomes


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> Processes:
    """Two processes, with the cases of the tests that were selected."""
    items = [item for item in request.session.items if item.path == request.path]
    parameters = [
        item.callspec.params
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    selected = {named(each["case"]) for each in parameters if "case" in each}
    agreements = [(of, "nothing") for of in CALLS]
    mixed = [("mixed", wrapper) for wrapper in WRAPPERS]
    called = (*DISAGREEMENTS, *FAULTS, *agreements, *mixed)
    disagreements = [disagreement(*each) for each in called]
    refusals = [("refusal", {"of": of}) for of in REFUSALS]
    lists = (
        cases_of(2),
        CHECKPOINTS,
        WRAPPED,
        COUNTED,
        COPIED,
        GATHERED,
        NO_ROWS,
        ROUNDED,
        HEADS,
        ADJOINTS,
        PADDED,
        SINGLE,
        BLOCKS,
    )
    cases = [case for case in itertools.chain(*lists) if named(case) in selected]
    names = {item.name for item in items}
    waiting = WAITING if test_a_refused_call_ends_the_calls_of_other_ranks.__name__ in names else []
    return Processes(2, [*cases, *FROZEN, *waiting, *disagreements, *refusals])


def assert_equal_to_one_process(
    outcomes: list[dict[str, Any]], mode: str, compress: str = "mlp"
) -> None:
    """Assert that errors are below the limit; in mode heads, that the heads have equal bits.

    Two ways to compress have other bits for one head than for two on some CPUs: an MLP, because
    PyTorch rounds gelu of the last elements of a tensor otherwise, and a convolution.
    """
    for errors in outcomes:
        assert max(errors["y"], errors["dx"], errors["parameters"]) <= LIMIT, errors
        assert errors["equal"] or mode == "sequence" or compress in ("mlp", "conv"), errors


EQUAL = cases_of(2) + CHECKPOINTS


def is_ordinary(case: Case) -> bool:
    """Return whether the ordinary run has this case: every form, and every option."""
    about = case[1]
    if "wrap" in about:
        return about["layout"] == "head_tail"
    if len(about) > 3:  # with an option
        exact_in_heads = about.get("compress") == "linear" and about["mode"] == "heads"
        return about["form"] == "packed" and (exact_in_heads or about["mode"] == "sequence")
    return about["form"] in ("batch", "packed") or about["layout"] == "head_tail"


@pytest.mark.few_cases(*(named(case) for case in EQUAL if is_ordinary(case)))
@pytest.mark.parametrize("case", EQUAL, ids=named)
def test_two_processes_compute_the_layer_of_one(two: Processes, case: Case) -> None:
    assert_equal_to_one_process(two.outcomes(case), case[1]["mode"], case[1].get("compress", "mlp"))


@pytest.mark.few_cases(
    "data_parallel, ddp, head_tail, sequence", "data_parallel, fsdp, head_tail, heads"
)
@pytest.mark.parametrize("case", WRAPPED, ids=named)
def test_ddp_and_fsdp_sum_the_accumulated_gradients(two: Processes, case: Case) -> None:
    for errors in two.outcomes(case):
        assert max(errors.values()) <= LIMIT, errors


@pytest.mark.parametrize("case", COUNTED, ids=named)
def test_number_of_collectives(two: Processes, case: Case) -> None:
    expected: tuple[dict[str, int], ...] = ({"to_heads": 1, "to_rows": 1},) * 2
    if case[1]["mode"] == "sequence":
        # The backward gathers the keys and values of sel again.
        backward = {"gather_rows": 1, "scatter_sum": 2, "extend_back": 1}
        expected = ({"extend": 1, "gather_rows": 2}, backward)
    assert two.outcomes(case) == [expected, expected]


@pytest.mark.parametrize("case", COPIED, ids=named)
def test_heads_mode_copies_what_it_exchanges_once(two: Processes, case: Case) -> None:
    for counts in two.outcomes(case):
        assert counts["copied"] == counts["sent"] > 0, counts
        assert counts["tensors"] == 3, counts  # queries, gates, and keys and values joined
        # The positions of the pieces; keys and values, and in the backward their gradients.
        assert counts["joined"] <= 3, counts
        assert 0 < counts["angles"] < counts["rows"], counts


@pytest.mark.parametrize("case", ADJOINTS, ids=named)
def test_gradients_of_collectives_are_their_adjoints(two: Processes, case: Case) -> None:
    for error in two.outcomes(case):
        assert error <= LIMIT


@pytest.mark.few_cases("padded, sequence, head_tail", "padded, heads, head_tail")
@pytest.mark.parametrize("case", PADDED, ids=named)
def test_padded_rows_change_nothing(two: Processes, case: Case) -> None:
    for errors in two.outcomes(case):
        assert max(errors.values()) <= LIMIT, errors


def test_head_parallel_computes_no_gradient_of_frozen_tensors(two: Processes) -> None:
    everything, frozen, frozen_v, nothing = (two.outcomes(case)[0] for case in FROZEN)
    rows = 112 * 24
    assert everything[0] > frozen[0] == rows  # of x alone
    assert rows > frozen_v[0] > 0
    assert nothing[0] == 0  # no collective
    assert frozen[1] == nothing[1] == ["qkv.weight", "gate.weight", "gate.bias", "out.weight"]
    assert not [name for name in frozen_v[1] if name.startswith("phi_v")]
    assert [name for name in frozen_v[1] if name.startswith("phi_k")]


@pytest.mark.slow
def test_a_refused_call_ends_the_calls_of_other_ranks(two: Processes) -> None:
    without, checked = map(two.outcomes, WAITING)
    refused = "InvalidInput: plan was resolved without partial=True"
    assert without[1][0].startswith(refused)
    assert checked[1][0].startswith(refused)
    text, seconds = without[0]
    assert text.startswith("NSAError: extend failed on rank 0: rank 1 did not take part"), text
    assert 3 < seconds < 30  # the timeout of the group is 4 s
    text, seconds = checked[0]
    assert text.startswith("InvalidInput: rank 1 refuses this call, for the reason in its own"), (
        text
    )
    assert seconds < 20  # the timeout of the group is 30 s


def assert_divided_heads_are_right(outcomes: list[dict[str, Any]]) -> None:
    """Assert that errors are below the limit, and that whole_parameters returns the original."""
    for errors in outcomes:
        assert errors.pop("whole")
        assert max(errors.values()) <= LIMIT, errors


@pytest.mark.few_cases(
    "head_parallel, packed", "head_parallel, packed, fsdp", "head_parallel, batch, mean"
)
@pytest.mark.parametrize("case", HEADS, ids=named)
def test_divided_heads_compute_the_layer_of_one(two: Processes, case: Case) -> None:
    assert_divided_heads_are_right(two.outcomes(case))


@pytest.mark.parametrize("case", GATHERED, ids=named)
def test_whole_inverts_take(two: Processes, case: Case) -> None:
    assert two.outcomes(case) == [True, True]


@pytest.mark.parametrize("case", NO_ROWS, ids=named)
def test_a_sequence_without_rows_has_an_output_without_rows(two: Processes, case: Case) -> None:
    assert two.outcomes(case) == [(case[1]["shape"], case[1]["shape"])] * 2


@pytest.mark.parametrize(("of", "about"), DISAGREEMENTS)
def test_nsa_check_finds_ranks_that_disagree(two: Processes, of: str, about: str) -> None:
    expected = "1 collective, InvalidInput: " + DISAGREEMENTS[of, about]
    for rank, text in enumerate(two.outcomes(disagreement(of, about))):
        assert text.startswith(expected.format(rank=rank)), text
        assert text.endswith("all ranks of a mesh must make the same call"), text


@pytest.mark.parametrize("of", CALLS)
def test_nsa_check_accepts_equal_calls(two: Processes, of: str) -> None:
    assert two.outcomes(disagreement(of, "nothing")) == ["no error"] * 2


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nsa_check_finds_mixed_heads(two: Processes, wrapper: str) -> None:
    for text in two.outcomes(disagreement("mixed", wrapper)):
        assert "InvalidInput: ranks to which HeadParallel gave different heads" in text, text


@pytest.mark.parametrize(("of", "about"), FAULTS)
def test_nsa_check_names_a_rank_that_raises(two: Processes, of: str, about: str) -> None:
    waiting, raising = two.outcomes(disagreement(of, about))
    assert raising.startswith(f"1 collective, {FAULTS[of, about]}"), raising
    assert waiting == (
        "1 collective, InvalidInput: rank 1 refuses this call, for the reason in its own error;"
        " rank 0 would wait for it"
    )


@pytest.mark.parametrize("case", SINGLE, ids=named)
def test_a_mesh_of_one_rank_changes_nothing(two: Processes, case: Case) -> None:
    assert two.outcomes(case) == [(True, {})] * 2


@pytest.mark.parametrize("case", BLOCKS, ids=named)
def test_two_processes_compute_the_blocks_of_one(two: Processes, case: Case) -> None:
    for errors in two.outcomes(case):
        assert max(errors.values()) <= LIMIT, errors


@pytest.mark.parametrize("of", REFUSALS)
def test_refusals_name_the_reason(two: Processes, of: str) -> None:
    for text in two.outcomes(("refusal", {"of": of})):
        assert text.startswith(REFUSALS[of]), text


@pytest.mark.few_cases(
    "rounded, torch.bfloat16, contiguous, sequence",
    "rounded, torch.bfloat16, contiguous, heads",
    "rounded, torch.bfloat16, head_tail, sequence",
    "rounded, torch.bfloat16, head_tail, heads",
)
@pytest.mark.parametrize("case", ROUNDED, ids=named)
def test_errors_are_those_of_one_process(two: Processes, case: Case) -> None:
    for name, tensors in two.outcomes(case)[0].items():
        actual, one, exact = (t.double().reshape(1, -1, t.shape[-1]) for t in tensors)
        dtype, is_grad = case[1]["dtype"], name != "y"
        verdict = judge(actual, exact, one, exact.abs(), dtype, grad=is_grad)
        own = judge(one, exact, one, exact.abs(), dtype, grad=is_grad)
        # Terms that cancel in a parameter's gradient bias the result of one process too.
        assert verdict.row <= LIMITS[dtype].row, (name, verdict, own)
        assert verdict.elem <= LIMITS[dtype].elem, (name, verdict, own)
        assert verdict.bias <= max(1.0, 1.25 * own.bias), (name, verdict, own)


@pytest.mark.slow
def test_four_processes_compute_the_layer_of_one() -> None:
    cases = cases_of(4)
    grids: list[Case] = [("grid", {"mode": mode}) for mode in MODES]
    four = Processes(4, [*cases, *grids])
    for case in cases:
        assert_equal_to_one_process(four.outcomes(case), case[1]["mode"])
    for case in grids:
        assert max(four.outcomes(case)) <= LIMIT


@pytest.mark.slow
def test_four_processes_name_the_rank_that_differs() -> None:
    documents, grid = disagreement("sequence", "documents"), disagreement("grid", "documents")
    four = Processes(4, [*WAITING, documents, grid])
    without, checked = map(four.outcomes, WAITING)
    for rank, others in ((0, "1, 2, 3"), (2, "0, 1, 3"), (3, "0, 1, 2")):
        expected = f"NSAError: extend failed on rank {rank}: at least one of the ranks {others} did"
        assert without[rank][0].startswith(expected), without[rank]
        assert checked[rank][0] == (
            "InvalidInput: rank 1 refuses this call, for the reason in its own error;"
            f" rank {rank} would wait for it"
        )
        assert checked[rank][1] < 20
    for each in (without, checked):
        assert each[1][0].startswith("InvalidInput: plan was resolved without partial=True"), each[
            1
        ]
    difference = "1 collective, InvalidInput: cu_seqlens on rank 3 differs from that on rank"
    for rank, text in enumerate(four.outcomes(documents)):
        assert text.startswith(f"{difference} 0 (rank {rank} has cu_seqlens = [0, 5, 5"), text
    assert four.outcomes(grid)[:2] == ["no error"] * 2
    for rank, text in enumerate(four.outcomes(grid)[2:], 2):
        assert text.startswith(f"{difference} 2 (rank {rank} has cu_seqlens = [0, 5, 5"), text


COMPILED: list[Case] = [
    ("equality", {"form": form, "layout": layout, "mode": mode, "wrap": wrap})
    for form, layout, mode, wrap in [
        *itertools.product(["packed"], LAYOUTS, MODES, ["compile"]),
        ("batch", "head_tail", "sequence", "compile"),
        ("packed", "head_tail", "sequence", "compile and recompute"),
    ]
]


@pytest.mark.slow
def test_compiled_layers_compute_the_layer_of_one() -> None:
    compiled = Processes(2, COMPILED)
    for case in COMPILED:
        assert_equal_to_one_process(compiled.outcomes(case), "sequence")


@pytest.mark.slow
def test_mutants_are_killed() -> None:
    same = {"form": "uneven pieces", "layout": "head_tail"}
    cases: list[Case] = [
        ("mutant", {"module": module, "changes": changes, **same})
        for module, changes in MUTANTS.values()
    ]
    restored = ("equality", {"mode": "sequence", **same})
    outcomes = run_on_ranks(2, [*cases, restored])
    assert_equal_to_one_process(outcomes.pop(), "sequence")
    for name, results in zip(MUTANTS, outcomes):
        # A change whose text the module lacks plants no fault.
        assert not [r for r in results if str(r).startswith("raised AssertionError")], name
        worst = max(
            1.0 if isinstance(r, str) else max(r["y"], r["dx"], r["parameters"]) for r in results
        )
        assert worst > 1e-6, (name, results)
        wrong = {
            "an error" if isinstance(r, str) else key
            for r in results
            for key in ("y", "dx", "parameters")
            if isinstance(r, str) or r[key] > 1e-6
        }
        killers.expect("mode sequence", name, ", ".join(sorted(wrong)))
