"""benchmarks/kernels/compare_trees.py: verdicts, table, arguments, and a run on the CPU."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import compare_trees as trees
import pytest

from nsa_bench.provenance import tree_id

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "kernels" / "compare_trees.py"
NEVER = float("inf")


class FakeTree:
    """A tree whose kernels take the given times, one per round."""

    def __init__(self, times, log=None, label=""):
        self.times, self.log, self.label = times, [] if log is None else log, label
        self.rounds = {}

    def begin(self, case):
        self.rounds = {
            name: itertools.cycle(times)
            for name, times in self.times.items()
            if not isinstance(times, str)
        }

    def names(self):
        return {name: times if isinstance(times, str) else "" for name, times in self.times.items()}

    def ms(self, name):
        self.log.append(self.label)
        return next(self.rounds[name])


def compare(old, new, rounds=5):
    rows = trees.compare(FakeTree(old), FakeTree(new), trees.CASES[:1], rounds, NEVER)
    return {row.name.removeprefix(f"{trees.CASES[0]} "): row for row in rows}


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([1.0], [1.0], "same"),
        ([1.0], [1.029], "same"),  # not above 3 %
        ([1.0], [1.031], "slower"),
        ([1.0], [0.96], "faster"),
        ([1.031], [1.0], "faster"),
        ([1.0], [0.98], "same"),
        ([0.9, 1.0, 1.1, 1.0, 0.95], [1.2], "slower"),
        ([0.9, 1.0, 1.1, 1.0, 0.95], [1.09], "same"),  # within twice the spread
        ([1.0], [1.0, 1.05, 1.1, 1.2, 1.3], "same"),  # the spread of the new tree counts too
        ([1.0, 1.0, 9.0, 1.0, 1.0], [1.05], "slower"),  # one outlier does not add spread
    ],
)
def test_a_row_is_slower_beyond_3_percent_and_twice_the_spread(old, new, verdict):
    assert compare({"cmp": old}, {"cmp": new})["cmp"].verdict == verdict


def test_a_row_has_medians_and_their_ratio():
    row = compare({"cmp": [1.0, 2.0, 3.0]}, {"cmp": [4.0, 5.0, 3.0]}, 3)["cmp"]
    assert (row.old_ms, row.new_ms, row.ratio, row.spread) == (2.0, 4.0, 2.0, 0.5)


def test_rounds_alternate_between_the_trees():
    log = []
    old, new = FakeTree({"cmp": [1.0]}, log, "old"), FakeTree({"cmp": [1.0]}, log, "new")
    list(trees.compare(old, new, trees.CASES[:1], 4, NEVER))
    assert log == ["old", "new", "new", "old"] * 2


def test_a_kernel_that_only_the_old_tree_runs_is_missing():
    rows = compare(
        {"cmp": [1.0], "sel": [1.0], "win": "Unsupported: no", "gates": [1.0]},
        {"cmp": "NSAError: broken", "sel": [1.0], "win": [1.0]},
    )
    assert {name: row.verdict for name, row in rows.items()} == {
        "cmp": "missing",
        "sel": "same",
        "win": "not timed",
        "gates": "missing",
    }
    assert rows["cmp"].reason == "new: NSAError: broken"
    assert rows["win"].reason == "old: Unsupported: no"
    assert rows["gates"].reason == "new: the tree has no such kernel"


def test_cases_after_the_time_limit_are_skipped():
    skipped = list(trees.compare(FakeTree({}), FakeTree({}), trees.CASES[:2], 1, 0.0))
    assert skipped == list(trees.CASES[:2])


def test_report_prints_a_table_and_returns_the_exit_code(capsys):
    rows = [
        trees.judged("64/4/128 8k cmp forward", [1.0, 1.0], [1.5, 1.5]),
        trees.judged("64/4/128 8k win forward", [1.0, 1.0], [1.0, 1.0]),
        trees.Row("8/2/32 1 x 2k gates", None, None, 0.0, "missing", "new: broken"),
    ]
    assert trees.report(rows, []) == 1
    output = capsys.readouterr().out.splitlines()
    assert output[0].split() == ["kernel", "old", "ms", "new", "ms", "new/old", "spread", "verdict"]
    assert output[1].split()[-5:] == ["1.0000", "1.5000", "1.500", "0.0%", "slower"]
    assert output[3].endswith("missing: new: broken")
    assert output[4] == "slower or missing: 64/4/128 8k cmp forward, 8/2/32 1 x 2k gates"
    assert trees.report(rows[1:2], []) == 0
    assert "nothing is slower" in capsys.readouterr().out
    assert trees.report(rows[1:2], [trees.CASES[0]]) == 1
    assert "left out by --minutes: 64/4/128 8k" in capsys.readouterr().out


def test_all_required_cases_exist():
    names = {str(case) for case in trees.CASES}
    assert names >= {"64/4/128 8k", "64/4/128 32k", "32/8/128 32k", "12/2/64 32k", "12/2/64 64k"}
    assert names >= {"64/4/192/128 32k", "64/4/128 16 x 32k", "8/2/32 1 x 2k"}
    assert trees.cases_of("12/2/64") == [c for c in trees.CASES if c.shape == "12/2/64"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (["--shapes", "7/1/9"], "--shapes: expected all, tiny or"),
        (["--rounds", "0"], "--rounds: expected 1 to 20, got 0"),
        (["--old", "absent"], "--old: "),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_invalid_arguments_are_refused(change, text, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        trees.main(["--old", str(tmp_path), "--new", str(tmp_path), *change])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_a_folder_without_nsa_core_is_refused(tmp_path, capsys):
    folders = ["--old", str(tmp_path), "--new", str(tmp_path)]
    options = ["--device", "cpu", "--backend", "sdpa", "--shapes", "tiny"]
    assert trees.main([*folders, *options]) == 1
    error = capsys.readouterr().err
    assert "holds no nsa_core" in error or "nsa_core cannot be imported" in error


@pytest.fixture
def site(tmp_path):
    """A folder with this tree's packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    for path in ROOT.glob("packages/*/src/nsa_*"):
        if not path.name.endswith(".egg-info"):
            (folder / path.name).symlink_to(path)
    return folder


def site_without(site, package):
    """Remove a package from the folder; a child then finds that of this environment."""
    (site / package).unlink()
    return site


@pytest.mark.parametrize("package", ["nsa_core", "nsa_backend_sdpa"])
def test_a_package_outside_the_folder_is_refused(site, package):
    child = trees.Child("old", site_without(site, package), "cpu", "sdpa")
    try:
        with pytest.raises(trees.ChildError, match=f"--old .* holds no {package}; install it"):
            child.hello()
    finally:
        child.end()


def test_a_rehearsal_reaches_the_children(site, tmp_path, monkeypatch):
    """rehearse.py patches each process with a sitecustomize module on PYTHONPATH."""
    patches, seen = tmp_path / "patches", tmp_path / "seen"
    patches.mkdir()
    (patches / "sitecustomize.py").write_text(f"open({str(seen)!r}, 'w').close()\n")
    monkeypatch.setenv("PYTHONPATH", str(patches))
    child = trees.Child("new", site, "cpu", "sdpa")
    try:
        assert child.hello().startswith(str(site))
    finally:
        child.end()
    assert seen.exists()


def test_the_provenance_names_folders_without_their_paths(tmp_path):
    words = ["--old", str(tmp_path / "a"), "--new", str(tmp_path / "b c"), "--device", "cpu"]
    (tmp_path / "a" / "nsa_core").mkdir(parents=True)
    (tmp_path / "a" / "nsa_core" / "__init__.py").write_text("1\n")
    facts = trees.provenance(trees.parser().parse_args(words))
    assert "--old a --new 'b c' --device cpu --backend triton" in facts["command"]
    assert str(tmp_path) not in json.dumps(facts)
    assert facts["machine"]["device_type"] == "cpu"
    assert facts["versions"].keys() >= {"python", "torch"}
    source = {"source_trees": {"nsa_core": tree_id(tmp_path / "a" / "nsa_core")}}
    assert facts["sources"] == {"old": source, "new": {"source_trees": {}}}


@pytest.mark.slow
def test_compares_this_tree_with_itself_on_the_cpu(site, tmp_path):
    file = tmp_path / "rows.json"
    options = ["--device", "cpu", "--backend", "sdpa", "--shapes", "tiny", "--rounds", "1"]
    command = [sys.executable, str(SCRIPT), "--old", str(site), "--new", str(site), *options]
    done = subprocess.run(
        [*command, "--json", str(file)], capture_output=True, text=True, timeout=300
    )
    document = json.loads(file.read_text())
    rows = document["rows"]
    assert (document["left_out"], document["machine"]["device_type"]) == ([], "cpu")
    assert document["sources"]["old"] == document["sources"]["new"]
    slots = ("cmp", "select", "sel", "win", "combine")
    expected = [f"4/2/8 96 {slot} forward" for slot in slots]
    expected += [f"4/2/8 96 {slot} backward" for slot in slots if slot != "select"]
    expected += ["4/2/8 2 x 48 layer step", "4/2/8 2 x 48 layer step of 4 tokens"]
    assert sorted(row["name"] for row in rows) == sorted(expected)
    assert all(row["old_ms"] > 0 and row["new_ms"] > 0 for row in rows), done.stderr
    slower = any(row["verdict"] == "slower" for row in rows)  # possible on a busy machine
    assert done.returncode == int(slower), done.stderr
    assert len(done.stdout.splitlines()) == len(rows) + 2


def test_a_child_that_ends_early_is_reported(site, capsys):
    child = trees.Child("new", site, "cpu", "sdpa")
    try:
        assert child.hello().startswith(str(site))
        child.process.kill()
        child.process.wait()
        child.begin(trees.TINY[0])
        with pytest.raises(trees.ChildError, match="the child of --new ended with code -9"):
            child.names()
    finally:
        child.end()
