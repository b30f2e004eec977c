"""docs/decode.md: its examples run, and print what they say."""

from __future__ import annotations

import pathlib
import re

import pytest

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "decode.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(code, names, capsys):
    exec(compile(code, "docs/decode.md", "exec"), names)
    said = re.findall(r"print\(.*\)  # (.*)", code)
    assert said
    assert capsys.readouterr().out.split("\n")[:-1] == said


def test_the_first_example(capsys):
    run(BLOCKS[0], {}, capsys)


@pytest.mark.gpu
def test_the_examples_of_a_gpu(capsys):
    names = {}
    for block in BLOCKS:
        run(block, names, capsys)
    assert len(BLOCKS) == 2
