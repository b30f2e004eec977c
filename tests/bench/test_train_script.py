"""The options of benchmarks/train.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def shapes_of(monkeypatch):
    """A function that runs the script with --shapes and returns the shapes of its section."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import train

    measured = []
    monkeypatch.setattr(train, "throughput", lambda bench: measured.append(bench.grid.shapes))

    def run(text: str) -> tuple[tuple[int, int], ...]:
        words = ["train.py", "--quick", "--device", "cpu", "--only", "throughput"]
        monkeypatch.setattr(sys, "argv", [*words, "--shapes", text])
        train.main()
        return measured[-1]

    return run


def test_shapes_replace_those_of_the_grid(shapes_of):
    assert shapes_of("64x2,128x1") == ((64, 2), (128, 1))


@pytest.mark.parametrize("text", ["64", "64x", "0x1", "64x2x1", "64x2,"])
def test_malformed_shapes_are_refused(shapes_of, text, capsys):
    with pytest.raises(SystemExit):
        shapes_of(text)
    assert f"--shapes must be like 2048x8,16384x1; got {text}" in capsys.readouterr().err
