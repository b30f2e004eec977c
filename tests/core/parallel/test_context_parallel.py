"""Several processes compute the layer of one: outputs, gradients, collectives and refusals."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from nsa_verify.judge.tensor import LIMITS, judge
from parallel_cases import FORMS
from rank_processes import run_on_ranks

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
        # The matrix product of 52 rows has other bits than the same rows among 104.
        if (form, mode) != ("uneven pieces", "heads")
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
DISAGREEMENTS: dict[str, str] = {
    "documents": "1 collective: cu_seqlens on rank 1 differs from that on rank 0 (rank {rank} has"
    " cu_seqlens = [0, 5, 5",
    "config": "1 collective: the config on rank 1 differs from that on rank 0",
    "rows": "1 collective: the shape of x on rank 1 differs from that on rank 0",
    "layout": "1 collective: the layout on rank 1 differs from that on rank 0",
    "plan": "1 collective: the plan on rank 1 differs from that on rank 0 (rank {rank} has the plan"
    " = {{'cmp': 'sdpa ",
    "recompute": "1 collective: recompute on rank 1 differs from that on rank 0",
    "requires_grad": "1 collective: requires_grad on rank 1 differs from that on rank 0",
}
REFUSALS: dict[str, str] = {
    "new_cache": "Unsupported: new_cache is not context parallel",
    "a cache": "Unsupported: a call with a cache is not context parallel",
    "new": "Unsupported: a call with a cache is not context parallel",
    "stats": "Unsupported: stats is not context parallel",
    "an odd number of rows": "InvalidInput: x must have an even number of rows for layout"
    " 'head_tail', got 7",
    "a plan for whole sequences": "InvalidInput: plan is for whole sequences",
    "documents of other rows": "InvalidInput: cu_seqlens must end at the 16 tokens given, got 8",
    "a second style": "InvalidInput: ContextParallel: the layer is divided already",
    "another module": "InvalidInput: ContextParallel divides NSAttention layers, got Linear",
    "too many ranks for heads": "InvalidInput: mode 'heads' needs a mesh whose size divides"
    " n_kv_heads: 2 ranks do not divide 3 key/value heads",
    "another module for heads": "InvalidInput: HeadParallel divides NSAttention layers, got Linear",
    "too many ranks for groups": "InvalidInput: HeadParallel needs a mesh whose size divides"
    " n_kv_heads: 2 ranks do not divide 3 key/value heads",
    "a sharded layer for heads": "InvalidInput: HeadParallel needs plain layers qkv, out and gate,"
    " got FSDPLinear, FSDPLinear, FSDPLinearGate: apply the style before wrapping",
    "a sharded phi for heads": "InvalidInput: HeadParallel needs parameters that are not sharded,"
    " got phi_k.",
    "a sharded norm for heads": "InvalidInput: HeadParallel needs parameters that are not sharded,"
    " got q_norm.weight (DTensor): apply the style before fully_shard",
    "a cache of divided heads": "Unsupported: new_cache is not head parallel",
    "a mesh of two dimensions": "InvalidInput: ContextParallel needs a mesh of one dimension, got 2"
    " dimensions (1, 2): pass one of them, for example mesh['cp']",
}
NO_ROWS: list[Case] = [
    ("no_rows", {"mode": mode, "packed": packed})
    for mode, packed in itertools.product(MODES, (False, True))
]
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
def two() -> Processes:
    """Two processes, with all cases of the ordinary suite."""
    disagreements = [("disagreement", {"about": about}) for about in DISAGREEMENTS]
    refusals = [("refusal", {"of": of}) for of in REFUSALS]
    lists = (
        cases_of(2),
        CHECKPOINTS,
        WRAPPED,
        COUNTED,
        GATHERED,
        NO_ROWS,
        ROUNDED,
        HEADS,
        ADJOINTS,
        PADDED,
        FROZEN,
        WAITING,
        disagreements,
        refusals,
    )
    return Processes(2, list(itertools.chain(*lists)))


def assert_equal_to_one_process(outcomes: list[dict[str, Any]], mode: str) -> None:
    """Assert that errors are below the limit; in mode heads, that the outputs have equal bits."""
    for errors in outcomes:
        assert max(errors["y"], errors["dx"], errors["parameters"]) <= LIMIT, errors
        assert errors["equal"] or mode == "sequence", errors


@pytest.mark.parametrize("case", cases_of(2) + CHECKPOINTS, ids=named)
def test_two_processes_compute_the_layer_of_one(two: Processes, case: Case) -> None:
    assert_equal_to_one_process(two.outcomes(case), case[1]["mode"])


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


@pytest.mark.parametrize("case", ADJOINTS, ids=named)
def test_gradients_of_collectives_are_their_adjoints(two: Processes, case: Case) -> None:
    for error in two.outcomes(case):
        assert error <= LIMIT


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


def test_a_refused_call_ends_the_calls_of_other_ranks(two: Processes) -> None:
    without, checked = map(two.outcomes, WAITING)
    refused = "InvalidInput: plan is for whole sequences"
    assert without[1][0].startswith(refused)
    assert checked[1][0].startswith(refused)
    text, seconds = without[0]
    assert text.startswith("NSAError: extend failed on rank 0: rank 1 did not take part"), text
    assert 3 < seconds < 30  # the timeout of the group is 4 s
    text, seconds = checked[0]
    assert text.startswith("InvalidInput: rank 1 refuses this call, for the reason in its own"), (
        text
    )
    assert seconds < 4


def assert_divided_heads_are_right(outcomes: list[dict[str, Any]]) -> None:
    """Assert that errors are below the limit, and that whole_parameters returns the original."""
    for errors in outcomes:
        assert max(errors["y"], errors["dx"], errors["parameters"]) <= LIMIT, errors
        assert errors["whole"]


@pytest.mark.parametrize("case", HEADS, ids=named)
def test_divided_heads_compute_the_layer_of_one(two: Processes, case: Case) -> None:
    assert_divided_heads_are_right(two.outcomes(case))


@pytest.mark.parametrize("case", GATHERED, ids=named)
def test_whole_inverts_take(two: Processes, case: Case) -> None:
    assert two.outcomes(case) == [True, True]


@pytest.mark.parametrize("case", NO_ROWS, ids=named)
def test_a_sequence_without_rows_has_an_output_without_rows(two: Processes, case: Case) -> None:
    shape = [0, 24] if case[1]["packed"] else [2, 0, 24]
    assert two.outcomes(case) == [(shape, shape)] * 2


@pytest.mark.parametrize("about", DISAGREEMENTS)
def test_nsa_check_finds_ranks_that_disagree(two: Processes, about: str) -> None:
    for rank, text in enumerate(two.outcomes(("disagreement", {"about": about}))):
        assert text.startswith(DISAGREEMENTS[about].format(rank=rank)), text


@pytest.mark.parametrize("of", REFUSALS)
def test_refusals_name_the_reason(two: Processes, of: str) -> None:
    for text in two.outcomes(("refusal", {"of": of})):
        assert text.startswith(REFUSALS[of]), text


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


MUTANTS: dict[str, tuple[str, dict[str, str]]] = {
    "halo of w - 2 rows": ("sequence", {"config.window_size - 1": "config.window_size - 2"}),
    "ownership by the first token": (
        "compressed_rows",
        {"(tokens - size)": "(tokens - 1)", " * stride + size - 1": " * stride"},
    ),
    "capacity rounded down": (
        "compressed_rows",
        {"-(-ranks.chunk // geometry.compress_stride)": "ranks.chunk // geometry.compress_stride"},
    ),
    "the second piece's dk and dv are missing": (
        "exchange_rows",
        {"    for grad in grads[1:]:\n": "    for grad in grads[1:1]:\n"},
    ),
    "mean for sum": (
        "exchange_rows",
        {"ranks.group, ranks.world).to(": "ranks.group, ranks.world).div(ranks.world).to("},
    ),
    "halo rows are not sent back": (
        "exchange_rows",
        {"        win = torch.stack([": "        win = 0 * torch.stack(["},
    ),
    "rotary by the row of the rank": (
        "row_angles",
        {"(cu_seqlens, end - first, first)": "(cu_seqlens, end - first)"},
    ),
    "select of the second piece reads from row 0": (
        "sequence",
        {
            "plan.select(q, k, lse, **packing.of_slots, first_query=first)": (
                "plan.select(q, k, lse, **packing.of_slots, first_query=0)"
            )
        },
    ),
}


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


@pytest.mark.slow
def test_script_of_the_page_has_the_losses_of_one_process(tmp_path: pathlib.Path) -> None:
    page = pathlib.Path(__file__).parents[3] / "docs" / "how-to" / "fsdp.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "context_parallel.py"
    script.write_text(next(b for b in blocks if "ContextParallel()" in b), encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    lines = [
        subprocess.run(
            [sys.executable, *launcher, str(script)],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            env=environment,
        ).stdout
        for launcher in ([], several)
    ]
    assert lines[0].startswith("losses: 5.")
    one, two = ([float(word) for word in line.split()[1:]] for line in lines)
    assert two == pytest.approx(one, abs=2e-4)
