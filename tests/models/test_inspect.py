"""nsa_models.inspect: recorded selections, shares of dense attention, pictures and the page."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import re
import struct
import sys

import pytest
import torch
from torch import nn

from inspect_planted import Planted
from nsa_core import BackendUnavailable, InvalidInput, nsa_attention_with_lse
from nsa_models.inspect import Inspection, draw, inspect_model, inspect_text, open_subject, save
from nsa_models.inspect.collect import CHOSEN, FORCED, FUTURE, MISSED, PASSED_OVER
from nsa_models.inspect.draw import detail, overview
from nsa_models.inspect.findings import UNTRAINED, headline, sentences
from nsa_models.inspect.page import page
from nsa_models.inspect.spans import TextSpan, split_text
from nsa_models.lm.config import size
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.tokens import ByteTokenizer

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(255, (61,))


@pytest.fixture
def inspection(config, tokens) -> Inspection:
    return inspect_model(LanguageModel(config), tokens, ByteTokenizer())


@pytest.fixture
def planted() -> Inspection:
    tokens = torch.zeros(64, dtype=torch.long)
    tokens[20:24] = 1
    return inspect_model(Planted(), tokens)


def test_blocks_and_gates_are_those_of_the_layers(config, tokens):
    model = LanguageModel(config)
    result = inspect_model(model, tokens)
    assert [layer.name for layer in result.layers] == ["blocks.0.attn", "blocks.1.attn"]
    x = model.embed(tokens[None])
    for layer, block in zip(result.layers, model.blocks):
        attn, inputs = block.attn, block.attn_norm(x)
        projected, gates = attn.project(inputs), attn.gate(inputs)
        _, _, blocks = nsa_attention_with_lse(
            projected.q,
            projected.k,
            projected.v,
            gates,
            k_cmp=projected.k_cmp,
            v_cmp=projected.v_cmp,
            config=attn.config,
        )
        assert torch.equal(layer.blocks, blocks[0])
        torch.testing.assert_close(layer.gates, gates[0])
        x = block(x)


def test_shares_equal_a_dense_softmax_over_every_choice_of_blocks(config, tokens):
    """The random share is the mean over all choices, and the best share their maximum."""
    model = LanguageModel(config).double()
    with torch.no_grad():  # sharp attention, so that choices differ
        model.blocks[0].attn.qkv.weight *= 3
    result, attn = inspect_model(model, tokens).layers[0], model.blocks[0].attn
    projected = attn.project(model.blocks[0].attn_norm(model.embed(tokens[None])))
    q, k, size = projected.q[0], projected.k[1][0], config.layer.select_block_size
    for t, group in itertools.product((0, 9, 15, 16, 31, 47, 60), range(2)):
        scores = torch.einsum("hd,td->ht", q[t, 2 * group : 2 * group + 2], k[: t + 1, group])
        p = (scores * config.layer.softmax_scale).softmax(-1).mean(0)
        share = [p[first : first + size].sum().item() for first in range(0, t + 1, size)]
        chosen = [block for block in result.blocks[t, group].tolist() if block >= 0]
        forced = {0, max(0, t // size - 1), t // size}
        free = [block for block in range(len(share)) if block not in forced]
        always = sum(share[block] for block in forced)
        choices = [
            always + sum(share[block] for block in choice)
            for choice in itertools.combinations(free, len(set(chosen) - forced))
        ]
        expected = {
            "selected": sum(share[block] for block in chosen),
            "forced": always,
            "random": sum(choices) / len(choices),
            "best": max(choices),
            "keys": sum(min(size, t + 1 - size * block) for block in chosen) / (t + 1),
        }
        for name, value in expected.items():
            row = getattr(result.mass, name)[t, group]
            assert row.item() == pytest.approx(value, abs=1e-5), name
        blocks = result.mass.blocks[t, group].tolist()
        assert blocks[: len(share)] == pytest.approx(share, abs=1e-5)
        assert not any(blocks[len(share) :])


def test_cells_follow_the_blocks(inspection):
    layer = inspection.layers[1]
    cells, size = layer.cells(), layer.config.select_block_size
    assert cells.shape == (2, 16, 61)
    for group, block, t in itertools.product(range(2), range(16), range(61)):
        kind, current = cells[group, block, t], t // size
        selected = block in layer.blocks[t, group].tolist()
        if block > current:
            assert kind == FUTURE
        elif block == 0 or block >= current - 1:
            assert kind == FORCED
        else:
            assert kind == CHOSEN if selected else kind in (MISSED, PASSED_OVER)
    missed, chosen = (cells == MISSED).sum((1, 2)), (cells == CHOSEN).sum((1, 2))
    assert (missed > 0).all()
    assert (missed <= chosen).all()  # the best choice has as many blocks


def test_a_planted_block_is_seen_by_every_query(planted):
    layer = planted.layers[0]
    choosing = slice(28, None)  # block 5, tokens 20 to 23, is local before
    assert (layer.cells()[0, 5, choosing] == CHOSEN).all()
    assert (layer.mass.selected[choosing] > 0.98).all()
    assert (layer.mass.best - layer.mass.selected < 1e-5).all()
    assert (layer.mass.random[choosing].mean() < 0.4).all()
    assert (
        headline(planted, 0)[0] == "Layer 0 reads 41% of the keys and keeps 98% of dense attention"
    )
    assert "at tokens 20 to 23, '1 1 1 1': 100% of the later queries" in sentences(planted)[2]


def test_a_layer_without_a_gain_is_called_random(planted):
    mass = planted.layers[0].mass._replace(selected=planted.layers[0].mass.random)
    flat = dataclasses.replace(planted, layers=(dataclasses.replace(planted.layers[0], mass=mass),))
    assert headline(flat, 0)[0] == "Layer 0 chooses its blocks no better than at random"
    assert headline(flat)[0] == "The selection is no better than random"
    assert "No layer gains over random blocks by more than a point; layer " in sentences(flat)[0]
    assert " points over random blocks: its" in sentences(planted)[0]


def test_branches_of_equal_gates_are_named_together(planted):
    gates = torch.tensor([0.531, 0.46, 0.534]).expand_as(planted.layers[0].gates)
    equal = dataclasses.replace(planted.layers[0], gates=gates)
    expected = "Its gates weight cmp and win most: cmp 0.53, sel 0.46, win 0.53 on average."
    assert sentences(dataclasses.replace(planted, layers=(equal,)))[1] == expected


def test_the_model_is_left_as_it_was(config, tokens):
    model = LanguageModel(config).train()
    inspect_model(model, tokens)
    assert model.training
    assert not any(block.attn._forward_pre_hooks for block in model.blocks)


def test_spans_hold_whole_characters():
    tokenizer = ByteTokenizer()
    tokens = [tokenizer.end, *tokenizer.encode("a€\n"), 0x80, *b"bcdefgh", 0xE2]
    assert split_text(tokenizer, tokens) == (
        TextSpan(0, 1, "⟨document⟩"),
        TextSpan(1, 2, "a"),
        TextSpan(2, 5, "€"),
        TextSpan(5, 6, "\n"),
        TextSpan(6, 8, "\ufffdb"),
        *(TextSpan(8 + i, 9 + i, letter) for i, letter in enumerate("cdefgh")),
        TextSpan(14, 15, "\ufffd"),
    )
    assert split_text(None, [7, 300]) == (TextSpan(0, 1, "7 "), TextSpan(1, 2, "300 "))


def test_a_run_of_bytes_that_are_no_text_is_split():
    spans = split_text(ByteTokenizer(), [0x80] * 20)
    assert [span.end - span.first for span in spans] == [6, 6, 6, 2]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(16, dtype=torch.long), "^the text must have more than 16 tokens, got 16: "),
        (torch.zeros(2, 30, dtype=torch.long), r"integers \[S\], got torch.int64 \[2, 30\]"),
        (torch.zeros(30), r"integers \[S\], got torch.float32 \[30\]"),
        (torch.full((30,), 256), r"must lie in \[0, 256\), got 256"),
    ],
)
def test_unusable_tokens_are_refused(config, tokens, message):
    with pytest.raises(InvalidInput, match=message):
        inspect_model(LanguageModel(config), tokens)


def test_a_model_without_nsa_layers_is_refused(config, tokens):
    dense = LanguageModel(dataclasses.replace(config, attention="dense"))
    with pytest.raises(InvalidInput, match="attention 'dense', which selects no blocks"):
        inspect_model(dense, tokens)
    with pytest.raises(InvalidInput, match="Linear without an NSAttention layer"):
        inspect_model(nn.Linear(2, 2), tokens)


def test_a_run_is_read_with_its_tokenizer_and_length(write_run, config):
    folder = write_run(LanguageModel(config), ByteTokenizer())
    result = inspect_text("a text of many words " * 5, folder, source="words.txt")
    assert (len(result.tokens), result.total_tokens, result.trained) == (40, 106, True)
    assert result.tokens[0] == ByteTokenizer.end
    assert (
        "".join(span.text for span in result.spans)
        == "⟨document⟩" + ("a text of many words " * 5)[:39]
    )
    assert result.weights == "2 layers, trained for 1,234 steps on some.txt"
    longer = inspect_text("a text of many words " * 5, folder, max_tokens=50)
    assert len(longer.tokens) == 50


def test_unusable_folders_and_lengths_are_refused(write_run, config):
    dense = LanguageModel(size("tiny", attention="dense"))
    folder = write_run(dense, ByteTokenizer(), name="dense")
    only = "model_type must be one of nsa_llama, nsa_qwen2, nsa_qwen3, got "
    with pytest.raises(InvalidInput, match=f"{only}'llama': the model has dense attention, which"):
        open_subject(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "mistral"}))
    with pytest.raises(InvalidInput, match=f"{only}'mistral'$"):
        open_subject(folder)
    with pytest.raises(InvalidInput, match=r"^checkpoint: .* was trained on a task"):
        open_subject(write_run(LanguageModel(config), data="recall"))
    with pytest.raises(InvalidInput, match="max_tokens must be an integer >= 1 or None, got 0"):
        inspect_text("text", max_tokens=0)


@pytest.mark.slow
def test_untrained_weights_follow_the_seed_and_are_labelled():
    one, same, other = (inspect_text("word " * 30, open_subject(seed=s)) for s in (1, 1, 2))
    assert torch.equal(one.layers[0].gates, same.layers[0].gates)
    assert not torch.equal(one.layers[0].gates, other.layers[0].gates)
    assert (one.weights, one.trained) == ("untrained weights, seed 1", False)
    assert f'class="warning">{UNTRAINED}' in page(one, 0)
    assert UNTRAINED not in page(dataclasses.replace(one, trained=True), 0)
    svg = detail(one, 0, "svg").decode()
    assert f"<!-- {UNTRAINED} · text, " in svg  # matplotlib keeps each text as a comment
    assert UNTRAINED not in detail(dataclasses.replace(one, trained=True), 0, "svg").decode()


def test_no_sentence_of_a_picture_is_cut_off(planted, monkeypatch):
    """Not even with percentages of three digits, the longest notes and more kv heads than shown."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(draw, "draw", lambda make, kind: make())
    monkeypatch.setattr(draw, "_clearest_heads", lambda layer: [0])
    layer = planted.layers[0]
    whole = dict.fromkeys(("selected", "random", "best", "keys"), torch.ones(64, 1))
    layer = dataclasses.replace(layer, mass=layer.mass._replace(**whole))
    long = dataclasses.replace(planted, layers=(layer,), source="a source " * 20, trained=False)
    two_heads = dataclasses.replace(layer, config=dataclasses.replace(layer.config, n_kv_heads=2))
    pictures = [
        draw.detail(dataclasses.replace(long, layers=(two_heads,)), 0, ""),
        draw.overview(long, ""),
    ]
    for picture in pictures:
        for text in picture.texts:
            assert text.get_window_extent().x1 < picture.bbox.x1, text.get_text()


@pytest.mark.slow
def test_pictures_are_deterministic_light_and_1600_pixels_wide(planted, tmp_path):
    pytest.importorskip("matplotlib")
    files = save(planted, tmp_path / "one")
    assert [file.name for file in files] == [
        "inspect.html",
        "selection.png",
        "layers.png",
        "selection.svg",
        "layers.svg",
    ]
    contents = {file.name: file.read_bytes() for file in files}
    assert contents["selection.png"] == detail(planted, 0, "png")
    assert contents["layers.svg"] == overview(planted, "svg")
    assert contents["inspect.html"].decode() == page(planted, 0)
    for name in ("selection.png", "layers.png"):
        assert struct.unpack(">I", contents[name][16:20]) == (1600,)
    links = re.findall(r'href="([^"]{5})', contents["selection.svg"].decode())
    assert set(links) >= {"data:"}  # the map is one image
    assert all(link.startswith(("data:", "#")) for link in links)
    assert len(contents["selection.svg"]) < 500_000


def test_folders_layers_and_missing_libraries_are_refused(planted, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInput, match="layer must be 0 to 0, got 1"):
        save(planted, tmp_path / "new", layer=1)
    with pytest.raises(
        InvalidInput, match="is not empty: it holds file; give a new folder, or force=True to"
    ):
        save(planted, tmp_path)
    for name in ("jinja2", "matplotlib"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(
                BackendUnavailable, match=rf"{name}, .*pip install 'nsa-cli\[plot\]'"
            ):
                save(planted, tmp_path / "new")
    assert not (tmp_path / "new").exists()
