"""Shared by all commands: consoles, progress, output files, and errors as exit codes."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported
from nsa_core.util.atomic_files import write_atomic
from nsa_core.util.text import describe_error, one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from nsa_core.dispatch.registry import Registry

__all__ = [
    "check_writable",
    "console",
    "environment",
    "exit_codes",
    "find_backends",
    "one_line",
    "plain_table",
    "prepare_streams",
    "print_json",
    "progress",
    "safe_mode",
    "set_plugin_options",
    "write_atomic",
]

FAILED, USAGE, UNAVAILABLE, BROKEN, UNWRITTEN, INTERRUPTED, CLOSED = 1, 2, 3, 4, 5, 130, 141
# Errors of a failed write. EBADF: standard output is open for reading only.
_UNWRITABLE = {
    errno.ENOSPC,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EBADF,
    getattr(errno, "EDQUOT", errno.ENOSPC),
}
# Depending on its version, typer depends on click or vendors it; this finds ClickException in both.
_ClickError: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
_UNLIMITED = 1_000_000  # columns; piped output is never wrapped or truncated
_plugin_options = (False, 20.0)


def set_plugin_options(safe: bool, limit_s: float) -> None:
    """Set the options that :func:`find_backends` uses.

    Args:
        safe: Load only this project's own plugins.
        limit_s: Seconds that a third-party plugin may take to load in a child process.
    """
    global _plugin_options
    _plugin_options = (safe, limit_s)


def safe_mode() -> bool:
    """Return whether only this project's own plugins are loaded."""
    return _plugin_options[0]


def find_backends() -> Registry:
    """Return the registry of all backends, or of this project's own in safe mode.

    Third-party plugins load in a child process first, so that a crash does not end the command.
    """
    from nsa_core.dispatch.registry import discover

    safe, limit_s = _plugin_options
    return discover(isolate=True, safe=safe, limit_s=limit_s)


def prepare_streams() -> None:
    """Make the output streams accept any text.

    Characters that the terminal cannot encode are written as escapes. If standard error is closed,
    its messages are dropped. If standard output is closed, the command ends with exit code 5.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  open until exit
    if sys.stdout is None:
        _exit(UNWRITTEN, "cannot write: standard output is closed")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def console(stderr: bool = False) -> Console:
    """Return a console without markup; piped output has no colour and no line limit."""
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with code 1
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else _UNLIMITED
    return PlainConsole(file=file, width=width, markup=False, highlight=False, emoji=False)


def plain_table(*columns: str) -> Table:
    """Return a table without borders whose cells are folded, never truncated."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def print_json(document: dict[str, Any]) -> None:
    """Print ``document`` as indented ASCII JSON on standard output."""
    import json

    print(json.dumps(document, indent=1))


def check_writable(path: Path | None, force: bool = False) -> None:
    """Check, before a long run, that an output file can be written after it.

    Args:
        path: The output file; None needs no check.
        force: Accept an existing file.

    Raises:
        InvalidInput: The file exists and ``force`` is false, the path is not a plain file, or its
            directory does not exist or is not writable.
    """
    if path is None:
        return
    if path.exists() and not path.is_file():
        raise InvalidInput(f"{path} is not a plain file")
    if path.exists() and not force:
        raise InvalidInput(f"{path} exists; give --force to overwrite it")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise InvalidInput(f"{path}: the directory {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInput(f"{path}: the directory {folder} cannot be written to")


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show progress and the time left on standard error.

    A terminal gets a bar; other outputs get a line at most every ten seconds.

    Yields:
        ``advance(label)``, to call after each of the ``total`` steps.
    """
    if sys.stderr.isatty():
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        # A label that does not fit continues on the next line; the numbers are never cut.
        columns = (
            BarColumn(bar_width=10, table_column=Column(no_wrap=True)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", table_column=Column()),
        )
        with Progress(*columns, console=console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda label: bar.update(task, advance=1, description=one_line(label))
        return
    started = last = time.monotonic()
    done = 0

    def advance(label: str) -> None:
        nonlocal done, last
        done += 1
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            seconds_left = (last - started) / done * (total - done)
            print(
                f"{done}/{total} {one_line(label)}, about {seconds_left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    yield advance


def environment() -> dict[str, Any]:
    """Return the versions and the machine that result files record."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in (
        "nsa-core",
        "nsa-verify",
        "nsa-bench",
        "nsa-models",
        "nsa-cli",
        "torch",
        "triton",
        "flash-attn",
    ):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "versions": versions,
    }


def _exit(code: int, message: str) -> NoReturn:
    """Flush standard output, print ``message`` on standard error, and exit with ``code``."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        # Python flushes the remaining buffer at shutdown, which would raise again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with contextlib.suppress(OSError):  # standard error may be closed too
        print(_fitted(f"nsa: {message}"), file=sys.stderr, flush=True)
    raise SystemExit(code)


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Turn expected errors into a message on standard error and an exit code of `nsa --help`."""
    try:
        yield
    except InvalidInput as error:
        _exit(USAGE, _paragraph(error))
    except BackendUnavailable as error:
        _exit(BROKEN if error.nothing_usable else UNAVAILABLE, _paragraph(error))
    except Unsupported as error:
        _exit(UNAVAILABLE, _paragraph(error))
    except NSAError as error:
        _exit(FAILED, _paragraph(error))
    except _ClickError as error:
        context = getattr(error, "ctx", None)
        hint = f" (try '{context.command_path} --help')" if context is not None else ""
        _exit(USAGE, one_line(error.format_message()) + hint)
    except (KeyboardInterrupt, typer.Abort):
        _exit(INTERRUPTED, "interrupted")
    except BrokenPipeError:
        _exit(CLOSED, "the output was closed before everything was written")
    except ImportError as error:
        _exit(BROKEN, f"the installation is broken: {describe_error(error)}")
    except OSError as error:
        if error.errno in _UNWRITABLE:
            _exit(UNWRITTEN, f"cannot write: {describe_error(error)}")
        _exit(BROKEN, f"an operating system call failed: {describe_error(error)}")


def _paragraph(error: BaseException) -> str:
    """Return the message with its line breaks; other control characters are escaped."""
    lines = str(error).splitlines() or [type(error).__name__]
    return "\n".join(line[: len(line) - len(line.lstrip(" "))] + one_line(line) for line in lines)


def _fitted(message: str) -> str:
    """Return ``message`` with its lines wrapped between words if standard error is a terminal."""
    if not sys.stderr.isatty():
        return message
    import shutil

    from nsa_cli import wrapping

    columns = shutil.get_terminal_size().columns
    lines = []
    for line in message.splitlines():
        indent = line[: len(line) - len(line.lstrip(" "))]
        lines += wrapping.wrap(line.strip(), columns, indent, indent + "  ")
    return "\n".join(lines)
