"""The charts on the pages are those of the result files, and their words have the same numbers."""

from __future__ import annotations

import json
import pathlib
import re
import shutil

import learning_figure
import pytest
import readme_figure
import scaling_figure

from nsa_bench.render.format import number

ROOT = pathlib.Path(__file__).resolve().parents[2]


def lines_of_chart(svg: str) -> list[list[float]]:
    """Return the numbers of every curve inside the axes, rounded to a tenth of a point."""
    curves = re.findall(r'<path d="([^"]+)" clip-path', svg)
    return [[round(float(n), 1) for n in re.findall(r"-?\d+\.?\d*", c)] for c in curves]


@pytest.mark.parametrize(
    ("script", "image"),
    [
        (readme_figure, "lengths.svg"),
        (scaling_figure, "context_parallel.svg"),
        (learning_figure, "learning_small.svg"),
        (learning_figure, "learning_model.svg"),
    ],
    ids=["lengths", "GPUs", "small models", "real model"],
)
def test_a_chart_is_that_of_the_results(script, image, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", [script.__name__, str(tmp_path)])
    script.main()
    drawn, shown = (
        lines_of_chart((folder / image).read_text()) for folder in (tmp_path, ROOT / "docs/images")
    )
    assert len(shown) > 3
    assert shown == drawn, f"run `python docs/scripts/{script.__name__}.py docs/images`"


def test_the_words_for_the_chart_of_several_gpus_have_its_numbers():
    page = (ROOT / "docs/how-to/million-tokens.md").read_text()
    (words,) = re.findall(r"!\[([^]]+)\]", page)
    document = json.loads(scaling_figure.RESULT.read_text())
    rows = [row for _, line in scaling_figure.lines_of(document) for row in line]
    rows = [row for row in rows if row["length"] == 2**18]
    assert [row["ranks"] for row in rows] == [1, 2, 4, 8]
    for value in [*map(scaling_figure.milliseconds, rows), *map(scaling_figure.gib, rows)]:
        assert re.search(rf"\b{re.escape(number(value))}\b", words), value


def longest_times(result):
    return {
        m.subject: m.performance.median_ms
        for m in result.measurements
        if (m.shape, m.length, m.phase, m.inputs) == ("64/4/128", 65536, "both", "random")
        and m.performance
    }


def test_the_words_for_the_chart_of_the_readme_have_its_numbers():
    """A reader who does not see the chart hears the same times."""
    own, older = readme_figure.measured(), readme_figure.rehearsed()
    assert older is not None
    (alt,) = re.findall(r'alt="([^"]+)"', (ROOT / "README.md").read_text())
    words = " ".join(alt.split())
    times = longest_times(own)
    assert f"takes {times['auto']:.0f} ms instead of {times['dense cudnn']:.0f} ms at 64k" in words
    ms = longest_times(older)
    own_ms, (dense_ms,) = ms.pop("auto"), ms.values()
    assert (
        f"compiled for the A100 and run on one {readme_figure.gpu(older)}, it takes"
        f" {own_ms:.0f} ms instead of the {dense_ms:.0f} ms of FlashAttention-2 at 64k"
    ) in words
    assert "only this comparison carries over" in words


def test_the_chart_without_a_result_of_the_a100_path_has_one_panel(tmp_path):
    """A result of the same GPU comes before that of another one."""
    gpu = tmp_path / "h100"

    def panels():
        return readme_figure.chart(gpu).decode().count("<!-- tokens -->")

    assert readme_figure.rehearsed(gpu) is None
    assert panels() == 1
    source = readme_figure.RESULTS.with_name("h100_as_sm80") / "a100_core_64_4_128.json"
    (tmp_path / "h200_as_sm80").mkdir()
    shutil.copy(source, tmp_path / "h200_as_sm80")
    assert panels() == 2
    document = json.loads(source.read_text())
    for m in document["measurements"]:
        if m["subject"] == "dense flash":
            m["subject"] = "dense flash-attn"
    document["environment"]["device"] = "NVIDIA H100 80GB HBM3 rehearsing sm_80"
    (tmp_path / "h100_as_sm80").mkdir()
    (tmp_path / "h100_as_sm80" / "a100_core_64_4_128.json").write_text(json.dumps(document))
    result = readme_figure.rehearsed(gpu)
    assert readme_figure.gpu(result) == "H100"
    assert {m.subject for m in result.measurements} == {"auto", "dense flash-attn"}
    (crossover,) = (c for c in result.crossovers if c.inputs == "random")
    assert (crossover.subject, crossover.length) == ("auto", 8192)
    assert panels() == 2


def test_the_chart_has_a_white_background():
    """Otherwise black text would stand on the page's own dark background."""
    chart = (ROOT / "docs/images/lengths.svg").read_text()
    first = re.search(r'<g id="patch_1">\s*<path d="[^"]+" style="fill: (#\w+)', chart)
    assert first is not None
    assert first[1] == "#ffffff"
