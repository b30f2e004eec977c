"""The end of `nsa train` by a signal: the saved step, its file, and the command that goes on."""

from __future__ import annotations

import contextlib
import shlex
import signal
import threading
from collections.abc import Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa_cli import output
from nsa_core.util.interruption import exit_code

if TYPE_CHECKING:
    from nsa_models.lm.trainer import Trainer

# Options of a resumed run that its checkpoint does not hold.
NOT_IN_CHECKPOINT = ("device", "threads", "backends", "png", "svg")


@contextlib.contextmanager
def explained(context: typer.Context, typed: Set[str], trainers: list[Trainer]) -> Iterator[None]:
    """End a run that a signal ends with a message: how far it came, and how it goes on.

    Args:
        context: The command.
        typed: Names of the options that the user gave.
        trainers: The trainer, once it exists.

    Raises:
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM.
    """
    try:
        with _sigterm_raises():
            yield
    except KeyboardInterrupt:
        _explain("Ctrl-C", context, typed, trainers)
        raise SystemExit(output.INTERRUPTED) from None
    except SystemExit as error:
        if error.code == exit_code("SIGTERM"):
            _explain("SIGTERM", context, typed, trainers)
        raise


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise SystemExit(143) at SIGTERM; the training loop defers the signal on its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(exit_code("SIGTERM"))

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _explain(by: str, context: typer.Context, typed: Set[str], trainers: list[Trainer]) -> None:
    console = output.console(stderr=True)
    out: Path = context.params["out"]
    if any(trainer.world.rank for trainer in trainers):
        return
    saved = trainers[0].saved_step if trainers else None
    if saved is None:
        console.print(f"nsa: ended by {by}; nothing is saved yet. To start again:")
        options = [name for name in context.params if name in typed]
        files = out.is_dir() and any(out.iterdir())
        flags = ["--force"] if files and "force" not in typed else []
    else:
        from nsa_models.lm.checkpoint import FILE

        steps = trainers[0].recipe.steps
        console.print(f"nsa: ended by {by}; step {saved} of {steps} is saved in {out / FILE}")
        if saved == steps:
            return
        console.print("To go on:")
        options = [name for name in ("out", *NOT_IN_CHECKPOINT) if name in typed]
        flags = ["--resume"]
    processes = trainers[0].world.size if trainers else 1
    words = [*_program(processes), *_typed_options(context, options), *flags]
    console.print(shlex.join(words), soft_wrap=True)  # a wrapped command could not be copied


def _program(processes: int) -> list[str]:
    """Return the words that start `nsa train` on so many processes."""
    safe = ["--safe"] if output.safe_mode() else []
    if processes == 1:
        return ["nsa", *safe, "train"]
    return ["torchrun", "--nproc-per-node", str(processes), "-m", "nsa_cli", *safe, "train"]


def _typed_options(context: typer.Context, names: list[str]) -> list[str]:
    """Return the named options with their values, as words of a command line."""
    words: list[str] = []
    for parameter in context.command.params:
        value: Any = context.params.get(parameter.name or "")
        if parameter.name in names and value is not False:
            words += [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]
    return words
