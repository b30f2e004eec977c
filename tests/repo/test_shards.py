"""Shards of `nox -s full`: each collected test is in exactly one; they take similar time.

And the lists of tests and cases that only this session runs.
"""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import sharding

TESTS = Path(__file__).resolve().parents[1]
FILES = {
    "tests/test_one.py": "def test_a(): pass\n\n\ndef test_b(): pass\n",
    "tests/test_two.py": """
import pytest
@pytest.mark.parametrize("x", [1, 2, 3, "a::b"])
def test_c(x): pass
@pytest.mark.slow
class TestMore:
    def test_d(self): pass
""",
    "tests/folder/test_three.py": "def test_e(): pass\n",
    "tests/test_four.py": """
import pytest
@pytest.mark.parametrize(("a", "b"), [(a, b) for a in "xyz" for b in (1, 2)])
def test_h(a, b): pass
@pytest.mark.parametrize("c", range(3))
def test_i(c): pass
""",
    "docs/test_page.py": "def test_f(): pass\n\n\ndef test_g(): pass\n",
}
LISTED = ("tests/test_two.py::test_c[2]", "docs/test_page.py::test_g")
DIVIDED = {"tests/test_two.py::test_c[1]": 9.0, "tests/test_one.py": 4.0}


@pytest.mark.parametrize("shards", [1, 2, 6, 50])
def test_each_test_has_one_shard_in_any_order(shards: int, collected_ids: list[str]) -> None:
    shard_of = dict(zip(collected_ids, sharding.shard_of_each(collected_ids, shards)))
    assert set(shard_of.values()) <= set(range(1, shards + 1))
    shuffled = random.Random(1).sample(collected_ids, len(collected_ids))
    assert dict(zip(shuffled, sharding.shard_of_each(shuffled, shards))) == shard_of


def test_a_file_is_split_only_if_its_tests_are_listed() -> None:
    names = [f"{file}::test_{n}" for file in ("a.py", "b.py", "c.py") for n in range(8)]
    seconds = {"a.py": 30.0, "b.py::test_0": 20.0, "b.py::test_1": 20.0}
    shard_of = dict(zip(names, sharding.shard_of_each(names, 3, seconds)))
    assert len({shard_of[name] for name in names if name.startswith("a.py")}) == 1
    assert len({shard_of[name] for name in names if name.startswith("c.py")}) == 1
    assert shard_of["b.py::test_0"] != shard_of["b.py::test_1"]


def test_shards_take_similar_time_by_the_measured_seconds() -> None:
    """Tests in Triton's interpreter are sharded separately."""
    for interpreted in (False, True):
        listed = {
            name if "::" in name else f"{name}::test": seconds
            for name, seconds in sharding.SECONDS.items()
            if ("/interpreted/" in name) == interpreted
        }
        load = [0.0] * 6
        for shard, seconds in zip(sharding.shard_of_each(list(listed), 6), listed.values()):
            load[shard - 1] += seconds
        assert max(load) < 1.25 * sum(load) / 6, load


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("shard_seconds.json", sharding.SECONDS),
        ("only_in_full.txt", sharding.ONLY_IN_FULL),
        ("few_cases.txt", sharding.FEW_CASES),
    ],
)
def test_every_listed_file_exists(file: str, names: Iterable[str]) -> None:
    missing = [name for name in names if not (TESTS.parent / name.split("::")[0]).is_file()]
    assert not missing, f"tests/{file} lists {missing}"


def test_every_test_of_only_in_full_exists(
    collected_ids: list[str], request: pytest.FixtureRequest
) -> None:
    """Check the files that this run collected as a whole.

    A file of Triton's interpreter is one item here, and another process collects its tests.
    """
    if any("::" in argument for argument in request.config.args):
        pytest.skip("this run collected single tests")
    names = [name for name in collected_ids if not name.endswith("::in the interpreter")]
    files = {name.partition("::")[0] for name in names}
    listed = {name for name in sharding.ONLY_IN_FULL if name.partition("::")[0] in files}
    assert "tests/repo/test_shards.py" in files
    missing = sorted(listed - set(collected_ids))
    assert not missing, f"tests/only_in_full.txt lists {missing}: correct the ids or delete them"
    functions = {name.partition("[")[0] for name in names if "[" in name}
    few = {name for name in sharding.FEW_CASES if name.partition("::")[0] in files}
    missing = sorted(few - functions)
    assert not missing, f"tests/few_cases.txt lists {missing}, which have no cases: delete them"


def test_covering_cases_have_every_value() -> None:
    values = itertools.product("xyz", "12", (" ", "-"))
    cases = [dict(zip("abc", case)) for case in values]
    kept = [cases[number] for number in sharding.covering_cases(cases)]
    assert len(kept) == 3
    assert {pair for case in kept for pair in case.items()} == {
        pair for case in cases for pair in case.items()
    }
    distinct = [{"a": str(number)} for number in range(5)]
    assert sharding.covering_cases(distinct) == [0, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small suite that uses this repository's tests/conftest.py."""
    root = tmp_path_factory.mktemp("suite")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    tests = root / "tests"
    for name in ("conftest.py", "sharding.py"):
        shutil.copy(TESTS / name, tests / name)
    (tests / "shard_seconds.json").write_text(str(DIVIDED).replace("'", '"'))
    (tests / "only_in_full.txt").write_text("\n".join(("# a comment", *LISTED, "")))
    (tests / "few_cases.txt").write_text("# a comment\ntests/test_four.py::test_h\n")
    settings = "[pytest]\ntestpaths = tests docs\nmarkers = slow\n    gpu\n"
    (root / "pytest.ini").write_text(settings)
    return root


def collected(suite: Path, *options: str) -> list[str]:
    """Return the ids of the tests that pytest would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options], cwd=suite, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.parametrize("selection", [[], ["-m", "not slow"]], ids=["all", "selected"])
def test_the_shards_together_are_all_collected_tests(selection: list[str], suite: Path) -> None:
    shards = [collected(suite, *selection, "--shard", f"{n}/3") for n in (1, 2, 3)]
    assert sorted(name for shard in shards for name in shard) == sorted(
        collected(suite, *selection)
    )
    assert all(shards)


def test_listed_tests_and_cases_count_as_slow(suite: Path) -> None:
    everything, ordinary = collected(suite), collected(suite, "-m", "not slow")
    left_out = {*LISTED, "tests/test_two.py::TestMore::test_d"}
    left_out |= {f"tests/test_four.py::test_h[{case}]" for case in ("x-2", "y-1", "z-2")}
    assert set(everything) - set(ordinary) == left_out


@pytest.mark.parametrize("text", ["0/6", "7/6", "2", "a/b", "-1/6", "1/0", "1/6/2"])
def test_an_invalid_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a shard such as 2/6"):
        sharding.parse_shard(text)
