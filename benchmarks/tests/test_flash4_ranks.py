"""flash4_ranks.py: the size from which cmp on FlashAttention-4 makes no problem slower."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import flash4_ranks
import pytest

from nsa_bench.result import read_result

RESULTS = Path(__file__).parents[1] / "results" / "h200"


def test_only_times_of_one_problem_are_compared() -> None:
    measurements = read_result(RESULTS / "flash4_64_4_128.json").measurements
    rows = flash4_ranks.rows_of(measurements, "both")
    assert [row.name for row in rows] == ["64/4/128 16384", "64/4/128 32768", "64/4/128 65536"]
    assert rows[0].size == 16384 * 128
    fa2 = [m for m in measurements if m.subject == "cmp=fa2"]
    of_two_sequences = [dataclasses.replace(m, subject="auto", batch=2) for m in fa2]
    assert flash4_ranks.rows_of([*measurements, *of_two_sequences], "both") == rows


def test_times_of_two_files_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((RESULTS / "flash4_64_4_128.json").read_text())
    files = []
    for subject in ("auto", "cmp=fa2"):
        kept = [m for m in document["measurements"] if m["subject"] == subject]
        files.append(tmp_path / f"{subject}.json")
        files[-1].write_text(json.dumps({**document, "measurements": kept}))
    flash4_ranks.main([str(file) for file in files])
    assert "64/4/128" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes_and_ratios", "least"),
    [
        ([(210, 1.01), (210, 0.9), (429, 0.9), (800, 0.8)], 420),
        ([(210, 0.9), (210, 1.01), (429, 0.9)], 420),
        ([(210, 0.9), (429, 1.01)], None),
        ([], None),
    ],
)
def test_a_size_counts_only_if_no_problem_of_it_is_slower(
    sizes_and_ratios: list[tuple[int, float]], least: int | None
) -> None:
    rows = [flash4_ranks.Row("", size, ratio) for size, ratio in sizes_and_ratios]
    assert flash4_ranks.least_size(rows) == least


def test_the_rank_file_has_the_measured_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in sorted(RESULTS.glob("flash4_*.json"))]
    flash4_ranks.main(files)
    printed = capsys.readouterr().out
    for phase, size in json.loads(flash4_ranks.RANK_FILE.read_text()).items():
        assert f"{phase:8} from a size of {size} on" in printed
