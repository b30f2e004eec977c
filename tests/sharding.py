"""Choose the tests of the ordinary run, and those of a shard of the full one.

`pytest --shard 2/6` runs the second of six disjoint parts.

A shard has whole files, so that module fixtures are built once. ``shard_seconds.json`` lists the
measured seconds of files, and of single tests in files that are split. It only balances the shards.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

SECONDS: dict[str, float] = json.loads(Path(__file__).with_name("shard_seconds.json").read_text())


def _lines(name: str) -> frozenset[str]:
    """Return the lines of a file in this folder, without comments and empty lines."""
    lines = Path(__file__).with_name(name).read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


# Ids of tests that count as slow without the marker.
ONLY_IN_FULL = _lines("only_in_full.txt")
# Functions of which most cases count as slow.
FEW_CASES = _lines("few_cases.txt")
UNLISTED_SECONDS = 0.5  # assumed for each test of an unlisted file


def parse_shard(text: str) -> tuple[int, int]:
    """Parse "2/6" into (shard, number of shards)."""
    shard, _, shards = text.partition("/")
    if not (shard.isdecimal() and shards.isdecimal() and 1 <= int(shard) <= int(shards)):
        raise ValueError(f"expected a shard such as 2/6, got {text!r}")
    return int(shard), int(shards)


def covering_cases(cases: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the positions of few cases in which every value of every parameter occurs.

    Args:
        cases: The value of each parameter as text, by the parameter's name.
    """
    wanted = {pair for case in cases for pair in case.items()}
    kept = []
    while wanted:
        best = max(range(len(cases)), key=lambda n: (len(wanted & {*cases[n].items()}), -n))
        kept.append(best)
        wanted -= {*cases[best].items()}
    return kept


def shard_of_each(
    names: Sequence[str], shards: int, seconds: Mapping[str, float] = SECONDS
) -> list[int]:
    """Return the shard, counted from 1, of each test "file::test", for any order of ``names``."""
    weights = seconds_of(names, seconds)
    load = [0.0] * shards
    shard_of: dict[str, int] = {}
    for unit, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        shard_of[unit] = min(range(shards), key=load.__getitem__)
        load[shard_of[unit]] += weight
    return [1 + shard_of[name if name in shard_of else name.partition("::")[0]] for name in names]


def seconds_of(names: Sequence[str], seconds: Mapping[str, float] = SECONDS) -> dict[str, float]:
    """Return the expected seconds of each file, and of each test in files that are split."""
    split_files = {name.partition("::")[0] for name in seconds if "::" in name}
    tests = Counter(name.partition("::")[0] for name in names)
    weights = {
        file: seconds.get(file, UNLISTED_SECONDS * count)
        for file, count in tests.items()
        if file not in split_files
    }
    for name in names:
        if name.partition("::")[0] in split_files:
            weights[name] = seconds.get(name, UNLISTED_SECONDS)
    return weights
