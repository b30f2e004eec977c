"""benchmarks/rehearse.py: occupancy of the rehearsed GPU, and the files of a rehearsal."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest
import rehearse

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOPPER = 228 * 1024  # bytes of shared memory of a multiprocessor


@pytest.mark.parametrize("arch", [80, 86, 89])
def test_padded_launch_has_the_occupancy_of_the_older_gpu(arch: int) -> None:
    total, threads, programs, limit = rehearse.TARGETS[arch]
    for shared in range(0, limit * 1024 + 1, 7 * 128):
        for warps in (1, 4, 8, 16):
            expected = min(total * 1024 // (shared + 1024), threads // (32 * warps), programs)
            asked = rehearse.padded(shared, warps, arch, HOPPER)
            assert asked >= shared
            resident = HOPPER // (asked + 1024)
            assert resident <= expected, (shared, warps)
            if asked > shared:  # no more padding than needed
                assert HOPPER // (asked - 128 + 1024) > expected, (shared, warps)
            assert asked <= 227 * 1024


def run(
    folder: pathlib.Path, variables: dict[str, str], code: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )


@pytest.mark.slow
def test_processes_see_the_older_gpu_and_import_torch_only_if_they_would(
    tmp_path: pathlib.Path,
) -> None:
    variables = rehearse.prepare(tmp_path, 86, "90")
    done = run(tmp_path, variables, "import sys; print('torch' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")
    code = (
        "import torch, json; torch.cuda.get_device_name  # patched after the import of torch.cuda\n"
        "import triton.compiler.compiler as c\n"
        "patched = c.CompiledKernel._init_handles.__name__\n"
        "print(json.dumps([torch.cuda.get_device_capability(), patched]))"
    )
    done = run(tmp_path, variables, code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[8, 6], "pad"]


def test_ptxas_assembles_the_older_ptx_for_the_gpu_at_hand(tmp_path: pathlib.Path) -> None:
    ptxas = tmp_path / "real"
    ptxas.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    ptxas.chmod(0o755)
    rehearse.prepare(tmp_path, 80, "90")
    script = tmp_path / "ptxas"
    lines = script.read_text().splitlines()
    script.write_text("\n".join([*lines[:-1], f'exec {ptxas} "$@"']) + "\n")
    done = subprocess.run(
        [script, "-v", "--gpu-name=sm_80", "a file.ptx"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["-v", "--gpu-name=sm_90", "a file.ptx"]


def test_kernels_for_another_architecture_are_found(tmp_path: pathlib.Path) -> None:
    for name, text in (
        ("right", ".version 8.7\n.target sm_80\nmma.sync"),
        ("other", ".version 8.7\n.target sm_90a\n"),
        ("hopper", ".target sm_80\nwgmma.mma_async"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.ptx").write_text(text)
    count, foreign = rehearse.foreign_kernels(tmp_path, 80)
    assert count == 3
    assert foreign == ["hopper/kernel.ptx", "other/kernel.ptx"]


@pytest.mark.slow
def test_command_needs_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "rehearse.py", "--", "ls"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr


def test_an_interrupted_command_may_write_its_report(tmp_path: pathlib.Path) -> None:
    report = tmp_path / "report"
    code = (
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "os.kill(os.getppid(), signal.SIGINT)\n"
        "time.sleep(0.5)\n"
        f"pathlib.Path({str(report)!r}).write_text(os.environ['SAID'])\n"
        "sys.exit(7)"
    )
    assert rehearse.run_to_its_end([sys.executable, "-c", code], {"SAID": "checked"}) == 7
    assert report.read_text() == "checked"
