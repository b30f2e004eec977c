"""The source of a measurement: its commit, where one can be found, and the tree ids of the files
that ran.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

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
# The repository may belong to someone else: git takes no lock in it and starts no program that it
# names.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


def source() -> dict[str, Any]:
    """The source that runs, for a result file.

    Returns:
        ``git_commit`` and ``git_commit_reason`` as :func:`git_commit`, and ``source_trees`` as
        :func:`source_trees`: git's tree id for the files of each package. A commit has the same
        files where ``git rev-parse COMMIT:packages/nsa-core/src/nsa_core`` prints the same id.
    """
    commit, reason = git_commit()
    return {"git_commit": commit, "git_commit_reason": reason, "source_trees": source_trees()}


def git_commit() -> tuple[str | None, str]:
    """The commit of the source that runs.

    The search visits the checkout around the installed files, the commits and folders that pip
    noted when it installed them, and the checkout around the working directory. A checkout counts
    only if it holds the very files of every installed package of :data:`PACKAGES`.

    Returns:
        (commit, ""), with "+" behind the commit where tracked files of its checkout differ from it;
        or (None, reason).
    """
    installed = {name: folder for name in PACKAGES if (folder := _folder(name))}
    reasons = []
    for label, place in _places(installed):
        if isinstance(place, str):
            return place, ""
        if place is None:
            reasons.append(f"{label} is in no git checkout")
        elif different := _differences(place, installed):
            names = ", ".join(different)
            reasons.append(f"{label} does not hold the installed files of {names}")
        elif commit := _commit(place):
            return commit, ""
        else:
            reasons.append(f"git told no commit of {label}")
    return None, "; ".join(reasons)


def in_checkout(package: str) -> Path:
    """The folder of a package of :data:`PACKAGES`, relative to the root of a checkout."""
    return Path("packages", package.replace("_", "-"), "src", package)


def _folder(package: str) -> Path | None:
    """The folder from which ``import package`` would load; nothing is imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _differences(root: Path, installed: Mapping[str, Path]) -> list[str]:
    """The packages whose installed files are not those of the checkout."""
    return [
        name
        for name, folder in installed.items()
        if tree_id(root / in_checkout(name)) != tree_id(folder)
    ]


def _places(installed: Iterable[str]) -> Iterator[tuple[str, Path | str | None]]:
    """(label, root of a checkout or a commit) of each place to look, the most certain first."""
    yield "the package", _root(Path(__file__).parent)
    notes = [_direct_url(name.replace("_", "-")) for name in installed]
    commits = {_noted_commit(note) for note in notes}
    if len(commits) == 1 and (commit := commits.pop()):
        yield "the repository that pip installed from", commit
    for root in dict.fromkeys(_root(folder) for note in notes for folder in _noted_folder(note)):
        yield "the folder that pip installed from", root
    yield "the working directory", _root(Path.cwd())


def _direct_url(distribution: str) -> dict[str, Any]:
    """pip's note of the source of a distribution; empty where there is none."""
    try:
        text = importlib.metadata.distribution(distribution).read_text("direct_url.json")
        noted = json.loads(text or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _noted_commit(note: Mapping[str, Any]) -> str | None:
    versioned = note.get("vcs_info")
    commit = versioned.get("commit_id") if isinstance(versioned, dict) else None
    return commit if isinstance(commit, str) else None


def _noted_folder(note: Mapping[str, Any]) -> list[Path]:
    """The local folder that pip installed from, or nothing."""
    address = urlsplit(str(note.get("url", "")))
    return [Path(unquote(address.path))] * ("dir_info" in note and address.scheme == "file")


def _root(folder: Path) -> Path | None:
    """The checkout around ``folder``."""
    folder = folder.resolve()
    return next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)


def _commit(root: Path) -> str | None:
    commit = _said(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    return commit + ("+" if _said(root, "status", "--porcelain", "--untracked-files=no") else "")


def _said(root: Path, *words: str) -> str | None:
    """What git prints about the checkout, as :func:`printed`.

    The checkout is named outright: a GIT_DIR of whoever started this process means another one.
    """
    return printed(
        *_GIT, f"--git-dir={root / '.git'}", f"--work-tree={root}", "-C", str(root), *words
    )


def printed(*command: str) -> str | None:
    """What a command prints, or None where it is missing, fails or takes longer than 10 s."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def source_trees() -> dict[str, str]:
    """Import name -> :func:`tree_id` of every installed package of ours and of every backend's
    package; nothing is imported.
    """
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    names = {*PACKAGES, *(point.value.split(":")[0].split(".")[0] for point in points)}
    folders = {name: _folder(name) for name in sorted(names)}
    trees = {name: tree_id(folder) for name, folder in folders.items() if folder}
    return {name: tree for name, tree in trees.items() if tree is not None}


def tree_id(folder: Path) -> str | None:
    """What git would call the tree of ``folder``'s files, byte code left out; None where there is
    no such folder.
    """
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
            if inner is not None:  # git knows no empty folders
                entries.append((f"{path.name}/", b"40000 " + path.name.encode() + b"\0" + inner))
        else:
            blob = _hashed(b"blob", path.read_bytes())
            entries.append((path.name, b"100644 " + path.name.encode() + b"\0" + blob))
    return _hashed(b"tree", b"".join(entry for _, entry in sorted(entries))) if entries else None


def _hashed(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).digest()
