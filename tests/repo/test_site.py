"""The documentation site: its navigation, its build, and tables that repeat facts of the code."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import nsa_core
from nsa_cli import app, output
from nsa_core import NSAConfig
from nsa_core.config import COMPRESS_KINDS, GATE_KINDS
from nsa_core.util.interruption import SIGNALS
from nsa_verify.run import suite


def nav_pages(config: str) -> list[str]:
    """Return the pages that the navigation of mkdocs.yml names, in order."""
    (section,) = re.findall(r"(?ms)^nav:\n(.*?)^\S", config)
    return re.findall(r"(?m)([\w/-]+\.md)$", section)


def test_the_navigation_names_every_page_once(repo: Any) -> None:
    docs = repo.root / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    named = nav_pages(repo.text("mkdocs.yml"))
    assert sorted(named) == sorted(pages)


def test_every_page_begins_with_one_title(repo: Any) -> None:
    titles = {}
    for path in (repo.root / "docs").rglob("*.md"):
        text = re.sub(r"(?ms)^```.*?^```", "", path.read_text(encoding="utf-8"))
        titles[repo.name(path)] = re.findall(r"(?m)^# (.+)$", text)
    assert not {page: found for page, found in titles.items() if len(found) != 1}
    assert len({title for (title,) in titles.values()}) == len(titles)


def test_the_front_matter_of_a_page_has_one_key_per_line(repo: Any) -> None:
    """A tool that fills paragraphs joins its lines, and then it has no effect."""
    pages = [path.read_text(encoding="utf-8") for path in (repo.root / "docs").rglob("*.md")]
    blocks = [page.split("---\n")[1] for page in pages if page.startswith("---\n")]
    assert blocks
    for line in "".join(blocks).splitlines():
        assert re.fullmatch(r"\w+: [^:]+", line)


def test_every_public_name_has_an_api_page(repo: Any) -> None:
    pages = [*(repo.root / "docs" / "reference" / "api").glob("*.md")]
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    text += repo.text("docs/reference/errors.md")
    documented = {path.rsplit(".", 1)[1] for path in re.findall(r"(?m)^::: ([\w.]+)$", text)}
    for members in re.findall(r"members: \[(.+)\]", text):
        documented |= set(members.split(", "))
    constants = {"API_VERSION", "__version__", "hookimpl"}
    assert set(nsa_core.__all__) - constants - documented == set()


def rows(page: str) -> list[list[str]]:
    """Return the cells of all table rows of a page."""
    lines = re.findall(r"(?m)^\| (.*) \|$", page)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def test_the_configuration_page_has_every_field_and_its_default(repo: Any) -> None:
    table = [row for row in rows(repo.text("docs/reference/configuration.md")) if len(row) == 5]
    shown = {row[0].strip("`"): row[2].strip("`") for row in table[1:]}
    defaults = {
        field.name: "required" if field.default is dataclasses.MISSING else repr(field.default)
        for field in dataclasses.fields(NSAConfig)
    }
    assert shown == defaults
    rules = {row[0].strip("`"): row[4] for row in table[1:]}
    assert re.findall(r"\w+", rules["compress"].replace(" or", "")) == list(COMPRESS_KINDS)
    assert re.findall(r"\w+", rules["gate"].replace(" or", "")) == list(GATE_KINDS)


def test_the_exit_code_page_has_the_codes_of_the_help(repo: Any) -> None:
    table = [row for row in rows(repo.text("docs/reference/cli.md")) if row[0].isdigit()]
    in_help = re.findall(r"\b\d+\b", app._EXIT_CODES)
    assert sorted(row[0] for row in table) == sorted(in_help)
    constants = (output.FAILED, output.USAGE, output.UNAVAILABLE, output.BROKEN, output.UNWRITTEN)
    codes = {0, *constants, output.CLOSED, *(128 + number for number in SIGNALS)}
    assert {int(row[0]) for row in table} == codes


def test_the_page_of_checks_has_every_check_of_verify(repo: Any) -> None:
    shown = set(re.findall(r"\*\*([a-z_ ]+)", repo.text("docs/explanation/verification.md")))
    names = {job.name for job in suite.jobs("quick", (torch.float32,))}
    assert len(names) > 30
    # "**decode fused ...**" stands for several checks, and "core" and "decode" for those of others.
    missing = [
        name
        for name in names
        if not {name, f"{name.rpartition(' ')[0]} ", name.partition(" ")[2]} & shown
    ]
    assert not missing


@pytest.fixture(scope="module")
def site(repo: Any, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The built site; MkDocs is in this environment, or in that of `nox -s docs`."""
    pythons = [sys.executable, str(repo.root / ".nox" / "docs" / "bin" / "python")]
    probe = "import mkdocs, material, mkdocstrings, mkdocs_gen_files, typer"
    tools = [
        python
        for python in pythons
        if pathlib.Path(python).exists()
        and not subprocess.run([python, "-c", probe], capture_output=True).returncode
    ]
    if not tools:
        pytest.skip("MkDocs is not installed: run `nox -s docs` once")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [tools[0], "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=repo.root,
        env=os.environ | {"DISABLE_MKDOCS_2_WARNING": "true", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_strict_build_has_a_file_for_every_page(site: pathlib.Path, repo: Any) -> None:
    for page in nav_pages(repo.text("mkdocs.yml")):
        stem = page.removesuffix("index.md").removesuffix(".md")
        assert (site / stem / "index.html").is_file(), page


@pytest.mark.slow
def test_the_page_of_the_command_line_has_every_command(site: pathlib.Path) -> None:
    import typer

    text = (site / "reference" / "cli" / "index.html").read_text(encoding="utf-8")

    def names(command: Any, prefix: str) -> list[str]:
        below = getattr(command, "commands", {})
        return [prefix] + [n for key, each in below.items() for n in names(each, f"{prefix} {key}")]

    expected = names(typer.main.get_command(app.app), "nsa")
    assert len(expected) > 14
    headings = set(re.findall(r'<h2 id="([\w-]+)">', text))
    assert headings >= {name.replace(" ", "-") for name in expected}
