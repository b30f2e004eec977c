"""The scripts of docs/how-to/fsdp.md have the losses of one process on two processes."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "how-to" / "fsdp.md"


def blocks() -> list[str]:
    """Return the Python blocks of the page."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def block_with(text: str) -> str:
    """Return the first Python block with ``text``."""
    return next(block for block in blocks() if text in block)


def without(line: str, block: str) -> str:
    """Return a block without its one line that begins with ``line``."""
    shorter, count = re.subn(rf"(?m)^{re.escape(line)}.*\n", "", block)
    assert count == 1, (line, count)
    return shorter


def losses(script: pathlib.Path, processes: int) -> list[list[float]]:
    """Run a script under torchrun, and return the numbers of each line that it prints."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launcher = several if processes else []
    output = subprocess.run(
        [sys.executable, *launcher, str(script)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env=environment,
    ).stdout
    assert re.match(r"loss(es)?: 5\.", output)
    return [[float(word) for word in line.split()[1:]] for line in output.splitlines()]


def assert_equal_on_two_processes(script: pathlib.Path, text: str, alone: int) -> None:
    script.write_text(text, encoding="utf-8")
    one, two = losses(script, alone), losses(script, 2)
    assert len(two) == len(one) > 0
    for line_of_two, line_of_one in zip(two, one):
        assert line_of_two == pytest.approx(line_of_one, abs=2e-4)


@pytest.mark.slow
def test_scripts_of_layers(tmp_path: pathlib.Path) -> None:
    """Divided sequences, then divided heads in the same process group, as the page says."""
    rows = without("dist.destroy_process_group", block_with('"blocks.*.attn": ContextParallel()'))
    heads = without("dist.init_process_group", block_with("HeadParallel()"))
    assert_equal_on_two_processes(tmp_path / "layers.py", rows + heads, alone=0)


@pytest.mark.slow
def test_script_of_a_model_of_transformers(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("transformers")
    text = block_with("NSAQwen3ForCausalLM")
    assert_equal_on_two_processes(tmp_path / "qwen3.py", text, alone=1)
