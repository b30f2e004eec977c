"""Integers beyond reason in models and training runs are refused at once."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from refusing import assert_refused
from transformers import AutoModelForCausalLM

from hf_models import DENSE_CONFIGS, NSA, NSA_CONFIGS, NSA_MODELS, SIZES, nsa_model
from nsa_core.limits import shown
from nsa_models.hf.configs import layer_spec
from nsa_models.hf.conversion import convert
from nsa_models.inspect.subject import inspect_text
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.config_json import config_of, json_of
from nsa_models.lm.data import TextRows
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.synthetic import RecallRows, UniformRows
from nsa_models.lm.task import DataSpec
from nsa_models.recipes.infllm2 import infllm2_blocks
from nsa_models.recipes.moba import moba_blocks

TOKENS = 2**31 - 1
SEED = 2**63 - 1
X = torch.zeros(1, 8, 2, 4)
TINY = size("tiny")
DENSE_MODEL = AutoModelForCausalLM.from_config(DENSE_CONFIGS["llama"](**SIZES))


def _json(name: str, value: object) -> object:
    """Read the number from config.json."""
    return config_of({**json_of(TINY, 8, None), name: value})


def _nsa_of_json(name: str, value: object) -> object:
    values = json_of(TINY, 8, None)
    return config_of({**values, "nsa": {**values["nsa"], name: value}})


def _hf_model(name: str, value: object) -> object:
    config = NSA_CONFIGS["llama"](**{**SIZES, "nsa": NSA})
    setattr(config, name, value)
    return NSA_MODELS["llama"](config)


def _dense_spec(name: str, value: object) -> object:
    config = DENSE_CONFIGS["qwen3"](**SIZES)
    setattr(config, name, value)
    return layer_spec(config)


@functools.cache
def _hf() -> Any:
    return nsa_model()


OF_HF = {
    **{"hidden_size": 2**20, "intermediate_size": 2**20, "num_hidden_layers": 1024},
    **{"vocab_size": 2**24, "num_attention_heads": 4096, "num_key_value_heads": 4096},
    **{"head_dim": 2**20, "max_position_embeddings": TOKENS},
}
OF_RUN = (
    *("steps", "batch", "accumulate", "warmup", "eval_every", "save_every"),
    *("context_parallel", "tensor_parallel"),
)
OF_LM = {"n_layers": 1024, "vocab_size": 2**24, "mlp_dim": 2**20}
OF_ROWS = {"vocab_size": 2**24, "length": TOKENS}
# call -> (how to pass a value under a name, the names and their limits)
CALLS: Mapping[str, tuple[Callable[[str, Any], object], Mapping[str, int]]] = {
    "LMConfig": (lambda name, value: size("tiny", **{name: value}), OF_LM),
    "config.json": (_json, OF_HF),
    "nsa of config.json": (
        _nsa_of_json,
        dict.fromkeys(("window_size", "select_block_size", "num_selected_blocks"), TOKENS),
    ),
    "Recipe": (
        lambda name, value: Recipe(**{name: value}),
        dict.fromkeys(OF_RUN, TOKENS) | {"seed": SEED},
    ),
    "UniformRows": (
        lambda name, value: UniformRows(**{"vocab_size": 8, "length": 8, name: value}),
        OF_ROWS,
    ),
    "RecallRows": (
        lambda name, value: RecallRows(**{"vocab_size": 8, "length": 8, name: value}),
        OF_ROWS,
    ),
    "DataSpec": (
        lambda name, value: DataSpec(**{"data": "recall", name: value}),
        OF_ROWS | {"held_out_rows": TOKENS, "seed": SEED},
    ),
    "TextRows": (lambda name, value: TextRows(None, None, value), {"length": TOKENS}),
    "inspect_text": (
        lambda name, value: inspect_text("some text", **{name: value}),
        {"max_tokens": TOKENS},
    ),
    "model of transformers": (_hf_model, OF_HF),
    "dense config of transformers": (_dense_spec, OF_HF),
    "new_cache of transformers": (
        lambda name, value: _hf().new_cache(**{name: value}),
        {"max_len": TOKENS, "max_rollback": TOKENS},
    ),
    "moba_blocks": (
        lambda name, value: moba_blocks(X, X, **{"block_size": 4, "topk": 2, name: value}),
        dict.fromkeys(("block_size", "topk", "first_query"), TOKENS),
    ),
    "infllm2_blocks": (
        lambda name, value: infllm2_blocks(X, X, **{name: value}),
        dict.fromkeys(
            (
                *("block_size", "topk", "init_blocks", "local_blocks", "pool", "stride"),
                "first_query",
            ),
            TOKENS,
        ),
    ),
}


@pytest.mark.parametrize("function", CALLS)
def test_numbers_out_of_range_are_refused(function: str) -> None:
    """One past the limit, numbers that fit no machine integer or no screen, and no counts."""
    call, names = CALLS[function]
    for name, limit in names.items():
        for value in (limit + 1, 10**400):
            refused = functools.partial(call, name, value)
            assert_refused(refused, name, f"<= {limit}", shown(value))
        # A configuration of transformers refuses other types itself.
        for value in (-(10**400),) if names is OF_HF else (True, 1e9, -(10**400)):
            assert_refused(functools.partial(call, name, value), name, shown(value))


DOORS: Mapping[str, Callable[[dict[str, int]], object]] = {
    "config.json": lambda nsa: config_of({**json_of(TINY, 8, None), "nsa": nsa}),
    "LMConfig": lambda nsa: LMConfig(dataclasses.replace(TINY.layer, **nsa), n_layers=1),
    "model of transformers": lambda nsa: NSA_MODELS["llama"](
        NSA_CONFIGS["llama"](**SIZES, nsa=nsa)
    ),
    "convert": lambda nsa: convert(DENSE_MODEL, nsa),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("name", "largest"),
    [("window_size", 2**20), ("select_block_size", 2**16), ("num_selected_blocks", 2**12)],
)
def test_what_writes_a_model_has_the_limits_of_what_reads_it(door, name, largest) -> None:
    DOORS[door]({name: largest})
    refused = functools.partial(DOORS[door], {name: largest + 16})
    assert_refused(refused, f"{name} must be <= {largest:,}, got {largest + 16:,}")


def test_the_limits_themselves_are_valid() -> None:
    config = LMConfig(TINY.layer, n_layers=1024, vocab_size=2**24, mlp_dim=2**20)
    assert config_of(json.loads(json.dumps(json_of(config, TOKENS, None)))) == config
    assert Recipe(**dict.fromkeys(OF_RUN[:6], TOKENS), seed=SEED).seed == SEED
    assert Recipe(seed=-SEED).seed == -SEED
    values = {"num_hidden_layers": 1024, "vocab_size": 2**24, "intermediate_size": 2**20}
    assert layer_spec(DENSE_CONFIGS["llama"](**{**SIZES, **values})).config.dim == 32
