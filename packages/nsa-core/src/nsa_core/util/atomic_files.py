"""Atomic file writes: a reader sees the old content or the new content, never a part."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from nsa_core.errors import InvalidInput


def user_cache() -> Path:
    """Return this library's cache directory, in XDG_CACHE_HOME or ~/.cache; it may not exist."""
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path(os.path.expanduser("~/.cache"))) / "nsa"


def write_atomic(path: str | Path, text: str, force: bool = False) -> None:
    """Write ``text`` as UTF-8 to ``path``; see :func:`write_bytes_atomic`."""
    write_bytes_atomic(path, text.encode("utf-8"), force)


def write_bytes_atomic(path: str | Path, content: bytes, force: bool = False) -> None:
    """Write ``content`` to ``path`` atomically.

    Args:
        path: the file to write; a symbolic link is followed.
        content: the bytes.
        force: replace an existing file.

    Raises:
        InvalidInput: the file exists and ``force`` is False, or the path is not a plain file.
        OSError: the operating system refuses the write (missing directory, no permission, disk
            full). No partial file remains.
    """
    # Resolve a symbolic link, so that its target is replaced, not the link.
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise InvalidInput(f"{path} is not a plain file; give the path of a file")
    if target.exists() and not force:
        raise InvalidInput(f"{path} exists; give --force to overwrite it")
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if force:
            os.replace(temporary, target)
        else:
            _publish(temporary, target, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def _publish(temporary: Path, target: Path, path: str | Path) -> None:
    """Give ``temporary`` the name ``target``, unless that name exists."""
    # A hard link fails if the name was created in the meantime; a rename would overwrite it.
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise InvalidInput(f"{path} exists; give --force to overwrite it") from None
    except OSError:
        os.replace(temporary, target)  # the file system has no hard links
