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


def commit_of(path: str, cwd: pathlib.Path, **environment: str) -> tuple[str | None, str]:
    """Run git_commit() of the packages on a Python path, in a process with folder ``cwd``."""
    code = (
        "import json; from nsa_bench.provenance import git_commit; print(json.dumps(git_commit()))"
    )
    env = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    commit, reason = json.loads(done.stdout)
    return commit, reason


def test_the_checkout_of_the_packages_gives_the_commit(checkout, tmp_path):
    folders = [checkout / provenance.in_checkout(name).parent for name in provenance.PACKAGES]
    path, head = os.pathsep.join(map(str, folders)), git(checkout, "rev-parse", "HEAD")
    assert commit_of(path, tmp_path, GIT_DIR=str(tmp_path / "absent")) == (head, "")
    (checkout / "README.md").write_text("b")
    assert commit_of(path, tmp_path) == (head + "+", "")
    commit, reason = commit_of(path, tmp_path, PATH=str(tmp_path))
    assert (commit, "git reports no commit" in reason) == (None, True), "without git"


def test_packages_of_several_checkouts_have_no_commit(target, checkout):
    folder = checkout / provenance.in_checkout("nsa_core").parent
    assert commit_of(os.pathsep.join(map(str, (folder, target))), checkout)[0] is None


def test_the_repository_that_pip_installed_from_gives_the_commit(target, tmp_path):
    def record(package: str, **facts: object) -> None:
        file = target / f"{package}-9.9.dist-info" / "direct_url.json"
        file.write_text(json.dumps(facts))

    for package in provenance.PACKAGES:
        record(package, vcs_info={"vcs": "git", "commit_id": "abc123"})
    assert commit_of(str(target), tmp_path) == ("abc123", "")
    record("nsa_cli", vcs_info={"commit_id": "def456"})
    commit, reason = commit_of(str(target), tmp_path)
    assert (commit, "pip recorded no commit" in reason) == (None, True), "two different commits"


def test_a_repository_around_the_installation_is_not_its_source(target, tmp_path):
    """A virtual environment inside another repository."""
    (tmp_path / ".gitignore").write_text("venv\n")
    committed(tmp_path)
    (tmp_path / "venv" / "lib").mkdir(parents=True)
    installed = target.rename(tmp_path / "venv" / "lib" / "python")
    assert commit_of(str(installed), tmp_path)[0] is None


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
