"""`nsa bench`, `nsa verify` and benchmarks/real_blocks.py on a GPU, with small sizes."""

from __future__ import annotations

import pathlib
import shlex
import subprocess
import sys

import pytest

from nsa_bench.result import read_result
from nsa_bench.timing import METHODS

pytestmark = pytest.mark.gpu
ROOT = pathlib.Path(__file__).resolve().parents[2]
SHAPE = "8/2/64"


def test_bench_times_trained_inputs_in_every_phase_with_every_rival(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("safetensors")
    training = shlex.split(
        f"--device cuda --shapes {SHAPE} --dim 256 --steps 20 --length 1024 --lengths 2k"
        f" --checkpoints {tmp_path} --json {tmp_path / 'blocks.json'}"
    )
    subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "real_blocks.py"), *training], check=True
    )
    bench = shlex.split(
        f"--device cuda --shape {SHAPE} --length 512,2k --phase forward,backward,both"
        f" --inputs random,real --checkpoint {tmp_path / '8-2-64.safetensors'} --budget 0.02"
        f" --combo auto --combo sdpa --time-limit 120 --json {tmp_path / 'r.json'}"
    )
    subprocess.run([sys.executable, "-m", "nsa_cli", "bench", *bench], check=True)
    result = read_result(tmp_path / "r.json")
    assert not result.failed
    assert result.environment["capability"]
    assert result.environment["driver"]
    rivals = {m.subject for m in result.measurements if m.kind == "dense"}
    for name in ("dense cudnn", "dense flash"):  # some need repeated keys and values
        assert any(rival.startswith(name) for rival in rivals), result.skipped
    for m in result.measurements:
        assert m.performance is not None, (m.subject, m.reason)
        assert m.performance.method in METHODS
        assert m.performance.host_ms > 0
        assert (m.performance.method == "graph") == (m.performance.eager is not None)
        if m.subject == "auto":  # launch-bound at up to 2048 tokens, so captured in a CUDA graph
            assert (m.performance.method, m.performance.not_captured) == ("graph", ""), (
                m.phase,
                m.length,
            )
            assert m.performance.median_ms < m.performance.eager_ms * 1.05, (m.phase, m.length)
        assert m.peak_memory_bytes > 0
        # A fraction above 1 means a time below the roofline, which is an error of a time or a rate.
        # Two measurements of a rate differ by up to 1.5 %.
        assert 0 < m.floor_fraction < 1.02, (
            m.subject,
            m.length,
            m.phase,
            m.floor_fraction,
        )
        for name, part in m.parts.items():
            assert part.performance is not None, (m.subject, name, part.reason)


def test_bench_times_decode_steps_as_graphs_and_eagerly(tmp_path: pathlib.Path) -> None:
    bench = shlex.split(
        "decode --device cuda --shape reports,16/1/128 --length 600,4k --batch 4"
        f" --page-size 128 --budget 0.02 --time-limit 240 --json {tmp_path / 'r.json'}"
    )
    subprocess.run([sys.executable, "-m", "nsa_cli", "bench", *bench], check=True)
    result = read_result(tmp_path / "r.json")
    assert not result.failed
    measurements = {(m.shape, m.length, m.subject): m for m in result.measurements}
    for m in measurements.values():
        assert m.performance is not None, (m.subject, m.reason)
        assert (m.performance.method == "eager") == m.subject.endswith(", eager")
        assert m.floor_fraction is None or 0 < m.floor_fraction < 1.02, (
            m.subject,
            m.floor_fraction,
        )
    for shape, length in (("8/2/32", 4096), ("16/1/128", 4096)):
        step = measurements[shape, length, "auto"]
        assert step.performance.method == "graph"  # capture proves that nothing synchronises
        by_slots = measurements.get((shape, length, "auto, slots one by one"), step)
        assert set(by_slots.parts) == {"cmp", "select", "sel", "win", "combine"}
        assert {part.performance.method for part in by_slots.parts.values()} == {"within graph"}
        sum_of_shares = (
            sum(part.performance.median_ms for part in by_slots.parts.values())
            / by_slots.performance.median_ms
        )
        assert 0.9 < sum_of_shares < 1.1, (shape, length, sum_of_shares)


def test_verify_checks_decode() -> None:
    arguments = shlex.split("--phase decode --device cuda --dtype float32,bfloat16,float16")
    done = subprocess.run(
        [sys.executable, "-m", "nsa_cli", "verify", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
