"""The benchmark of context parallelism: failures of a rank, verdicts, figures and commands."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from nsa_bench.gate import Gate
from nsa_bench.parallel.call import Division
from nsa_bench.parallel.longest import Search
from nsa_bench.parallel.projection import CollectiveTimes
from nsa_bench.parallel.result import (
    MEASURED,
    PROJECTED,
    Largest,
    ParallelResult,
    Row,
    Traffic,
    read_parallel_result,
)
from nsa_bench.parallel.traffic import Call
from nsa_bench.parallel.worker import Judge, Measure, Project
from nsa_bench.parallel.workers import reason_of
from nsa_bench.render.plots_parallel import lines_of, parallel_figure
from nsa_bench.render.tables_parallel import parallel_summary, parallel_tables
from nsa_bench.result import read_result
from nsa_bench.shapes import parse_shape
from nsa_bench.timing import summarise
from nsa_cli.app import main
from nsa_core.errors import InvalidInput
from parallel_bench_tasks import Fault, Planted, run_bench, run_tasks, settings
from sequence_mutants import MUTANTS

SUM = 3.0  # of the numbers of two ranks


@pytest.mark.slow
def test_a_rank_that_fails_leaves_no_other_rank_waiting() -> None:
    faults = [("memory", 1), ("error", 0), ("exit", 1)]
    tasks = [Fault(0, "")]
    for kind, rank in faults:
        tasks += [Fault(rank, kind), Fault(0, "")]
    started = time.monotonic()
    both = run_tasks(settings(), tasks, 300)
    assert time.monotonic() - started < 200  # the workers would wait for 18 minutes
    reasons = [
        "out of memory on rank 1",
        "failed: ValueError: planted on rank 0",
        "failed: ended its process with exit status 3 in a worker on rank 1",
    ]
    for answers in both:
        assert [a.value for a in answers[0]] == [SUM, SUM]
        for index, reason in enumerate(reasons):
            # gloo raises on the other rank too if a process ends.
            assert reason in reason_of(answers[1 + 2 * index]).split("; ")
            assert [a.value for a in answers[2 + 2 * index]] == [SUM, SUM]  # a new set of workers


@pytest.mark.slow
def test_a_task_ends_at_the_end_of_the_run() -> None:
    started = time.monotonic()
    both = run_tasks(settings(), [Fault(0, "sleep"), Fault(0, "")], 25)
    assert time.monotonic() - started < 100
    for answers in both:
        late = "not measured: the time limit was reached"
        assert [reason_of(each) for each in answers] == [late, late]


JUDGES = [
    Judge(parse_shape("4/2/16"), dtype, Division(2, mode, layout))
    for dtype, mode, layout in itertools.product(
        ("bfloat16", "float32"), ("sequence", "heads"), ("head_tail", "contiguous")
    )
]


@pytest.mark.slow
def test_the_check_of_every_division_passes_and_sees_planted_faults() -> None:
    """No tensor is one that NCCL refuses; each fault is seen in fp32, in one layout at least."""
    planted = [Planted(j, *f) for f in MUTANTS.values() for j in JUDGES if sees_all(j)]
    right, wrong = [Planted(judge) for judge in JUDGES], [*planted]
    answers = run_tasks(settings(), [*right, *wrong], 400)[0]
    assert not any(map(reason_of, answers)), [reason_of(a) for a in answers]
    gates = [each[0].value for each in answers]
    for gate in gates[: len(right)]:
        assert gate.ok, gate
    for index, name in enumerate(MUTANTS):
        failures = gates[len(right) + index].failures
        assert [f for f in failures if "row" in f], (name, failures)


def sees_all(judge: Judge) -> bool:
    return (judge.dtype, judge.division.name) == ("float32", "2 GPUs, sequence, head_tail")


@pytest.mark.slow
def test_stand_ins_move_the_bytes_of_the_collectives() -> None:
    shape, division = parse_shape("4/2/16"), Division(2, "sequence", "head_tail")
    tasks: list[Any] = [Measure(shape, "float32", division, 128), None]
    tasks += [Project(shape, "float32", division, 128, rank) for rank in (0, 1)]
    measured, *projected = run_tasks(settings(), tasks, 400)[0]
    for rank, answers in enumerate(projected):
        real, alone = measured[rank].value.traffic, answers[0].value.traffic
        assert [t.op for t in real][:3] == ["extend", "gather_rows", "gather_rows"]
        assert [(t.op, t.received_bytes) for t in alone] == [(t.op, t.received_bytes) for t in real]
        assert all(t.ms is not None and t.ms > 0 for t in real)
        assert all(t.ms is None for t in alone)


@pytest.mark.slow
def test_a_run_measures_projects_and_searches() -> None:
    chosen = settings(projected=(4,), modes=("sequence", "heads"), layouts=("head_tail",))
    first, second = run_bench(chosen)
    assert dataclasses.replace(first, seconds=0.0) == dataclasses.replace(second, seconds=0.0)
    assert [gate.ok for gate in first.gates] == [True, True]
    assert not first.failed
    names = [(row.kind, row.ranks, row.mode) for row in first.rows]
    assert names == [
        (MEASURED, 1, ""),
        (MEASURED, 2, "sequence"),
        (MEASURED, 2, "heads"),
        (PROJECTED, 4, "sequence"),
    ]
    for row in first.rows:
        assert row.performance is not None, row
        assert len(row.compute_ms) == row.ranks
        assert min(row.compute_ms) > 0
        if row.kind == MEASURED:  # no rank computes longer than the whole call takes
            together = [sum(times) for times in zip(row.compute_ms, row.waiting_ms, strict=True)]
            assert together == pytest.approx([row.performance.median_ms] * row.ranks, rel=1e-3)
        assert (sum(row.received_bytes) > 0) == (row.ranks > 1)


def traffic(op: str, count: int, ms: float | None) -> Traffic:
    return Traffic(op, count, ms)


def test_collective_times_are_a_line_through_the_measured_ones() -> None:
    measured = [traffic("gather_rows", n << 20, 1.0 + 2 * n) for n in (1, 2, 4)]
    measured += [traffic("extend", 100, 3.0), traffic("extend", 100, 5.0)]
    times = CollectiveTimes(measured, 2)
    gather = [traffic("gather_rows", 3 << 20, None)]
    assert times.milliseconds(gather, 2) == pytest.approx(7.0)
    assert times.milliseconds(gather, 4) == pytest.approx(1.0 * 3 + 6.0)  # three starts
    assert times.milliseconds([traffic("extend", 50, None)], 4) == pytest.approx(2.0)
    assert times.milliseconds([traffic("to_heads", 1, None)], 4) is None
    assert times.milliseconds([], 4) == 0.0


def test_a_search_doubles_and_then_halves_twice() -> None:
    def tried(most: int, fits: int, failed: int | None) -> tuple[list[int], int, int | None]:
        search, lengths = Search(fits, failed, 65536), []
        while (length := search.next_length()) is not None:
            lengths.append(length)
            search.add(length, length <= most)
        return lengths, search.fits, search.failed

    k = 1024
    assert tried(900 * k, 512 * k, 1024 * k) == ([768 * k, 896 * k], 896 * k, 1024 * k)
    assert tried(300 * k, 0, None) == (
        [64 * k, 128 * k, 256 * k, 512 * k, 384 * k, 320 * k],
        256 * k,
        320 * k,
    )
    assert tried(0, 0, None) == ([64 * k], 0, 64 * k)  # the first does not fit: no length does


def test_the_bytes_of_a_call_are_those_of_the_other_ranks(monkeypatch) -> None:
    """A gather, a reduce-scatter and an exchange of rows for heads, seen as rank 1."""
    x = torch.zeros(6, 4, dtype=torch.bfloat16)
    operators = torch.ops.nsa_parallel
    gather = Call(operators.gather_rows.default, (x, "g", 4, torch.float32))
    assert gather.received_bytes(1) == 3 * 6 * 4 * 2
    scatter = Call(operators.scatter_sum.default, (x.float(), "g", 2))
    assert scatter.received_bytes(1) == 3 * 4 * 4
    monkeypatch.setattr("nsa_bench.parallel.traffic.group_size", lambda group: 4)
    tensors = [x.view(6, 4, 1), x.float().view(6, 4, 1)]
    exchange = Call(operators.to_heads.default, (tensors, "head_tail", "g"))
    assert exchange.received_bytes(1) == (6 * 4 * 2 + 6 * 4 * 4) * 3 // 4
    with pytest.raises(ValueError, match="sum_ranks"):
        Call(operators.sum_ranks.default, (x, "g")).received_bytes(0)


def example() -> ParallelResult:
    """A result with a measured row, a projection, a row without a time and a failed check."""
    performance = summarise([2.0, 3.0, 4.0], "barrier", 1)
    facts = {"shape": "4/2/16", "dtype": "bfloat16", "length": 1 << 20}
    row = Row(
        kind=MEASURED,
        **facts,
        ranks=2,
        mode="sequence",
        layout="head_tail",
        performance=performance,
        reason="",
        speed_up=1.9,
        compute_ms=[2.5, 2.0],
        waiting_ms=[0.1, 0.6],
        communication_ms=0.1,
        received_bytes=[1 << 30, 1 << 29],
        peak_bytes=[3 << 30, 2 << 30],
        traffic=[traffic("extend", 10, 0.1)],
    )
    one = dataclasses.replace(row, ranks=1, mode="", layout="", speed_up=None)
    rows = [
        one,
        row,
        dataclasses.replace(row, kind=PROJECTED, ranks=8),
        dataclasses.replace(row, ranks=2, mode="heads", performance=None, reason="out of memory"),
    ]
    gate = Gate("2 GPUs, heads, head_tail", "4/2/16", "float32", False, "c", 1.0, ["y: row 9 > 4"])
    largest = Largest("4/2/16", "bfloat16", 1, "", "", 1 << 19, 1 << 20, "out of memory")
    return ParallelResult({}, {"device": "a GPU"}, [gate], rows, [largest], {}, 1.0)


def test_a_result_file_is_read_back(tmp_path) -> None:
    file = tmp_path / "result.json"
    file.write_text(example().to_json())
    assert read_parallel_result(file) == example()
    with pytest.raises(InvalidInput, match="is not a result of nsa bench"):
        read_result(file)


def test_projections_are_labelled_in_tables_and_charts() -> None:
    measured, projected = parallel_tables(example())
    assert "projection" not in measured[0]
    assert len(measured[2]) == 3
    assert projected[0] == "4/2/16 bfloat16, one document: projection, not measured"
    (cells,) = projected[2]
    assert " ".join(cells) == "1M 8 sequence head_tail 3.00 1.90 2.50 0.100 1.00 3.00"
    assert [label for label, _ in lines_of(example())] == ["1 GPU", "2 GPUs", "8 GPUs, projected"]
    lines = [line for _, line in parallel_summary(example())]
    assert lines == [
        "0 of 1 checks against one GPU passed",
        "2 GPUs, heads, head_tail, 4/2/16 float32: y: row 9 > 4",
        "2 GPUs, heads, head_tail, 1M tokens: out of memory",
        "4/2/16 bfloat16, 1 GPU: the longest sequence has 512k tokens (1M: out of memory)",
    ]
    assert example().failed


def test_a_run_without_a_time_on_several_gpus_says_so_and_exits_with_1(tmp_path) -> None:
    passed = dataclasses.replace(example(), gates=[])
    assert not passed.timed_nothing
    one, divided, projected, failed = passed.rows
    late = dataclasses.replace(divided, performance=None, reason="not measured: late")
    skipped = {"heads, 4/2/16": "2 ranks do not divide 1 key/value heads"}
    nothing = dataclasses.replace(passed, rows=[one, late, projected, failed], skipped=skipped)
    assert nothing.timed_nothing
    assert not nothing.failed
    reasons = "not measured: late; out of memory; 2 ranks do not divide 1 key/value heads"
    line = f"NO DIVISION WAS TIMED ({reasons})"
    assert ("bold red", line) in list(parallel_summary(nothing))
    for result, code in ((passed, 0), (nothing, 1)):
        file = tmp_path / f"{code}.json"
        file.write_text(result.to_json())
        with pytest.raises(SystemExit) as ended:
            main(["bench", "report", str(file)])
        assert ended.value.code == code


def test_tables_fit_80_columns() -> None:
    for _, columns, cells in parallel_tables(example()):
        widths = [max(map(len, column)) for column in zip(columns, *cells)]
        assert sum(widths) + 2 * len(widths) - 2 <= 80


def test_the_chart_draws_memory_and_time() -> None:
    pytest.importorskip("matplotlib")
    figure = parallel_figure(example())
    for axes, unit in zip(figure.axes, ("ms", "GiB")):
        assert axes.get_ylabel() == unit
        assert [line.get_linestyle() for line in axes.lines] == ["-", "-", "--"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context-parallel", "2"], "start them with torchrun --standalone --nproc-per-node 2"),
        (["--context-parallel", "1"], "Input should be greater than or equal to 2"),
        (["--context-parallel", "2", "--batch", "2"], "--batch: not for --context-parallel"),
        (["--modes", "heads"], "--modes: only with --context-parallel; leave it out"),
        (["--modes", "heads", "--project", "4"], "--modes, --project: only with"),
        (["--modes", "heads", "--project", "4"], "leave them out"),
    ],
)
def test_the_command_refuses_options_that_do_not_fit(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "--context-parallel", "2", "--length", "1Q"],
            "'1Q'",
        ),
        (
            ["bench", "--context-parallel", "3", "--shape", "tiny", "--length", "128"],
            "runs on 3 processes, but torchrun started 2",
        ),
        (["train", "--no-such-option"], "has no option --no-such-option"),
        (["train", "--tensor-parallel", "3"], "--tensor-parallel must divide"),
    ],
)
def test_processes_print_an_error_once_and_have_the_same_exit_code(
    tmp_path, arguments: list[str], message: str
) -> None:
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    more = ["--out", str(tmp_path / "run")] if arguments[0] == "train" else []
    done = subprocess.run(
        [sys.executable, *launched, "-m", "nsa_cli", *arguments, *more, "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    lines = done.stderr.splitlines()
    assert [message in line for line in lines if line.startswith("nsa: ")] == [True], done.stderr
    codes = [line.split()[2] for line in lines if line.lstrip().startswith("exitcode")]
    assert codes == ["2", "2"], done.stderr


def test_report_prints_a_result(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    file.write_text(example().to_json())
    with contextlib.suppress(SystemExit):
        main(["bench", "report", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert "4/2/16 bfloat16, one document: projection, not measured" in lines
    assert "0 of 1 checks against one GPU passed" in lines
    with pytest.raises(SystemExit) as ended:
        main(["bench", "report", str(file), "--html", str(tmp_path / "a.html")])
    assert ended.value.code == 2
    assert "has no page; give --png or --svg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": ("ring",)}, "modes must be one or more of sequence, heads, got 'ring'"),
        ({"layouts": ()}, "layouts must be one or more of contiguous, head_tail, got ''"),
        (
            {"modes": ("heads",), "shapes": [parse_shape("6/3/16")]},
            "2 ranks do not divide the 3 of 6/3/16: use mode sequence",
        ),
        ({"projected": (4, 1)}, "projected must be numbers of GPUs >= 2, got 1"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        settings(**changes)
