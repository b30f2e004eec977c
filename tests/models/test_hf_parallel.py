"""Models of transformers with the styles ContextParallel and HeadParallel."""

from __future__ import annotations

from typing import Any

import pytest

from rank_processes import run_on_ranks

LIMIT = 1e-11  # relative, in float64
LOSS_LIMIT = 1e-6  # transformers computes the loss in fp32
EQUAL: list[tuple[str, dict[str, Any]]] = [
    ("tokens", {"kind": "llama", "packed": False, "recompute": True}),
    ("tokens", {"kind": "qwen2", "packed": True, "mode": "sequence"}),
    ("tokens", {"kind": "qwen3", "packed": True}),
    ("heads", {"kind": "llama", "padded": False}),
    ("heads", {"kind": "qwen3", "padded": True}),
]
REFUSED = {
    "a mask": "InvalidInput: attention_mask must be None for layers with the style ContextParallel",
    "positions": "InvalidInput: position_ids must be None for layers with the style Context",
    "labels": "InvalidInput: labels would be shifted within the rows of this rank",
    "a cache": "Unsupported: a cache is not context parallel",
    "generation": "Unsupported: generation is not context parallel",
    "generation without a cache": "Unsupported: generation is not context parallel",
    "generation of divided heads": "Unsupported: generation is not head parallel",
    "a bias": "Unsupported: HeadParallel does not divide biases, and the layer has one in qkv:",
    "a bias of the output": "the layer has one in qkv and out: use ContextParallel, or",
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Any]]:
    """Return the results of both ranks by the name of the case."""
    cases = [*EQUAL, *[("refusal", {"of": of}) for of in REFUSED]]
    return dict(zip(map(str, cases), run_on_ranks(2, cases, ["hf_divided_cases"])))


@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_a_divided_model_computes_that_of_one_process(outcomes, case):
    for errors in outcomes[str(case)]:
        assert not isinstance(errors, str), errors
        assert errors.pop("loss") < LOSS_LIMIT
        assert max(errors.values()) < LIMIT, errors


@pytest.mark.parametrize("of", REFUSED)
def test_calls_that_cannot_work_are_refused_on_all_ranks(outcomes, of):
    for message in outcomes[str(("refusal", {"of": of}))]:
        assert REFUSED[of] in message
