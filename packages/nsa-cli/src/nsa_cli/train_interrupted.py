"""The end of `nsa train` before its time: the saved step, and the command that goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa_cli import output, torchrun
from nsa_cli.train_options import NOT_IN_FOLDER
from nsa_core.errors import NSAError
from nsa_core.util.atomic_files import NotWritten
from nsa_core.util.interruption import Interruption, exit_code, recorded_signals, signal_of
from nsa_core.util.text import describe_error
from nsa_models.lm.run_folder import is_empty

if TYPE_CHECKING:
    from nsa_models.lm.parallel import World
    from nsa_models.lm.trainer import Trainer


@dataclasses.dataclass
class Training:
    """The command of a training, and how far it has come.

    Attributes:
        context: The command.
        typed: Names of the options that the user gave.
        world: The processes, once they have joined.
        trainer: The trainer, once it exists.
    """

    context: typer.Context
    typed: Set[str]
    world: World | None = None
    trainer: Trainer | None = None

    def resume_command(self) -> list[str]:
        """Return the words that continue the run on the same processes."""
        on = [name for name in ("out", *NOT_IN_FOLDER) if name in self.typed]
        return [*_program(self.world), *_typed_options(self.context, on), "--resume"]


@contextlib.contextmanager
def explained(training: Training) -> Iterator[Interruption]:
    """End a run that a signal or an error ends with a message: how far it came, how it goes on.

    Signals raise at once; the training loop defers them on its own.

    Raises:
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, 5 if a file could not be
            written, or the exit code of the error.
    """
    try:
        with recorded_signals() as interruption:
            yield interruption
    except KeyboardInterrupt as error:
        name = signal_of(error)
        _explain(f"ended by {'Ctrl-C' if name == 'SIGINT' else name}", training)
        raise SystemExit(exit_code(name)) from None
    except Exception as error:
        trainer, world = training.trainer, training.world
        if trainer is None or (world is not None and world.rank):
            raise  # no work is lost, or the first process speaks
        if not isinstance(error, (NSAError, OSError, MemoryError, _out_of_memory())):
            traceback.print_exc()
        is_own = isinstance(error, (NSAError, NotWritten))
        _explain(str(error) if is_own else describe_error(error), training)
        raise SystemExit(output.exit_code_of(error)) from None


def _out_of_memory() -> type[Exception]:
    import torch

    error: type[Exception] = torch.OutOfMemoryError
    return error


def end_of(training: Training, world: World) -> Callable[[int, str], None]:
    """Return a function that ends this process because another one is lost.

    It does not return to the training, which may wait for the lost process for ever. One of the
    processes that are left explains the end, unless the first one has explained its own.
    """
    from nsa_models.lm.watch import ENDED

    def end(lost: int, reason: str) -> None:
        try:
            if world.rank == 0 or (lost == 0 and world.rank == 1 and ENDED not in reason):
                _explain(reason, training, for_all=True)
        finally:
            os._exit(output.FAILED)

    return end


def _explain(end: str, training: Training, for_all: bool = False) -> None:
    """Print the end of the run, the saved step, and the commands that go on or start again.

    Args:
        end: Why the run ended.
        training: The run.
        for_all: This process speaks for all; else only the first one speaks.
    """
    context, typed, trainer = training.context, training.typed, training.trainer
    world = training.world
    if not for_all and world is not None and world.rank:
        return
    out = Path(context.params["out"])  # some versions of typer keep the text
    commands = [training.resume_command()]
    if trainer is None and context.params["resume"]:
        text = "the saved run is unchanged. To go on:"
    elif trainer is not None and trainer.rescued is not None:
        text = (
            f"step {trainer.step_number} is kept in {trainer.rescued}. To go on, first make room:"
        )
        commands.insert(0, ["cp", "-r", f"{trainer.rescued}/.", str(out)])
    elif trainer is None or trainer.saved_step is None:
        text = "nothing is saved yet. To start again:"
        again = _typed_options(context, [name for name in context.params if name in typed])
        empty = not out.is_dir() or is_empty(out)
        commands = [[*_program(world), *again, *([] if empty or "force" in typed else ["--force"])]]
    else:
        step, steps = trainer.saved_step, trainer.recipe.steps
        text = f"step {step} of {steps} is saved in {out}"
        commands = commands if step < steps else []
    lines = [f"nsa: {end}; {text}", *["To go on:"] * (bool(commands) and text[-1] != ":")]
    # Commands are not wrapped: a wrapped one could not be copied.
    for line in [*map(output.fitted, lines), *map(shlex.join, commands)]:
        print(line, file=sys.stderr, flush=True)


def _program(world: World | None) -> list[str]:
    """Return the words that start `nsa train` on the same processes."""
    plugins = output.plugin_words()
    if world is None or not torchrun.launched():
        return ["nsa", *plugins, "train"]
    return ["torchrun", "--nproc-per-node", str(world.size), "-m", "nsa_cli", *plugins, "train"]


def _typed_options(context: typer.Context, names: list[str]) -> list[str]:
    """Return the named options with their values, as words of a command line."""
    words: list[str] = []
    for parameter in context.command.params:
        value: Any = context.params.get(parameter.name or "")
        if parameter.name in names and value is not False:
            words += [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]
    return words
