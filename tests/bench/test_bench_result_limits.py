"""Integers beyond reason in a result file are refused by the name of their field."""

import json
from pathlib import Path

import pytest

from nsa_bench.result import LARGEST, read_result
from nsa_core.errors import InvalidInput

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FILE = RESULTS / "h100" / "core_12_2_64.json"
TOKENS = 2**31 - 1


@pytest.mark.parametrize(
    ("section", "field", "limit"),
    [
        ("measurements", "length", TOKENS),
        ("measurements", "batch", TOKENS),
        ("measurements", "flops", LARGEST),
        ("measurements", "peak_memory_bytes", LARGEST),
        ("crossovers", "length", TOKENS),
    ],
)
def test_a_number_out_of_range_is_refused(
    tmp_path: Path, section: str, field: str, limit: int
) -> None:
    document = json.loads(FILE.read_text())
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
            read_result(path)
            continue
        with pytest.raises(InvalidInput) as caught:
            read_result(path)
        assert f"{section}[0].{field} {words}" in str(caught.value)


def test_a_real_number_beyond_the_floats_is_refused(tmp_path: Path) -> None:
    document = json.loads(FILE.read_text())
    document["measurements"][0]["floor_ms"] = 10**400
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match=r"measurements\[0\].floor_ms must be .* about 1e400"):
        read_result(path)
