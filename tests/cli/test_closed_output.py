"""A reader that closes the pipe gives exit code 141; a stream that cannot be written gives 5."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200"
BENCH = ["bench", "--device", "cpu", "--shape", "2/1/8", "--length", "40", "--combo", "sdpa"]
BENCH += ["--blocks", "8,4,16,3,24", "--budget", "0.001"]
CLOSED = "nsa: the output was closed before everything was written\n"

# Run the first checks of `nsa verify` in worker processes. Progress prints a line per check.
VERIFY = """
import itertools, sys, types

if __name__ == "__main__":
    from nsa_cli import output
    from nsa_cli.app import main
    from nsa_verify.run import suite

    jobs, checks, processes = suite.jobs, int(sys.argv[1]), sys.argv[2]
    suite.jobs = lambda *args, **options: jobs(*args, **options)[:checks]
    output.time = types.SimpleNamespace(monotonic=itertools.count(step=20).__next__)
    main(["verify", "--device", "cpu", "--dtype", "float32", "--jobs", processes])
"""


# Run each command of sys.argv[2] in a fork of a process that has imported torch, and print the exit
# codes. Standard output is a pipe without a reader; standard error is a file in the folder
# sys.argv[1]. The import tests of `nsa doctor` are replaced: they are slow and precede the output.
FORKS = """
import json, os, pathlib, sys, unittest.mock

import torch
from nsa_cli import health
from nsa_cli.app import main

absent = {"version": None, "status": "missing", "error": "not tried"}
health.LibraryImport.facts = lambda library, limit_s: absent
health.Child = unittest.mock.Mock()
codes = []
for number, arguments in enumerate(json.loads(sys.argv[2])):
    if (child := os.fork()) == 0:
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
        file = os.open(pathlib.Path(sys.argv[1]) / str(number), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 2)
        main(arguments)
        sys.exit("main returned")
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""
IN_FORKS = [  # each prints with other functions
    ["--help"],
    ["backends", "list"],
    ["backends", "list", "--no-probe", "--json"],
    ["doctor", "--report"],
    ["bench", "report", str(RESULTS / "decode_small.json")],
]


def processes_of(session: int) -> list[str]:
    """Return the command lines of the processes in ``session`` that are still running."""
    running = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session_id = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session_id) == session and state != "Z":
                running.append((folder / "cmdline").read_text().replace("\0", " "))
    return running


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    """(exit code, standard error) of each of ``IN_FORKS`` with a pipe without a reader."""
    folder = tmp_path_factory.mktemp("errors")
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(folder), json.dumps(IN_FORKS)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    return [(code, (folder / str(number)).read_text()) for number, code in enumerate(codes)]


@pytest.mark.parametrize("number", range(len(IN_FORKS)), ids=lambda n: " ".join(IN_FORKS[n][:2]))
def test_a_closed_pipe_exits_with_code_141(number, forked):
    code, err = forked[number]
    assert code == 141, err
    assert err.endswith(CLOSED)
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checks", "processes", "both"),
    [pytest.param("4", "2", False, marks=pytest.mark.slow), ("40", "1", True)],
)
def test_a_closed_pipe_ends_verify_and_its_workers(checks, processes, both, tmp_path):
    """With ``both``, the first progress line fails while most of the checks are still waiting."""
    script = tmp_path / "verify.py"
    script.write_text(VERIFY)
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.Popen(
        [sys.executable, str(script), checks, processes],
        stdout=writer,
        stderr=writer if both else subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    os.close(writer)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 141, err
    assert both or err.endswith(CLOSED)
    assert "Traceback" not in (err or "")
    # The resource tracker of multiprocessing ends shortly after its parent.
    deadline = time.monotonic() + 10
    while (left := processes_of(child.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def in_shell(redirected: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run `nsa` in bash with a redirection; output is buffered, as it is for most users."""
    environment = {**os.environ, **variables}
    environment.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(
        ["bash", "-c", f'"$0" -m nsa_cli "$@" {redirected}', sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


def test_a_closed_pipe_in_a_shell_exits_with_code_141(tmp_path):
    """`nsa backends list | head -1`, with more output than a pipe buffers."""
    for number in range(200):
        info = tmp_path / f"toy_{number}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-{number}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[nsa.backends]\ntoy-{number} = toy_{'x' * 1000}\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    arguments = ("--safe", "backends", "list", "--no-probe", "--json")
    done = in_shell('| head -1; echo "${PIPESTATUS[0]}"', *arguments, PYTHONPATH=path)
    assert done.stdout.splitlines() == ["{", "141"]
    assert done.stderr == CLOSED


@pytest.mark.parametrize(
    ("redirected", "arguments", "code", "message"),
    [
        (">&-", "backends list", 5, "nsa: cannot write: standard output is closed\n"),
        ("1</dev/null", "backends list --no-probe", 5, "nsa: cannot write: "),
        (">/dev/full", "backends list --no-probe", 5, "nsa: cannot write: "),
        ("2>&-", "backends list --nonsense", 2, ""),
    ],
)
def test_a_stream_that_cannot_be_written_ends_with_one_line(redirected, arguments, code, message):
    done = in_shell(redirected, *arguments.split())
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == bool(message)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["bench", "train", "verify"])
def test_progress_for_a_closed_standard_error_is_dropped(command, tmp_path):
    """The tables are printed and the files are written, as if standard error were open."""
    arguments = {
        "bench": [*BENCH, "--json", str(tmp_path / "r.json")],
        "train": [
            *("train", "--out", str(tmp_path / "run"), "--device", "cpu", "--data", "uniform"),
            *("--length", "32", "--batch", "2", "--held-out-rows", "1", "--steps", "2"),
        ],
        "verify": ["verify", "--device", "cpu", "--dtype", "float32", "--phase", "decode"],
    }[command]
    done = in_shell("2>&-", *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.count("\n") > 3
    written = {"bench": ["r.json"], "train": ["run"], "verify": []}[command]
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == written
