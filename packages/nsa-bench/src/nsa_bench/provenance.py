"""Which source a figure was measured with: the commit, where one can be found, and what the
installed files hash to.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from nsa_core.contract import ENTRY_POINT_GROUP

PACKAGE = Path(__file__).parents[1]  # nsa_core, as it was imported
IN_CHECKOUT = Path("packages/nsa-core/src/nsa_core")
_LIMIT_S = 10
# Whoever owns the repository: no lock is taken in it, and no program that it names is started.
_GIT = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")


def source() -> dict[str, Any]:
    """For a result file: ``git_commit`` (None: ``git_commit_reason`` says why), and
    ``source_trees``.

    ``source_trees`` has for each package of ours and each backend's what git calls the tree of its
    files: a commit has the same files where ``git rev-parse COMMIT:packages/nsa-core/src/nsa_core``
    prints the same.
    """
    commit, reason = git_commit()
    return {"git_commit": commit, "git_commit_reason": reason, "source_trees": source_trees()}


def git_commit() -> tuple[str | None, str]:
    """(commit, "") of the source that runs, "+" behind it where tracked files of its checkout
    differ; or (None, why).

    Looked for in this order: the checkout that the files lie in; the commit that pip noted when it
    installed from a repository; the checkout that pip noted when it installed from one; the
    checkout around the working directory. The last two count only where they hold the very files
    that are installed.
    """
    why = []
    for where, root, exact in _places():
        if isinstance(root, str):
            return root, ""
        if root is None:
            why.append(f"{where} is in no git checkout")
        elif exact and not _tracks(root):
            why.append(f"{where} is in a checkout of something else")
        elif not exact and tree_id(root / IN_CHECKOUT) != tree_id(PACKAGE):
            why.append(f"{where} does not hold the files that are installed")
        elif commit := _commit(root):
            return commit, ""
        else:
            why.append(f"git told no commit of {where}")
    return None, "; ".join(why)


def _places() -> Iterator[tuple[str, Path | str | None, bool]]:
    """(what to call it, its checkout's root or a commit, whether the installed files lie in it)."""
    yield "the package", _root(PACKAGE), True
    noted = _direct_url()
    versioned = noted.get("vcs_info")
    commit = versioned.get("commit_id") if isinstance(versioned, dict) else None
    if isinstance(commit, str):
        yield "what pip noted", commit, False
    address = urlsplit(str(noted.get("url", "")))
    if "dir_info" in noted and address.scheme == "file":
        yield "the folder that pip installed from", _root(Path(unquote(address.path))), False
    yield "the working directory", _root(Path.cwd()), False


def _direct_url() -> dict[str, Any]:
    """Where pip installed nsa-core from; empty where it did not say."""
    try:
        text = importlib.metadata.distribution("nsa-core").read_text("direct_url.json")
        noted = json.loads(text or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _root(folder: Path) -> Path | None:
    """The checkout around ``folder``."""
    folder = folder.resolve()
    return next((place for place in (folder, *folder.parents) if (place / ".git").exists()), None)


def _tracks(root: Path) -> bool:
    """Whether the checkout is of the package itself, and not of something it is installed into."""
    name = Path(__file__).resolve().relative_to(root).as_posix()
    return _said(root, "ls-files", "--error-unmatch", "--", name) is not None


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
    """Import name -> :func:`tree_id` of nsa_core, nsa_cli and every backend's package; nothing is
    imported.
    """
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    names = {"nsa_core", "nsa_cli", *(point.value.split(":")[0].split(".")[0] for point in points)}
    found = {}
    for name in sorted(names):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # an entry point that names nothing
            continue
        places = list(spec.submodule_search_locations or ()) if spec else []
        tree = tree_id(Path(places[0])) if places else None
        if tree is not None:
            found[name] = tree
    return found


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
