"""Send what a plugin prints to standard error, so that standard output holds a command's own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send standard output to standard error inside the block, also that of C libraries.

    The streams belong to the whole process, so that only the main thread changes them. In another
    thread the block has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with contextlib.redirect_stdout(sys.stderr), _descriptor_to_stderr():
        yield


@contextlib.contextmanager
def _descriptor_to_stderr() -> Iterator[None]:
    _flush_c_streams()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.__stdout__.flush()  # type: ignore[union-attr]
    try:
        saved = os.dup(1)
    except OSError:  # standard output is closed
        yield
        return
    try:
        with contextlib.suppress(OSError):  # standard error is closed
            os.dup2(2, 1)
        yield
        _flush_c_streams()
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _flush_c_streams() -> None:
    """Write out what C libraries have buffered for standard output."""
    import ctypes  # rarely needed

    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)
