"""The page about backends shows files of the template."""

from __future__ import annotations

import pathlib
import re

from nsa_cli import scaffold

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def test_the_page_shows_files_of_the_template() -> None:
    text = (DOCS / "how-to" / "write-a-backend.md").read_text()
    shown = dict(
        re.findall(
            r"(?m)^`nsa-backend-mine/([^`\n]+)`\n\n```\w+\n(.*?)^```$",
            text,
            re.DOTALL | re.MULTILINE,
        )
    )
    files = scaffold.rendered("mine")
    assert shown == {path: files[path] for path in shown}
    names = {path.split("/")[-1] for path in shown}
    assert names == {"plugin.py", "probe.py", "test_conformance.py"}
    blocks = re.findall(r"(?m)^```(?!bash$)\w+$", text)
    assert len(blocks) == len(shown), "a code block is not a file of the template"
