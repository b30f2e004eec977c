"""The commit in a result file, for every way in which the package can have come here."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from nsa_bench import provenance

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
INSTALLED = provenance.PACKAGE


def git(folder: pathlib.Path, *words: str) -> str:
    who = (
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
        ("git", *who, *words), cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def copy(folder: pathlib.Path) -> None:
    shutil.copytree(INSTALLED, folder, ignore=shutil.ignore_patterns("__pycache__"))


def committed(root: pathlib.Path) -> str:
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "all")
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A repository like this one, with one commit."""
    root = tmp_path / "checkout"
    copy(root / provenance.IN_CHECKOUT)
    (root / "README.md").write_text("a")
    committed(root)
    return root


@pytest.fixture
def target(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder as pip --target leaves it."""
    folder = tmp_path / "target"
    copy(folder / "nsa_core")
    info = folder / "nsa_core-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nsa-core\nVersion: 9.9\n")
    return folder


def note(target: pathlib.Path, noted: object) -> None:
    (target / "nsa_core-9.9.dist-info" / "direct_url.json").write_text(json.dumps(noted))


def asked(target: pathlib.Path, cwd: pathlib.Path, **environment: str) -> tuple[str | None, str]:
    """git_commit() of the installation in ``target``, in a process that works in ``cwd``."""
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


def test_installed_from_a_checkout_with_target(target, checkout, tmp_path):
    note(target, {"url": (checkout / "packages" / "nsa-core").as_uri(), "dir_info": {}})
    head = git(checkout, "rev-parse", "HEAD")
    assert asked(target, tmp_path) == (head, "")
    (checkout / "README.md").write_text("b")
    assert asked(target, tmp_path) == (head + "+", "")
    (checkout / provenance.IN_CHECKOUT / "ops.py").write_text("# went on after the installation\n")
    commit, reason = asked(target, tmp_path)
    assert commit is None
    assert "the folder that pip installed from does not hold the files that are installed" in reason


def test_installed_from_a_repository(target, tmp_path):
    note(
        target,
        {"url": "https://example.org/nsa", "vcs_info": {"vcs": "git", "commit_id": "abc123"}},
    )
    assert asked(target, tmp_path) == ("abc123", "")


def test_the_working_directory_counts_when_it_holds_the_same_files(target, checkout, tmp_path):
    head = git(checkout, "rev-parse", "HEAD")
    assert asked(target, checkout / "packages") == (head, "")
    (checkout / provenance.IN_CHECKOUT / "ops.py").write_text("# another version\n")
    commit, reason = asked(target, checkout)
    assert (commit, "the working directory does not hold the files" in reason) == (None, True)


def test_a_project_around_the_installation_is_not_its_source(target, tmp_path):
    """A virtual environment inside somebody's repository, and a GIT_DIR left over from a hook."""
    (tmp_path / ".gitignore").write_text("target\n")
    committed(tmp_path)
    commit, reason = asked(target, tmp_path, GIT_DIR=str(tmp_path / ".git"))
    assert commit is None
    assert "the package is in a checkout of something else" in reason
    assert "the working directory does not hold the files that are installed" in reason


def test_nowhere_says_where_was_looked(target, tmp_path):
    for noted in (
        {},
        [],
        {"url": "file:///absent", "dir_info": {}},
        {"url": 3, "dir_info": {}, "vcs_info": 3},
    ):
        note(target, noted)
        commit, reason = asked(target, tmp_path)
        assert commit is None
        assert "the package is in no git checkout" in reason
        assert "the working directory is in no git checkout" in reason


def test_without_git_there_is_a_reason(target, checkout, tmp_path):
    commit, reason = asked(target, checkout, PATH=str(tmp_path))
    assert (commit, reason.endswith("git told no commit of the working directory")) == (None, True)


def test_tree_is_what_git_calls_it(checkout):
    folder = checkout / provenance.IN_CHECKOUT
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").write_bytes(b"x")
    (folder / "empty").mkdir()
    assert provenance.tree_id(folder) == git(
        checkout, "rev-parse", f"HEAD:{provenance.IN_CHECKOUT.as_posix()}"
    )
    (folder / "ops.py").write_text("")
    assert provenance.tree_id(folder) != git(
        checkout, "rev-parse", f"HEAD:{provenance.IN_CHECKOUT.as_posix()}"
    )
    assert provenance.tree_id(folder / "absent") is None


def test_every_package_of_ours_has_its_tree():
    found = provenance.source()
    assert found["source_trees"].keys() >= {
        "nsa_core",
        "nsa_cli",
        "nsa_backend_sdpa",
        "nsa_backend_triton",
        "nsa_backend_fa2",
    }
    assert (found["git_commit"] is None) == bool(found["git_commit_reason"])
