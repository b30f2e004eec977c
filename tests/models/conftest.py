"""Small models and data shared by the tests of nsa_models.lm."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import pytest
import torch

from nsa_bench.roofline import Peaks
from nsa_models.lm import saving
from nsa_models.lm.config import LMConfig
from nsa_models.lm.config_json import json_of
from nsa_models.lm.corpus import Corpus
from nsa_models.lm.data import TextRows
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.model_folder import Training
from nsa_models.lm.parallel import World
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
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the measurement of the machine's matrix rate, which takes a second."""
    monkeypatch.setattr("nsa_models.lm.train.measure_peaks", lambda *_: Peaks(1e15, 1e12))


@pytest.fixture
def text(tmp_path: pathlib.Path) -> str:
    """Return the path of a file with sixty documents."""
    lines = (
        f'{{"text": "this is document {n} of sixty, {"and so on, " * n}the end"}}\n'
        for n in range(60)
    )
    (tmp_path / "text.jsonl").write_text("".join(lines))
    return str(tmp_path / "text.jsonl")


@pytest.fixture
def write_run(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Return ``write_run(model, tokenizer, ...)``, which writes a run and returns its folder."""

    def write(
        model: LanguageModel,
        tokenizer: Tokenizer | None = None,
        data: str = "some.txt",
        length: int = 40,
        step: int = 1234,
        name: str = "run",
    ) -> pathlib.Path:
        kind, end, files = None, None, {}
        if tokenizer is not None:
            kind, end, files = tokenizer.kind, tokenizer.end, tokenizer.files()
        recipe, spec = Recipe(batch=1), DataSpec(data, length)
        training = Training(step, step * length, recipe, spec, {}, [{}], kind, 1)
        texts = saving.text_files(json_of(model.config, length, end), files)
        (folder := tmp_path / name).mkdir()
        optimizer, here = torch.optim.AdamW(model.parameters()), World(torch.device("cpu"))
        saving.save_run(folder, model, optimizer, training, texts, here)
        return folder

    return write


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
