"""Small models and data shared by the tests of nsa_models.lm."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import pytest
import torch

from nsa_models.lm import checkpoint
from nsa_models.lm.config import LMConfig
from nsa_models.lm.corpus import Corpus
from nsa_models.lm.data import TextRows
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import DataSpec
from nsa_models.lm.tokens import ByteTokenizer, Tokenizer
from small_layer import LAYER


@pytest.fixture(params=["nsa", "dense"])
def attention(request: pytest.FixtureRequest) -> str:
    """Run a test with NSA and with dense attention."""
    return str(request.param)


@pytest.fixture
def config() -> LMConfig:
    """Return two layers of width 24 over bytes, with NSA."""
    return LMConfig(LAYER, 2, mlp_dim=32)


@pytest.fixture
def documents() -> list[str]:
    """Return forty documents of 1 to 196 characters; some have more bytes than characters."""
    return [f"document {n}: " + "wörd " * n if n else "x" for n in range(0, 40)]


@pytest.fixture
def rows(documents):
    """Return ``rows(length, **options)``, which packs the documents into rows of bytes."""
    return lambda length, **options: TextRows(
        Corpus(documents, "words"), ByteTokenizer(), length, **options
    )


@pytest.fixture
def write_checkpoint(tmp_path):
    """Return ``write_checkpoint(model, tokenizer, ...)``, which writes a run's checkpoint."""
    pytest.importorskip("safetensors")

    def write(
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
        data: str = "some.txt",
        length: int = 40,
        step: int = 1234,
    ) -> pathlib.Path:
        facts = {
            "train": dataclasses.asdict(Recipe()),
            "data": dataclasses.asdict(DataSpec(data, length)),
            "position": {},
            "step": step,
            "tokens": step * length,
        }
        tensors = checkpoint.collect_tensors(model, torch.optim.AdamW(model.parameters()))
        path = tmp_path / checkpoint.FILE
        checkpoint.write(path, tensors, model.config, facts, tokenizer)
        return path

    return write


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
