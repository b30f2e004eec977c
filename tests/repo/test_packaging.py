"""Metadata of the packages, workflows, Dockerfile, release notes and the packages' READMEs."""

from __future__ import annotations

import datetime
import re
import types

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from test_release import PACKAGES, commands, metadata, project, tomllib, version_of
from test_release import noxfile_of as load_noxfile

CODE = {".py", ".pyc"}
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
PUBLISHES = re.compile(r"pypi-publish|gh release|twine upload|deploy-pages")
PINNED = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")

# The jobs that may write, and what.
RIGHTS = {
    "docs": {"deploy": {"pages", "id-token"}},
    "release": {"publish": {"id-token"}, "announce": {"contents"}},
}


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml too, whose extensions are Python names."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def load(repo, name: str) -> dict:
    return yaml.load(repo.text(name), Loader)


def workflow(repo, name: str) -> dict:
    """Return a workflow; YAML reads its key `on` as a boolean."""
    document = load(repo, f".github/workflows/{name}.yml")
    document["on"] = document.pop(True)
    return document


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_the_shared_metadata(package, repo):
    shared = tomllib.loads(repo.text("metadata.toml"))
    table = metadata(project(repo, package))
    assert {name: table.get(name) for name in shared} == shared, "run `nox -s metadata`"
    assert shared.keys() >= {"urls", "authors", "keywords", "classifiers", "readme", "license"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_has_every_data_file_of_its_package(package, repo):
    """Results name the tree of the installed files, which then is that of the checkout."""
    name = package.replace("-", "_")
    folder = repo.root / "packages" / package / "src" / name
    document = tomllib.loads(repo.text(f"packages/{package}/pyproject.toml"))
    (globs,) = document["tool"]["setuptools"]["package-data"].values()
    shipped = {path for pattern in globs for path in folder.glob(pattern)}
    files = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in CODE}
    assert files == {path for path in shipped if path.is_file()}


def test_the_dockerfile_runs_the_first_command_of_the_readme(repo):
    text = repo.text("Dockerfile")
    (install,) = re.findall(r"(?m)^RUN (python3 .+)$", text)
    (command,) = re.findall(r'(?m)^CMD \["sh", "-c", "(.+)"\]$', text)
    assert f"{install} && {command}" == commands(repo)[0]
    assert "ENV PIP_NO_CACHE_DIR=1 PATH=/nsa/.venv/bin:$PATH\nWORKDIR /nsa\n" in text


def dockerfile_faults(text: str, ignored: str) -> set[str]:
    """Return the rules that a Dockerfile and its .dockerignore break."""
    images = re.findall(r"(?m)^FROM (.+)$", text)
    user = re.findall(r"(?m)^USER (.+)$", f"USER root\n{text}")[-1]
    copied = re.findall(r"(?m)^(?:COPY|ADD) (.+)$", text)
    rules = {
        "image without a digest": any(
            not re.fullmatch(r"python:[\d.]+-slim@sha256:[0-9a-f]{64}", image) for image in images
        ),
        "runs as root": user in ("root", "0"),
        "copies more than the packages": copied != ["packages packages"]
        or ignored.splitlines()[:2] != ["*", "!packages"],
    }
    return {rule for rule, is_broken in rules.items() if is_broken}


@pytest.mark.parametrize(
    ("old", "new", "faults"),
    [
        ("", "", set()),
        (r"@sha256:\w+", "", {"image without a digest"}),
        ("USER nsa\n", "", {"runs as root"}),
        ("USER nsa", "USER root", {"runs as root"}),
        ("$", "\nUSER root", {"runs as root"}),
        ("COPY .*", "COPY . .", {"copies more than the packages"}),
    ],
)
def test_the_dockerfile_pins_its_image_and_leaves_root(old, new, faults, repo):
    text = re.sub(old, new, repo.text("Dockerfile").rstrip("\n"))
    assert dockerfile_faults(text, repo.text(".dockerignore")) == faults


def test_ci_runs_every_python_that_the_packages_name(repo):
    jobs = workflow(repo, "ci")["jobs"]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == PYTHONS
    shared = tomllib.loads(repo.text("metadata.toml"))
    prefix = "Programming Language :: Python :: "
    named = [c.removeprefix(prefix) for c in shared["classifiers"] if c.startswith(f"{prefix}3.")]
    assert named == PYTHONS
    assert shared["requires-python"] == f">={PYTHONS[0]}"


def writes(job: dict) -> bool:
    return "write" in job.get("permissions", {}).values() or bool(PUBLISHES.search(str(job)))


def workflow_faults(name: str, text: str) -> set[str]:
    """Return the rules that a workflow breaks: pinned actions, and rights for few steps."""
    document = yaml.load(text, Loader)
    jobs = document["jobs"]
    steps = [step for job in jobs.values() for step in job.get("steps", ())]
    local = {job["uses"] for job in jobs.values() if "uses" in job}
    checkouts = [step for step in steps if step.get("uses", "").startswith("actions/checkout@")]
    used = re.findall(r"(?m)^ +(?:- )?uses: (.+)$", text)
    writers = {name: job for name, job in jobs.items() if writes(job)}
    rules = {
        "action without a commit": len(used) != len(local) + sum("uses" in step for step in steps)
        or any(not PINNED.fullmatch(action) for action in used if action not in local),
        "workflow of another repository": not local <= {"./.github/workflows/ci.yml"},
        "rights for all jobs": document.get("permissions") != {"contents": "read"},
        "unexpected rights": {job: set(jobs[job].get("permissions", ())) for job in writers}
        != RIGHTS.get(name, {}),
        "own code beside id-token": any(
            "id-token" in job.get("permissions", ()) and ("run" in step or step in checkouts)
            for job in writers.values()
            for step in job.get("steps", ())
        ),
        "token left in the checkout": any(
            step.get("with", {}).get("persist-credentials") is not False for step in checkouts
        ),
        "stored secret": "secrets." in text,
        "text of a stranger in a command": any("${{" in step.get("run", "") for step in steps),
        "runs code of a pull request with rights": "pull_request_target" in text,
    }
    return {rule for rule, is_broken in rules.items() if is_broken}


def test_every_workflow_pins_its_actions_and_limits_its_rights(repo):
    folder = repo.root / ".github/workflows"
    faults = {path.stem: workflow_faults(path.stem, path.read_text()) for path in folder.iterdir()}
    assert faults == {"ci": set(), "docs": set(), "release": set()}


@pytest.mark.parametrize(
    ("name", "old", "new", "fault"),
    [
        ("ci", r"checkout@\w+ # ", "checkout@", "action without a commit"),
        ("ci", r"(checkout@\w+) # v[\d.]+", r"\1", "action without a commit"),
        ("release", r"publish@\w+", "publish@release/v1", "action without a commit"),
        ("release", r"\./\.github", "octo/repo/.github", "workflow of another repository"),
        ("ci", "  contents: read", "  contents: write", "rights for all jobs"),
        ("docs", "permissions:\n  contents: read\n", "", "rights for all jobs"),
        ("ci", "    steps:", "    permissions: {issues: write}\n    steps:", "unexpected rights"),
        ("release", "id-token: write", "contents: write", "unexpected rights"),
        ("docs", "pages: write", "pages: write\n      contents: write", "unexpected rights"),
        (
            "docs",
            "(?m)^(      - uses: .*deploy)",
            r"      - run: ls\n\1",
            "own code beside id-token",
        ),
        ("ci", "persist-credentials: false", "fetch-depth: 1", "token left in the checkout"),
        ("release", r"github\.token", "secrets.TOKEN", "stored secret"),
        (
            "release",
            r'create "\$VERSION"',
            "create ${{ github.ref }}",
            "text of a stranger in a command",
        ),
        (
            "docs",
            "pull_request:",
            "pull_request_target:",
            "runs code of a pull request with rights",
        ),
    ],
)
def test_a_rule_of_workflows_is_checked(name, old, new, fault, repo):
    text = repo.text(f".github/workflows/{name}.yml")
    broken, count = re.subn(old, new, text)
    assert count
    assert workflow_faults(name, broken) == {fault}


def test_the_release_publishes_on_a_tag_only_after_all_tests(repo):
    release = workflow(repo, "release")
    assert release["on"].keys() == {"push", "workflow_dispatch"}
    assert release["on"]["push"] == {"tags": ["v*"]}
    jobs = release["jobs"]
    assert {name: job.get("if") for name, job in jobs.items()} == {
        "tests": None,
        "build": None,
        "publish": "github.event_name == 'push'",
        "announce": "github.event_name == 'push'",
    }
    assert jobs["tests"] == {"uses": "./.github/workflows/ci.yml"}
    assert "workflow_call" in workflow(repo, "ci")["on"]
    assert jobs["publish"]["needs"] == ["tests", "build"]
    assert jobs["announce"]["needs"] == "publish"
    steps = " ".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert 'release_notes -- "${VERSION#v}"' in steps
    assert "-s wheels -- --output dist" in steps


def test_the_documentation_is_deployed_from_main_only(repo):
    docs = workflow(repo, "docs")
    assert docs["on"] == {"push": {"branches": ["main"]}, "pull_request": None}
    assert docs["jobs"]["deploy"]["if"] == "github.ref == 'refs/heads/main'"


def test_workflows_run_sessions_that_exist(repo):
    runs = [
        step["run"]
        for name in ("ci", "docs", "release")
        for job in workflow(repo, name)["jobs"].values()
        for step in job.get("steps", ())
        if "nox -s" in step.get("run", "")
    ]
    used = {word for run in runs for word in run.split("nox -s ")[1].split(" -- ")[0].split()}
    defined = set(re.findall(r"(?m)^@nox\.session.*\ndef (\w+)\(", repo.text("noxfile.py")))
    assert used >= {"tests", "lint", "typecheck", "wheels", "docs", "release_notes"}
    assert used <= defined


def test_pre_commit_has_the_ruff_of_the_lint_session(repo):
    hooks = {
        entry["repo"].split("/")[-1]: entry["rev"]
        for entry in load(repo, ".pre-commit-config.yaml")["repos"]
    }
    (allowed,) = re.findall(r'(?m)^RUFF = "ruff(.+?)"', repo.text("noxfile.py"))
    assert SpecifierSet(allowed).contains(hooks["ruff-pre-commit"].removeprefix("v"))


def test_the_changelog_has_a_dated_heading_for_the_version(repo):
    first, second = re.findall(r"(?m)^## (.+)$", repo.text("CHANGELOG.md"))[:2]
    version, _, day = second.partition(" - ")
    assert first == "Unreleased"
    assert version == version_of(repo, "nsa-core") == str(load(repo, "CITATION.cff")["version"])
    assert datetime.date.fromisoformat(day) >= datetime.date(2026, 11, 23)


def release_notes(repo, folder, changelog: str, *words: str) -> None:
    for package in PACKAGES:
        path = folder / "packages" / package / "pyproject.toml"
        path.parent.mkdir(parents=True)
        path.write_text(project(repo, package))
    (folder / "CHANGELOG.md").write_text(changelog)
    (folder / "noxfile.py").write_text(repo.text("noxfile.py"))
    session = types.SimpleNamespace(posargs=list(words), error=pytest.fail)
    load_noxfile(folder).release_notes(session)


def test_release_notes_are_the_section_of_the_version(repo, tmp_path, capsys):
    version = version_of(repo, "nsa-core")
    release_notes(
        repo,
        tmp_path,
        f"# Changelog\n\n## Unreleased\n\n- new\n\n## {version} - 2030-01-02\n\n### Added\n\n"
        "- a\n\n## 0.0.1 - 2029-01-01\n\n- old\n",
        version,
    )
    assert capsys.readouterr().out == "### Added\n\n- a\n"


@pytest.mark.parametrize(
    ("heading", "words", "message"),
    [
        ("## 0.0.1 - 2029-01-01", ["VERSION"], "no heading"),
        ("## VERSION", ["VERSION"], "no heading"),
        ("## 9.9.9 - 2029-01-01", ["9.9.9"], "does not have version 9.9.9"),
        ("## VERSION - 2029-01-01", [], "does not have version VERSION"),
    ],
    ids=["missing", "undated", "other packages", "no argument"],
)
def test_release_notes_refuse(heading, words, message, repo, tmp_path):
    version = version_of(repo, "nsa-core")
    text = f"# Changelog\n\n{heading.replace('VERSION', version)}\n\n- a\n"
    with pytest.raises(pytest.fail.Exception, match=message):
        release_notes(repo, tmp_path, text, *(word.replace("VERSION", version) for word in words))
