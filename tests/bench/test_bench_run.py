"""A benchmark run: gates before times, every kernel timed, results read back, failures reported."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys

import markupsafe
import pytest
import torch

from nsa_bench.clocks import CpuClock
from nsa_bench.render.page import page
from nsa_bench.render.summary import summary
from nsa_bench.render.tables import rows_of
from nsa_bench.result import read_result
from nsa_bench.shapes import parse_lengths
from nsa_bench.timing import Outcome, Workload, measure, summarise
from nsa_cli import output
from nsa_cli.bench import bench
from nsa_cli.bench_options import PRESETS
from nsa_core.errors import InvalidInput
from nsa_verify.problems.combination import parse_combination


@pytest.mark.slow
def test_a_run_times_every_kernel_and_dense_attention(run, tmp_path):
    result = run(
        phases=["forward", "backward", "both"], inputs=["real"], text=b"to be or not to be"
    )
    assert not result.failed
    assert [g.ok for g in result.gates] == [True]
    assert result.gates[0].seconds < 10
    assert len(result.measurements) == 2 * 3 * 2  # lengths, phases, and (auto, dense flash)
    for m in result.measurements:
        assert m.performance is not None, m
        assert m.performance.q1_ms <= m.performance.median_ms <= m.performance.q3_ms
        assert len(m.performance.samples_ms) >= 3
        assert m.peak_memory_bytes > 0
        assert 0 < m.floor_fraction < 1
        assert m.ratio_to_dense == 1 if m.kind == "dense" else m.ratio_to_dense > 0
        if m.kind == "combo":
            # n * l' = 48: 40 tokens select every block
            selection = {"causal"} if m.length == 40 else {"select", "sel"}
            parts = {"compress", "cmp", "win", "combine"} | selection
            timed = {
                "forward": parts,
                "backward": parts - {"select"},
                "both": set(),  # forward and backward are measured already
            }
            assert set(m.parts) == timed[m.phase]
            assert all(part.performance for part in m.parts.values())
    assert {c.phase for c in result.crossovers} == {"forward", "backward", "both"}
    file = tmp_path / "r.json"
    file.write_text(result.to_json())
    assert read_result(file) == result
    assert json.loads(file.read_text())["settings"]["threads"] == 1


def test_peak_memory_includes_the_output(run):
    m = next(m for m in run(lengths=[80], phases=["forward"]).measurements if m.kind == "dense")
    assert m.peak_memory_bytes >= 80 * 2 * 8 * 4


def test_a_wrong_backend_is_not_timed(run, registry_with):
    result = run(registry_with("wrong", lambda o: o * 1.01), phases=["forward"])
    assert result.failed
    assert {g.combo: g.ok for g in result.gates} == {"auto": True, "wrong": False}
    wrong = [m for m in result.measurements if m.subject == "wrong"]
    assert wrong
    for m in wrong:
        assert m.performance is None
        assert m.parts == {}
        assert m.reason.startswith("not correct")
    assert all(m.performance for m in result.measurements if m.subject == "auto")
    assert not [c for c in result.crossovers if c.subject == "wrong" and c.length]


def test_a_wrong_gradient_fails_the_gate(run, registry_with, monkeypatch):
    registry = registry_with("wrong")
    module = sys.modules[registry.get("wrong").spec.slots["win"].forward.partition(":")[0]]
    real = module.backward
    monkeypatch.setattr(
        module, "backward", lambda *t, call: tuple(g * 1.01 for g in real(*t, call=call))
    )
    result = run(
        registry, lengths=[40], phases=["backward"], combos=[parse_combination("win=wrong")]
    )
    assert result.failed
    assert all("win (wrong) d" in line for line in result.gates[0].failures)
    assert not run(
        registry, lengths=[40], phases=["forward"], combos=[parse_combination("win=wrong")]
    ).failed


@pytest.mark.slow
def test_a_backend_that_raises_fails_its_gate(run, registry_with):
    def broken(o):
        raise ValueError("no such tile")

    result = run(registry_with("broken", broken), lengths=[40], phases=["forward"])
    assert result.failed
    assert "no such tile" in next(g for g in result.gates if not g.ok).failures[0]


@pytest.mark.slow
def test_cells_after_the_time_limit_have_a_reason(run):
    result = run(time_limit_s=0.0)
    assert {m.reason for m in result.measurements} == {"not measured: the time limit was reached"}
    assert {c.length for c in result.crossovers} == {None}


def test_a_value_that_is_named_twice_is_measured_once(nsa, tmp_path):
    """Two cells of one length had no growth from one to the other: ZeroDivisionError."""
    twice = ("--phase", "forward,forward", "--inputs", "real,real", "--shape", "2/1/8,2/1/8")
    options = ("--device", "cpu", "--length", "40", "--budget", "0.001", "--combo", "sdpa")
    file = tmp_path / "r.json"
    assert nsa("bench", *twice, *options, "--json", str(file)).code == 0
    assert [m.subject for m in read_result(file).measurements] == ["sdpa", "dense flash"]


def test_an_unknown_phase_is_refused(run):
    with pytest.raises(InvalidInput, match="sideways"):
        run(phases=["sideways"])


SMALL = (
    "--shape",
    "2/1/8",
    "--length",
    "40",
    "--phase",
    "forward",
    "--blocks",
    "8,4,16,3,24",
    "--budget",
    "0.001",
)


def test_the_command_prints_and_saves_a_result(nsa, tmp_path):
    files = {name: str(tmp_path / f"r.{name}") for name in ("json",)}
    done = nsa("bench", *SMALL, "--json", files["json"])
    assert done.code == 0, done.err
    for text in (
        "Combinations",
        "2/1/8 float32, forward",
        "dense flash",
        "peak rates",
        "1 CPU thread",
    ):
        assert text in done.out
    assert nsa("bench", *SMALL, "--json", files["json"]).code == 2  # the file exists
    assert "dense flash" in nsa("bench", "report", files["json"]).out
    assert nsa("bench", "compare", files["json"], files["json"]).code == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--cell-limit", "0.001", "--length", "2k"), "the cell's time limit of 0.001 s was"),
        (("--max-call", "0.001", "--length", "1M"), "--max-call 0.001"),
        # 216 bytes a token: q, k, v, gates and o
        (("--length", "999999999"), "out of memory: a call needs at least 201.2 GiB, and cpu has"),
    ],
)
def test_a_run_that_timed_nothing_says_why_and_exits_with_1(
    nsa, tmp_path, monkeypatch, options, why
):
    monkeypatch.setattr("nsa_bench.limits._memory_bytes", lambda device: 100 << 30)
    file = str(tmp_path / "r.json")
    done = nsa("bench", *SMALL[:2], *SMALL[4:], *options, "--json", file)
    words = " ".join(done.out.split())
    assert done.code == 1, done.err
    assert "NO COMBINATION WAS TIMED (" in words
    assert why in words.split("NO COMBINATION WAS TIMED (")[1]
    assert "Traceback" not in done.err
    assert nsa("bench", "report", file).code == 1


def test_default_lengths_select_blocks():
    block_sizes = inspect.signature(bench).parameters["blocks"].default
    *_, block, n, _ = map(int, block_sizes.split(","))
    lengths = [v["lengths"] for preset in PRESETS.values() for v in preset.values()]
    assert min(min(parse_lengths(text)) for text in lengths) > n * block == 1024


def test_a_run_of_dense_attention_alone_timed_no_combination(run):
    result = run(lengths=[40], phases=["forward"])
    assert not result.timed_nothing
    dense = [m for m in result.measurements if m.kind == "dense"]
    assert dataclasses.replace(result, measurements=dense).timed_nothing


@pytest.mark.slow
def test_the_command_exits_with_1_for_a_wrong_backend(nsa, registry_with, monkeypatch):
    registry = registry_with("wrong", lambda o: o * 1.01)
    monkeypatch.setattr(output, "find_backends", lambda: registry)
    done = nsa("bench", *SMALL)
    assert done.code == 1
    assert "NOT CORRECT wrong" in done.out
    assert "not correct: its gate failed" in done.out


@pytest.mark.slow
def test_the_compare_command_exits_with_1_for_a_regression(nsa, run, tmp_path):
    old = run(lengths=[40], phases=["forward"])
    slow = [
        dataclasses.replace(
            m, performance=dataclasses.replace(m.performance, median_ms=1e6, q1_ms=1e6, q3_ms=1e6)
        )
        for m in old.measurements
    ]
    (tmp_path / "old").write_text(old.to_json())
    (tmp_path / "new").write_text(dataclasses.replace(old, measurements=slow).to_json())
    paths = (str(tmp_path / "old"), str(tmp_path / "new"))
    done = nsa("bench", "compare", *paths, "--fail-over", "5%")
    assert done.code == 1
    assert "slower" in done.out
    assert nsa("bench", "compare", *reversed(paths)).code == 0
    assert nsa("bench", "compare", *paths, "--fail-over", "much").code == 2


@pytest.mark.slow
def test_the_compare_command_names_the_figures_that_the_new_file_lacks(nsa, run, tmp_path):
    long = run(lengths=[40, 80], phases=["forward"])
    short = [m for m in long.measurements if m.length == 40]
    (tmp_path / "long").write_text(long.to_json())
    (tmp_path / "short").write_text(dataclasses.replace(long, measurements=short).to_json())
    paths = (str(tmp_path / "long"), str(tmp_path / "short"))
    done = nsa("bench", "compare", *paths)
    assert done.code == 1
    missing = [line for line in done.out.splitlines() if line.rstrip().endswith(" missing")]
    assert len(missing) == 8  # auto, its six kernels, and dense attention
    assert all(line.split()[0] == "80" for line in missing)
    words = " ".join(done.out.split())
    assert f"8 figures of {paths[0]} are missing in {paths[1]}; measure them, or" in words
    assert done.out.splitlines()[-1] == "15 figures: 8 missing, 7 same"
    allowed = nsa("bench", "compare", *paths, "--allow-missing")
    assert (allowed.code, "measure them" in allowed.out) == (0, False)
    assert allowed.out.count(" missing\n") == 8
    other = nsa("bench", "compare", *reversed(paths))
    assert (other.code, other.out.splitlines()) == (0, ["15 figures: 7 same, 8 new"])


@pytest.mark.parametrize("words", ["bench --combo triton", "bench decode --combo win=fa2"])
def test_a_backend_that_cannot_run_here_is_refused(nsa, words):
    done = nsa(*words.split(), "--device", "cpu")
    assert done.code == 3
    assert words.rpartition("=")[2].rpartition(" ")[2] in done.err


@pytest.mark.slow
def test_a_cell_over_its_time_limit_reports_what_is_missing(run):
    result = run(lengths=[40], phases=["forward"], cell_limit_s=0.0)
    for m in result.measurements:
        assert m.performance is None
        assert m.reason == "not measured: the cell's time limit of 0 s was reached"
        assert {part.reason for part in m.parts.values()} == (
            {m.reason} if m.kind == "combo" else set()
        )
    (line,) = (entry for _, entry in summary(result) if entry.startswith("no figure"))
    assert line.count("alone") == 5
    assert all(m.subject in line for m in result.measurements)
    assert [row[2] for _, _, cells in rows_of(result) for row in cells] == ["-"] * len(
        result.measurements
    )
    before, after = page(result).split("<h2>Figures that are missing</h2>")
    assert "no figure" not in before
    assert str(markupsafe.escape(line)) in after
    assert not result.failed


@pytest.mark.slow
def test_both_alone_times_every_kernel(run):
    (m,) = (m for m in run(lengths=[40], phases=["both"]).measurements if m.kind == "combo")
    assert set(m.parts) == {"compress", "cmp", "causal", "win", "combine"}


def test_a_table_of_short_sequences_names_causal_attention_in_place_of_selection(run):
    result = run(lengths=[40], phases=["forward"])
    (_, columns, _), *_ = rows_of(result)
    assert columns[-5:] == [f"{n} ms" for n in ("compress", "cmp", "causal", "win", "combine")]
    (note,) = (line for _, line in summary(result) if line.startswith("causal: "))
    assert "selection does not run" in note
    long = run(lengths=[80], phases=["forward"])
    (_, columns, _), *_ = rows_of(long)
    assert {"select ms", "sel ms"} < {*columns}
    assert "causal ms" not in columns
    assert not [line for _, line in summary(long) if line.startswith("causal: ")]


@pytest.mark.slow
def test_the_expected_time_follows_the_growth_of_the_last_two_lengths(run, monkeypatch):
    """1 ms per 40 tokens is 4 ms at 160 tokens; S^2 from 80 would expect 8 and skip it at 5."""
    from nsa_bench import prefill as module

    def measured(self, cell, plans, baselines):
        times = {
            name: summarise([cell.length / 40.0], "perf_counter")
            for name in ("total auto", "dense flash")
        }
        return {name: Outcome(time) for name, time in times.items()}

    monkeypatch.setattr(module.PrefillBench, "_time_workloads", measured)
    measurements = run(
        phases=["forward"], lengths=[40, 80, 160, 320], max_call_s=0.005
    ).measurements
    assert [m.length for m in measurements if m.kind == "combo" and m.performance] == [40, 80, 160]
    assert {m.reason for m in measurements if m.length == 320} == {
        "not measured: a call would take about 0.008 s, over --max-call 0.005"
    }


@pytest.mark.slow
def test_a_broken_device_fails_later_cells_and_keeps_earlier_ones(run, monkeypatch):
    from nsa_bench import subjects as module

    real = module.make_inputs

    def broken(*arguments, **options):
        if options["length"] > 40:
            raise RuntimeError("an illegal memory access was encountered")
        return real(*arguments, **options)

    monkeypatch.setattr(module, "make_inputs", broken)
    result = run(phases=["forward"])
    assert result.failed
    assert all(m.performance for m in result.measurements if m.length == 40)
    assert all(
        "failed: RuntimeError: an illegal" in m.reason
        for m in result.measurements
        if m.length == 80
    )


def test_memory_that_the_cpu_refuses_is_out_of_memory():
    workload = Workload("large", lambda: lambda: torch.empty(1 << 50, dtype=torch.uint8))
    outcomes = measure([workload], CpuClock(), budget_s=0.01)
    assert outcomes["large"].reason == "out of memory"


def test_a_kernel_that_fails_during_timing_has_a_reason(monkeypatch):
    calls = []

    def make():
        def call():
            calls.append(1)
            if len(calls) > 4:
                raise RuntimeError("no more")

        return call

    monkeypatch.setattr("nsa_bench.clocks.SAMPLE_MS", 1e-6)
    outcomes = measure(
        [Workload("bad", make), Workload("good", lambda: lambda: None)], CpuClock(), budget_s=0.01
    )
    assert outcomes["bad"].reason == "failed: RuntimeError: no more"
    assert outcomes["bad"].performance is None
    assert outcomes["good"].performance
