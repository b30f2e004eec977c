"""Shards of the suite: `pytest --shard 2/6` runs one of six parts, which together are the whole.

Whole files go to a shard, so that their fixtures are made once; files that take longer than
``LONGEST`` are divided test by test. ``shard_seconds.json`` has measured seconds and only balances.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

SECONDS: dict[str, float] = json.loads(Path(__file__).with_name("shard_seconds.json").read_text())
UNLISTED = 0.5  # seconds of a test in a file that is not listed
LONGEST = 60.0  # seconds of a file that stays whole


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
    files = [name.partition("::")[0] for name in names]
    tests = Counter(files)
    weights: dict[str, float] = {}
    units = []
    for name, file in zip(names, files):
        whole = seconds.get(file, UNLISTED * tests[file])
        units.append(file if whole <= LONGEST else name)
        weights[units[-1]] = whole if whole <= LONGEST else whole / tests[file]
    load = [0.0] * shards
    place = {}
    for unit in sorted(weights, key=lambda unit: (-weights[unit], unit)):
        place[unit] = min(range(shards), key=load.__getitem__)
        load[place[unit]] += weights[unit]
    return [1 + place[unit] for unit in units]
