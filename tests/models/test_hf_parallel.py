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
    ("heads", {"kind": "qwen2", "padded": False}),
    ("heads", {"kind": "llama", "padded": False, "attention_bias": True}),
    ("heads", {"kind": "qwen2", "padded": True, "nsa_layers": [1]}),
    ("heads", {"kind": "llama", "padded": True, "nsa_layers": [0], "dense": True}),
]
SAVED: dict[str, dict[str, Any]] = {
    "plain": {"kind": "qwen3"},
    "with biases": {"kind": "llama", "attention_bias": True},
    "with a dense layer": {"kind": "qwen3", "nsa_layers": [1]},
    "sharded by FSDP2": {"kind": "llama", "sharded": True},
}
REFUSED = {
    "a mask": "InvalidInput: attention_mask must be None for layers with the style ContextParallel",
    "a mask for the decoder": "InvalidInput: attention_mask must be None for layers with the style",
    "boundaries of two rows": "InvalidInput: cu_seq_lens_q needs an input of one row, got 2 rows",
    "positions": "InvalidInput: position_ids must be None for layers with the style Context",
    "labels": "InvalidInput: labels would be shifted within the rows of this rank",
    "dense layers": "Unsupported: a model with dense layers (nsa_layers) is not context parallel",
    "a dense layer": "InvalidInput: ContextParallel divides NSAttention layers, got Qwen3Attention",
    "a cache": "Unsupported: a cache is not context parallel",
    "generation": "Unsupported: generation is not context parallel",
    "generation without a cache": "Unsupported: generation is not context parallel",
    "generation of divided heads": "Unsupported: generation is not head parallel",
    "a state_dict to save": "InvalidInput: state_dict must be None for a model whose heads HeadPar",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Return the results of both ranks by the name of the case."""
    saving = [
        ("saved", {"folder": str(tmp_path_factory.mktemp("saved")), **options})
        for options in SAVED.values()
    ]
    results = run_on_ranks(2, [*EQUAL, *saving], ["hf_divided_cases"])
    return dict(zip([*map(str, EQUAL), *SAVED], results))


@pytest.fixture(scope="module")
def refusals() -> dict[str, list[str]]:
    """Return the messages of both ranks by the name of the refusal."""
    cases: list[tuple[str, dict[str, Any]]] = [("refusal", {"of": of}) for of in REFUSED]
    return dict(zip(REFUSED, run_on_ranks(2, cases, ["hf_divided_cases"])))


@pytest.mark.slow
@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_a_divided_model_computes_that_of_one_process(outcomes, case):
    for errors in outcomes[str(case)]:
        assert not isinstance(errors, str), errors
        assert errors.pop("loss") < LOSS_LIMIT
        assert max(errors.values()) < LIMIT, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_a_model_with_divided_heads_is_saved_whole(outcomes, name):
    kind = {"qwen3": "NSAQwen3ForCausalLM", "llama": "NSALlamaForCausalLM"}[SAVED[name]["kind"]]
    same = {"logits": True, "parameters": True, "unchanged": True}
    assert outcomes[name] == [{"class": kind, **same}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("of", REFUSED)
def test_calls_that_cannot_work_are_refused_on_all_ranks(refusals, of):
    for message in refusals[of]:
        assert REFUSED[of] in message
