"""The source of a measurement: its commit, if one is known, and git tree ids of its packages."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

from nsa_core.contract import ENTRY_POINT_GROUP

PACKAGES = (
    "nsa_core",
    "nsa_verify",
    "nsa_bench",
    "nsa_models",
    "nsa_cli",
    "nsa_backend_sdpa",
    "nsa_backend_triton",
    "nsa_backend_fa2",
)
_LIMIT_S = 10
# The repository may belong to another user: git must take no lock in it and start no program from
# its configuration.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


def source() -> dict[str, Any]:
    """Return the running source, for a result file.

    Returns:
        ``git_commit`` and ``git_commit_reason`` from :func:`git_commit`, and ``source_trees`` from
        :func:`source_trees`: git's tree id for the files of each package. A commit has the same
        files if ``git rev-parse COMMIT:packages/nsa-core/src/nsa_core`` prints the same id.
    """
    commit, reason = git_commit()
    return {"git_commit": commit, "git_commit_reason": reason, "source_trees": source_trees()}


def git_commit() -> tuple[str | None, str]:
    """Find the commit of the running source.

    It is that of the checkout from which the packages run, or the one that pip recorded when it
    installed them from a repository. Another installation has tree ids only.

    Returns:
        (commit, ""), with "+" after the commit if the checkout has uncommitted changes to tracked
        files; or (None, reason).
    """
    roots = {_root(name) for name in PACKAGES if _folder(name)}
    if len(roots) == 1 and (root := roots.pop()) is not None:
        commit = _commit(root)
        return commit, "" if commit else "git reports no commit for the checkout of the packages"
    commits = {_pip_commit(name) for name in PACKAGES if _folder(name)}
    if len(commits) == 1 and (commit := commits.pop()):
        return commit, ""
    return None, "the packages run from no checkout, and pip recorded no commit of all of them"


def in_checkout(package: str) -> Path:
    """Return the folder of a package in :data:`PACKAGES`, relative to a checkout's root."""
    return Path("packages", package.replace("_", "-"), "src", package)


def _folder(package: str) -> Path | None:
    """Return the folder from which ``import package`` would load, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def _root(package: str) -> Path | None:
    """Return the root of the checkout from which a package runs."""
    folder, inside = _folder(package), in_checkout(package)
    if folder is None or folder.resolve().parts[-len(inside.parts) :] != inside.parts:
        return None
    root = folder.resolve().parents[len(inside.parts) - 1]
    return root if (root / ".git").exists() else None


def _pip_commit(package: str) -> str | None:
    """Return the commit from which pip installed a package."""
    try:
        distribution = importlib.metadata.distribution(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return None
    record: dict[str, Any] = json.loads(distribution.read_text("direct_url.json") or "{}")
    commit: str | None = record.get("vcs_info", {}).get("commit_id")
    return commit


def _commit(root: Path) -> str | None:
    commit = _git_output(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    return commit + (
        "+" if _git_output(root, "status", "--porcelain", "--untracked-files=no") else ""
    )


def _git_output(root: Path, *words: str) -> str | None:
    """Run git in a checkout and return its output, as :func:`command_output`.

    The checkout is passed explicitly, because a GIT_DIR in the environment may name another one.
    """
    return command_output(
        *_GIT, f"--git-dir={root / '.git'}", f"--work-tree={root}", "-C", str(root), *words
    )


def command_output(*command: str) -> str | None:
    """Return the output of a command; None if it is missing, fails or takes longer than 10 s."""
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()


def source_trees() -> dict[str, str]:
    """Return the tree id of every package of ours and of every backend, by import name.

    Nothing is imported.
    """
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    names = {*PACKAGES, *(point.value.split(":")[0].split(".")[0] for point in points)}
    folders = {name: _folder(name) for name in sorted(names)}
    trees = {name: tree_id(folder) for name, folder in folders.items() if folder}
    return {name: tree for name, tree in trees.items() if tree is not None}


def tree_id(folder: Path) -> str | None:
    """Return git's tree id of a folder without byte code; None if the folder does not exist."""
    try:
        tree = _tree(folder)
    except OSError:
        return None
    return None if tree is None else tree.hex()


def _tree(folder: Path) -> bytes | None:
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__":
            continue
        if path.is_dir():
            inner = _tree(path)
            if inner is not None:  # git does not track empty folders
                entries.append((f"{path.name}/", b"40000 " + path.name.encode() + b"\0" + inner))
        else:
            blob = bytes.fromhex(blob_id(path))
            entries.append((path.name, b"100644 " + path.name.encode() + b"\0" + blob))
    return (
        _object_hash(b"tree", b"".join(entry for _, entry in sorted(entries))) if entries else None
    )


def blob_id(file: Path) -> str:
    """Return git's blob id of a file."""
    return _object_hash(b"blob", file.read_bytes()).hex()


def _object_hash(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).digest()
