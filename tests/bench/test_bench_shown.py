"""Presentations of a result: plots and the HTML page."""

from __future__ import annotations

import pathlib

import pytest

from nsa_bench.result import read_result

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200"


def test_plots_and_page_are_complete_and_self_contained(nsa, run, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "r.json"
    file.write_text(run(phases=["forward"]).to_json())
    files = {name: tmp_path / f"r.{name}" for name in ("png", "svg", "html")}
    done = nsa(
        "bench", "report", str(file), *(x for n, p in files.items() for x in (f"--{n}", str(p)))
    )
    assert done.code == 0, done.err
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in files["svg"].read_bytes()
    page = files["html"].read_text()
    assert page.rstrip().endswith("</html>")
    assert "data:image/png;base64," in page
    assert not [word for word in ("http://", "https://", "<script", "<link") if word in page]


def test_times_within_one_decade_have_axis_labels():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    from nsa_bench.render.plots import _over_length

    result = read_result(RESULTS / "core.json")
    cells = [
        m
        for m in result.measurements
        if m.performance and 12 < m.performance.median_ms < 50 and m.length >= 32768
    ]
    assert len(cells) > 2
    assert {m.length for m in cells} == {32768, 65536}
    axes = figure.subplots()
    _over_length(axes, cells, result, {m.subject: "#000000" for m in cells})
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    texts = [x.label1.get_text() for x in ticks if low < x.get_loc() < high and x.label1.get_text()]
    assert texts
    assert [tick.label1.get_text() for tick in axes.xaxis.get_major_ticks()] == ["32k", "64k"]


def test_numbers_in_a_decode_figure_do_not_overlap_marks():
    pytest.importorskip("matplotlib")
    from nsa_bench.render.plots_decode import decode_figure

    result = read_result(RESULTS / "decode.json")
    figure = decode_figure(result)
    figure.draw_without_rendering()
    numbers = 0
    for axes in figure.axes[::2]:
        marks = {
            round(line.get_ydata().mean(), 3): line.get_window_extent().x1 for line in axes.lines
        }
        for text in axes.texts:
            box, numbers = text.get_window_extent(), numbers + 1
            assert (
                marks.get(round(text.get_position()[1], 3), 0) + 2 < box.x0 < box.x1 < axes.bbox.x1
            ), text.get_text()
    assert numbers == sum(m.performance is not None for m in result.measurements)
    shown = [axes.axison for axes in figure.axes[1::2]]
    shapes = list(dict.fromkeys(m.shape for m in result.measurements))
    assert shown == [
        any(m.shape == shape and m.shares for m in result.measurements) for shape in shapes
    ]


def test_sums_of_shares_do_not_overlap_the_line_at_one():
    pytest.importorskip("matplotlib")
    from nsa_bench.render.plots_decode import decode_figure

    figure = decode_figure(read_result(RESULTS / "decode_small.json"))  # sums from 98 to 101 %
    figure.draw_without_rendering()
    (axes,) = figure.axes[1::2]
    (line,) = axes.lines
    ends = [
        (line.get_window_extent().x1, axes.bbox.x1, text.get_window_extent()) for text in axes.texts
    ]
    assert len(ends) == 6
    assert all(left < box.x0 < box.x1 < right for left, right, box in ends)


def test_a_missing_matplotlib_is_reported_before_any_work(nsa, monkeypatch, tmp_path):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "matplotlib" else find(name, *a),
    )
    done = nsa("bench", "--shape", "2/1/8", "--length", "40", "--png", str(tmp_path / "r.png"))
    assert done.code == 3
    assert "pip install 'nsa-cli[plot]'" in done.err
    assert not (tmp_path / "r.png").exists()
