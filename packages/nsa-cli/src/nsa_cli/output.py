"""Shared by all commands: progress, output files, and errors as exit codes."""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer

from nsa_cli import torchrun
from nsa_cli.screen import console, fitted, print_table, print_text, shorten, table_width
from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported
from nsa_core.util.atomic_files import (
    NotWritten,
    check_folder_writable,
    check_output_folder,
    write_atomic,
)
from nsa_core.util.interruption import exit_code, recorded_signals, signal_of
from nsa_core.util.text import describe_error, escape_control, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_core.plan.registry import Registry

__all__ = [  # of screen and nsa_core, for the commands
    "console",
    "fitted",
    "one_line",
    "print_table",
    "print_text",
    "shorten",
    "table_width",
    "write_atomic",
]
STDOUT = Path("-")
OUR_PACKAGES = (
    *("nsa-core", "nsa-verify", "nsa-bench", "nsa-models", "nsa-cli"),
    *("nsa-backend-sdpa", "nsa-backend-triton", "nsa-backend-fa2"),
)
FAILED, USAGE, UNAVAILABLE, BROKEN, UNWRITTEN, CLOSED = 1, 2, 3, 4, 5, 141
# Errors of a failed write. EBADF: standard output is open for reading only.
_UNWRITABLE = {
    errno.ENOSPC,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EBADF,
    getattr(errno, "EDQUOT", errno.ENOSPC),
}
# Depending on its version, typer depends on click or vendors it.
UsageError: Any = typer.BadParameter.__base__
ClickError: Any = UsageError.__base__
PLUGIN_LIMIT_S = 10.0
_OUR_MODULES = {name.replace("-", "_") for name in OUR_PACKAGES}
_python_format = warnings.formatwarning
_plugin_options = (False, PLUGIN_LIMIT_S)
_EXPECTED_S = 2.0  # weight of the expected time of a run in the time left


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


def plugin_words() -> list[str]:
    """Return the options of :func:`set_plugin_options` as words of a command."""
    safe, limit_s = _plugin_options
    limit = ["--plugin-limit", f"{limit_s:g}"] if limit_s != PLUGIN_LIMIT_S else []
    return ["--safe"] * safe + limit


def import_with_plugins(module: str) -> None:
    """Import ``module`` here and for the children of plugins, at the same time, if there are any.

    Call it before :func:`find_backends`, which starts the children.
    """
    from nsa_core.plan.registry import third_party_plugins
    from nsa_core.util.child import preload

    if third_party_plugins(safe_mode()):
        preload(module)
        importlib.import_module(module)


def find_backends() -> Registry:
    """Return the registry of all backends, or of this project's own in safe mode.

    Each third-party plugin loads and runs in a child process, so that a crash does not end the
    command.
    """
    from nsa_core.plan.registry import discover

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
        end(UNWRITTEN, "cannot write: standard output is closed")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def prints_json(document: dict[str, Any], file: Path | None, force: bool) -> bool:
    """Write ``document`` as --json asks; return whether that replaces the tables.

    Args:
        document: The JSON document.
        file: The value of --json: a file, STDOUT, or None to write nothing.
        force: Overwrite an existing file.
    """
    import json

    if file is not None:
        text = json.dumps(document, indent=1) + "\n"
        if file == STDOUT:
            print(text, end="")
        else:
            write_atomic(file, text, force)
    return file == STDOUT


def print_next(*commands: Sequence[str], target: Console | None = None) -> None:
    """Print the commands that usually follow, each as one line to copy."""
    for words in commands:
        (target or console()).print(
            f"next: {shlex.join(words)}", no_wrap=True, overflow="ignore", crop=False
        )


def unused(path: str) -> str:
    """Return ``path``, or with the first number that makes it the name of no file or folder."""
    names = itertools.chain([path], (f"{path}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not os.path.lexists(name))


def check_writable(option: str, path: Path | None, force: bool = False) -> None:
    """Check, before a long run, that an output file can be written after it.

    Args:
        option: The option that names the file, for errors.
        path: The output file; None needs no check, and neither does STDOUT of --json.
        force: Accept an existing file.

    Raises:
        InvalidInput: The file exists and ``force`` is false, the path is not a plain file, its
            directory does not exist or no file can be created there, which is tried, or it is
            named as a file of another format than that of --png, --svg or --html.
        NotWritten: The disk is full or broken.
    """
    if path is None or (path == STDOUT and option == "--json"):
        return
    exists, folder = path.exists(), Path(os.path.realpath(path)).parent
    with naming(option):
        if path.is_dir():
            raise InvalidInput(f"{path} is a folder; give the path of a file, such as {path}/NAME")
        if exists and not path.is_file():
            raise InvalidInput(f"{path} is not a plain file; give the path of a file")
        if exists and not force:
            raise InvalidInput(f"{path} exists; give --force to overwrite it")
        if not folder.is_dir():
            raise InvalidInput(f"{path}: the directory {folder} does not exist; create it first")
        _check_format(path, option.removeprefix("--"))
        check_folder_writable(folder, path)


def _check_format(path: Path, kind: str) -> None:
    """Refuse a plot or page in a file whose name ends as those of another format."""
    import mimetypes

    if kind not in ("png", "svg", "html"):
        return
    if path == STDOUT:
        raise InvalidInput(f"{path}: only --json writes to standard output; give another path")
    if mimetypes.guess_type(path.name)[0] not in (None, mimetypes.guess_type(f"x.{kind}")[0]):
        raise InvalidInput(
            f"{path} names a file of another format; give a path that ends in .{kind}"
        )


def check_files(files: Mapping[str, Path | None], force: bool = False) -> None:
    """Check several output files as :func:`check_writable` does; no two may be the same file.

    Args:
        files: Option -> its file.
        force: Accept existing files.
    """
    options: dict[str, str] = {}  # place -> the option that names it
    for option, path in files.items():
        check_writable(option, path, force)
        if path is None or path == STDOUT:
            continue
        other = options.setdefault(os.path.realpath(path), option)
        if other != option:
            raise InvalidInput(f"{other} and {option} are the same file {path}; give another one")


def check_out(folder: Path, force: bool = False, remedy: str = "empty this one") -> None:
    """Check --out before any work; see :func:`check_output_folder`, whose error this completes."""
    with naming("--out"):
        check_output_folder(folder, force, remedy)


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Begin the message of an InvalidInput with the option whose value is wrong."""
    try:
        yield
    except InvalidInput as error:
        named = str(error).startswith(option.rstrip(":"))
        raise InvalidInput(str(error) if named else f"{option} {error}") from error


@contextlib.contextmanager
def progress(
    steps: int, total: float | None = None, seconds: float = 0.0
) -> Iterator[Callable[..., None]]:
    """Show progress and the time left on standard error.

    A terminal gets a bar; other outputs get a line at most every ten seconds.

    Args:
        steps: Number of steps.
        total: Expected time of all steps, in any unit; None: they take equal times.
        seconds: Expected time of all steps in seconds; 0: unknown, so no time left is shown in the
            first percent. It counts as much as two seconds of the run, because a few steps would
            give a wrong rate, and the first one, which also waits for imports, counts for nothing.

    Yields:
        ``advance(label, cost=1.0)``, to call after each step; its cost is a part of the total.
    """
    total = steps if total is None else total
    started = last = time.monotonic()
    done, spent, measured = 0, 0.0, 0.0

    def after(label: str, cost: float) -> str:
        nonlocal done, spent, started, measured
        now = time.monotonic()
        done, spent, measured = done + 1, spent + cost, measured + cost
        if done == 1 and seconds:
            started, measured = now, 0.0
        weight = _EXPECTED_S if seconds else 0.0
        expected = weight * total / seconds if seconds else 0.0
        if not seconds and 100 * spent < total:
            return f"{done}/{steps} {one_line(label)}"
        left = (now - started + weight) * max(total - spent, 0.0) / (measured + expected)
        time_left = f", about {_duration(left)} left" if left >= 0.5 else ""
        return f"{done}/{steps} {one_line(label)}{time_left}"

    if sys.stderr.isatty():
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        # A label that does not fit continues on the next line.
        columns = (
            BarColumn(bar_width=10, table_column=Column(no_wrap=True)),
            TextColumn("{task.description}", table_column=Column()),
        )
        with Progress(*columns, console=console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda label, cost=1.0: bar.update(
                task, advance=cost, description=after(label, cost)
            )
        return

    def advance(label: str, cost: float = 1.0) -> None:
        nonlocal last
        line = after(label, cost)
        if time.monotonic() - last >= 10:
            last = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    yield advance


def _duration(seconds: float) -> str:
    """Return a number of seconds as "45 s", "12 min" or "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    found = {name: installed_version(name) for name in distributions}
    return {name: version for name, version in found.items() if version}


def environment() -> dict[str, Any]:
    """Return the versions and the machine that result files record."""
    import platform

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "versions": versions(*OUR_PACKAGES[:5], "torch", "triton", "flash-attn"),
    }


def end(code: int, message: str) -> NoReturn:
    """Flush standard output, print ``message`` on standard error, and exit with ``code``.

    Of several processes of torchrun that end with the same message, one prints it.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        _discard(sys.stdout)
    with torchrun.ending(message) as prints:
        try:
            if prints:
                print(fitted(escape_control(f"nsa: {message}")), file=sys.stderr, flush=True)
        except OSError:  # standard error is closed too
            _discard(sys.stderr)
    raise SystemExit(code)


def format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Return a warning of ours as a sentence, and one of other code as Python shows it."""
    if _OUR_MODULES.isdisjoint(Path(filename).parts):
        return _python_format(message, category, filename, lineno, line)
    return fitted(f"nsa: warning: {one_line(message)}") + "\n"


def _discard(stream: TextIO) -> None:
    """Drop what ``stream`` still buffers, and all later output.

    Python flushes both streams at shutdown, and exits with 120 if that fails.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Turn expected errors into a message on standard error and an exit code of `nsa --help`."""
    try:
        with recorded_signals():
            yield
    except (NSAError, NotWritten) as error:
        end(exit_code_of(error), _paragraph(error))
    except ClickError as error:
        context = getattr(error, "ctx", None)
        hint = f" (try '{context.command_path} --help')" if context is not None else ""
        message = error.format_message().removeprefix("Invalid value: ")
        message = re.sub(r"^Invalid value for '?(--[\w-]+)'?:", r"\1:", message)
        end(USAGE, one_line(message) + hint)
    except KeyboardInterrupt as error:
        name = signal_of(error)
        end(exit_code(name), f"interrupted by {name}")
    except BrokenPipeError:
        end(CLOSED, "the output was closed before everything was written")
    except ImportError as error:
        end(BROKEN, f"the installation is broken: {describe_error(error)}")
    except OSError as error:
        if error.errno in _UNWRITABLE:
            end(UNWRITTEN, f"cannot write: {describe_error(error)}")
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            end(USAGE, f"{error.filename}: {error.strerror}; give another path")
        end(BROKEN, f"an operating system call failed: {describe_error(error)}")


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error of this library, or for another one."""
    if isinstance(error, InvalidInput):
        return USAGE
    if isinstance(error, BackendUnavailable):
        return BROKEN if error.nothing_usable else UNAVAILABLE
    if isinstance(error, Unsupported):
        return UNAVAILABLE
    return UNWRITTEN if isinstance(error, NotWritten) else FAILED


def _paragraph(error: BaseException) -> str:
    """Return the message with its line breaks; other control characters are escaped."""
    lines = str(error).splitlines() or [type(error).__name__]
    return "\n".join(line[: len(line) - len(line.lstrip(" "))] + one_line(line) for line in lines)
