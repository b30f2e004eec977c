"""The folder of a training run: one process at a time trains in it, and others may read it."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import stat
from collections.abc import Iterator
from pathlib import Path

from nsa_core.errors import InvalidInput
from nsa_core.util.atomic_files import is_leftover, writing
from nsa_core.util.text import one_line
from nsa_models.lm import log
from nsa_models.lm.tokens import TOKENIZER, TOKENIZER_CONFIG

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
OPTIMIZER = "optimizer"  # the folder of the optimizer's tensors
# The reason why a model has no text to read or to continue.
ON_TASK = "was trained on a task, which has no tokenizer; give a run on text"
_LOCK, _HOLDER = ".nsa-train.lock", ".nsa-train.txt"
# Files that are written under a temporary name first.
_ATOMIC = (CONFIG, INDEX, TOKENIZER, TOKENIZER_CONFIG, log.FILE)


def check_model(folder: Path) -> None:
    """Check that a folder has the config.json of a model.

    Raises:
        InvalidInput: It is not a folder, or has none.
    """
    if (folder / CONFIG).exists() or (folder / CONFIG).is_symlink():
        return
    problem = f"has no {CONFIG}" if folder.is_dir() else "does not exist"
    problem = "is a file" if folder.is_file() else problem
    raise InvalidInput(
        f"{folder} {problem}: give the folder of a model, of nsa train, nsa convert or"
        " save_pretrained"
    )


def is_empty(folder: Path) -> bool:
    """Return whether ``folder`` holds no files of a run; locks and leftovers do not count."""
    return all(path.name in (_LOCK, _HOLDER) or is_leftover(path) for path in folder.iterdir())


def may_be_in_use(folder: Path) -> bool:
    """Return whether a training runs in ``folder``, or was killed in it."""
    return (folder / _LOCK).exists()


def check_plain(folder: Path) -> None:
    """Check that a folder has plain files and folders only: a training would write through a link.

    Raises:
        InvalidInput: It has a link, a pipe or a device; the message names it.
    """
    for file in folder.iterdir():
        mode = file.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise InvalidInput(
                f"{file} is a link, a pipe or a device, and a training would write to it: remove"
                " it, or give another folder"
            )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for the training of the block; the lock ends with the process.

    The folder is created if it does not exist; afterwards it is removed if it is still empty. Files
    that a killed process left half-written are removed. Of the processes of one training only the
    first one may lock.

    Raises:
        InvalidInput: Another process trains in the folder, or it has a link, a pipe or a device;
            the message names it.
        NotWritten: The folder or the lock cannot be created.
    """
    from filelock import FileLock, Timeout

    with writing(folder):
        new = not folder.exists()
        folder.mkdir(exist_ok=True)
    check_plain(folder)
    lock, holder = FileLock(folder / _LOCK), folder / _HOLDER
    with writing(folder / _LOCK):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            owner = ""
            with contextlib.suppress(OSError, ValueError):  # it has not written it yet
                owner = one_line(holder.read_text(encoding="utf-8"))
            raise InvalidInput(
                f"{folder} is in use by {owner[:200] or 'another process'}, which trains in it;"
                " wait for its end, end it, or give another folder"
            ) from None
    try:
        with writing(holder):
            since = f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M:%S}"
            own = f"process {os.getpid()} on {platform.node()} since {since}"
            holder.write_text(own, encoding="utf-8")
        for path in folder.iterdir():
            if is_leftover(path) and path.name.startswith(tuple(f".{name}." for name in _ATOMIC)):
                path.unlink(missing_ok=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink(missing_ok=True)
            # While it is locked: whoever opened the file before sees that its name is gone.
            (folder / _LOCK).unlink(missing_ok=True)
        lock.release()
        if new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
