"""A model folder: the same model here and in transformers, and no altered file is used."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import random
import shlex
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import nsa_models.hf as hf
from hf_models import DENSE_CONFIGS, NSA, SIZES, SIZES_OF_KIND, nsa_model, randomize
from nsa_core import BackendUnavailable, InvalidInput
from nsa_models.hf.conversion import DEFAULTS
from nsa_models.hf.folder import load_tokenizer, new_text_ids
from nsa_models.lm import config_json, json_fields, weights
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.model_folder import ModelFolder, open_folder
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.run_folder import CONFIG, INDEX
from nsa_models.lm.task import DataSpec
from nsa_models.lm.tokens import TOKENIZER, TOKENIZER_CONFIG, ByteTokenizer, FileTokenizer
from training_cases import are_equal, tensors_of, trainer_of

# class of transformers -> changes of LMConfig, and of its layer
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama": ({}, {}),
    "Llama, untied": ({"tied": False, "norm_eps": 1e-2}, {"rope_base": 500.0}),
    "Llama, biases": ({"qkv_bias": True, "out_bias": True}, {}),
    "Qwen2": ({"qkv_bias": True, "norm_eps": 1e-2}, {}),
    "Qwen3": ({"norm_eps": 1e-2}, {"qk_norm": True}),
    "Qwen3, biases": ({"qkv_bias": True, "out_bias": True, "tied": False}, {"qk_norm": True}),
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
    "original_max_position_embeddings": 64,
}


def model_of(kind: str, attention: str) -> LanguageModel:
    """Return a model with random weights, also those whose initial values hide errors."""
    changes, of_layer = KINDS[kind]
    layer = dataclasses.replace(size("tiny").layer, **of_layer)
    if attention == "hybrid":
        attention, changes = "nsa", {**changes, "nsa_layers": (1,)}
    model = LanguageModel(LMConfig(layer, 2, 256, mlp_dim=96, attention=attention, **changes))
    randomize(model)
    return model.eval()


def states_equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return are_equal(dict(one.named_parameters()), dict(other.named_parameters()))


@pytest.mark.parametrize("attention", ["dense", "nsa", "hybrid"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_transformers_reads_and_writes_the_same_model(write_run, tmp_path, kind, attention):
    trained = model_of(kind, attention)
    folder = write_run(trained, length=128)
    opened = open_folder(folder)
    assert opened.config == trained.config
    assert states_equal(opened.model(), trained)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values())
    name = f"{'NSA' * (attention != 'dense')}{kind.partition(',')[0]}ForCausalLM"
    assert type(model).__name__ == name
    ids = torch.randint(256, (2, 150))
    assert torch.allclose(model(ids).logits, trained(ids), rtol=0, atol=2e-5)
    assert (model.dtype, model.config.max_position_embeddings) == (torch.float32, 128)
    shapes = weights.shapes(trained.config)
    own = {name: list(p.shape) for name, p in model.named_parameters()}
    assert own == shapes
    model.save_pretrained(tmp_path / "theirs")
    again = open_folder(tmp_path / "theirs")
    assert (again.training, again.config) == (None, trained.config)
    assert states_equal(again.model(), trained)


def test_a_parameter_is_joined_from_its_parts():
    config = size("tiny", attention="dense")
    for name, tensor in LanguageModel(config).named_parameters():
        split = weights.split(name, tensor, config)
        assert len(split) == {"qkv": 3, "up": 2}.get(name.split(".")[-2], 1)
        assert torch.equal(weights.join(name, config, split.__getitem__), tensor)


# changes of a configuration of transformers, and options of save_pretrained
SOURCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama3": ({"rope_parameters": LLAMA3}, {}),
    "yarn": ({"rope_parameters": YARN}, {}),
    "sharded": ({"num_key_value_heads": None}, {"max_shard_size": "10KB"}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "bfloat16": ({}, {}),
}


@pytest.mark.parametrize("attention", ["dense", "nsa", "hybrid"])
@pytest.mark.parametrize("source", SOURCES)
@torch.no_grad()
def test_a_model_of_transformers_is_trained(tmp_path, source, attention):
    """Training begins with its weights, and its configuration stays."""
    changes, options = SOURCES[source]
    model = nsa_model(**changes, nsa_layers=[1] if attention == "hybrid" else None)
    if attention == "dense":
        model = AutoModelForCausalLM.from_config(DENSE_CONFIGS["llama"](**SIZES | changes))
        randomize(model)
    model = model.to(torch.bfloat16 if source == "bfloat16" else torch.float32).eval()
    model.save_pretrained(tmp_path / "theirs", **options)
    assert (len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1) == (source == "sharded")
    trainer = trainer_of(0, 1, data="task", start=tmp_path / "theirs")
    assert (trainer.plan() is None) == (attention == "dense")
    trained, ids = trainer.model.eval(), torch.randint(1, 61, (2, 150))
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    assert torch.allclose(model.float()(ids).logits, trained(ids), rtol=0, atol=2e-5)
    (out := tmp_path / "run").mkdir()
    trainer.save(out)
    again = AutoModelForCausalLM.from_pretrained(out)
    assert torch.allclose(again(ids).logits, trained(ids), rtol=0, atol=2e-5)
    assert again.dtype == torch.float32
    assert again.config.rope_parameters == model.config.rope_parameters
    assert getattr(again.config, "nsa_layers", None) == ([1] if attention == "hybrid" else None)


TEXTS = {
    "no text": "",
    "two bytes": "".join(map(chr, range(0x800))),
    "more bytes": "日本 🙂",
    "spaces": "\n\t  two  spaces",
}


@pytest.mark.parametrize("content", TEXTS.values(), ids=TEXTS.keys())
def test_the_tokenizer_of_bytes_gives_the_ids_of_the_training(write_run, content):
    folder = open_folder(write_run(model_of("Llama", "nsa"), ByteTokenizer()))
    assert isinstance(folder.tokenizer(), ByteTokenizer)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer(content)["input_ids"]
    assert ids == ByteTokenizer().encode(content)
    assert tokenizer.decode(ids) == content
    assert new_text_ids(tokenizer, content) == [0xFF, *ids]


def words(*special: str) -> str:
    """Return a tokenizer.json of words."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    return tokenizer.to_str()


@pytest.mark.parametrize("special", [["<eos>"], ["<x>", "</s>"], []])
def test_a_tokenizer_file_gives_the_ids_of_the_training(write_run, special):
    ours = FileTokenizer(words(*special))
    folder = open_folder(write_run(model_of("Llama", "dense"), ours))
    again, theirs = folder.tokenizer(), load_tokenizer(folder)
    for tokenizer in (ours, again):
        assert tokenizer.encode("b a c") == theirs("b a c")["input_ids"] == [2, 1, 0]
        assert (
            tokenizer.end == theirs.eos_token_id == theirs.bos_token_id == 2 + len(special or "x")
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, pathlib.Path]:
    """Return a run and a converted folder, each with a tokenizer."""
    path = tmp_path_factory.mktemp("folders")
    dense, run = path / "dense", path / "run"
    AutoModelForCausalLM.from_config(DENSE_CONFIGS["llama"](**SIZES)).save_pretrained(dense)
    (dense / TOKENIZER).write_text(words("</s>"))
    hf.convert_checkpoint(dense, path / "converted", NSA)
    run.mkdir()
    trainer = trainer_of(0, 1)
    trainer.step()
    trainer.save(run)
    return {name: path / name for name in ("run", "converted")}


@pytest.fixture
def folder(request, folders, tmp_path) -> pathlib.Path:
    """Return a copy of the folder that the test names."""
    shutil.copytree(folders[request.param], tmp_path / "copy")
    return tmp_path / "copy"


def state_of(folder: pathlib.Path) -> dict[str, Any]:
    """Return everything that generation and a resumed training read."""
    opened = open_folder(folder)
    values = {name: repr(getattr(opened, name)) for name in ("values", "config", "training")}
    return {**values, "texts": opened.tokenizer_texts(), "tensors": tensors_of(folder)}


def is_right(folder: pathlib.Path, expected: dict[str, Any]) -> bool:
    """Return whether a folder is read as it was written, or is refused with the name of a file."""
    try:
        state = state_of(folder)
    except InvalidInput as error:
        return str(folder) in str(error)
    # Without the key of our own facts, the folder is one of another program.
    names = expected["tensors"].keys() & state["tensors"].keys()
    assert {*open_folder(folder).files} <= names
    tensors = ({name: one["tensors"][name] for name in names} for one in (state, expected))
    is_run = state["training"] == expected["training"]
    assert is_run or state["training"] == "None"
    return are_equal(*tensors) and all(
        state[n] == expected[n] for n in ("values", "config", "texts")
    )


@pytest.mark.parametrize("folder", ["run", "converted"], indirect=True)
def test_flipped_bits_in_any_file_are_noticed(folder):
    expected, moments, flips, files = state_of(folder), random.Random(0), 0, folder.rglob("*")
    files = sorted(path for path in files if path.is_file())
    assert len(files) >= 5
    for file in files:
        content = file.read_bytes()
        for _ in range(50):
            flipped, place = bytearray(content), moments.randrange(8 * len(content))
            flipped[place // 8] ^= 1 << place % 8
            file.write_bytes(flipped)
            assert is_right(folder, expected), (file, place)
            flips += 1
        file.write_bytes(content)
    assert flips == 50 * len(files)


@pytest.mark.parametrize("folder", ["run", "converted"], indirect=True)
def test_cut_and_missing_files_are_refused(folder):
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for length in (None, 0, 1, len(content) // 2, len(content) - 1):
            file.unlink()
            if length is not None:
                file.write_bytes(content[:length])
            # The last line break of the index means nothing.
            expected = pytest.raises(InvalidInput, match=str(folder))
            if file.name == INDEX and length == len(content) - 1:
                expected = contextlib.nullcontext()
            with expected:
                open_folder(folder)
            file.write_bytes(content)


@pytest.mark.parametrize("folder", ["run"], indirect=True)
def test_each_process_checks_its_share_of_the_files(folder):
    parsed = (INDEX, CONFIG, TOKENIZER_CONFIG)  # by every process
    for file in (path for path in folder.rglob("*") if path.name not in parsed):
        if file.is_dir():
            continue
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        refused = 0
        for rank in (0, 1, 2):
            try:
                open_folder(folder, rank, 3)
            except InvalidInput as error:
                refused += str(file) in str(error)
        assert refused == 1
        file.write_bytes(content)


def change(file: pathlib.Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def dense_fields(**layer: Any) -> dict[str, Any]:
    base = dataclasses.replace(size("tiny").layer, **layer)
    return config_json.json_of(LMConfig(base, 1, attention="dense"), 8, None)


# call on a folder of transformers, class, words of the message
ERRORS: dict[str, tuple[Callable[[pathlib.Path], Any], type[Exception], tuple[str, str]]] = {
    "absent": (lambda f: open_folder(f / "no"), InvalidInput, ("does not exist", "of nsa train")),
    "a file": (lambda f: open_folder(f / CONFIG), InvalidInput, ("is a file", "folder of a model")),
    "other model": (
        lambda f: (change(f / CONFIG, intermediate_size=40), open_folder(f)),
        InvalidInput,
        ("mlp.down_proj.weight must be float [32, 40], got F32 [32, 48]", "of one model"),
    ),
    "no training": (
        lambda f: trainer_of(0, 1, data="task", resume=f),
        InvalidInput,
        ("no training to resume", "--checkpoint"),
    ),
    "fields": (
        lambda f: json_fields.build(
            DataSpec, {**dataclasses.asdict(DataSpec("uniform")), "length": True, "more": 1}, "here"
        ),
        InvalidInput,
        ("length must be an integer, got True", "'more' is unknown"),
    ),
    "no place in dense": (
        lambda f: dense_fields(scale=0.5, rope=False),
        InvalidInput,
        ("rope=False, scale=0.5", "NSA in all layers"),
    ),
    "no place beside NSA": (
        lambda f: config_json.json_of(
            LMConfig(dataclasses.replace(size("tiny").layer, scale=0.5), 2, nsa_layers=(0,)),
            8,
            None,
        ),
        InvalidInput,
        ("scale=0.5", "NSA in all layers"),
    ),
    "fields beside dense layers": (
        lambda f: (change(f / CONFIG, nsa=NSA | {"scale": 0.5}, nsa_layers=[1]), open_folder(f)),
        InvalidInput,
        ("config.nsa: scale must not be set, because the dense layers", "load the folder with"),
    ),
    "an absent layer": (
        lambda f: (change(f / CONFIG, nsa_layers=[0, 2]), open_folder(f)),
        InvalidInput,
        ("config.json: nsa_layers must be", "numbers from 0 to 1, got (0, 2)"),
    ),
    "layers that are no numbers": (
        lambda f: (change(f / CONFIG, nsa_layers="all"), open_folder(f)),
        InvalidInput,
        ("nsa_layers must be a list of an integer or null", "got 'all'"),
    ),
    "another layer": (
        lambda f: (change(f / CONFIG, nsa_layers=[1]), open_folder(f)),
        InvalidInput,
        ("'model.layers.0.self_attn.gate.weight' is not a parameter", "of one model"),
    ),
    "NSA layers of a dense model": (
        lambda f: size("tiny", attention="dense", nsa_layers=(0,)),
        InvalidInput,
        ("nsa_layers must be None with attention 'dense'", "dense"),
    ),
    "ranks that share dense layers": (
        lambda f: Recipe(tensor_parallel=2).check_divisible(size("tiny", nsa_layers=(0,)), 64),
        InvalidInput,
        ("tensor_parallel must be 1 with dense layers (nsa_layers), got 2", "only NSA layers can"),
    ),
    "biases": (
        lambda f: config_json.json_of(size("tiny", out_bias=True), 8, None),
        InvalidInput,
        ("qkv_bias=False", "out_bias=True"),
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_the_error_says_what_is_wrong(tmp_path, case):
    call, kind, said = ERRORS[case]
    nsa_model().save_pretrained(tmp_path / "model")
    with pytest.raises(kind) as caught:
        call(tmp_path / "model")
    assert all(words in str(caught.value) for words in said), str(caught.value)


@pytest.mark.parametrize("folder", ["run"], indirect=True)
def test_without_safetensors_the_library_is_named(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(BackendUnavailable, match="safetensors"):
        open_folder(folder)


@pytest.mark.slow
@pytest.mark.parametrize("nsa_layers", [None, "1"])
def test_one_folder_serves_every_command(
    nsa, text, tmp_path, monkeypatch, capsys, no_timing, nsa_layers
):
    """Convert a sharded bfloat16 model, train it, generate with it, and inspect it."""
    monkeypatch.chdir(tmp_path)
    sizes = SIZES | {"vocab_size": 256, "eos_token_id": 0xFF, "bos_token_id": 0xFF}
    dense = AutoModelForCausalLM.from_config(
        DENSE_CONFIGS["qwen3"](**sizes, **SIZES_OF_KIND["qwen3"])
    )
    dense.to(torch.bfloat16).save_pretrained("dense", max_shard_size="20KB")
    capsys.readouterr()
    for name, content in ByteTokenizer().files().items():
        (tmp_path / "dense" / name).write_text(content)
    fields = " ".join(f"--nsa {name}={value}" for name, value in NSA.items())
    if nsa_layers is not None:
        fields += f" --nsa-layers {nsa_layers}"
    small = f"--device cpu --data {text} --length 100 --batch 2 --held-out-rows 1 --steps 1"
    for command in (
        f"convert --checkpoint dense --out converted {fields}",
        f"train --checkpoint converted --out run {small}",
        "train --resume --out run --device cpu --steps 2",
        f"train --checkpoint run --out again {small}",
        f"inspect --checkpoint run --text {text} --out page --device cpu",
    ):
        result = nsa(*shlex.split(command))
        assert (result.code, result.err) == (0, ""), command
    page = (tmp_path / "page" / "inspect.html").read_text()
    result = nsa("generate", "--checkpoint", "again", "--prompt", "this", "--max-new-tokens", "3")
    assert (result.code, result.out[:4]) == (0, "this")
    assert ">Layer 0 " in page if nsa_layers is None else ">Layer 1 " in page
    opened = {name: open_folder(tmp_path / name) for name in ("converted", "run", "again")}
    assert {o.config for o in opened.values()} == {opened["run"].config}
    assert [opened[name].training.step for name in ("run", "again")] == [2, 1]
    model = AutoModelForCausalLM.from_pretrained("again")
    assert (model.config.nsa, model.dtype) == (DEFAULTS | NSA, torch.float32)
    assert model.config.nsa_layers == (None if nsa_layers is None else [int(nsa_layers)])
    assert AutoTokenizer.from_pretrained("again")("Ä")["input_ids"] == [0xC3, 0x84]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--size toy --attention nsa", "--size, --attention: set by the folder of --checkpoint"),
        ("--tokenizer x.json", "--tokenizer: set by the folder of --checkpoint; leave it out"),
        ("--data TEXT", "model has no tokenizer.json, and a text needs the tokenizer of the model"),
        (
            "--data uniform",
            "vocabulary of 61, but the data has ids up to 127; give --vocab 61",
        ),
    ],
)
def test_a_model_that_does_not_suit_the_options_is_refused(
    nsa, text, tmp_path, monkeypatch, options, message
):
    nsa_model().save_pretrained(tmp_path / "model")
    (tmp_path / "x.json").write_text(words())
    monkeypatch.chdir(tmp_path)
    out = [f"--out={tmp_path / 'run'}", f"--checkpoint={tmp_path / 'model'}", "--device=cpu"]
    result = nsa("train", *out, *options.replace("TEXT", text).split())
    assert (result.code, message in " ".join(result.err.split())) == (2, True), result.err
    assert not (tmp_path / "run").exists()


def test_a_model_is_trained_on_a_task(nsa, tmp_path, no_timing):
    nsa_model().save_pretrained(tmp_path / "model")
    options = "--device cpu --data uniform --vocab 61 --length 40 --batch 2 --steps 1"
    out = ["--out", str(tmp_path / "run"), "--checkpoint", str(tmp_path / "model")]
    result = nsa("train", *out, *options.split())
    assert result.code == 0, result.err
    opened: ModelFolder = open_folder(tmp_path / "run")
    assert (opened.training.tokenizer, opened.tokenizer()) == (None, None)
    result = nsa("generate", "--checkpoint", str(tmp_path / "run"))
    assert (result.code, "was trained on a task, which has no tokenizer" in result.err) == (2, True)
