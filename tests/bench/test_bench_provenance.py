"""The commit in a result file, for every way to install the packages."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from nsa_bench import provenance

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
CORE = provenance.in_checkout("nsa_core")


def git(folder: pathlib.Path, *words: str) -> str:
    config = (
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b.c",
        "-c",
        "commit.gpgsign=false",
        "-c",
        "init.defaultBranch=main",
    )
    done = subprocess.run(
        ("git", *config, *words), cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def copy(package: str, folder: pathlib.Path) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    (source,) = spec.submodule_search_locations or ()
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))


def committed(root: pathlib.Path) -> str:
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "all")
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a repository with this one's packages and one commit."""
    root = tmp_path / "checkout"
    for package in provenance.PACKAGES:
        copy(package, root / provenance.in_checkout(package))
    (root / "README.md").write_text("a")
    committed(root)
    return root


@pytest.fixture
def target(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a folder of installed packages, as `pip install --target` creates it."""
    folder = tmp_path / "target"
    for package in provenance.PACKAGES:
        copy(package, folder / package)
        info = folder / f"{package}-9.9.dist-info"
        info.mkdir()
        name = package.replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    return folder


def write_record(target: pathlib.Path, record: object, packages=provenance.PACKAGES) -> None:
    for package in packages:
        file = target / f"{package}-9.9.dist-info" / "direct_url.json"
        file.write_text(json.dumps(record))


def commit_of(
    target: pathlib.Path, cwd: pathlib.Path, **environment: str
) -> tuple[str | None, str]:
    """Run git_commit() of the installation in ``target``, in a process with folder ``cwd``."""
    code = (
        "import json; from nsa_bench.provenance import git_commit; print(json.dumps(git_commit()))"
    )
    env = os.environ | {"PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    commit, reason = json.loads(done.stdout)
    return commit, reason


@pytest.mark.slow
def test_the_folder_that_pip_installed_from_gives_the_commit(target, checkout, tmp_path):
    for package in provenance.PACKAGES:
        folder = checkout / provenance.in_checkout(package).parents[1]
        write_record(target, {"url": folder.as_uri(), "dir_info": {}}, [package])
    head = git(checkout, "rev-parse", "HEAD")
    assert commit_of(target, tmp_path) == (head, "")
    (checkout / "README.md").write_text("b")
    assert commit_of(target, tmp_path) == (head + "+", "")
    (checkout / CORE / "ops.py").write_text("# added after the installation\n")
    commit, reason = commit_of(target, tmp_path)
    assert commit is None
    assert (
        "the folder that pip installed from differs from the installed files of nsa_core;" in reason
    )


def test_the_repository_that_pip_installed_from_gives_the_commit(target, tmp_path):
    pinned = {"vcs": "git", "commit_id": "abc123"}
    write_record(target, {"url": "https://example.org/nsa", "vcs_info": pinned})
    assert commit_of(target, tmp_path) == ("abc123", "")
    write_record(target, {"vcs_info": {**pinned, "commit_id": "def456"}}, ["nsa_cli"])
    assert commit_of(target, tmp_path)[0] is None, "two different commits"


def test_the_working_directory_counts_if_its_files_are_equal(target, checkout):
    head = git(checkout, "rev-parse", "HEAD")
    assert commit_of(target, checkout / "packages") == (head, "")


def test_every_installed_package_is_compared_with_the_checkout(target, checkout, monkeypatch):
    """A single file of one package differs."""
    monkeypatch.syspath_prepend(str(target))
    monkeypatch.setattr(provenance, "__file__", str(target / "nsa_bench" / "provenance.py"))
    monkeypatch.setattr(provenance, "_folder", lambda name: target / name)
    monkeypatch.chdir(checkout)
    head = git(checkout, "rev-parse", "HEAD")
    for package in provenance.PACKAGES:
        assert provenance.git_commit() == (head, "")
        file = target / package / "__init__.py"
        text = file.read_text()
        file.write_text("another version")
        commit, reason = provenance.git_commit()
        assert commit is None
        assert f"working directory differs from the installed files of {package}" in reason
        file.write_text(text)


def test_a_repository_around_the_installation_is_not_its_source(target, tmp_path):
    """A virtual environment inside another repository, with GIT_DIR set by a hook."""
    (tmp_path / ".gitignore").write_text("target\n")
    committed(tmp_path)
    commit, reason = commit_of(target, tmp_path, GIT_DIR=str(tmp_path / ".git"))
    assert commit is None
    names = ", ".join(provenance.PACKAGES)
    for label in ("the package", "the working directory"):
        assert f"{label} differs from the installed files of {names}" in reason


def test_without_a_checkout_the_reason_lists_every_origin(target, tmp_path):
    for record in ({}, {"url": "file:///absent", "dir_info": {}}):
        write_record(target, record)
        commit, reason = commit_of(target, tmp_path)
        assert commit is None
        assert "the package is not in a git checkout" in reason
        assert "the working directory is not in a git checkout" in reason


def test_without_git_there_is_a_reason(target, checkout, tmp_path):
    commit, reason = commit_of(target, checkout, PATH=str(tmp_path))
    assert commit is None
    assert reason.endswith("git reports no commit for the working directory")


def test_tree_id_equals_gits_tree_id(checkout):
    folder = checkout / CORE
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_bytes(b"x")
    (folder / "empty").mkdir()
    assert provenance.tree_id(folder) == git(checkout, "rev-parse", f"HEAD:{CORE.as_posix()}")
    (folder / "ops.py").write_text("")
    assert provenance.tree_id(folder) != git(checkout, "rev-parse", f"HEAD:{CORE.as_posix()}")
    assert provenance.tree_id(folder / "absent") is None


def test_packages_lists_every_package_of_the_repository():
    packages = pathlib.Path(__file__).resolve().parents[2] / "packages"
    modules = packages.glob("*/src/*/__init__.py")
    # No benchmark imports nsa_vllm.
    assert {path.parent.name for path in modules} == {*provenance.PACKAGES, "nsa_vllm"}


def test_source_has_a_tree_id_for_every_package():
    facts = provenance.source()
    assert facts["source_trees"].keys() >= set(provenance.PACKAGES)
    assert (facts["git_commit"] is None) == bool(facts["git_commit_reason"])
