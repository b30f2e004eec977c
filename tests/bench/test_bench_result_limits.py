"""Integers beyond reason in a result file are refused by the name of their field."""

import json
from pathlib import Path

import pytest

from nsa_bench.parallel.result import read_parallel_result
from nsa_bench.result import LARGEST, read_result
from nsa_core.errors import InvalidInput

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FILES = {"prefill": "h100/core_12_2_64.json", "parallel": "h200/context_parallel.json"}
TOKENS = 2**31 - 1


@pytest.mark.parametrize(
    ("file", "section", "field", "limit"),
    [
        ("prefill", "measurements", "length", TOKENS),
        ("prefill", "measurements", "batch", TOKENS),
        ("prefill", "measurements", "flops", LARGEST),
        ("prefill", "measurements", "peak_memory_bytes", LARGEST),
        ("prefill", "crossovers", "length", TOKENS),
        ("parallel", "rows", "length", TOKENS),
        ("parallel", "rows", "ranks", LARGEST),
    ],
)
def test_a_number_out_of_range_is_refused(
    tmp_path: Path, file: str, section: str, field: str, limit: int
) -> None:
    document = json.loads((RESULTS / FILES[file]).read_text())
    read = read_parallel_result if file == "parallel" else read_result
    path = tmp_path / "result.json"
    entry = document[section][0]
    for value, words in (
        (limit, None),
        (limit + 1, f"must be from 0 to {limit}, got {limit + 1}"),
        (10**400, f"must be from 0 to {limit}, got about 1e400"),
        (-1, f"must be from 0 to {limit}, got -1"),
        (1e9, "must be int"),
        (True, "must be int"),
    ):
        entry[field] = value
        path.write_text(json.dumps(document))
        if words is None:
            read(path)
            continue
        with pytest.raises(InvalidInput) as caught:
            read(path)
        assert f"{section}[0].{field} {words}" in str(caught.value)


def test_a_real_number_beyond_the_floats_is_refused(tmp_path: Path) -> None:
    document = json.loads((RESULTS / FILES["prefill"]).read_text())
    document["measurements"][0]["floor_ms"] = 10**400
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match=r"measurements\[0\].floor_ms must be .* about 1e400"):
        read_result(path)
