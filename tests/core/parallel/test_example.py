"""examples/context_parallel.py has the losses of one process on two processes."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[3] / "examples" / "context_parallel.py"


def losses(processes: int, *options: str) -> list[float]:
    """Run the script under torchrun, and return the losses that it prints."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    command = [sys.executable, *launcher, str(SCRIPT), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=300, env=environment
    )
    label, *numbers = done.stdout.split()
    assert label == "losses:"
    return [float(number) for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--heads",)], ids=["tokens", "heads"])
def test_two_processes_have_the_losses_of_one(options: tuple[str, ...]) -> None:
    one, two = losses(1, *options), losses(2, *options)
    assert two == pytest.approx(one, abs=2e-4)
    assert len(one) == 3
    assert one[2] < one[1] < one[0]
