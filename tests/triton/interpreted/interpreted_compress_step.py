"""The script that compares the fused compress of a decode step with PyTorch's operators."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[3] / "benchmarks" / "kernels"


@pytest.mark.slow
def test_both_ways_to_compress_agree(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(KERNELS)
    import compress_step

    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["compress_step.py", "--quick", "--json", str(file)])
    compress_step.main()
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"].split(" ", 4)[4] for row in rows] == [
        *("mlp, together", "mlp, by turns", "linear, together", "linear, by turns")
    ]
    for row in rows:
        assert 0 < row["cmp_difference"] < 1e-5  # equal bits would mean one way ran twice
        assert row["y_difference"] < 1e-5
