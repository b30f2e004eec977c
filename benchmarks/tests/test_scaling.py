"""benchmarks/scaling.py: its check sees planted faults, its rows and its table, its errors."""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import scaling
import torch
from figure_parallel import COLUMNS, PARALLEL
from figure_tables import Results

from nsa_core.layer import fp32_product
from nsa_models.lm.parallel import World
from rank_processes import run_on_ranks
from sequence_mutants import MUTANTS, mutated

ROOT = pathlib.Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
SHAPE, BLOCKS = "4/2/16", (8, 4, 16, 4, 16)
HEAD_TAIL = ("sequence", "head_tail")
# Runs the script with a fault of mode sequence.
PLANTED = """
import sys
sys.path[:0] = {paths}
from sequence_mutants import MUTANTS, mutated
import scaling
with mutated(*MUTANTS["halo rows are not sent back"]):
    scaling.main()
"""


def judge(rank: int, world: int, dtype: str, division: tuple[str, str], fault: str) -> list[str]:
    """Return what the check finds on this rank, with a planted fault or with none.

    run_on_ranks refuses tensors that NCCL refuses. The gates run as on a GPU: in bf16, the gradient
    of a gate's weight is then a transposed view.
    """
    grid = World(torch.device("cpu"), rank, world).arranged(world, 1)
    gpu = mock.patch.object(fp32_product, "DEVICES", ("cpu",))
    with gpu, mutated(*MUTANTS.get(fault, ("", {}))):
        referee = scaling.Referee(scaling.layer_config(SHAPE, BLOCKS), getattr(torch, dtype), grid)
        return referee.judge(scaling.Division(world, *division))


@pytest.mark.slow
def test_the_check_passes_every_division_and_sees_every_planted_fault() -> None:
    divisions = itertools.product(("sequence", "heads"), ("head_tail", "contiguous"))
    cases = [
        {"dtype": dtype, "division": division, "fault": ""}
        for division, dtype in itertools.product(divisions, ("bfloat16", "float32"))
    ]
    right = len(cases)
    cases += [{"dtype": "float32", "division": HEAD_TAIL, "fault": name} for name in MUTANTS]
    found = run_on_ranks(2, [("judge", case) for case in cases], ["test_scaling"])
    assert found[:right] == [[[], []]] * right
    for name, failures in zip(MUTANTS, found[right:], strict=True):
        assert failures[0] == failures[1]
        assert [failure for failure in failures[0] if "row" in failure], (name, failures)


def run(
    tmp_path: pathlib.Path, script: pathlib.Path, code: int, *more: str, processes: int = 2
) -> tuple[Any, str]:
    """Run a script on several processes; return the result file and what is printed."""
    file = tmp_path / "h100" / "context_parallel.json"
    file.parent.mkdir()
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launched.append(str(script))
    options = ["--device", "cpu", "--dtype", "float32", "--shape", SHAPE, "--budget", "0.001"]
    options += ["--blocks", *map(str, BLOCKS), "--length", "128", "--layouts", "head_tail", *more]
    done = subprocess.run(
        [sys.executable, *launched, *options, "--json", file],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout


def test_a_run_divides_over_all_processes_and_over_half_of_them() -> None:
    assert [*map(scaling.halved, (2, 3, 4, 6, 8))] == [[2], [3], [4, 2], [6], [8, 4, 2]]


@pytest.mark.slow
def test_a_layer_is_timed_on_one_process_on_two_and_on_four(tmp_path: pathlib.Path) -> None:
    more = ("--modes", "sequence", "--on-most", "256")
    document, printed = run(tmp_path, BENCHMARKS / "scaling.py", 0, *more, processes=4)
    assert document["complete"]
    assert [gate["division"][:6] for gate in document["gates"]] == ["4 GPUs", "2 GPUs"] * 2
    assert all(gate["ok"] for gate in document["gates"])
    assert {"device", "git_commit", "source_trees", "torch"} <= document["environment"].keys()
    one, four, two, long = document["rows"]
    assert [(row["length"], row["ranks"], row["mode"]) for row in document["rows"]] == [
        (128, 1, ""),
        (128, 4, "sequence"),
        (128, 2, "sequence"),
        (256, 4, "sequence"),
    ]
    for row in document["rows"]:
        median, alone = row["performance"]["median_ms"], row["ranks"] == 1
        assert 0 < max(row["forward_ms"], row["backward_ms"]) < median * 1.5
        assert len(row["collectives"]) == (0 if alone else 7)
        total = sum(each["ms"] for each in row["collectives"])
        assert row["communication_ms"] == pytest.approx(total)
        assert len(row["waiting_ms"]) == len(row["peak_bytes"]) == (1 if alone else 4)
        assert all(waiting < median for waiting in row["waiting_ms"])
    for row in (two, four):
        ratio = one["performance"]["median_ms"] / row["performance"]["median_ms"]
        assert row["speed_up"] == pytest.approx(ratio)
    assert long["speed_up"] is None
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[:4] for line in lines[2:4]] == [
        ["128", "1", "-", "-"],
        ["128", "4", "sequence", "head_tail"],
    ]
    assert "4 of 4 checks against one GPU passed" in lines
    results = Results(tmp_path / "h200")  # the page reads the result file
    shown = PARALLEL["context-parallel"](results).splitlines()[2:]
    rows = [row.strip("| ").split(" | ") for row in shown]
    assert [row[:2] for row in rows] == [
        ["128", "1"],
        ["128", "2, sequence, head_tail"],
        ["128", "4, sequence, head_tail"],
        ["256", "4, sequence, head_tail"],
    ]
    assert {len(row) for row in rows} == {len(COLUMNS)}
    device, chart = (PARALLEL[f"context-parallel-{name}"](results) for name in ("device", "chart"))
    assert device == document["environment"]["device"]
    assert chart.endswith("(../images/context_parallel.svg)")


@pytest.mark.slow
def test_a_division_with_a_fault_is_not_timed_and_the_run_fails(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED.format(paths=[str(BENCHMARKS), str(ROOT / "tests/core/parallel")]))
    document, printed = run(tmp_path, script, 1)
    rows = {row["mode"]: row for row in document["rows"]}
    assert rows["sequence"]["reason"] == "not correct: its check failed"
    assert rows["sequence"]["performance"] is None
    assert rows["heads"]["performance"] is not None
    assert rows["heads"]["speed_up"] > 0
    assert "2 of 4 checks against one GPU passed" in printed
    assert "2 GPUs, sequence, head_tail, 128 tokens: not correct: its check failed" in printed


def test_one_gpu_without_memory_is_a_row_and_one_of_several_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(scaling, "measure", full)
    monkeypatch.setattr(scaling, "make_layer", lambda *_: None)
    options = argparse.Namespace(shape=SHAPE, dtype="float32", combo=None, budget=1.0, gpus=[])
    config = scaling.layer_config(SHAPE, BLOCKS)
    one = scaling.Run(options, config, [128], World(torch.device("cpu")))
    one._worlds[2] = World(torch.device("cpu"))
    row = one._row(scaling.ONE, 128)
    assert (row["performance"], row["reason"]) == (None, "out of memory")
    assert scaling.cells(row) == ["128", "1", *["-"] * (len(scaling.COLUMNS) - 2)]
    assert one._row(scaling.Division(2, *HEAD_TAIL), 130)["reason"] == (
        "130 tokens do not divide over 2 GPUs"
    )
    with pytest.raises(SystemExit, match="2 GPUs, sequence, head_tail, 128 tokens, rank 0: out of"):
        one._row(scaling.Division(2, *HEAD_TAIL), 128)


@pytest.mark.parametrize(
    ("launched", "options", "message"),
    [
        (False, [], "start it with torchrun --standalone --nproc-per-node N benchmarks/scaling.py"),
        (True, ["--shape", "5/2/16"], "5 query heads do not divide over 2 kv heads"),
        (True, ["--length", "1Q"], "'1Q' is not a number of tokens"),
        (True, ["--modes", "ring"], "invalid choice: 'ring'"),
        (True, ["--gpus", "4", "3", "1"], "be 2 or more and divide the 4 processes, got [3, 1]"),
    ],
)
def test_wrong_options_are_named(
    launched: bool,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: launched)
    monkeypatch.setattr("sys.argv", ["scaling.py", "--device", "cpu", *options])
    monkeypatch.setattr(scaling, "join", lambda device: World(torch.device(device), 0, 4))
    with pytest.raises(SystemExit) as ended:
        scaling.main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
