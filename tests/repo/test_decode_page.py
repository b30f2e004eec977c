"""The examples of docs/decode.md run and print the output that the page shows."""

from __future__ import annotations

import pathlib
import re

import pytest

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "decode.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run_example(code, variables, capsys):
    exec(compile(code, "docs/decode.md", "exec"), variables)
    expected = re.findall(r"print\(.*\)  # (.*)", code)
    assert expected
    assert capsys.readouterr().out.split("\n")[:-1] == expected


def test_the_first_example_prints_the_shown_output(capsys):
    run_example(BLOCKS[0], {}, capsys)


@pytest.mark.gpu
def test_all_examples_print_the_shown_output_on_a_gpu(capsys):
    variables = {}
    for block in BLOCKS:
        run_example(block, variables, capsys)
    assert len(BLOCKS) == 2
