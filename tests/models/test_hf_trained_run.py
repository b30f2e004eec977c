"""Runs of `nsa train` as models of transformers, and their conversion to NSA."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, Qwen3ForCausalLM

import nsa_models.hf as hf
from nsa_core import InvalidInput
from nsa_models.lm import checkpoint
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.tokens import ByteTokenizer, FileTokenizer

CLASSES = {
    ("dense", False): LlamaForCausalLM,
    ("dense", True): Qwen3ForCausalLM,
    ("nsa", False): hf.NSALlamaForCausalLM,
    ("nsa", True): hf.NSAQwen3ForCausalLM,
}
FIELDS = {
    "compress_block_size": 8,
    "compress_stride": 4,
    "select_block_size": 16,
    "num_selected_blocks": 4,
    "window_size": 32,
}


@pytest.fixture
def run(tmp_path):
    """Return a function that writes a run with random weights; it returns its folder and model."""

    def write(
        attention: str = "dense", tokenizer: Any = None, name: str = "run", **layer: Any
    ) -> tuple[Any, LanguageModel]:
        base = size("tiny")
        changed = dataclasses.replace(base.layer, rope_base=500.0, **layer)
        vocab_size = tokenizer.vocab_size if tokenizer else 256
        config = LMConfig(changed, 2, vocab_size, mlp_dim=96, attention=attention)
        model = LanguageModel(config).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:  # their initial value 1 hides errors
                    parameter.add_(0.3 * torch.randn_like(parameter))
        facts = {"train": {}, "data": {"data": "recall", "length": 128}, "position": {}}
        folder = tmp_path / name
        folder.mkdir()
        path = folder / checkpoint.FILE
        tensors = checkpoint.collect_tensors(model, torch.optim.AdamW(model.parameters()))
        checkpoint.write(path, tensors, config, facts | {"step": 1, "tokens": 1}, tokenizer)
        return folder, model

    return write


@pytest.mark.parametrize(("attention", "qk_norm"), list(CLASSES))
def test_a_run_has_the_same_logits_in_transformers(run, attention, qk_norm):
    folder, trained = run(attention, qk_norm=qk_norm)
    model = hf.from_run(folder)
    assert type(model) is CLASSES[attention, qk_norm]
    ids = torch.randint(256, (2, 150))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, trained(ids), rtol=0, atol=2e-5)
    assert model.config.max_position_embeddings == 128
    if attention == "nsa":
        assert model.config.nsa == FIELDS


def test_a_run_is_read_again_after_save_pretrained(run, tmp_path):
    folder, trained = run("nsa", ByteTokenizer())
    hf.from_run(folder).save_pretrained(tmp_path / "saved")
    hf.run_tokenizer(folder).save_pretrained(tmp_path / "saved")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    ids = tokenizer("Some text", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, trained(ids), rtol=0, atol=2e-5)
    assert model.config.eos_token_id == tokenizer.eos_token_id == 0xFF


@pytest.mark.parametrize(
    "text", ["plain", "Héllo ÿ Ā", "\n\t\x00 \x7f", "日本 🙂", "  two  spaces"]
)
def test_the_tokenizer_of_bytes_gives_the_ids_of_the_training(run, text):
    tokenizer = hf.run_tokenizer(run("dense", ByteTokenizer())[0])
    ids = tokenizer(text)["input_ids"]
    assert ids == ByteTokenizer().encode(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("end", ["<eos>", None])
def test_a_tokenizer_file_gives_the_ids_of_the_training(run, end):
    words = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, "?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if end:
        words.add_special_tokens([end])
    ours = FileTokenizer(words.to_str())
    tokenizer = hf.run_tokenizer(run("dense", ours)[0])
    assert tokenizer("b a c")["input_ids"] == ours.encode("b a c") == [2, 1, 0]
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == ours.end == 3


@pytest.mark.slow
def test_the_command_converts_a_dense_run_with_the_sizes_of_the_run(nsa, run, tmp_path):
    folder, trained = run("dense", ByteTokenizer())
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 9)
    stage = ["--text", str(tmp_path / "text.txt"), "--steps", "1", "--length", "150"]
    out = tmp_path / "out"
    result = nsa("convert", "--hf", str(folder), "--out", str(out), *stage)
    assert (result.code, result.err) == (0, "")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.nsa == FIELDS
    assert torch.equal(model.model.embed_tokens.weight, trained.embed.weight)
    assert AutoTokenizer.from_pretrained(out)("Ä")["input_ids"] == [0xC3, 0x84]
    result = nsa(
        "convert",
        "--hf",
        str(folder),
        "--out",
        str(tmp_path / "b"),
        "--nsa",
        "window_size=40",
        "--dtype",
        "bf16",
    )
    assert result.code == 0
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert other.config.nsa == FIELDS | {"window_size": 40}
    assert other.dtype == torch.bfloat16


def test_a_run_on_a_task_is_converted_without_a_tokenizer(run, tmp_path):
    folder, _ = run()
    assert hf.run_tokenizer(folder) is None
    conversion = hf.convert_checkpoint(folder, tmp_path / "out", {"window_size": 40})
    assert conversion.model.config.nsa == FIELDS | {"window_size": 40}
    assert not list((tmp_path / "out").glob("tokenizer*"))


@pytest.mark.parametrize(
    ("attention", "layer", "message"),
    [
        ("nsa", {}, "its attention is nsa; load it with nsa_models.hf.from_run"),
        ("dense", {"scale": 0.5}, "no scale=0.5; convert this run with nsa train --from-dense"),
        ("dense", {"rope": False, "v_head_dim": 16}, "have no rope=False, v_head_dim=16"),
    ],
)
def test_runs_that_cannot_be_converted_are_refused(nsa, run, tmp_path, attention, layer, message):
    folder, _ = run(attention, **layer)
    result = nsa("convert", "--hf", str(folder), "--out", str(tmp_path / "out"))
    assert result.code == 2
    assert message in " ".join(result.err.split())
    assert not (tmp_path / "out").exists()


def test_text_needs_a_run_on_text(nsa, run, tmp_path):
    folder, _ = run()
    (tmp_path / "text.txt").write_text("words " * 99)
    stage = ["--text", str(tmp_path / "text.txt"), "--length", "100"]
    result = nsa("convert", "--hf", str(folder), "--out", str(tmp_path / "out"), *stage)
    assert result.code == 2
    assert "was trained on a task, which has no tokenizer" in " ".join(result.err.split())
    with pytest.raises(InvalidInput, match="has no tokenizer"):
        hf.tokenizer.read_tokenizer(folder)
