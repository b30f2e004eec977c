"""Plots of a result: labels, crossovers, bars, colours, and the packages that they need."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import pathlib
import re
import sys

import pytest

from nsa_bench.render import plots_decode, style, words
from nsa_bench.render.arrange import arrange
from nsa_bench.render.style import log_ticks, looks_of, plot_style, spread
from nsa_bench.result import EAGER, Result, read_result
from nsa_bench.roofline import PARTS
from nsa_core.errors import BackendUnavailable

RESULTS = pathlib.Path(__file__).with_name("data")  # published files change with every measurement
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def result() -> Result:
    """Return measured times of one shape and all phases, with a rival and missing times."""
    return read_result(RESULTS / "backends_64_4_128.json")


@pytest.fixture(scope="module")
def figure(result):
    """Return the drawn figure of the result."""
    pytest.importorskip("matplotlib")
    from nsa_bench.render.plots import result_figure

    with plot_style():
        drawn = result_figure(result)
        drawn.draw_without_rendering()
    return drawn


def panels(figure, name: str) -> list:
    return [axes for axes in figure.axes if axes.get_gid() == name]


def texts(axes, gid: str) -> list:
    return [text for text in axes.texts if text.get_gid() == gid]


def box_of(text):
    """Return the box of a text without the line of an annotation."""
    from matplotlib.text import Text

    return Text.get_window_extent(text)


def boxes_overlap(artists) -> list[str]:
    """Return the texts of neighbours that overlap."""
    drawn = [(artist.get_text(), box_of(artist)) for artist in artists]
    return [f"{a[0]} / {b[0]}" for a, b in itertools.combinations(drawn, 2) if a[1].overlaps(b[1])]


@pytest.mark.slow
def test_the_commands_write_plots_and_a_page(nsa, run, tmp_path):
    file = tmp_path / "r.json"
    file.write_text(run(phases=["forward"]).to_json())
    files = {name: tmp_path / f"r.{name}" for name in ("png", "svg", "html")}
    done = nsa(
        "bench", "report", str(file), *(x for n, p in files.items() for x in (f"--{n}", str(p)))
    )
    assert done.code == 0, done.err
    assert files["png"].read_bytes().startswith(PNG)
    assert b"</svg>" in files["svg"].read_bytes()
    assert files["html"].read_text(encoding="utf-8").rstrip().endswith("</html>")


@pytest.mark.slow
def test_each_line_has_a_label_at_its_end_and_labels_do_not_overlap(figure, result):
    time_panels = panels(figure, "time")
    assert [axes.get_title("left") for axes in time_panels] == [
        "Forward",
        "Backward",
        "Forward and backward",
    ]
    width, height = figure.bbox.width, figure.bbox.height
    for axes, phase in zip(time_panels, ("forward", "backward", "both")):
        timed = [m for m in result.measurements if m.phase == phase and m.performance]
        labels = texts(axes, "end label")
        assert {text.get_text().split("  ")[0] for text in labels} == {
            words.label(m) for m in timed
        }
        assert not boxes_overlap(labels)
        for text in labels:
            box = box_of(text)
            assert axes.bbox.x1 < box.x0 < box.x1 < width, text.get_text()
            assert 0 < box.y0 < box.y1 < height
        ends = {text.get_text().split("  ")[0]: text.xy for text in labels}
        for m in timed:
            if m.length == max(o.length for o in timed if o.subject == m.subject):
                assert ends[words.label(m)] == (m.length, m.performance.median_ms)


@pytest.mark.slow
def test_each_crossover_is_marked_and_named_inside_the_panel(figure, result):
    for axes, phase in zip(panels(figure, "time"), ("forward", "backward", "both")):
        (crossover,) = [
            c
            for c in result.crossovers
            if (c.shape, c.phase) == ("64/4/128", phase) and c.length is not None
        ]
        (ring,) = [line for line in axes.lines if line.get_gid() == "crossover"]
        ((x, y),) = ring.get_xydata()
        assert x == crossover.length
        own = {
            m.length: m.performance.median_ms
            for m in result.measurements
            if (m.subject, m.phase) == ("auto", phase) and m.performance
        }
        below, above = max(n for n in own if n <= x), min(n for n in own if n >= x)
        assert own[below] < y < own[above]
        (sentence,) = texts(axes, "crossover")
        tokens = f"{crossover.length / 1024:.1f}k"
        assert sentence.get_text() == f"faster than dense from {tokens} tokens"
        box = sentence.get_window_extent()
        assert axes.bbox.x0 < box.x0 < box.x1 < axes.bbox.x1
        lowest = min(
            line.get_window_extent().y0 for line in axes.lines if len(line.get_xdata()) > 2
        )
        assert axes.bbox.y0 < box.y0 < box.y1 < lowest


def test_token_counts_and_times_are_plain_numbers_on_the_axes(figure):
    for axes in panels(figure, "time"):
        labels = [tick.label1.get_text() for tick in axes.xaxis.get_major_ticks()]
        assert labels == ["2k", "4k", "8k", "16k", "32k", "64k"]
        assert axes.get_xlabel() == "tokens"
        assert "milliseconds" in axes.get_ylabel()
        low, high = axes.get_ylim()
        ticks = [t for t in axes.yaxis.get_major_ticks() if low <= t.get_loc() <= high]
        assert len(ticks) >= 3
        assert all(re.fullmatch(r"[\d.]+", tick.label1.get_text()) for tick in ticks)


def test_times_within_one_decade_have_axis_labels(result):
    from matplotlib.figure import Figure

    from nsa_bench.render.plots_length import time_against_length

    cells = [m for m in result.measurements if m.phase == "forward" and m.performance]
    cells = [m for m in cells if 12 < m.performance.median_ms < 50 and m.length >= 32768]
    assert {m.length for m in cells} == {32768, 65536}
    axes = Figure().add_axes((0.1, 0.1, 0.5, 0.8))
    time_against_length(axes, cells, [], looks_of(result))
    assert len(axes.yaxis.get_ticklocs()) >= 2
    assert [tick.label1.get_text() for tick in axes.xaxis.get_major_ticks()] == ["32k", "64k"]


def test_parts_are_stacked_to_their_sum(figure, result):
    (axes,) = panels(figure, "parts")
    longest = max(m.length for m in result.measurements if m.timed_parts)
    bars = [m for m in result.measurements if m.timed_parts and m.length == longest]
    shares = [result.shares(m) for m in bars]
    assert any(shares)
    for row, each in enumerate(shares):
        segments = [p for p in axes.patches if abs(p.get_y() + p.get_height() / 2 - row) < 1e-6]
        assert [p.get_width() for p in segments] == pytest.approx(list(each.values()))
        starts = [0, *itertools.accumulate(each.values())][: len(each)]
        assert [p.get_x() for p in segments] == pytest.approx(starts)
    totals = texts(axes, "total")
    assert [t.get_text() for t in totals] == [
        f"{words.number(m.performance.median_ms)} ms" for m in bars
    ]
    ends = [max(1.0, sum(each.values())) for each in shares]
    for text, end in zip(totals, ends):
        x = axes.transData.transform((end, 0))[0]
        assert x < text.get_window_extent().x0
        assert text.get_window_extent().x1 < axes.bbox.x1
    key = [text.get_text() for text in axes.get_legend().get_texts()]
    assert key == [name for name in style.BRANCH_COLOURS if any(name in each for each in shares)]


def test_a_call_whose_parts_are_no_shares_has_the_reason_in_place_of_a_bar(result):
    from matplotlib.figure import Figure

    from nsa_bench.render.plots_parts import parts_panel

    fused = {**result.combos, "auto": {"backward": "triton, fused"}}
    changed = dataclasses.replace(result, combos=fused)
    wanted = ("auto", 16384)
    bars = [m for m in result.measurements if (m.subject, m.length) == wanted and m.timed_parts]
    assert [m.phase for m in bars] == ["forward", "backward"]
    axes = Figure().add_axes((0.1, 0.1, 0.8, 0.8))
    parts_panel(bars, changed).draw(axes, False)
    (reason,) = texts(axes, "reason")
    words_of_reason = " ".join(reason.get_text().split())
    assert words_of_reason == f"not comparable: {changed.not_comparable(bars[1])}"
    assert "one fused kernel runs the backward" in words_of_reason
    assert reason.get_position()[1] == 1
    rows = {round(patch.get_y() + patch.get_height() / 2) for patch in axes.patches}
    assert rows == {0}


def test_efficiency_is_that_of_the_fastest_combination_and_its_kernels(figure, result):
    (axes,) = panels(figure, "limits")
    names = [text.get_text().strip() for text in axes.get_yticklabels()]
    shares = dict(zip(names, (patch.get_width() for patch in axes.patches)))
    (best,) = [
        m
        for m in result.measurements
        if (m.subject, m.phase, m.length) == ("auto", "forward", 65536)
    ]
    assert shares["NSA auto"] == best.floor_fraction
    assert {name: shares[name] for name in best.parts} == {
        name: part.floor_fraction for name, part in best.parts.items()
    }
    assert "dense cudnn" in shares
    assert "NSA sdpa" not in shares


@pytest.mark.few_cases("decode_small")
@pytest.mark.parametrize("name", ["decode", "decode_small"])
def test_a_decode_figure_shows_each_step_once_with_its_numbers(name):
    pytest.importorskip("matplotlib")
    from nsa_bench.render.plots import result_figure

    full = read_result(RESULTS / f"{name}.json")
    with plot_style():
        figure = result_figure(full)
        figure.draw_without_rendering()
    for axes, shape in zip(
        panels(figure, "steps"), dict.fromkeys(m.shape for m in full.measurements)
    ):
        timed = [m for m in full.measurements if m.shape == shape and m.performance]
        for gid, is_eager in (("step", False), ("eager", True)):
            drawn = sorted(line.get_xdata()[0] for line in axes.lines if line.get_gid() == gid)
            assert drawn == sorted(
                m.performance.median_ms for m in timed if m.subject.endswith(EAGER) == is_eager
            )
        numbers = texts(axes, "numbers")
        assert not boxes_overlap(numbers)
        assert all(box_of(t).x0 > axes.bbox.x1 for t in numbers)
        shown = " ".join(t.get_text() for t in numbers)
        assert all(words.number(m.performance.median_ms) in shown for m in timed)
        assert not boxes_overlap([t for t in axes.get_yticklabels() if t.get_text()])
    with_shares = [m for m in full.measurements if m.timed_parts]
    rows = [len(axes.get_yticks()) for axes in panels(figure, "parts")]
    assert sum(rows) == len(with_shares) > 0


def test_labels_move_only_as_far_as_they_must():
    assert spread([0.5, 0.1, 0.9], 0.1, 0, 1) == pytest.approx([0.5, 0.1, 0.9])
    assert spread([0.5, 0.5], 0.1, 0, 1) == pytest.approx([0.45, 0.55])
    assert spread([0.5, 0.52, 0.1], 0.1, 0, 1) == pytest.approx([0.46, 0.56, 0.1])
    assert spread([0.99, 1.2, 0.98], 0.1, 0, 1) == pytest.approx([0.9, 1.0, 0.8])
    assert spread([-1, 0.0], 0.1, 0, 1) == pytest.approx([0.0, 0.1])
    assert spread([0.5] * 5, 0.5, 0, 1) == pytest.approx([0, 0.5, 1, 1.5, 2])  # too many to fit


def test_a_log_axis_has_at_least_four_ticks():
    assert log_ticks(0.02, 2000) == [0.1, 1, 10, 100, 1000]
    assert log_ticks(3, 150) == [5, 10, 20, 50, 100]


@pytest.mark.parametrize(
    ("low", "high", "ticks"), [(4e-5, 4, [1e-4, 0.01, 1]), (0.09, 9, [0.1, 0.2, 0.5, 1, 2, 5, 10])]
)
def test_long_labels_of_times_leave_every_second_tick_out(low, high, ticks):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots_decode._time_scale(axes, low, high)
    assert [*axes.get_xticks()] == ticks
    assert log_ticks(12, 50) == [20, 30, 40, 50]
    assert log_ticks(0.31, 0.39) == []


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", [*style.NSA_COLOURS, *style.GREYS, style.FAINT])
def test_lines_are_visible_on_a_light_and_on_a_dark_page(colour):
    css = (pathlib.Path(style.__file__).parent / "templates" / "report.css").read_text()
    light, dark = re.findall(r"--paper: (#\w{6})", css)[:2]
    assert (luminance(light) + 0.05) / (luminance(colour) + 0.05) >= 3
    assert (luminance(style.DARK_COLOURS[colour]) + 0.05) / (luminance(dark) + 0.05) >= 4.5


def test_nsa_is_coloured_and_the_others_differ_in_grey_and_dashes(result):
    looks = looks_of(result)
    kinds = {m.subject: m.kind for m in result.measurements}
    nsa = [looks[name] for name, kind in kinds.items() if kind == "combo"]
    others = [looks[name] for name, kind in kinds.items() if kind != "combo"]
    assert {look.linestyle for look in nsa} == {style.SOLID}
    assert len({look.colour for look in nsa}) == len({look.marker for look in nsa}) == len(nsa) == 3
    assert {look.colour for look in others} <= set(style.GREYS)
    assert len({look.linestyle for look in others}) == 5
    assert len(set(others)) == len(others) == 7
    assert style.SOLID not in {look.linestyle for look in others}


def test_a_step_and_its_variants_share_a_hue():
    looks = looks_of(read_result(RESULTS / "decode.json"))
    auto = {look for subject, look in looks.items() if subject.startswith("auto")}
    assert len(auto) == 1
    assert looks["sdpa"] not in auto


@pytest.mark.slow
def test_a_result_without_any_time_is_drawn(run):
    from nsa_bench.render.plots import render

    nothing_timed = run(lengths=[40], phases=["forward"], cell_limit_s=0.0)
    assert render(nothing_timed, "png").startswith(PNG)
    assert render(dataclasses.replace(nothing_timed, measurements=[]), "png").startswith(PNG)


def test_words_of_token_counts():
    assert [words.tokens(n) for n in (512, 8192, 40000, 1 << 20)] == ["512", "8k", "40000", "1M"]
    assert [words.about_tokens(n) for n in (700, 8192, 9515)] == ["700", "8k", "9.3k"]


def test_headlines_state_the_range_of_crossovers_and_the_best_ratio():
    runs = [read_result(file) for file in sorted(RESULTS.glob("backends_*.json"))]
    every = {
        name: [item for run in runs for item in getattr(run, name)]
        for name in ("measurements", "crossovers")
    }
    forward, backward, both = words.headlines(dataclasses.replace(runs[0], **every))
    assert re.fullmatch(
        r"Forward: NSA auto is faster than dense attention from 1\d\.\dk to 1\d\.\dk tokens on,"
        r" depending on the problem; it is \d\.\d\d times as fast at 64k tokens \(64/4/128,"
        r" bfloat16, random inputs\)\.",
        forward,
    )
    assert backward.startswith("Backward: ")
    assert both.startswith("Forward and backward: ")
    first, *_, last = words.headlines(read_result(RESULTS / "decode.json"))
    times = r"a step of NSA auto takes 0\.3\d\d ms, 3\.\d\d times as fast as dense"
    assert re.search(times, first)
    assert "1 sequence of 2k tokens (8/2/32)" in last
    assert re.search(r"2\.\d\d times the time of dense attention", last)


def test_a_combination_that_is_always_slower_is_called_slower(result):
    slow = [
        m
        for m in result.measurements
        if m.phase == "forward" and (m.subject == "sdpa" or m.kind == "dense")
    ]
    (line,) = words.headlines(dataclasses.replace(result, measurements=slow))
    assert "NSA sdpa is slower than dense attention" in line


@pytest.mark.few_cases
@pytest.mark.parametrize("option", ["--png", "--svg", "--html"])
@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_named_before_any_work(nsa, monkeypatch, tmp_path, package, option):
    hide(monkeypatch, package)
    file = tmp_path / "r.out"
    done = nsa("bench", "--shape", "2/1/8", "--length", "40", option, str(file))
    assert done.code == 3
    assert f"nsa bench needs {package}, which is not installed" in done.err
    assert "pip install 'nsa-cli[plot]'" in done.err
    assert not file.exists()
    assert not done.out


def hide(monkeypatch, *packages: str) -> None:
    """Make packages look as if they were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in packages else find(name, *a)
    )


@pytest.mark.slow
def test_a_page_without_its_packages_is_refused_and_json_is_written(
    monkeypatch, nsa, run, tmp_path
):
    from nsa_bench.render.page import page

    result = run(phases=["forward"])
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(BackendUnavailable, match="pip install"):
        page(result)
    file = tmp_path / "r.json"
    arguments = ("--shape", "2/1/8", "--length", "40", "--blocks", "8,4,16,3,24")
    limits = ("--budget", "0.001", "--device", "cpu", "--phase", "forward")
    assert nsa("bench", *arguments, *limits, "--json", str(file)).code == 0
    assert read_result(file).measurements


def test_a_table_wider_than_the_screen_is_divided():
    names = ["tokens", "subject", "ms", *(f"{name} ms" for name in PARTS)]
    cells = [str(number) for number in range(len(names))]
    untimed = ["9", "other", "-", *[""] * len(PARTS)]
    rows = ("title", names, [cells, untimed])
    stacked = list(arrange(rows, 60))
    assert [title for title, _, _ in stacked] == ["title", "title, continued"]
    assert [len(rows) for *_, rows in stacked] == [2, 1]
    shown: dict[str, str] = {}
    for _, columns, rows_shown in stacked:
        assert len("  ".join(columns)) <= 60
        shown.update(zip(columns, rows_shown[0]))
    assert shown == dict(zip(names, cells))
    assert list(arrange(rows, 100)) == [rows]
