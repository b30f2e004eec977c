"""Run every Python block of the pages as a test, in order, with one namespace per page.

A block that needs a GPU stands behind a comment `skip: next if(not gpu, reason="needs a GPU")`, and
a block that only `nox -s full` runs behind a comment `slow`. The comment of a line
`print(...)  # text` is what the line must print. A text block after a Python block that prints is
what it must print; line breaks are free. The blocks of write-a-backend.md are files, which
tests/repo/test_docs.py compares with the template.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import tempfile
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

_SHOWN = re.compile(r"(?m)^print\(.*\)  # (.*)$")


class _Evaluator(PythonEvaluator):
    """Run a block and compare what it prints with the comments that show it."""

    def __call__(self, example: Example) -> None:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            super().__call__(example)
        printed = output.getvalue()
        if shown := _SHOWN.findall(str(example.parsed)):
            assert printed.splitlines() == shown, f"shown {shown}, printed {printed.splitlines()}"
            printed = ""
        example.namespace["_printed"] = printed


def _compare_output(example: Example) -> None:
    """Compare a text block with the output of the Python block before it, if that printed."""
    if printed := example.namespace.pop("_printed", ""):
        shown = str(example.parsed)
        assert shown.split() == printed.split(), f"shown:\n{shown}\nprinted:\n{printed}"


def _set_up(namespace: dict[str, Any]) -> None:
    """Start a page: seed torch, and go to a folder that has only what examples read."""
    import torch

    torch.manual_seed(0)
    folder = tempfile.mkdtemp(prefix="nsa-")
    with open(os.path.join(folder, "notes.txt"), "w", encoding="utf-8") as file:
        file.write("a text of many words. " * 8)
    namespace |= {"gpu": torch.cuda.is_available(), "_folders": (os.getcwd(), folder)}
    os.chdir(folder)


def _tear_down(namespace: dict[str, Any]) -> None:
    before, folder = namespace["_folders"]
    os.chdir(before)
    shutil.rmtree(folder)


pytest_collect_file = Sybil(
    parsers=[
        CodeBlockParser("python", _Evaluator()),
        CodeBlockParser("text", _compare_output),
        SkipParser(),
    ],
    patterns=["*.md"],
    excludes=["write-a-backend.md"],
    setup=_set_up,
    teardown=_tear_down,
).pytest()


@pytest.hookimpl(tryfirst=True)  # before the hooks that deselect tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the blocks behind a comment `slow`."""
    for item in items:
        example = getattr(item, "example", None)
        if example and example.document.text[: example.start].endswith("<!-- slow -->\n\n"):
            item.add_marker("slow")
