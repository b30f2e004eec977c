"""nsa_models.inspect: recorded selections, shares of dense attention, pictures and the page."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html.parser
import itertools
import json
import pathlib
import re
import shutil
import struct
import sys

import pytest
import torch
from torch import nn

from nsa_core import BackendUnavailable, InvalidInput, NSAConfig, NSAttention, nsa_attention
from nsa_models.inspect import Inspection, inspect_model, inspect_text, open_subject, save
from nsa_models.inspect.collect import CHOSEN, FORCED, FUTURE, MISSED, PASSED_OVER
from nsa_models.inspect.draw import detail, overview
from nsa_models.inspect.findings import UNTRAINED, headline, sentences
from nsa_models.inspect.page import page
from nsa_models.inspect.spans import Span, split_text
from nsa_models.lm import checkpoint
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.tokens import ByteTokenizer

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


class Words:
    """A tokenizer of whole words; id 0 ends a document."""

    def __init__(self, text: str) -> None:
        self.words = ["", *dict.fromkeys(re.findall(r"\S+\s*", text))]
        self.vocab_size, self.end = len(self.words), 0

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) for word in re.findall(r"\S+\s*", text)]

    def decode(self, ids) -> str:
        return "".join(self.words[i] for i in ids)

    def to_dict(self) -> dict[str, str]:
        return {}


class Planted(nn.Module):
    """One NSA layer whose queries all attend to the tokens of id 1."""

    def __init__(self) -> None:
        super().__init__()
        config = NSAConfig(
            dim=8,
            n_heads=2,
            n_kv_heads=1,
            head_dim=4,
            compress_block_size=4,
            compress_stride=4,
            select_block_size=4,
            num_selected_blocks=4,
            window_size=8,
            compress="mean",
            rope=False,
        )
        self.embed, self.attn = nn.Embedding(2, 8), NSAttention(config)
        with torch.no_grad():
            self.embed.weight.zero_()
            self.embed.weight[:, 0] = 1  # every token asks
            self.embed.weight[1, 1] = 1  # the tokens of id 1 answer
            self.attn.qkv.weight.zero_()
            self.attn.qkv.weight[0:8:4, 0] = 6  # the first feature of both queries
            self.attn.qkv.weight[8:20:4, 1] = 6  # and of the keys of the three branches

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.attn(self.embed(tokens))


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
        _, blocks = nsa_attention(
            projected.q,
            projected.k,
            projected.v,
            gates,
            k_cmp=projected.k_cmp,
            v_cmp=projected.v_cmp,
            config=attn.config,
            return_blocks=True,
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
    assert "chooses no better than at random" in sentences(flat)[0]
    assert "chooses best" in sentences(planted)[0]


def test_the_model_is_left_as_it_was(config, tokens):
    model = LanguageModel(config).train()
    inspect_model(model, tokens)
    assert model.training
    assert not any(block.attn._forward_pre_hooks for block in model.blocks)


def test_spans_hold_whole_characters():
    tokenizer = ByteTokenizer()
    tokens = [tokenizer.end, *tokenizer.encode("a€\n"), 0x80, *b"bcdefgh", 0xE2]
    assert split_text(tokenizer, tokens) == (
        Span(0, 1, "⟨document⟩"),
        Span(1, 2, "a"),
        Span(2, 5, "€"),
        Span(5, 6, "\n"),
        Span(6, 8, "\ufffdb"),
        *(Span(8 + i, 9 + i, letter) for i, letter in enumerate("cdefgh")),
        Span(14, 15, "\ufffd"),
    )
    assert split_text(None, [7, 300]) == (Span(0, 1, "7 "), Span(1, 2, "300 "))


def test_a_run_of_bytes_that_are_no_text_is_split():
    spans = split_text(ByteTokenizer(), [0x80] * 20)
    assert [span.end - span.first for span in spans] == [6, 6, 6, 2]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(16, dtype=torch.long), "must have more than 16 tokens, got 16: each query"),
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


@pytest.fixture
def saved(config, tmp_path):
    """Return ``saved(tokenizer, **changes)``, which writes a checkpoint and returns its path."""
    pytest.importorskip("safetensors")

    def write(tokenizer=None, data="some.txt", **changes) -> pathlib.Path:
        changed = dataclasses.replace(config, **changes)
        model = LanguageModel(changed)
        tensors = checkpoint.collect_tensors(model, torch.optim.AdamW(model.parameters()))
        facts = {"data": {"data": data, "length": 40}, "step": 1234}
        path = tmp_path / "checkpoint.safetensors"
        checkpoint.write(path, tensors, changed, facts, tokenizer)
        return path

    return write


def test_a_checkpoint_is_read_with_its_tokenizer_and_length(saved):
    result = inspect_text("a text of many words " * 5, saved(ByteTokenizer()), source="words.txt")
    assert (len(result.tokens), result.total_tokens, result.trained) == (40, 106, True)
    assert result.tokens[0] == ByteTokenizer.end
    assert (
        "".join(span.text for span in result.spans)
        == "⟨document⟩" + ("a text of many words " * 5)[:39]
    )
    assert result.weights == "2 layers, trained for 1,234 steps on some.txt"
    longer = inspect_text("a text of many words " * 5, saved(ByteTokenizer()), max_tokens=50)
    assert len(longer.tokens) == 50


def test_unusable_checkpoints_and_texts_are_refused(saved, tmp_path):
    with pytest.raises(InvalidInput, match="has dense attention, which selects no blocks"):
        open_subject(saved(ByteTokenizer(), attention="dense"))
    with pytest.raises(InvalidInput, match="trained on the task recall: it has no text"):
        open_subject(saved(data="recall"))
    (tmp_path / "other").write_text("x")
    with pytest.raises(InvalidInput, match="cannot be read as a checkpoint"):
        open_subject(tmp_path / "other")
    with pytest.raises(InvalidInput, match="text must contain text, got only white space"):
        inspect_text(" \n")
    with pytest.raises(InvalidInput, match="max_tokens must be at least 1, got 0"):
        inspect_text("text", max_tokens=0)


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


class Reader(html.parser.HTMLParser):
    """Collect the addresses, the scripts and the text of each element with an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts: dict[str | None, str] = {}
        self.spans: list[str] = []
        self.tags: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.links += [str(values[name]) for name in ("src", "href", "action") if name in values]
        self._open.append((tag, values))
        if "data-first" in values:
            self.spans.append("")

    def handle_endtag(self, tag) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data) -> None:
        tag, values = self._open[-1] if self._open else ("", {})
        if tag == "script":
            self.scripts[values.get("type")] = data
        if "data-first" in values:
            self.spans[-1] += data


def hostile() -> Inspection:
    text = "</script><script>alert(1)</script> <img/src=x> \x1b[31m \u202e {{7*7}} "
    text += "&amp; \x00 'x' \"y\" "
    tokenizer = Words(text)
    tokens = torch.tensor(tokenizer.encode(text) * 4)
    model = Planted()
    model.embed = nn.Embedding(tokenizer.vocab_size, 8)
    return inspect_model(model, tokens, tokenizer, source="<b>name</b>")


def test_the_page_escapes_text(planted):
    result = hostile()
    text = page(result, 0)
    reader = Reader(text)
    visible = [
        span.text.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e").replace("\x00", "\\x00")
        for span in result.spans
    ]
    assert reader.spans == visible
    assert "img" not in reader.tags
    assert "b" not in reader.tags
    assert reader.tags.count("script") == 2
    assert not set(text) & {"\x1b", "\u202e", "\x00"}


def test_the_page_loads_nothing_and_runs_only_its_script(inspection):
    text = page(inspection, 1)
    reader = Reader(text)
    assert set(reader.links) == {"data:,"}
    assert not re.search(r"https?:|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    digest = hashlib.sha256(reader.scripts[None].encode()).digest()
    assert "default-src 'none'" in policy[1]
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}'" in policy[1]


def test_the_data_of_the_page_equal_the_inspection(inspection):
    data = json.loads(Reader(page(inspection, 1)).scripts["application/json"])
    assert (data["length"], data["layer"], len(data["layers"])) == (61, 1, 2)
    assert 0 <= data["head"] < 2
    assert 16 <= data["token"] < 61  # a query that has a choice
    for values, layer in zip(data["layers"], inspection.layers):
        assert base64.b64decode(values["cells"]) == bytes(layer.cells().flatten().tolist())
        for name, expected in (
            ("gates", layer.gates.unflatten(1, (2, 2)).mean(2)),
            ("mass", layer.mass.blocks),
        ):
            steps = torch.tensor(list(base64.b64decode(values[name]))) / 200
            torch.testing.assert_close(steps, expected.flatten(), atol=0.0026, rtol=0)


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
    with pytest.raises(InvalidInput, match="is not empty; give another folder, or --force"):
        save(planted, tmp_path)
    with pytest.raises(InvalidInput, match="file is not a folder"):
        save(planted, tmp_path / "file", force=True)
    with pytest.raises(InvalidInput, match=r"directory .*no does not exist; create it first"):
        save(planted, tmp_path / "no" / "new")
    for name in ("jinja2", "matplotlib"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(
                BackendUnavailable, match=rf"{name}, .*pip install 'nsa-cli\[plot\]'"
            ):
                save(planted, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    # The pictures have a test of their own.
    monkeypatch.setattr("nsa_models.inspect.draw.detail", lambda *_: b"a picture")
    monkeypatch.setattr("nsa_models.inspect.draw.overview", lambda *_: b"a picture")
    (block,) = re.findall(r"(?s)```python\n(.*?)```", (DOCS / "inspect.md").read_text())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("a text of many words. " * 8)
    variables: dict[str, object] = {}
    exec(compile(block, "docs/inspect.md", "exec"), variables)
    assert (tmp_path / "picture" / "inspect.html").is_file()
    assert isinstance(variables["inspection"], Inspection)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium in PATH")
def test_the_page_works_in_a_browser(planted, inspection, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    (tmp_path / "page.html").write_text(page(inspection, 1), encoding="utf-8")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for width, scheme in ((1400, "light"), (375, "dark")):
            tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            messages: list[str] = []
            tab.on("console", lambda message, seen=messages: seen.append(message.text))
            tab.on("pageerror", lambda error, seen=messages: seen.append(str(error)))
            tab.on("request", lambda request, seen=messages: seen.append(request.url))
            tab.goto((tmp_path / "page.html").as_uri())
            assert_page_follows(tab, inspection)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert messages == [(tmp_path / "page.html").as_uri()]  # no error, no other request
        browser.close()


def assert_page_follows(tab, inspection: Inspection) -> None:
    """Choose a layer, a head and a query in each way that the page offers."""
    tab.select_option("#layer", "0")
    tab.select_option("#head", "1")
    assert tab.inner_text("#title") == headline(inspection, 0)[0]
    tab.click(
        "#text [data-first='50']"
        if tab.query_selector("#text [data-first='50']")
        else "#text span:last-child"
    )
    query = int(tab.input_value("#query"))
    layer = inspection.layers[0]

    def selected() -> set[int]:
        return {b for b in layer.blocks[query, 1].tolist() if b >= 0}

    def marked() -> set[int]:
        elements = "[...document.querySelectorAll('#text .forced, #text .chosen')]"
        firsts = tab.evaluate(f"{elements}.map((element) => Number(element.dataset.first))")
        return {first // 4 for first in firsts}

    spans = {span.first // 4 for span in inspection.spans if span.first <= query}
    assert marked() == selected() & spans
    assert tab.inner_text("#readout strong").startswith(f"Token {query} ")
    tab.focus("#map")
    tab.keyboard.press("ArrowLeft")
    query -= 1
    assert int(tab.input_value("#query")) == query
    assert marked() == selected() & {s.first // 4 for s in inspection.spans if s.first <= query}
    tab.mouse.move(0, 0)
    box = tab.locator("#map").bounding_box()
    tab.locator("#map").hover(position={"x": box["width"] * 20.5 / 61, "y": 5})
    assert tab.inner_text("#readout strong").startswith("Token 20 ")
    tab.mouse.move(0, 0)
    assert tab.inner_text("#readout strong").startswith(f"Token {query} ")
    assert f"layer=0&head=1&token={query}" in tab.url
