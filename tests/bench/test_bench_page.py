"""The HTML page of a result: complete, escaped, self-contained, and working in a browser."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import pathlib
import re
import shutil
import subprocess

import pytest

from nsa_bench.render.format import number
from nsa_bench.render.page import page
from nsa_bench.render.summary import summary
from nsa_bench.render.tables import tables
from nsa_bench.result import Result, read_result

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h100"
DATA = pathlib.Path(__file__).with_name("data")  # a result of three shapes with missing times
NASTY = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&\"'"


class Reader(html.parser.HTMLParser):
    """Collects tags, addresses, texts per tag, and table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.metas: dict[str, str] = {}
        self.texts: list[tuple[str, str]] = []
        self.scripts: dict[str, str] = {}
        self.path: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        names = ("src", "href", "srcset", "action", "data", "poster", "background")
        self.addresses += [found[name] for name in names if found.get(name)]
        if tag == "meta":
            self.metas[found.get("http-equiv") or found.get("name") or "charset"] = str(
                found.get("content")
            )
        else:
            self.path.append((tag, found.get("id") or ""))

    def handle_endtag(self, tag):
        while self.path and self.path.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, identifier = self.path[-1] if self.path else ("", "")
        self.texts.append((tag, data.strip()))
        if tag == "script":
            self.scripts[identifier] = data

    def of(self, *tags: str) -> list[str]:
        return [text for tag, text in self.texts if tag in tags and text]


def reduced(file: pathlib.Path, **wanted: str) -> Result:
    """Return a result with the measurements that have the given fields."""
    result = read_result(file)
    kept = [
        m for m in result.measurements if all(getattr(m, key) == v for key, v in wanted.items())
    ]
    assert kept
    return dataclasses.replace(result, measurements=kept)


@pytest.fixture(scope="module")
def result() -> Result:
    """Return one shape of a published result, which has missing times and a rival."""
    pytest.importorskip("plotly")
    return reduced(DATA / "backends.json", shape="64/4/128")


@pytest.fixture(scope="module")
def read(result) -> Reader:
    """Return the parsed page of the result."""
    return Reader(page(result))


def charts_of(reader: Reader) -> list[dict]:
    return json.loads(reader.scripts["chart-data"])


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


def test_every_time_is_a_point_of_a_chart_with_its_ratio(read, result):
    charts = charts_of(read)
    phases = {"forward": "Forward", "backward": "Backward", "both": "Forward and backward"}
    assert [chart["choice"]["phase"] for chart in charts] == list(phases.values())
    for m in result.measurements:
        (chart,) = [c for c in charts if c["choice"]["phase"] == phases[m.phase]]
        traces = [trace for trace in chart["time"]["data"] if "meta" not in trace]
        lines = {trace["name"].removeprefix("NSA "): trace for trace in traces}
        line = lines.get(m.subject, {"x": []})
        if m.performance is None:
            assert m.length not in line["x"]
            continue
        index = line["x"].index(m.length)
        assert line["y"][index] == m.performance.median_ms
        hover = line["text"][index]
        assert f"{number(m.performance.median_ms)} ms" in hover
        if m.kind == "combo":
            ratio = m.ratio_to_dense
            words = "times as fast as dense" if ratio >= 1 else "times the time of dense"
            assert f"{number(max(ratio, 1 / ratio))} {words}" in hover
    for chart in charts:
        assert chart["time"]["layout"]["xaxis"]["type"] == "log"
        assert chart["time"]["layout"]["yaxis"]["type"] == "log"
        assert chart["time"]["layout"]["xaxis"]["ticktext"][:2] == ["2k", "4k"]


def test_the_chart_marks_each_crossover(read, result):
    for chart, phase in zip(charts_of(read), ("forward", "backward", "both")):
        (mark,) = [trace for trace in chart["time"]["data"] if trace.get("meta") == "crossover"]
        (crossover,) = [
            c
            for c in result.crossovers
            if (c.shape, c.phase) == ("64/4/128", phase) and c.length is not None
        ]
        assert mark["x"] == [crossover.length] * 2
        assert f"from {crossover.length / 1024:.1f}k tokens" in mark["text"][1]
        assert mark["legendgroup"] == crossover.subject  # it is hidden with its line


def test_parts_are_stacked_in_the_chart(read, result):
    forward, _, both = charts_of(read)
    assert both["parts"] is None  # kernels are not timed in this phase
    assert forward["parts"]["layout"]["barmode"] == "stack"
    bars = {trace["name"]: trace for trace in forward["parts"]["data"]}
    for m in result.measurements:
        for name, share in result.shares(m).items() if m.phase == "forward" else ():
            row = bars[name]["y"].index(f"NSA {m.subject}, {m.length // 1024}k tokens")
            assert bars[name]["x"][row] == pytest.approx(100 * share)


def test_the_chart_states_why_parts_are_no_shares(result):
    fused = {**result.combos, "auto": {"backward": "triton, fused"}}
    changed = dataclasses.replace(result, combos=fused)
    read = Reader(page(changed))
    forward, backward, _ = charts_of(read)
    (reasons,) = [t for t in backward["parts"]["data"] if t["name"] == "not comparable"]
    rows = {y for t in backward["parts"]["data"] if t["type"] == "bar" for y in t["y"]}
    assert "NSA auto, 2k tokens" in reasons["y"]
    assert not rows & {*reasons["y"]}
    assert all(text.startswith("not comparable: ") for text in reasons["text"])
    drawn = {y for t in forward["parts"]["data"] if t["type"] == "bar" for y in t["y"]}
    assert "NSA auto, 2k tokens" in drawn
    why = "one fused kernel runs the backward of the whole call, in place of these kernels"
    (line,) = [line for line in read.of("li", "p") if line.endswith(why)]
    assert line.startswith("not comparable: the parts of auto, 64/4/128 bfloat16 random, backward,")


def test_decode_charts_have_every_step_and_share():
    pytest.importorskip("plotly")
    result = read_result(RESULTS / "decode.json")
    first, second = charts_of(Reader(page(result)))
    for chart, shape in ((first, "64/4/128"), (second, "8/2/32")):
        timed = [m for m in result.measurements if m.shape == shape and m.performance]
        points = [t for t in chart["time"]["data"] if "least time" not in t["name"]]
        assert sorted(x for t in points for x in t["x"]) == sorted(
            m.performance.median_ms for m in timed
        )
        rows = [y for t in points[:1] for y in t["y"]]
        assert len(set(rows)) == len(rows)  # a row of its own per cell and subject
        assert set(rows) <= set(chart["time"]["layout"]["yaxis"]["categoryarray"])
    assert sum(len(t["x"]) for t in first["parts"]["data"]) == 30  # six steps of five slots


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
    assert "<img" not in text.replace('"<img', "")  # plotly.js has it in a string
    reader, plain = Reader(text), Reader(page(dataclasses.replace(result, measurements=[m])))
    assert reader.tags.count("script") == plain.tags.count("script") == 4
    assert "img" not in reader.tags
    assert NASTY in "".join(reader.of("h1"))
    (chart,) = charts_of(reader)
    assert chart["choice"]["shape"] == NASTY  # text of an option, which no parser reads
    for text in strings(chart["time"]) + strings(chart["parts"]):  # Plotly reads HTML in these
        assert "<img" not in text
        assert "<script" not in text
    assert "&lt;img" in chart["time"]["data"][0]["name"]


def strings(value: object) -> list[str]:
    """Return all strings of a JSON document."""
    if isinstance(value, dict):
        return [s for item in value.values() for s in strings(item)]
    if isinstance(value, list):
        return [s for item in value for s in strings(item)]
    return [value] if isinstance(value, str) else []


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
    assert sum("plotly.js v" in text for text in read.of("script")) == 1


def test_equal_results_give_equal_bytes_of_a_stated_size(result, read):
    text = page(result)
    assert text == page(result)
    guide = RESULTS.parents[2] / "docs" / "how-to" / "benchmark.md"
    documented = guide.read_text(encoding="utf-8")
    (megabytes,) = re.findall(r"about (\d+) MB", documented)
    assert abs(len(text.encode()) / 1e6 - float(megabytes)) < 0.5


def test_an_interrupted_run_without_a_time_has_a_page_without_charts(result):
    text = page(dataclasses.replace(result, measurements=[], crossovers=[]))
    reader = Reader(text)
    assert "script" not in reader.tags
    assert len(text) < 100_000


PROBE = """
<script>
const seen = [];
for (const select of document.querySelectorAll("#choosers select")) {
  for (const option of [...select.options]) {
    select.value = option.value;
    select.dispatchEvent(new Event("change"));
    seen.push(document.getElementById("time-title").textContent);
  }
}
document.body.dataset.seen = JSON.stringify(seen);
</script>
"""


def requests_of_the_page(log: pathlib.Path) -> list[str]:
    """Return the network addresses in Chromium's log, without the browser's own requests."""
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    params = [event["params"] for event in events if "initiator" in event.get("params", {})]
    urls = [p["url"] for p in params if p["initiator"] != "not an origin"]
    return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "lines", "titles", "phrase"),
    [
        (DATA / "backends.json", 8, 5, "faster than dense"),
        (RESULTS / "decode.json", 2, 2, "1 sequence of 512 tokens"),
    ],
    ids=["backends", "decode"],
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_works_in_a_browser_without_a_network(
    tmp_path, path, lines, titles, phrase, scheme
):
    pytest.importorskip("plotly")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not in PATH (Debian: apt-get install chromium)")
    file, log = tmp_path / "page.html", tmp_path / "net.json"
    text = page(read_result(path))
    file.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--log-net-log={log}",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
        "--virtual-time-budget=10000",
        "--window-size=1280,2400",
    )
    done = subprocess.run(
        [chromium, *options, "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert messages == []  # neither errors nor refused requests
    dom = done.stdout
    assert len(re.findall(r'<svg class="main-svg"', dom)) >= 4  # two layers per chart
    assert len(re.findall(r'class="trace scatter', dom)) >= lines
    assert phrase in dom.split('id="time-chart"')[1].split("<h2>Figures</h2>")[0]
    seen = json.loads(html.unescape(re.findall(r'data-seen="([^"]*)"', dom)[0]))
    assert len(set(seen)) == titles  # each choice shows another problem
    assert requests_of_the_page(log) == []
