"""benchmarks/several_gpus.py on the CPU: it passes, and a planted fault makes it fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from several_gpus import MARGIN, Expected, Report, compare

from nsa_models.lm.parallel import World

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
pytest.importorskip("safetensors")

# Runs the script with a fault of mode sequence.
PLANTED = """
import sys
sys.path[:0] = {paths}
from sequence_mutants import MUTANTS, mutated
with mutated(*MUTANTS["halo rows are not sent back"]):
    import several_gpus
    kinds = several_gpus.kinds(2)
    kept = ("context parallel, heads", "context parallel, sequence")
    several_gpus.kinds = lambda gpus: {{name: kinds[name] for name in kept}}
    several_gpus.main()
"""


def checks_of(file: Path, command: list[str], code: int) -> dict[str, list[str]]:
    """Run a command on two processes; return what is wrong by check, and check what is printed."""
    options = ["--device", "cpu", "--gpus", "2", "--time-limit", "500", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, *command, *options],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(file.read_text())
    checks = {each["check"]: each["failures"] for each in document["checks"]}
    assert document["complete"]
    assert document["passed"] == (code == 0)
    assert "git_commit" in document["machine"]
    for name, failures in checks.items():  # only the first process prints
        lines = [line for line in done.stdout.splitlines() if line.endswith(f" s  {name}")]
        assert [line[:4] for line in lines] == ["FAIL" if failures else "PASS"]
    return checks


@pytest.mark.slow
def test_all_checks_pass_on_two_processes(tmp_path: Path) -> None:
    checks = checks_of(tmp_path / "result.json", [str(BENCHMARKS / "several_gpus.py")], 0)
    divisions = [name for name in checks if name.startswith("division ")]
    assert len(divisions) == 8
    for name in ("DDP", "FSDP2", "tensor parallel", "context parallel, sequence"):
        assert {f"train {name}", f"resume {name}: 2, 1, 2"} <= checks.keys()


@pytest.mark.slow
def test_a_planted_fault_fails_its_checks_only(tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED.format(paths=[str(BENCHMARKS), str(ROOT / "tests/core/parallel")]))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    checks = checks_of(tmp_path / "result.json", [*torchrun, str(script)], 1)
    wrong = {name for name, failures in checks.items() if failures}
    assert wrong == {name for name in checks if "sequence" in name}
    assert checks["train context parallel, sequence"][0].startswith("gradient norm of step 1")


def one_step(loss: float) -> dict[str, torch.Tensor]:
    return {"loss of step 1": torch.tensor(loss).double()}


def test_a_difference_beyond_the_controls_fails(tmp_path: Path) -> None:
    ulp = 2.0**-20
    one = Expected(one_step(2.0), [one_step(2.0 + ulp), one_step(2.0)])
    assert compare(one_step(2.0 + MARGIN * ulp), one) == []
    failures = compare(one_step(2.0 + 1.1 * MARGIN * ulp), one)
    assert failures == ["loss of step 1 differs by 8.34e-06, more than 7.63e-06"]
    assert compare(one_step(float("nan")), one)
    assert compare({"loss of step 1": torch.ones(2)}, one)
    file = tmp_path / "result.json"
    report = Report(World(torch.device("cpu")), file)
    report.check("right", list)
    assert report.finish() == 0
    report.check("wrong", lambda: failures)
    assert report.finish() == 1
    assert not json.loads(file.read_text())["passed"]


def test_an_error_of_a_check_ends_the_run_as_not_passed(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    report = Report(World(torch.device("cpu")), file)

    def broken() -> list[str]:
        raise RuntimeError("planted")

    with pytest.raises(SystemExit) as ended:
        report.check("broken", broken)
    assert ended.value.code == 1
    document = json.loads(file.read_text())
    assert document["checks"][0]["failures"] == ["rank 0: RuntimeError: planted"]
    assert not document["complete"]
    assert not document["passed"]
