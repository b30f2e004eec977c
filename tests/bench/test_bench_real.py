"""Real inputs: checkpoints of trained layers, which benchmarks/real_blocks.py writes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import pickle
import sys

import pytest
import torch

from nsa_bench import bytemodel
from nsa_bench.inputs import make_inputs
from nsa_bench.python_docs import library_text
from nsa_bench.shapes import parse_shape
from nsa_core.errors import BackendUnavailable, InvalidInput

CONFIG = dataclasses.replace(parse_shape("2/1/8").config((8, 4, 16, 3, 24)), dim=16)
TEXT = (
    b"the quick brown fox jumps over the lazy dog and the quick brown fox jumps again over the dog"
)


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    pytest.importorskip("safetensors")
    file = tmp_path / "layer.safetensors"
    bytemodel.save(bytemodel.untrained(CONFIG, 3), file, {"steps": 7})
    return file


@pytest.mark.slow
def test_a_saved_checkpoint_makes_the_real_inputs(checkpoint, run, monkeypatch):
    model, facts = bytemodel.load(checkpoint)
    assert facts == {"steps": 7}
    with pytest.raises(InvalidInput, match="exists"):
        bytemodel.save(model, checkpoint, {})
    assert model.config == CONFIG
    for name, tensor in bytemodel.untrained(CONFIG, 3).state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[name], tensor.bfloat16().float(), rtol=0, atol=0
        )
    options = {
        "batch": 1,
        "length": 64,
        "dtype": torch.float32,
        "device": "cpu",
        "seed": 0,
        "text": TEXT,
    }
    trained, untrained = (make_inputs("real", CONFIG, model=m, **options) for m in (model, None))
    tokens = bytemodel.byte_tokens(TEXT, 1, 64)
    expected, gates = model.activations(tokens)
    tensors = {"q": expected.q, "k": expected.k[1], "v": expected.v[1], "gates": gates}
    for name, tensor in tensors.items():
        assert torch.equal(getattr(trained, name), tensor)
        assert not torch.equal(getattr(trained, name), getattr(untrained, name))
    seen = []

    def recorded(*arguments, model, **options):
        seen.append(model)
        return make_inputs(*arguments, model=model, **options)

    monkeypatch.setattr("nsa_bench.subjects.make_inputs", recorded)
    result = run(
        lengths=[40], phases=["forward"], inputs=["real"], text=TEXT, checkpoints=[checkpoint]
    )
    assert all(m.performance for m in result.measurements)
    assert result.settings["checkpoints"] == {"2/1/8": {"file": checkpoint.name, "steps": 7}}
    assert torch.equal(seen[0].head.weight, model.head.weight)


def test_checkpoints_of_wrong_shapes_or_files_are_refused(checkpoint, run, tmp_path):
    def assert_refused(match: str, **changes) -> None:
        with pytest.raises(InvalidInput, match=match):
            run(**{"inputs": ["real"], "text": TEXT, "checkpoints": [checkpoint], **changes})

    assert_refused("needed: one each of 4/2/8", shapes=[parse_shape("4/2/8")])
    second = tmp_path / "second"
    second.write_bytes(checkpoint.read_bytes())
    assert_refused("second checkpoint of shape 2/1/8", checkpoints=[checkpoint, second])
    assert_refused("inputs are random", inputs=["random"])
    for name, content in (
        ("none", None),
        ("empty", b""),
        ("pickle", pickle.dumps({"a": 1})),
        ("cut", b"\x10" + b"\0" * 7),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        assert_refused("cannot be read as a checkpoint", checkpoints=[tmp_path / name])


def test_files_that_are_not_byte_models_are_refused(tmp_path, checkpoint):
    import safetensors.torch

    safetensors.torch.save_file({"w": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(InvalidInput, match="its header says None"):
        bytemodel.load(tmp_path / "other")
    tensors = safetensors.torch.load_file(checkpoint)
    with safetensors.safe_open(checkpoint, framework="pt") as file:
        header = file.metadata()
    for change in ({"config": "{}"}, {"config": json.dumps({"dim": 0})}, {"facts": "[["}):
        safetensors.torch.save_file(tensors, tmp_path / "other", {**header, **change})
        with pytest.raises(InvalidInput):
            bytemodel.load(tmp_path / "other")
    tensors.pop("head.weight")
    safetensors.torch.save_file(tensors, tmp_path / "other", header)
    with pytest.raises(InvalidInput, match=r"head\.weight"):
        bytemodel.load(tmp_path / "other")


def test_without_safetensors_the_error_has_the_install_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'safetensors'"):
        bytemodel.load(tmp_path / "x")
    with pytest.raises(BackendUnavailable, match="safetensors"):
        bytemodel.save(bytemodel.untrained(CONFIG, 0), tmp_path / "x", {})


def test_activations_depend_on_preceding_bytes_only():
    model = bytemodel.untrained(CONFIG, 0)
    tokens = bytemodel.byte_tokens(TEXT, 1, 90)
    changed = tokens.clone()
    changed[0, 80] += 1
    before, after = (model.activations(t)[0].q[0] for t in (tokens, changed))
    assert torch.equal(before[:80], after[:80])
    assert not torch.equal(before[80:], after[80:])
    assert torch.equal(model(tokens)[0, :80], model(changed)[0, :80])


@pytest.mark.slow
def test_library_text_is_long_and_deterministic():
    text = library_text(65536)
    assert len(text) >= 65536
    assert text == library_text(65536)
    assert len(library_text(len(text) + 1)) > len(text)
