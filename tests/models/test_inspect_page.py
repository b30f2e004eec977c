"""The page of nsa_models.inspect: escaping, requests, data, and its work in a browser."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import shutil

import pytest
import torch
from torch import nn

from inspect_planted import Planted
from nsa_models.inspect import Inspection, inspect_model
from nsa_models.inspect.findings import headline
from nsa_models.inspect.page import page
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.tokens import ByteTokenizer


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


@pytest.fixture
def inspection(config) -> Inspection:
    """Inspect 61 letters, each a span."""
    tokens = torch.randint(ord("a"), ord("z"), (61,))
    return inspect_model(LanguageModel(config), tokens, ByteTokenizer())


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


def test_the_page_escapes_text():
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium in PATH")
def test_the_page_works_in_a_browser(inspection, tmp_path):
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
    tab.click("#text [data-first='50']")
    tab.mouse.move(0, 0)
    query = 50
    assert int(tab.input_value("#query")) == query
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
