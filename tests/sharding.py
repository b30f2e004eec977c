"""Shards of the suite: `pytest --shard 2/6` runs one of six parts, which together are the whole.

A shard gets whole files, so that their fixtures are made once. ``shard_seconds.json`` has measured
seconds of files, and of single tests of files to be divided; it only balances the shards.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

SECONDS: dict[str, float] = json.loads(Path(__file__).with_name("shard_seconds.json").read_text())
UNLISTED = 0.5  # seconds of a test that is not listed


def parsed(text: str) -> tuple[int, int]:
    """(shard, number of shards) of "2/6"."""
    shard, _, shards = text.partition("/")
    if not (shard.isdecimal() and shards.isdecimal() and 1 <= int(shard) <= int(shards)):
        raise ValueError(f"expected a shard such as 2/6, got {text!r}")
    return int(shard), int(shards)


def shard_of_each(
    names: Sequence[str], shards: int, seconds: Mapping[str, float] = SECONDS
) -> list[int]:
    """The shard, from 1 on, of each test "file::test"; the same for every order of ``names``."""
    weights = seconds_of(names, seconds)
    load = [0.0] * shards
    place: dict[str, int] = {}
    for unit, weight in sorted(weights.items(), key=lambda one: (-one[1], one[0])):
        place[unit] = min(range(shards), key=load.__getitem__)
        load[place[unit]] += weight
    return [1 + place[name if name in place else name.partition("::")[0]] for name in names]


def seconds_of(names: Sequence[str], seconds: Mapping[str, float] = SECONDS) -> dict[str, float]:
    """The expected seconds of each file, and of each test of a file that is divided."""
    divided = {name.partition("::")[0] for name in seconds if "::" in name}
    tests = Counter(name.partition("::")[0] for name in names)
    weights = {
        file: seconds.get(file, UNLISTED * count)
        for file, count in tests.items()
        if file not in divided
    }
    for name in names:
        if name.partition("::")[0] in divided:
            weights[name] = seconds.get(name, UNLISTED)
    return weights
