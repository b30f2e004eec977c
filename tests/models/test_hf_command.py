"""`nsa convert`: its output, its files and its errors."""

from __future__ import annotations

import re
import string

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import nsa_models.hf as hf
from hf_models import DENSE_CONFIGS, NSA, SIZES
from nsa_models.hf.first_stage import StageProgress

SET = [word for name, value in NSA.items() for word in ("--nsa", f"{name}={value}")]


@pytest.fixture
def dense(tmp_path):
    """Return the folder of a dense Qwen2 with a tokenizer of characters."""
    folder = tmp_path / "dense"
    AutoModelForCausalLM.from_config(DENSE_CONFIGS["qwen2"](**SIZES)).save_pretrained(folder)
    characters = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate("?" + string.ascii_lowercase + " ")}, "?")
    )
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=characters, unk_token="?").save_pretrained(folder)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    return folder


def test_the_command_lists_what_is_new_and_trains_it(dense, nsa, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stage = ["--text", "text.txt", "--steps", "9", "--length", "200", "--lr", "0.02"]
    fields = [*SET, "--nsa", "compress=mlp"]
    result = nsa("convert", "--checkpoint", "dense", "--out", "trained", *fields, *stage)
    assert (result.code, result.err) == (0, "")
    follows = "next: nsa train --checkpoint trained --data python-docs --out trained-trained\n"
    assert result.out.endswith(follows)
    plain = nsa("convert", "--checkpoint", "dense", "--out", "plain", *fields)
    assert plain.code == 0
    assert result.out.startswith(plain.out.partition("Written")[0])
    words = " ".join(result.out.split())
    assert "compared: all 27 tensors of the dense model. All branches share the dense" in words
    copies = nsa("convert", "--checkpoint", "dense", "--out", "own", "--nsa", "shared_kv=false")
    words = " ".join(copies.out.split())
    assert "Each branch has a copy of the dense projections of keys and values." in words
    model, trained = (AutoModelForCausalLM.from_pretrained(name) for name in ("plain", "trained"))
    assert {name: getattr(model.model.layers[0].self_attn.config, name) for name in NSA} == NSA
    new = {name for name, _ in model.named_parameters() if re.search("phi_|gate[.]", name)}
    for name in dict(model.named_parameters()):
        if ".0." in name:
            short = name.removeprefix("model.layers.0.")
            assert (f"\n{short} " in result.out) is (name in new), name
    pairs = zip(model.named_parameters(), trained.parameters(), strict=True)
    changed = {name for (name, one), other in pairs if not torch.equal(one, other)}
    assert changed
    assert changed <= new
    rows = re.findall(r"(?m)^ *(\d+) +(?:([\d.]+) +)?([\d.]+)% +([\d.]+)%$", result.out)
    assert [row[0] for row in rows] == ["0", "2", "4", "6", "8", "9"]
    assert float(rows[-1][1]) < float(rows[1][1])
    text = torch.tensor(
        AutoTokenizer.from_pretrained("trained")((tmp_path / "text.txt").read_text())["input_ids"]
    )
    mass = [entry.selected for entry in hf.selected_mass(trained, text[-200:])]
    assert rows[-1][2] == f"{100 * sum(mass) / 2:.1f}"


@pytest.mark.parametrize(
    ("command", "types"),
    [
        ("convert", "llama, qwen2, qwen3"),
        ("inspect", "nsa_llama, nsa_qwen2, nsa_qwen3"),
        ("train", "llama, qwen2, qwen3, nsa_llama, nsa_qwen2, nsa_qwen3"),
        ("generate", "llama, qwen2, qwen3, nsa_llama, nsa_qwen2, nsa_qwen3"),
    ],
)
def test_each_command_names_the_types_that_it_takes(nsa, tmp_path, command, types):
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    out = [] if command == "generate" else ["--out", str(tmp_path / "out")]
    result = nsa(command, "--checkpoint", str(tmp_path), *out)
    message = f"{tmp_path}/config.json: model_type must be one of {types}, got 'mistral'\n"
    assert (result.code, result.err) == (2, f"nsa: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nsa-layers", "0-5"], "different layer numbers from 0 to 1, got [0, 1, 2, 3, "),
        (["--nsa-layers", "every_4th_dense"], "--nsa-layers must be 'all' or a list"),
        (["--nsa", "window=3"], "nsa: --nsa: NSAConfig has no field 'window'"),
        (["--nsa", "a=1", "--nsa", "a=2"], "nsa: --nsa: a stands twice; give it once"),
        (
            ["--nsa", "window_size=" + "[" * 10**5],
            "nsa: --nsa: window_size must be an integer >= 1",
        ),
        (["--nsa", "window_size"], "--nsa must be NAME=VALUE such as window_size=512"),
        (
            ["--nsa", "window_size=2000000", "--nsa", "num_selected_blocks=4097"],
            "nsa: --nsa: window_size must be <= 1,048,576, got 2,000,000; num_selected_blocks must"
            " be <= 4,096, got 4,097",
        ),
        (["--steps", "3"], "--steps: there is no training without --text"),
        (["--text", "none.txt"], "--text none.txt: No such file or directory"),
        (["--text", "text.txt"], "tokens, but rows of --length 4,096"),
        (
            ["--text", "text.txt", "--length", "200"],
            "nsa: --length must be > 1,024, the tokens that a query selects, got 200; or select"
            " fewer with --nsa num_selected_blocks=N",
        ),
        (["--text", "text.txt", "--lr", "0"], "nsa: --lr must be finite and > 0, got 0.0"),
        (["--dtype", "fp32,bf16"], "--dtype must be one dtype, got float32, bfloat16"),
        (["--out", "dense"], "dense is not empty: it holds config.json, generation_config.json, "),
    ],
)
def test_errors_name_the_option_and_write_nothing(
    arguments, message, dense, nsa, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    patch = "nsa_models.hf.folder.load_model"
    monkeypatch.setattr(patch, lambda *_: pytest.fail("the weights were read"))
    out = [] if "--out" in arguments else ["--out", "new"]
    result = nsa("convert", "--checkpoint", "dense", *out, *arguments)
    assert result.code == 2
    assert message in " ".join(result.err.split())
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_generate_reads_a_converted_model_with_a_window_of_128k(dense, nsa, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    large = ["--nsa", f"window_size={2**17}", "--nsa", "num_selected_blocks=4096"]
    assert nsa("convert", "--checkpoint", "dense", "--out", "new", *large).code == 0
    words = ["--checkpoint", "new", "--prompt", "the fox", "--max-new-tokens", "2"]
    result = nsa("generate", *words)
    follows = "next: nsa inspect --checkpoint new --out new-blocks\n"
    assert (result.code, result.err) == (0, follows)


def test_a_folder_without_a_tokenizer_cannot_be_trained(dense, nsa, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in dense.glob("tokenizer*"):
        file.unlink()
    result = nsa("convert", "--checkpoint", "dense", "--out", "new", "--text", "text.txt")
    assert (result.code, "has no tokenizer that can be read" in result.err) == (2, True)


def test_an_interrupted_write_leaves_no_folder(dense, tmp_path, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copyfile", fail)
    with pytest.raises(KeyboardInterrupt):
        hf.convert_checkpoint(dense, tmp_path / "new", NSA)
    assert not list(tmp_path.glob("*new*"))


def test_the_last_row_of_the_text_is_measured_and_never_trained_on(
    dense, nsa, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a" * 300 + "b" * 300 + "c" * 200)
    calls = []

    def stage(model, batches, **settings):
        calls.append((list(batches), settings))
        yield StageProgress(0, float("nan"), 0.5, 0.25)

    monkeypatch.setattr("nsa_models.hf.first_stage.train_new_parameters", stage)
    sizes = ["--steps", "9", "--length", "200", "--batch", "2", "--lr", "0.02"]
    folders = ["--checkpoint", "dense", "--out", "new"]
    result = nsa("convert", *folders, *SET, "--text", "text.txt", *sizes)
    assert result.code == 0
    assert re.search(r"(?m)^ +0 +50.0% +25.0%$", result.out)
    ((batches, settings),) = calls
    assert (settings["learning_rate"], settings["measure_every"]) == (0.02, 2)
    (measured,) = settings["measure"].unique().tolist()
    assert len(settings["measure"]) == 200
    assert [tuple(batch.shape) for batch in batches] == [(2, 200)] * 9
    trained = torch.stack(batches).unique().tolist()
    assert len(trained) == 2
    assert measured not in trained
