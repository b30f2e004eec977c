"""The charts on the pages are those of the result files, and their words have the same numbers."""

from __future__ import annotations

import pathlib
import re
import statistics

import learning_figure
import pytest
import readme_figure
import scaling_figure

ROOT = pathlib.Path(__file__).resolve().parents[2]


def lines_of_chart(svg: str) -> list[list[float]]:
    """Return the numbers of every curve inside the axes, rounded to a tenth of a point."""
    curves = re.findall(r'<path d="([^"]+)" clip-path', svg)
    return [[round(float(n), 1) for n in re.findall(r"-?\d+\.?\d*", c)] for c in curves]


@pytest.mark.parametrize(
    ("script", "image"),
    [
        (readme_figure, "speed_and_quality.svg"),
        (scaling_figure, "context_parallel.svg"),
        (learning_figure, "learning_small.svg"),
        (learning_figure, "learning_model.svg"),
    ],
    ids=["README", "GPUs", "small models", "real model"],
)
def test_a_chart_is_that_of_the_results(script, image, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", [script.__name__, str(tmp_path)])
    script.main()
    drawn, shown = (
        lines_of_chart((folder / image).read_text()) for folder in (tmp_path, ROOT / "docs/images")
    )
    assert len(shown) > 3
    assert shown == drawn, f"run `python docs/scripts/{script.__name__}.py docs/images`"


def test_the_words_for_the_chart_of_the_readme_have_its_numbers():
    """A reader who does not see the chart hears the same times and losses."""
    (alt,) = re.findall(r'alt="([^"]+)"', (ROOT / "README.md").read_text())
    words = " ".join(alt.split())
    own, dense = (readme_figure.times()[name] for name in ("NSA", "dense"))
    assert own[5120] > dense[5120]
    assert own[16384] < dense[16384]
    assert "slower than dense attention at 5k tokens, faster at 16k" in words
    assert f"takes {own[65536]:.0f} ms instead of {dense[65536]:.0f} ms at 64k" in words
    nsa, baseline = (
        [f"{statistics.fmean(seeds):.2f}" for seeds in readme_figure.losses()[name].values()]
        for name in ("NSA", "dense")
    )
    assert (
        f"{nsa[0]} instead of {baseline[0]} nats in the first 1k tokens"
        f" and {nsa[-1]} instead of {baseline[-1]} from 4k to 8k"
    ) in words


def test_the_chart_has_a_white_background():
    """Otherwise black text would stand on the page's own dark background."""
    chart = (ROOT / "docs/images/speed_and_quality.svg").read_text()
    first = re.search(r'<g id="patch_1">\s*<path d="[^"]+" style="fill: (#\w+)', chart)
    assert first is not None
    assert first[1] == "#ffffff"
