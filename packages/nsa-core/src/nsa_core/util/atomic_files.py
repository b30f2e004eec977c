"""Files written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from nsa_core.errors import InvalidInput


def user_cache() -> Path:
    """This library's directory under XDG_CACHE_HOME or ~/.cache; it need not exist."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~/.cache"))) / "nsa"


def write_atomic(path: str | Path, text: str, force: bool = False) -> None:
    """Write ``text`` as UTF-8, as :func:`write_bytes_atomic` does and with its errors."""
    write_bytes_atomic(path, text.encode("utf-8"), force)


def write_bytes_atomic(path: str | Path, content: bytes, force: bool = False) -> None:
    """Write ``content`` to ``path``: a reader sees the old file or the whole new one, never a part.

    Raises:
        InvalidInput: the file exists and ``force`` is False, or the path names something that is
            not a plain file.
        OSError: the system refuses (directory missing, no permission, disk full); nothing is left
            behind.
    """
    # a link is followed: what it points to is replaced, not the link
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise InvalidInput(f"{path} is not a plain file")
    if target.exists() and not force:
        raise InvalidInput(f"{path} exists; give --force to overwrite it")
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(draft, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if force:
            os.replace(draft, target)
        else:
            _publish(draft, target, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()


def _publish(draft: Path, target: Path, path: str | Path) -> None:
    # A link fails where the name was taken meanwhile; a rename would overwrite it.
    try:
        os.link(draft, target)
    except FileExistsError:
        raise InvalidInput(f"{path} exists; give --force to overwrite it") from None
    except OSError:
        os.replace(draft, target)  # a file system without hard links
