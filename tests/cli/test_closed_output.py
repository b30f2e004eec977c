"""A reader that leaves early is exit code 141, and a closed standard output is exit code 5, in real
processes.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import time

import pytest

BENCH = [
    "bench",
    "--device",
    "cpu",
    "--shape",
    "2/1/8",
    "--length",
    "40",
    "--combo",
    "sdpa",
    "--blocks",
    "8,4,16,3,24",
]
BENCH += ["--budget", "0.001"]
CONFORMANCE = [
    "conformance",
    "sdpa",
    "--device",
    "cpu",
    "-v",
    "-k",
    "test_is_installed or test_probe_answers",
]
CLOSED = "nsa: the output was closed before everything was written\n"

# `nsa verify` on its first checks, in two worker processes, with a line of progress on stderr for
# each check.
VERIFY = """
import itertools, sys, types

if __name__ == "__main__":
    from nsa_cli import output
    from nsa_cli.app import main
    from nsa_verify import suite

    jobs, checks, processes = suite.jobs, int(sys.argv[1]), sys.argv[2]
    suite.jobs = lambda *args, **options: jobs(*args, **options)[:checks]
    output.time = types.SimpleNamespace(monotonic=itertools.count(step=20).__next__)
    main(["verify", "--device", "cpu", "--dtype", "float32", "--jobs", processes])
"""


def broken_pipe(*command: str, both: bool = False) -> tuple[int, str, int]:
    """Run ``command`` with standard output, or ``both`` streams, on a pipe whose reader has left.

    Returns its exit code, its standard error, and the session that its processes share.
    """
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command,
        stdout=writer,
        stderr=writer if both else subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    os.close(writer)
    _, err = child.communicate(timeout=300)
    return child.returncode, err or "", child.pid


def processes_of(session: int) -> list[str]:
    """The command lines of the processes in ``session`` that still run."""
    running = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                running.append((folder / "cmdline").read_text().replace("\0", " "))
    return running


def nsa(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "nsa_cli", *arguments]


@pytest.mark.parametrize(
    "arguments",
    [
        ["backends", "list"],
        ["backends", "list", "--json"],
        ["backends", "explain", "--device", "cpu"],
        ["doctor"],
        ["env"],
        BENCH,
        CONFORMANCE,
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_reader_that_left_is_exit_code_141(arguments):
    code, err, _ = broken_pipe(*nsa(*arguments))
    assert code == 141, err
    assert err.endswith(CLOSED)
    assert "Traceback" not in err


@pytest.mark.parametrize(("checks", "processes", "both"), [("4", "2", False), ("40", "2", True)])
def test_a_reader_that_left_ends_verify_and_its_workers(checks, processes, both, tmp_path):
    """``both``: the first line of progress fails, while the workers have most of the checks before
    them.
    """
    script = tmp_path / "verify.py"
    script.write_text(VERIFY)
    code, err, session = broken_pipe(sys.executable, str(script), checks, processes, both=both)
    assert code == 141, err
    assert err.endswith("" if both else CLOSED)
    assert "Traceback" not in err
    # multiprocessing's resource tracker ends itself a little later
    deadline = time.monotonic() + 10
    while (left := processes_of(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_a_reader_that_left_in_a_shell(tmp_path):
    """`nsa backends list | head -1`: head leaves after one line of an output that no pipe holds."""
    site = tmp_path / "site"
    for number in range(200):
        info = site / f"toy_{number}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: toy-{number}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[nsa.backends]\ntoy-{number} = toy_{'x' * 1000}\n")
    command = (
        '"$0" -m nsa_cli --safe backends list --no-probe --json | head -1; echo "${PIPESTATUS[0]}"'
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        ["bash", "-c", command, sys.executable],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["{", "141"]
    assert done.stderr == CLOSED


@pytest.mark.parametrize(
    "arguments", [["--help"], ["backends", "list"], ["verify"], ["env"]], ids=" ".join
)
def test_a_closed_standard_output_is_exit_code_5(arguments):
    done = subprocess.run(
        ["bash", "-c", '"$0" -m nsa_cli "$@" >&-', sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (5, "nsa: cannot write: standard output is closed\n")


def test_a_closed_standard_error_keeps_messages_out_of_the_output():
    command = '"$0" -m nsa_cli backends list --nonsense 2>&-'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_a_standard_output_open_for_reading_is_exit_code_5():
    command = '"$0" -m nsa_cli backends list --no-probe 1</dev/null'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 5
    assert done.stderr.startswith("nsa: cannot write: ")
    assert done.stderr.count("\n") == 1
