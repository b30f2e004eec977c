"""Atomic file writes: a reader sees the old content or the new content, never a part."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from nsa_core.errors import InvalidInput
from nsa_core.util.text import one_line

_EDQUOT = getattr(errno, "EDQUOT", errno.ENOSPC)  # absent on some platforms
_HINTS = {
    _EDQUOT: "free some of your quota, or give a path on another disk",
    errno.ENOSPC: "free some space, or give a path on another disk",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EIO: "check the disk, or give a path on another one",
}
_NO_DISK = (errno.ENOSPC, _EDQUOT, errno.EFBIG, errno.EIO)  # the path is right, but the disk is not
_SHOWN_NAMES = 3  # of a folder that is not empty
_LEFTOVER = re.compile(r"\..*\.[0-9a-f]{8}\.tmp")


class NotWritten(OSError):
    """A file could not be written; the message names it, the reason and a remedy."""

    def __str__(self) -> str:
        remedy = _HINTS.get(self.errno or 0, "give a path that can be written")
        return f"could not write {self.filename}: {self.strerror or self.args[-1]}; {remedy}"


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn any OSError of the block, which writes ``path``, into :class:`NotWritten`."""
    try:
        yield
    except NotWritten:
        raise
    except OSError as error:
        number = error.errno or errno.EIO
        raise NotWritten(number, error.strerror or str(error), str(path)) from error


def check_folder_writable(folder: Path, named: str | Path | None = None) -> None:
    """Check that files can be created in ``folder``: write a temporary file and remove it.

    Args:
        folder: the folder, which exists.
        named: the path that errors name; None names the folder.

    Raises:
        InvalidInput: no file can be created there.
        NotWritten: the disk is full or broken.
    """
    named = folder if named is None else named
    temporary = _temporary(folder / "trial")
    try:
        with writing(named):
            try:
                with open(temporary, "xb") as file:
                    file.write(b"\n")
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()
    except NotWritten as error:
        if error.errno in _NO_DISK:
            raise
        where = "" if named == folder else f" in {folder}"
        raise InvalidInput(
            f"{named}: no file can be created{where}: {error.strerror}; give a path that can be"
            " written"
        ) from error


def check_output_folder(folder: Path, force: bool = False, remedy: str = "empty this one") -> None:
    """Check, before any work, that files can go into ``folder``, which need not exist.

    Args:
        folder: the folder.
        force: accept a folder that is not empty.
        remedy: what the error about such a folder proposes besides a new folder.

    Raises:
        InvalidInput: it is not a folder, is not empty and ``force`` is false, its parent folder
            does not exist, or no file can be created in it.
        NotWritten: the disk is full or broken.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"{folder} is not a folder; give the path of a folder")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if names and not force:
        shown = ", ".join(map(one_line, names[:_SHOWN_NAMES]))
        more = f" and {len(names) - _SHOWN_NAMES} more" * (len(names) > _SHOWN_NAMES)
        raise InvalidInput(
            f"{folder} is not empty: it holds {shown}{more}; give a new folder, or {remedy}"
        )
    existing = folder if folder.is_dir() else folder.absolute().parent
    if not existing.is_dir():
        raise InvalidInput(f"{folder}: the directory {existing} does not exist; create it first")
    check_folder_writable(existing, folder)


def is_leftover(path: Path) -> bool:
    """Return whether ``path`` is a temporary file of a write, which its process did not finish."""
    return _LEFTOVER.fullmatch(path.name) is not None


def _temporary(target: Path) -> Path:
    """Return a new name beside ``target``; it is not longer than a file name may be."""
    return target.with_name(f".{target.name[:60]}.{secrets.token_hex(4)}.tmp")


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
        NotWritten: the operating system refuses the write (missing directory, no permission, disk
            full). No partial file remains, and an existing file is unchanged.
    """
    with writing(path):
        _replace(path, content, force)


def write_somewhere(path: Path, write: Callable[[Path], object]) -> Path | None:
    """Keep a result whose file ``path`` could not be written: write it to the temporary folder.

    Args:
        path: the file that could not be written.
        write: writes the result to the path that it gets.

    Returns:
        The file; None if it could not be written either.
    """
    import tempfile

    try:
        folder = Path(tempfile.mkdtemp(prefix="nsa-"))
    except OSError:
        return None
    try:
        write(folder / path.name)
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    return folder / path.name


def _replace(path: str | Path, content: bytes, force: bool) -> None:
    # Resolve a symbolic link, so that its target is replaced, not the link.
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise InvalidInput(f"{path} is not a plain file; give the path of a file")
    if target.exists() and not force:
        raise InvalidInput(f"{path} exists; give --force to overwrite it")
    temporary = _temporary(target)
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            if target.exists() and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), target.stat().st_mode & 0o7777)
            os.fsync(file.fileno())
        if force:
            os.replace(temporary, target)
        else:
            _publish(temporary, target, path)
    finally:
        with contextlib.suppress(OSError):
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
