"""Files that cannot be written: refused before the work with code 2, or reported with code 5."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import typer

from nsa_bench import clocks, roofline
from nsa_bench.result import read_result
from nsa_cli import bench, verify
from nsa_cli import inspect as inspect_command
from nsa_cli.app import app
from nsa_core.plan import tuned
from nsa_core.plan.registry import discover
from nsa_core.util import atomic_files
from nsa_verify.problems import cases
from nsa_verify.problems.findings import Finding
from nsa_verify.run import suite

SMALL_BENCH = ["--device", "cpu", "--shape", "2/1/8", "--length", "40", "--combo", "sdpa"]
SMALL_BENCH += ["--blocks", "8,4,16,3,24", "--budget", "0.001"]
SDPA = ["--device", "cpu", "--dtype", "float32", *(f"--{s}=sdpa" for s in ("cmp", "sel", "win"))]
NO_SPACE = "No space left on device; free some space, or give a path on another disk"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a folder on which writing data fails; the temporary folder is another one."""
    folder, elsewhere = tmp_path / "full", tmp_path / "elsewhere"
    folder.mkdir(), elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    fsync = os.fsync

    def failing(number: int) -> None:
        if os.readlink(f"/proc/self/fd/{number}").startswith(str(folder)):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(number)

    monkeypatch.setattr(os, "fsync", failing)
    return folder


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replace the checks of `nsa verify` by one per entry of the list, which is its result."""
    results = [True]

    def jobs(*_: object, **__: object) -> list[suite.Job]:
        def findings(subject, case, dtype):
            for ok in results:
                yield Finding("quick", "cmp", case.name, "float32", "o", ok, detail="as planned")

        return [suite.Job("quick", findings, cases.quick_cases()[0], torch.float32)]

    monkeypatch.setattr(suite, "jobs", jobs)
    monkeypatch.setattr(verify.output, "find_backends", discover)
    return results


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the work of every command fail the test."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("the work began")

    for module, name in (
        (verify, "dtype_names"),
        (bench, "_settings"),
        (inspect_command, "pick_device"),
        (tuned, "save"),
    ):
        monkeypatch.setattr(module, name, work)
    monkeypatch.setattr("nsa_bench.tune.tune", work)
    monkeypatch.setattr("nsa_cli.backend_rows.list_and_probe", work)
    monkeypatch.setattr("nsa_cli.health.inspect_environment", work)
    monkeypatch.setattr("nsa_cli.bench_decode.settings", work)
    monkeypatch.setattr("nsa_cli.train._prepare", work)


FILES = ("--json", "--html", "--png", "--svg")
RESULT = pathlib.Path(__file__).parents[2] / "benchmarks/results/h200/shapes_128k.json"
COMMANDS = ["verify --json", "bench --json", "train --device cpu --out", "inspect --text T --out"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    nsa, no_work, tmp_path, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("T").write_text("a text")
    for path, message in (
        ("/proc/x.json", "no file can be created in /proc: No such file or directory"),
        ("missing/x.json", "does not exist; create it first"),
        (".", "--json . is a folder; give" if "json" in command else "is not empty"),
        ("x" * 300, "File name too long; give another path"),
    ):
        done = nsa(*command.split(), path)
        assert done.code == 2, done
        assert message in done.err
        assert (done.out, done.err.count("\n")) == ("", 1)
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == ["T"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_found_before_the_work(nsa, no_work, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("T").write_text("a text")

    class Full:
        def __init__(self, path: pathlib.Path, mode: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(atomic_files, "open", Full, raising=False)
    done = nsa(*command.split(), "new")
    assert (done.code, done.err) == (5, f"nsa: could not write new: {NO_SPACE}\n")


def test_tune_refuses_a_cache_that_cannot_be_written_before_the_work(nsa, no_work, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    done = nsa("tune", "--device", "cpu")
    assert (done.code, "set XDG_CACHE_HOME to a folder" in done.err) == (2, True)


@pytest.mark.parametrize(("ok", "code"), [(True, 5), (False, 1)])
def test_verify_prints_and_keeps_a_report_that_cannot_be_written(nsa, full_disk, checks, ok, code):
    """A failed check decides the exit code, and the unwritten file is named all the same."""
    checks[:] = [True, ok]
    file = full_disk / "r.json"
    file.write_text("old")
    done = nsa("verify", *SDPA, "--json", str(file), "--force")
    assert done.code == code, done.err
    assert f"nsa: could not write {file}: {NO_SPACE}\n  the result is kept in " in done.err
    kept = json.loads(pathlib.Path(done.err.split()[-1]).read_text())
    assert [finding["ok"] for finding in kept["findings"]] == [True, ok]
    assert "quick" in done.out
    assert (file.read_text(), list(full_disk.iterdir())) == ("old", [file])


@pytest.mark.slow
def test_bench_prints_and_keeps_a_result_that_cannot_be_written(nsa, full_disk, monkeypatch):
    monkeypatch.setattr(clocks, "SAMPLE_MS", 0.1)
    monkeypatch.setattr(roofline, "measure_peaks", lambda device, dtype: roofline.Peaks(1e11, 1e10))
    files = [f"--{kind}={full_disk / kind}" for kind in ("json", "html")]
    done = nsa("bench", *SMALL_BENCH, *files)
    assert done.code == 5, done.err
    first, kept, second = done.err.splitlines()[-3:]
    assert first == f"nsa: could not write {full_disk / 'json'}: {NO_SPACE}"
    assert second == f"could not write {full_disk / 'html'}: {NO_SPACE}"
    assert all(m.performance for m in read_result(pathlib.Path(kept.split()[-1])).measurements)
    assert "Written to" not in done.out
    assert "sdpa" in done.out
    assert not list(full_disk.iterdir())
    kept_elsewhere = kept.split()[-1]
    done = nsa("bench", "report", kept_elsewhere, "--html", str(full_disk / "r.html"))
    assert (done.code, "sdpa" in done.out) == (5, True)


@pytest.mark.slow
def test_tune_prints_times_that_cannot_be_saved(nsa, full_disk, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(full_disk))
    done = nsa(
        *("tune", "--device", "cpu", "--shape", "2/1/8", "--length", "48"),
        *("--blocks", "8,4,16,3,24", "--budget", "0.001"),
    )
    assert (done.code, f"could not write {tuned.path()}: {NO_SPACE}" in done.err) == (5, True)
    assert "chosen" in done.out
    assert "saved in" not in done.out


def test_inspect_prints_findings_whose_pictures_cannot_be_written(nsa, full_disk, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("nsa_models.inspect.draw.detail", lambda *_: b"a picture")
    monkeypatch.setattr("nsa_models.inspect.draw.overview", lambda *_: b"a picture")
    text = full_disk.parent / "text"
    text.write_text("a text of many words " * 20)
    done = nsa("inspect", "--text", str(text), "--device", "cpu", "--out", str(full_disk / "new"))
    assert done.code == 5, done.err
    assert done.err == f"nsa: could not write {full_disk / 'new' / 'inspect.html'}: {NO_SPACE}\n"
    assert "Its gates" in done.out
    assert "Written to" not in done.out


# Command -> its options that write a file or a folder. `nsa convert` has no --force.
WRITING = {
    "backends list": ("--json",),
    "backends show sdpa": ("--json",),
    "backends explain": ("--json",),
    "doctor": ("--json",),
    "inspect --text T": ("--out",),
    "verify": ("--json",),
    "train --device cpu --out D": ("--png", "--svg"),
    "train --device cpu": ("--out",),
    "bench": ("--json", "--html", "--png", "--svg"),
    "bench decode": ("--json", "--html", "--png", "--svg"),
    "bench report RESULT": ("--html", "--png", "--svg"),
}


def test_every_option_that_writes_a_file_is_tested():
    def walk(command: Any, name: str) -> Iterator[tuple[str, str]]:
        options = {word for option in command.params for word in option.opts}
        if "--force" in options:
            yield from ((name, o) for o in ("--out", *FILES) if o in options)
        for word, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{name} {word}".strip())

    tested = {
        (re.sub(" (-.*|RESULT|sdpa)", "", command), option)
        for command, options in WRITING.items()
        for option in options
    }
    assert set(walk(typer.main.get_command(app), "")) == tested


@pytest.mark.parametrize(
    "command", [f"{c} {option}" for c, options in WRITING.items() for option in options]
)
def test_an_existing_file_is_overwritten_with_force_only(
    nsa, no_work, tmp_path, command, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("T").write_text("a text")
    pathlib.Path("RESULT").symlink_to(RESULT)
    target = pathlib.Path("existing")
    file = target
    if command.endswith("--out"):
        target.mkdir()
        file = target / "mine"
    file.write_text("mine")
    done = nsa(*command.split(), "existing")
    assert (done.code, done.out) == (2, ""), done
    assert "--force" in done.err
    assert file.read_text() == "mine"
    try:
        assert nsa(*command.split(), "existing", "--force").code != 2
    except AssertionError as work:
        assert str(work) == "the work began"  # noqa: PT017  the command accepted the file


def test_a_new_backend_needs_an_empty_folder(nsa, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("thesis.tex", "a", "b", "c"):
        (folder / name).write_text("mine")
    done = nsa("backends", "new", "toy-one", str(folder))
    assert (done.code, done.err) == (
        2,
        f"nsa: {folder} is not empty: it holds a, b, c and 1 more; give a new folder, or empty this"
        " one\n",
    )
    assert {path.read_text() for path in folder.iterdir()} == {"mine"}
    done = nsa("backends", "new", "toy-one", str(folder / "a" / "new"))
    assert (done.code, f"the directory {folder / 'a'} does not exist" in done.err) == (2, True)
    done = nsa("backends", "new", "toy-one", str(folder / "a"))
    assert (done.code, "is not a folder" in done.err) == (2, True)
    done = nsa("backends", "new", "toy-one", "/proc/new")
    assert (done.code, "no file can be created in /proc" in done.err) == (2, True)


def test_a_new_backend_that_cannot_be_written_leaves_nothing(nsa, tmp_path, monkeypatch):
    mkdir = pathlib.Path.mkdir

    def failing(self: pathlib.Path, *arguments: object, **options: object) -> None:
        if self.name == "tests":
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(self, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "mkdir", failing)
    done = nsa("backends", "new", "toy-one", str(tmp_path / "new"))
    assert (done.code, f"{NO_SPACE}\n" in done.err) == (5, True), done.err
    assert not (tmp_path / "new").exists()


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 96 KiB, of which 64 are in use."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the permission to mount a file system")
    (folder / "fill").write_bytes(b"x" * 2**16)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_file_system_ends_every_command_with_code_5(small_disk, tmp_path):
    """With 32 KiB left, and with none; each command runs in a process of its own."""
    (tmp_path / "text").write_text("a text of many words " * 20)
    train = ["--device", "cpu", "--data", "uniform", "--length", "32", "--batch", "2"]
    verify_all = ["--preset", "quick", *SDPA, "--phase", "decode"]
    commands = {
        "train": ["train", "--out", f"{small_disk}/run", *train, "--steps", "2"],
        "verify": ["verify", *verify_all, "--json", f"{small_disk}/v.json"],
        "bench": ["bench", *SMALL_BENCH, "--html", f"{small_disk}/b.html"],
        "inspect": ["inspect", "--text", f"{tmp_path}/text", "--out", f"{small_disk}/pic"],
        "new": ["backends", "new", "toy-one", f"{small_disk}/new"],
    }
    for filled in (False, True):
        if filled:
            subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/more"], capture_output=True)
        for name, command in commands.items():
            done = subprocess.run(
                [sys.executable, "-m", "nsa_cli", *command], capture_output=True, text=True
            )
            if name == "new" and not filled:  # it fits
                assert done.returncode == 0
                shutil.rmtree(small_disk / "new")
                continue
            assert done.returncode == 5, (name, done)
            assert "Traceback" not in done.stderr
            assert NO_SPACE in done.stderr
            left = {path.name for path in small_disk.iterdir()} - {"fill", "more"}
            assert left <= {"run", "pic"}, name
            for folder in left:
                shutil.rmtree(small_disk / folder)
