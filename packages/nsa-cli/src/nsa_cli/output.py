"""What every command shares: consoles, progress, files, and errors turned into one line and an exit
code.
"""

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
# A write that fails with one of these failed for good. EBADF: standard output is open for reading
# only.
_UNWRITABLE = {
    errno.ENOSPC,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EBADF,
    getattr(errno, "EDQUOT", errno.ENOSPC),
}
# typer borrows click or carries its own, by version; this is ClickException either way.
_ClickError: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
_UNLIMITED = 1_000_000  # columns: piped output is never wrapped or cut
_plugin_options = (False, 20.0)


def set_plugin_options(safe: bool, limit_s: float) -> None:
    """Whether to load this project's own plugins only, and how long a third-party one may take
    (`nsa --help`).
    """
    global _plugin_options
    _plugin_options = (safe, limit_s)


def safe_mode() -> bool:
    """Whether only this project's own plugins are loaded."""
    return _plugin_options[0]


def find_backends() -> Registry:
    """Every backend, third-party plugins tried in a child process first; only ours in safe mode."""
    from nsa_core.dispatch.registry import discover

    safe, limit_s = _plugin_options
    return discover(isolate=True, safe=safe, limit_s=limit_s)


def prepare_streams() -> None:
    """Foreign text must not stop the output: what the terminal cannot encode is written as an
    escape.

    A closed standard error swallows its messages; a closed standard output ends the command with
    exit code 5.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  as long as the process
    if sys.stdout is None:
        _leave(UNWRITTEN, "cannot write: standard output is closed")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def console(stderr: bool = False) -> Console:
    """A console that reads no markup; when piped, without colour and without a width."""
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:  # rich would leave with exit code 1
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else _UNLIMITED
    return PlainConsole(file=file, width=width, markup=False, highlight=False, emoji=False)


def plain_table(*columns: str) -> Table:
    """A table without borders whose cells are folded, never cut."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(name, overflow="fold")
    return made


def print_json(document: dict[str, Any]) -> None:
    """``document`` as indented JSON in ASCII on stdout."""
    import json

    print(json.dumps(document, indent=1))


def check_writable(path: Path | None, force: bool = False) -> None:
    """Refuse, before any work is done, an output file that could not be written after it.

    Raises:
        InvalidInput: the file exists (and not ``force``), or its directory does not exist or takes
            no files.
    """
    if path is None:
        return
    if path.exists() and not path.is_file():
        raise InvalidInput(f"{path} is not a plain file")
    if path.exists() and not force:
        raise InvalidInput(f"{path} exists; give --force to overwrite it")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise InvalidInput(f"{path}: the directory {folder} does not exist")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidInput(f"{path}: the directory {folder} cannot be written to")


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Progress and time left on stderr: a bar on a terminal, else a line at most every ten seconds.

    Yields ``advance(label)``.
    """
    if sys.stderr.isatty():
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
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
            left = (last - started) / done * (total - done)
            print(
                f"{done}/{total} {one_line(label)}, about {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    yield advance


def environment() -> dict[str, Any]:
    """Versions and machine, for result files."""
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


def _leave(code: int, message: str) -> NoReturn:
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        # What is still buffered for a reader that is gone must not raise again when Python shuts
        # down.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with contextlib.suppress(OSError):  # the reader may have taken stderr with it
        print(f"nsa: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Turn the errors a user can meet into one line on stderr and the exit code that `nsa --help`
    lists.
    """
    try:
        yield
    except InvalidInput as error:
        _leave(USAGE, _paragraph(error))
    except BackendUnavailable as error:
        _leave(BROKEN if error.nothing_usable else UNAVAILABLE, _paragraph(error))
    except Unsupported as error:
        _leave(UNAVAILABLE, _paragraph(error))
    except NSAError as error:
        _leave(FAILED, _paragraph(error))
    except _ClickError as error:
        context = getattr(error, "ctx", None)
        hint = f" (try '{context.command_path} --help')" if context is not None else ""
        _leave(USAGE, one_line(error.format_message()) + hint)
    except (KeyboardInterrupt, typer.Abort):
        _leave(INTERRUPTED, "interrupted")
    except BrokenPipeError:
        _leave(CLOSED, "the output was closed before everything was written")
    except ImportError as error:
        _leave(BROKEN, f"the installation is broken: {describe_error(error)}")
    except OSError as error:
        if error.errno in _UNWRITABLE:
            _leave(UNWRITTEN, f"cannot write: {describe_error(error)}")
        _leave(BROKEN, f"the system refused: {describe_error(error)}")


def _paragraph(error: BaseException) -> str:
    """The message with its own line breaks (a line per backend) and nothing else that moves the
    cursor.
    """
    lines = str(error).splitlines() or [type(error).__name__]
    return "\n".join(line[: len(line) - len(line.lstrip(" "))] + one_line(line) for line in lines)
