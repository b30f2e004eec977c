"""The HTML page of a result: complete, escaped and self-contained."""

from __future__ import annotations

import dataclasses
import html.parser
import pathlib
import re
import xml.etree.ElementTree

import pytest

from nsa_bench.render.format import number
from nsa_bench.render.page import page
from nsa_bench.render.summary import summary
from nsa_bench.render.tables import tables
from nsa_bench.result import Result, read_result
from nsa_bench.timing import LATE

RESULTS = pathlib.Path(__file__).with_name("data")  # published files change with every measurement
NASTY = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&\"'"


class Reader(html.parser.HTMLParser):
    """Collects tags, addresses, texts per tag, and table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.metas: dict[str, str] = {}
        self.texts: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.path: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        names = ("src", "href", "srcset", "action", "data", "poster", "background")
        self.addresses += [found[name] for name in names if found.get(name)]
        if tag == "meta":
            self.metas[found.get("http-equiv") or found.get("name") or "charset"] = str(
                found.get("content")
            )
        else:
            self.path.append(tag)

    def handle_endtag(self, tag):
        while self.path and self.path.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.append((self.path[-1] if self.path else "", data.strip()))

    def of(self, *tags: str) -> list[str]:
        return [text for tag, text in self.texts if tag in tags and text]


@pytest.fixture(scope="module")
def result() -> Result:
    """Return a published result with rivals and missing times, one of them of a whole call only."""
    pytest.importorskip("matplotlib")
    full = read_result(RESULTS / "backends_64_4_128.json")
    late = next(m for m in full.measurements if m.parts and m.length == 8192)
    missing = dataclasses.replace(late, performance=None, reason=LATE)
    return dataclasses.replace(
        full, measurements=[missing if m is late else m for m in full.measurements]
    )


@pytest.fixture(scope="module")
def read(result) -> Reader:
    """Return the parsed page of the result."""
    return Reader(page(result))


def test_every_figure_is_in_a_table_and_every_sentence_on_the_page(read, result):
    cells = read.of("td")
    for m in result.measurements:
        performances = [m.performance, *(part.performance for part in m.parts.values())]
        for performance in filter(None, performances):
            assert number(performance.median_ms) in cells
    without_total = [m for m in result.measurements if m.performance is None]
    assert any(part.performance for m in without_total for part in m.parts.values())
    for title, columns, rows in tables(result):
        assert title in read.of("h3")
        assert set(columns) <= set(read.of("th"))
        assert {cell for row in rows for cell in row if cell} <= set(cells)
    shown = read.of("li", "p")
    assert [line for _, line in summary(result) if line not in shown] == []
    assert any(line.startswith("no figure: ") for line in shown)


SVG = "{http://www.w3.org/2000/svg}"


def figures_of(text: str) -> list[xml.etree.ElementTree.Element]:
    """Return the figures of a page, which must be well-formed."""
    return [xml.etree.ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text)]


def words_in(figure: xml.etree.ElementTree.Element) -> str:
    """Return the texts that a reader of a figure sees, on one line."""
    return " ".join(" ".join(text.itertext()) for text in figure.iter(f"{SVG}text"))


def test_every_panel_is_a_figure_with_a_title_and_a_description_of_its_values(result, read):
    figures = figures_of(page(result))
    titles = [figure.findtext(f"{SVG}title") for figure in figures]
    phases = ["Forward", "Backward", "Forward and backward"]
    assert titles[:3] == phases
    assert titles[3:] == [
        "Time per branch at 64k tokens",
        "Hardware efficiency, forward, 64k tokens",
    ]
    assert read.of("figcaption") == titles
    for figure in figures:
        named = figure.get("aria-labelledby", "").split()
        assert [figure[0].get("id"), figure[1].get("id")] == named
        assert figure.get("role") == "img"
    longest = max(m.length for m in result.measurements)
    for figure, phase in zip(figures, ("forward", "backward", "both")):
        shown, description = words_in(figure), figure.findtext(f"{SVG}desc", "")
        assert "milliseconds per call" in shown
        timed = [m for m in result.measurements if (m.phase, m.length) == (phase, longest)]
        for m in timed:
            if m.performance is not None:
                assert f"{m.subject} {number(m.performance.median_ms)} ms" in " ".join(
                    shown.split()
                )
                assert f"{m.subject}  {number(m.performance.median_ms)} ms" in description
        (crossover,) = [
            c
            for c in result.crossovers
            if (c.shape, c.phase) == ("64/4/128", phase) and c.length is not None
        ]
        sentence = f"faster than dense from {crossover.length / 1024:.1f}k tokens"
        assert sentence in shown
        assert sentence in description
    (forward,) = [
        m
        for m in result.measurements
        if (m.subject, m.phase, m.length) == ("auto", "forward", longest)
    ]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in result.shares(forward).items())
    assert f"NSA auto, Forward: {shares}" in figures[3].findtext(f"{SVG}desc", "")
    assert f"NSA auto {forward.floor_fraction:.0%}" in figures[4].findtext(f"{SVG}desc", "")


def test_the_figure_states_why_parts_are_no_shares(result):
    fused = {**result.combos, "auto": {"backward": "triton, fused"}}
    measurements = [m for m in result.measurements if m.length <= 16384]
    text = page(dataclasses.replace(result, combos=fused, measurements=measurements))
    why = "one fused kernel runs the backward of the whole call, in place of these kernels"
    description = figures_of(text)[3].findtext(f"{SVG}desc", "")
    assert f"NSA auto, Backward: {why}" in description
    (line,) = [line for line in Reader(text).of("li", "p") if line.endswith(why)]
    assert line.startswith("not comparable: the parts of auto, 64/4/128 bfloat16 random, backward,")


def test_a_decode_page_has_every_step_and_share():
    pytest.importorskip("matplotlib")
    result = read_result(RESULTS / "decode.json")
    figures = figures_of(page(result))
    titles = ["Time of a step", "Time per slot"] * 2
    assert [figure.findtext(f"{SVG}title") for figure in figures] == titles
    for figure, shape in zip(figures[::2], ("64/4/128", "8/2/32")):
        shown, description = words_in(figure), figure.findtext(f"{SVG}desc", "")
        for m in result.measurements:
            if m.shape == shape and m.performance and not m.subject.endswith(", eager"):
                assert f"{number(m.performance.median_ms)} ms" in shown
                assert f"{number(m.performance.median_ms)} ms" in description
    assert sum(figure.findtext(f"{SVG}desc", "").count("%") for figure in figures) == 60


def test_names_are_escaped(result):
    wanted = ("auto", "forward", 2048)
    (m,) = (m for m in result.measurements if (m.subject, m.phase, m.length) == wanted)
    part = dataclasses.replace(m.parts["cmp"], backend=NASTY)
    bad = dataclasses.replace(
        m, subject=NASTY, shape=NASTY, inputs=NASTY, dtype=NASTY, parts={**m.parts, "cmp": part}
    )
    untimed = dataclasses.replace(bad, performance=None, reason=NASTY, parts={})
    crossover = dataclasses.replace(
        result.crossovers[0],
        subject=NASTY,
        shape=NASTY,
        inputs=NASTY,
        dtype=NASTY,
        length=2048,
        sentence=NASTY,
    )
    hostile = dataclasses.replace(
        result,
        measurements=[bad, untimed],
        combos={NASTY: {"cmp": NASTY}},
        skipped={NASTY: NASTY},
        peaks={NASTY: result.peaks["bfloat16"]},
        crossovers=[crossover],
        environment={"device": NASTY, "git_commit": NASTY, "versions": {"torch": NASTY}},
        settings={NASTY: [NASTY]},
    )
    text = page(hostile)
    assert NASTY not in text
    reader, plain = Reader(text), Reader(page(dataclasses.replace(result, measurements=[m])))
    assert not {"script", "img"} & {*reader.tags, *plain.tags}
    assert NASTY in "".join(reader.of("h1"))
    assert NASTY in words_in(figures_of(text)[0])


def test_the_page_is_one_file_that_may_not_load_anything(read):
    assert read.addresses == []
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(read.tags)
    policy = read.metas["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';")
    assert "connect-src" not in policy
    assert "http" not in policy
    assert read.metas["viewport"].startswith("width=device-width")
    styles = "".join(read.of("style"))
    assert not re.search(r"url\(|@import", styles)
    assert "prefers-color-scheme: dark" in styles
    assert "@media print" in styles
    assert "script" not in read.tags
    assert len(set(read.ids)) == len(read.ids)  # also of the parts of figures


@pytest.mark.parametrize(
    "name", [pytest.param("backends_64_4_128", marks=pytest.mark.slow), "decode"]
)
def test_equal_results_give_equal_bytes_and_a_small_page(name):
    result = read_result(RESULTS / f"{name}.json")
    text = page(result)
    assert text == page(result)
    assert len(text) < 500_000


def test_a_dark_page_has_a_colour_for_each_colour_of_its_figures(result):
    text = page(dataclasses.replace(result, measurements=result.measurements[:20]))
    used = set(re.findall(r"var\((--c\w+)\)", text))
    light, dark = text.split("@media screen and (prefers-color-scheme: dark)")
    assert used
    for part in (light, dark):
        assert used <= set(re.findall(r"(--c\w+): #", part))


def test_an_interrupted_run_without_a_time_has_a_page_without_charts(result):
    text = page(dataclasses.replace(result, measurements=[], crossovers=[]))
    reader = Reader(text)
    assert "svg" not in reader.tags
    assert len(text) < 100_000
