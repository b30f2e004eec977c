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
PUBLISHES = re.compile(r"pypi-publish|gh release|twine upload|deploy-pages|workflows/")


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
    (run,) = re.findall(r"(?m)^RUN (.+)$", text)
    (command,) = re.findall(r'(?m)^CMD \["sh", "-c", "(.+)"\]$', text)
    assert f"{run} && {command}" == commands(repo)[0]
    assert "ENV PIP_NO_CACHE_DIR=1 PATH=/nsa/.venv/bin:$PATH\nWORKDIR /nsa\nCOPY . .\n" in text


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


def test_the_release_workflow_publishes_on_a_tag_only(repo):
    release = workflow(repo, "release")
    assert release["on"].keys() == {"push", "workflow_dispatch"}
    assert release["on"]["push"] == {"tags": ["v*"]}
    assert release["permissions"] == {"contents": "read"}
    guarded = {name for name, job in release["jobs"].items() if writes(job)}
    assert guarded == {"publish", "announce", "docs"}
    for name, job in release["jobs"].items():
        assert job.get("if") == ("github.event_name == 'push'" if name in guarded else None), name
        assert name == "build" or job["needs"] in ("build", "publish")
    steps = " ".join(step.get("run", "") for step in release["jobs"]["build"]["steps"])
    assert 'release_notes -- "${VERSION#v}"' in steps
    assert "-s wheels -- --output dist" in steps
    assert "secrets." not in repo.text(".github/workflows/release.yml"), "publishing needs no token"


def test_the_documentation_is_not_deployed_from_a_pull_request(repo):
    jobs = workflow(repo, "docs")["jobs"]
    assert {name for name, job in jobs.items() if writes(job)} == {"deploy"}
    assert jobs["deploy"]["if"] == "github.event_name != 'pull_request'"


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
