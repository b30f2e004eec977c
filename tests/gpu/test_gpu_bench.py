"""The bench and the recipe of real inputs on a GPU, small."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from nsa_core.bench.result import read_result
from nsa_core.bench.timing import METHODS

pytestmark = pytest.mark.gpu
ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPE = "8/2/64"


def test_trained_inputs_every_phase_and_every_rival(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors")
    recipe = ["--device", "cuda", "--shapes", SHAPE, "--dim", "256", "--steps", "20", "--length", "1024"]
    recipe += ["--lengths", "2k", "--checkpoints", str(tmp_path), "--json", str(tmp_path / "blocks.json")]
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "real_blocks.py"), *recipe], check=True)
    bench = ["--device", "cuda", "--shape", SHAPE, "--length", "512,2k", "--phase", "forward,backward,both"]
    bench += ["--inputs", "random,real", "--checkpoint", str(tmp_path / "8-2-64.safetensors"), "--budget", "0.02"]
    bench += ["--combo", "auto", "--combo", "sdpa", "--time-limit", "120", "--json", str(tmp_path / "r.json")]
    subprocess.run([sys.executable, "-m", "nsa_cli", "bench", *bench], check=True)
    result = read_result(tmp_path / "r.json")
    assert not result.failed
    assert result.environment["capability"]
    assert result.environment["driver"]
    rivals = {m.subject for m in result.measurements if m.kind == "dense"}
    for name in ("dense cudnn", "dense flash"):  # some only with repeated k/v
        assert any(rival.startswith(name) for rival in rivals), result.skipped
    for m in result.measurements:
        assert m.performance is not None, (m.subject, m.reason)
        assert m.performance.method in METHODS
        assert m.peak_memory_bytes > 0
        assert 0 < m.floor_fraction < 1.05, (m.subject, m.length, m.phase, m.floor_fraction)  # else the timing is wrong
        for name, part in m.parts.items():
            assert part.performance is not None, (m.subject, name, part.reason)
    assert any(m.performance.method == "graph" for m in result.measurements)
