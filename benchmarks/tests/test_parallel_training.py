"""benchmarks/parallel_training.py: its runs on two processes, its controls and its tables."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from figure_parallel import PARALLEL
from figure_tables import Results
from parallel_training import move_weights

from nsa_models.lm.config import size
from nsa_models.lm.model import LanguageModel

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def documents_of(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Return the result file of two processes on the CPU."""
    file = tmp_path / "result.json"
    script = str(BENCHMARKS / "parallel_training.py")
    command = [sys.executable, script, *options, "--gpus", "2", "--quick", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--json", str(file)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(file.read_text())
    assert done.stdout.count("section=") == len(document["rows"])  # the second one prints none
    return document


@pytest.mark.slow
@pytest.mark.parametrize(("kv_heads", "mode"), [(2, "heads"), (1, "sequence")])
def test_divided_training_has_the_losses_of_one_process(
    tmp_path: Path, kv_heads: int, mode: str
) -> None:
    document = documents_of(tmp_path, "loss", "--kv-heads", str(kv_heads))
    rows = {row["run"]: row for row in document["rows"]}
    expected = {"context parallel": mode, "context parallel, FSDP2": mode}
    expected |= {"tensor parallel": None} if kv_heads == 2 else {}
    assert {name: row.get("mode") for name, row in rows.items() if row["gpus"] == 2} == expected
    assert [row["gpus"] for row in document["rows"][:6]] == [1] * 6
    assert rows["one GPU, repeated"]["largest_difference"] == 0
    # Six losses may round to the same numbers after one move of the weights, hardly after three.
    moved = [row["largest_difference"] for name, row in rows.items() if "moved by one" in name]
    assert len(moved) == 3
    assert max(moved) > 0
    baseline = rows["one GPU"]["losses"]
    assert len(set(baseline)) == len(baseline) == 6
    for row in rows.values():
        assert row["losses"] == pytest.approx(baseline, abs=1e-5)
        differences = [abs(a - b) for a, b in zip(row["losses"], baseline)]
        assert row["largest_difference"] == max(differences)
        assert differences[row["at_step"] - 1] == max(differences)


@pytest.mark.slow
def test_steps_are_timed_on_one_process_and_on_two(tmp_path: Path) -> None:
    rows = documents_of(tmp_path, "speed")["rows"]
    assert [(row["run"], row["gpus"], row.get("mode")) for row in rows] == [
        ("one GPU", 1, None),
        ("context parallel", 2, "heads"),
        ("context parallel, FSDP2", 2, "heads"),
    ]
    for row in rows:
        assert len(row["steps_ms"]) == 2
        assert row["step_ms"] in row["steps_ms"]
        assert row["tokens_per_s"] == pytest.approx(128e3 / row["step_ms"], rel=0.1)
        assert row["peak_gib"] > 0


@pytest.mark.slow
def test_no_division_begins_after_the_time_limit(tmp_path: Path) -> None:
    rows = documents_of(tmp_path, "speed", "--time-limit", "0")["rows"]
    assert [row.get("reason") for row in rows] == [None, *["not begun: time limit"] * 2]


def test_every_weight_is_moved_to_a_neighbour() -> None:
    model = LanguageModel(size("tiny"))
    before = [p.detach().clone() for p in model.parameters()]
    move_weights(model, 1)
    risen = weights = 0
    for old, parameter in zip(before, model.parameters()):
        new, infinity = parameter.detach(), torch.full_like(old, torch.inf)
        up, down = torch.nextafter(old, infinity), torch.nextafter(old, -infinity)
        assert ((new == up) | (new == down)).all()
        risen, weights = risen + int((new == up).sum()), weights + new.numel()
    assert 0.49 < risen / weights < 0.51
    other = LanguageModel(size("tiny"))
    other.load_state_dict(model.state_dict())
    for parameter, old in zip(other.parameters(), before):
        parameter.data.copy_(old)
    move_weights(other, 2)
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_the_pages_say_that_nothing_is_measured_yet(tmp_path: Path) -> None:
    names = ("parallel-speed", "parallel-speed-device", "parallel-loss", "context-parallel-chart")
    texts = [PARALLEL[name](Results(tmp_path / "h100")).splitlines()[-1] for name in names]
    assert texts == [f"| not measured yet{' | -' * 4} |", *["not measured yet"] * 3]


def test_the_tables_compare_with_one_gpu(tmp_path: Path) -> None:
    speed = [
        {"run": "one GPU", "gpus": 1, "step_ms": 2400.0, "tokens_per_s": 109227, "peak_gib": 41.25},
        {
            "run": "context parallel",
            "gpus": 2,
            "step_ms": 1250.0,
            "tokens_per_s": 209715,
            "peak_gib": 20.0,
            "mode": "heads",
        },
        {"run": "context parallel, FSDP2", "gpus": 2, "reason": "not begun: time limit"},
    ]
    losses = [
        {"run": "one GPU", "gpus": 1, "losses": [2.0]},
        {"run": "one GPU, repeated", "gpus": 1, "losses": [2.0], "mean_difference": 0.00125},
        {
            "run": "tensor parallel",
            "gpus": 2,
            "losses": [2.0625],
            "mean_difference": 0.0312,
        },
        {"run": "context parallel", "gpus": 2, "reason": "not begun: time limit"},
    ]
    (tmp_path / "h100").mkdir()
    for name, rows in (("parallel_speed.json", speed), ("parallel_loss.json", losses)):
        document = {
            "machine": {"device": "NVIDIA H100"},
            "model": dataclasses.asdict(size("m7c_125m")),
            "rows": rows,
        }
        (tmp_path / "h100" / name).write_text(json.dumps(document))
    results = Results(tmp_path / "h200")  # another GPU's folder is found too
    assert PARALLEL["parallel-speed-device"](results) == "NVIDIA H100"
    assert PARALLEL["parallel-speed"](results).splitlines()[2:] == [
        "| one GPU | 2.40 | 109,227 | - | 41.2 |",
        "| 2 GPUs, context parallel in mode heads | 1.25 | 209,715 | 1.92x | 20.0 |",
        "| 2 GPUs, context parallel, FSDP2 | not begun: time limit | - | - | - |",
    ]
    assert PARALLEL["parallel-loss"](results) == (
        "0.03120 to 0.03120 on 2 GPUs and 0.00125 to 0.00125 between runs on one at 12/2/64"
    )
