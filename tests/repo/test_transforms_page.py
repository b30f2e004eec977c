"""The examples of docs/transforms.md run and print the output that the page shows."""

from __future__ import annotations

import pathlib
import re

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "transforms.md").read_text()


def test_the_examples_print_the_shown_output(capsys):
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    exec(compile(code, "docs/transforms.md", "exec"), {})
    expected = re.findall(r"print\(.*\)  # (.*)", code)
    assert len(expected) == 2
    assert capsys.readouterr().out.split("\n")[:-1] == expected
