"""Divided layers that recompute their branches, and layers with biases whose heads are divided."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from parallel_cases import FORMS
from rank_processes import run_on_ranks

LIMIT = 1e-13  # relative, in float64
Case = tuple[str, dict[str, Any]]

RECOMPUTED: list[Case] = [
    ("recomputed", {"form": form, "layout": layout, "check": check})
    for form, layout, check in [
        *itertools.product(("packed", "batch"), ("contiguous", "head_tail"), [False]),
        ("packed", "head_tail", True),
    ]
]
ALL = ["gate", "out", "qkv"]
BIASED: list[Case] = [
    ("biased_heads", {"form": form, "names": names, **options})
    for form, names, options in [
        ("packed", ALL, {}),
        ("batch", ALL, {"frozen": True}),
        ("packed", ["qkv"], {"shared_kv": True, "qk_norm": True}),
        ("batch", ["out"], {}),
        ("packed", ["gate.0", "gate.2", "out", "qkv"], {"gate": "mlp"}),
    ]
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Any]]:
    """Return the results of two processes by the name of the case."""
    cases = RECOMPUTED + BIASED
    return dict(zip(map(str, cases), run_on_ranks(2, cases, ["divided_layer_cases"])))


@pytest.mark.slow
@pytest.mark.parametrize("case", RECOMPUTED, ids=str)
def test_a_divided_sequence_recomputes_its_branches(outcomes: Any, case: Case) -> None:
    total, bounds = FORMS[case[1]["form"]]
    rows, heads = total // 2 * (2 if bounds is None else 1), 4
    for result in outcomes[str(case)]:
        assert not isinstance(result, str), result
        assert result["equal"]
        # Outputs of width 6 and log-sum-exps of three branches, in float64.
        assert result["saved"] >= 3 * rows * heads * (6 + 1) * 8
        pieces = 2 if case[1]["layout"] == "head_tail" else 1
        slots = ("cmp", "sel", "win", "combine")  # the blocks are kept
        assert result["again"] == {(slot, "forward"): pieces for slot in slots}
        without, with_recompute = result["collectives"]
        assert with_recompute == without  # sel's keys and values are gathered again in both


@pytest.mark.slow
@pytest.mark.parametrize("case", BIASED, ids=str)
def test_biases_of_divided_heads(outcomes: Any, case: Case) -> None:
    options = case[1]
    trained = [name for name in options["names"] if not (options.get("frozen") and name == "out")]
    for result in outcomes[str(case)]:
        assert not isinstance(result, str), result
        assert max(result["y"], result["dx"], result["gradients"]) <= LIMIT, result
        assert result["whole"]
        assert result["frozen"]
        assert result["biases"] == [f"{name}.bias" for name in trained]
