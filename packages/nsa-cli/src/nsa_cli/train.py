"""`nsa train`: train a small language model with NSA or dense attention; log, save and plot it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa_cli import output, torchrun, train_interrupted
from nsa_cli import train_options as options
from nsa_cli.choices import (
    Backends,
    Device,
    Threads,
    as_options,
    check_checkpoint,
    errors_name_options,
    one_dtype,
    options_on_command_line,
    parse_backends,
    pick_device,
    read_file,
    refuse_options,
)
from nsa_cli.extras import need_extras
from nsa_core.errors import InvalidInput
from nsa_models.lm import run_folder
from nsa_models.lm.tokens import read_tokenizer

if TYPE_CHECKING:
    from nsa_models.lm.fingerprint import Fingerprint
    from nsa_models.lm.model import LanguageModel
    from nsa_models.lm.model_folder import ModelFolder
    from nsa_models.lm.parallel import World
    from nsa_models.lm.recipe import Recipe
    from nsa_models.lm.task import Data, DataSpec
    from nsa_models.lm.tokens import Tokenizer
    from nsa_models.lm.train import Progress
    from nsa_models.lm.trainer import Trainer


def train(
    context: typer.Context,
    out: options.Out,
    data: options.Data = "python-docs",
    size: options.Size = "tiny",
    attention: options.Attention = "nsa",
    tokenizer: options.Tokenizer = None,
    text_field: options.TextField = "text",
    held_out: options.HeldOut = 0.05,
    held_out_rows: options.HeldOutRows = 64,
    length: options.Length = 256,
    vocab: options.Vocab = 128,
    steps: options.Steps = 1000,
    batch: options.Batch = 8,
    accumulate: options.Accumulate = 1,
    lr: options.LearningRate = 3e-3,
    warmup: options.Warmup = 50,
    weight_decay: options.WeightDecay = 0.1,
    clip: options.Clip = 1.0,
    dtype: options.Dtype = "float32",
    recompute: options.Recompute = False,
    compile: options.Compile = False,
    graph: options.Graph = False,
    parallel: options.Parallel = "ddp",
    context_parallel: options.ContextParallel = 1,
    tensor_parallel: options.TensorParallel = 1,
    eval_every: options.EvalEvery = 100,
    save_every: options.SaveEvery = 500,
    seed: options.Seed = 0,
    device: Device = "auto",
    threads: Threads = 1,
    backends: Backends = "auto",
    checkpoint: options.Checkpoint = None,
    resume: options.Resume = False,
    force: options.Force = False,
    png: options.Png = None,
    svg: options.Svg = None,
) -> None:
    """Train a small decoder language model on text, or on a task with a known optimal loss.

    Documents are packed into rows with their boundaries; a document that does not fit continues in
    the next row. A document is either trained on or held out, never both. Under torchrun, the same
    command trains on several GPUs, with the losses of one. A signal or an error saves the last
    complete step and prints the command that continues from it.
    """
    # After typer's conversion, so that paths are Path objects.
    values = {name: value for name, value in locals().items() if name != "context"}
    typed = options_on_command_line(context)
    training = train_interrupted.Training(context, typed)
    named = {name: name for name in values} | options.RENAMED
    with (
        train_interrupted.explained(training) as interruption,
        _world(values, training, named) as world,
        _watching(world, train_interrupted.end_of(training, world)),
        _locked(values, world),
    ):
        with errors_name_options(named):
            trainer = _prepare(values, typed, world)
        training.trainer = trainer
        interruption.check()
        history = _run(trainer, out)
        # A sharded model computes on all processes together.
        accuracy = trainer.accuracy() if trainer.data.spec.data == "recall" else None
        if world.rank == 0:
            _print_summary(history, trainer, training, accuracy)
            _plot_losses(out, png, svg, force or resume)


@contextlib.contextmanager
def _world(
    values: dict[str, Any], training: train_interrupted.Training, named: Mapping[str, str]
) -> Iterator[World]:
    """Join the processes of the training.

    Options, the tokenizer and the output folder are checked before torch loads. The tokenizer is
    read, and replaces its path in ``values``.
    """
    from nsa_models.lm.recipe import check_graph

    with errors_name_options(named):
        _check_launched(values, training.typed)
        _check_options(values, training.typed)
        if values["device"] == "cpu" and not torchrun.launched():
            check_graph(values["graph"], 1, "cpu")
        _check_folder(values["out"], values["resume"], values["force"])
        if values["tokenizer"] is not None:
            with output.naming("--tokenizer"):
                values["tokenizer"] = read_tokenizer(values["tokenizer"])
        device = pick_device(values["device"], values["threads"])
        from nsa_models.lm.parallel import join

        training.world = world = join(device)
    try:
        yield world
    finally:
        world.close()


def _check_launched(values: Mapping[str, Any], typed: Set[str]) -> None:
    """Refuse options that need torchrun without it: one process has nothing to divide."""
    needing = ["parallel"] * ("parallel" in typed)
    needing += [name for name in ("context_parallel", "tensor_parallel") if values[name] > 1]
    if needing and not torchrun.launched():
        option = as_options(needing[:1])
        raise InvalidInput(
            f"{option} {values[needing[0]]} divides a training over processes of torchrun, which"
            " did not start this one: start N processes with torchrun --nproc-per-node N -m"
            f" nsa_cli train and the same options, or leave {option} out to train on one process"
        )


def _watching(
    world: World, end: Callable[[int, str], None]
) -> contextlib.AbstractContextManager[None]:
    """Return a context that ends this process with a message if another one of several ends."""
    if world.size == 1:
        return contextlib.nullcontext()
    from nsa_models.lm.watch import watching

    return watching(world, end)


def _check_folder(out: Path, resume: bool, force: bool) -> None:
    """Refuse an output folder in which no file can be created, or with other content."""
    if resume and not out.exists():
        raise InvalidInput(f"--resume: {out} does not exist; leave --resume out to start a run")
    output.check_out(out, force=True)
    if not run_folder.may_be_in_use(out):  # else whoever locks it says more
        _check_content(out, resume, force)


def _check_content(out: Path, resume: bool, force: bool) -> None:
    """Refuse to resume in a folder without a run, and to start in one that is not empty."""
    empty = not out.exists() or run_folder.is_empty(out)
    if resume and not os.path.lexists(out / run_folder.INDEX):  # a broken link is damage
        fix = "leave --resume out" if empty else "give --force instead of --resume"
        raise InvalidInput(
            f"--resume: {out} has no saved run, so there is nothing to go on with; {fix} to"
            " start a run there"
        )
    if not (resume or force or empty):
        raise InvalidInput(
            f"--out {out} is not empty; give --resume to go on with it or --force to overwrite it"
        )


@contextlib.contextmanager
def _locked(values: Mapping[str, Any], world: World) -> Iterator[None]:
    """Lock the output folder and check what it holds; only the first process does so."""
    if world.rank != 0:
        yield
        return
    with run_folder.locked(values["out"]):
        # Again: another training may have saved a run since the first check.
        _check_content(values["out"], values["resume"], values["force"])
        yield


def _check_options(values: Mapping[str, Any], typed: Set[str]) -> None:
    """Refuse wrong options before torch loads."""
    resume = values["resume"]
    libraries = ["safetensors"]
    if not resume:  # else the folder names the data and the tokenizer
        _check_effect(values, typed)
        if not 0 < values["held_out"] < 1:
            raise InvalidInput(
                f"--held-out must lie between 0 and 1, such as 0.05, got {values['held_out']}"
            )
        _recipe(values).rows_of(0, 0, 1)  # other numbers of processes divide fewer batches
        if values["tokenizer"] is not None:
            read_file("--tokenizer", values["tokenizer"])
            libraries.append("tokenizers")
    if values["checkpoint"] is not None:
        check_checkpoint(values["checkpoint"])
    parse_backends(values["backends"])
    need_extras("nsa train", [*libraries, *["matplotlib"] * bool(values["png"] or values["svg"])])
    of_run = [name for name in values if name in typed - options.ON_RESUME]
    of_model = [name for name in options.OF_MODEL if name in typed]
    if resume:
        refuse_options(of_run, "set by the folder of --resume")
    if values["checkpoint"] is not None:
        refuse_options(of_model, "set by the folder of --checkpoint")
    plots = {f"--{kind}": values[kind] for kind in ("png", "svg")}
    output.check_files(plots, values["force"] or resume)


def _check_effect(values: Mapping[str, Any], typed: Set[str]) -> None:
    """Refuse typed options that have no effect on this run."""
    data, tasks = values["data"], options.TASKS
    ineffective, other_kind = (
        (options.TEXT_ONLY, "text") if data in tasks else (options.TASKS_ONLY, " and ".join(tasks))
    )
    unused = [name for name in ineffective if name in typed]
    refuse_options(unused, f"only with {other_kind}, not with --data {data}")


def _prepare(values: Mapping[str, Any], typed: Set[str], world: World) -> Trainer:
    """Build the trainer, and refuse a backend that cannot run."""
    from nsa_models.lm import saving
    from nsa_models.lm.model_folder import open_folder
    from nsa_models.lm.task import DataSpec, open_data
    from nsa_models.lm.trainer import Trainer

    out, resume = values["out"], values["resume"]
    source = out if resume else values["checkpoint"]
    folder = None if source is None else open_folder(source, world.rank, world.size)
    training = folder.training if folder is not None and resume else None
    if training is None:
        spec = DataSpec(
            values["data"],
            values["length"],
            values["text_field"],
            values["held_out"],
            values["seed"],
            values["vocab"],
            values["held_out_rows"],
        )
        recipe = _recipe(values)
    else:
        spec = training.data
        changed = {name: values[name] for name in options.CHANGEABLE_ON_RESUME if name in typed}
        recipe = dataclasses.replace(training.recipe, **changed)
    tokenizer: Tokenizer | None = values["tokenizer"]
    if folder is not None:
        tokenizer = folder.tokenizer()
        _check_tokens(spec, tokenizer, folder, "--checkpoint" if training is None else "--resume")
    data = open_data(spec, tokenizer)
    if training is not None:
        _check_data(data, training.corpus, out, world)
    model = _model(values, data.vocab_size, folder, world, recipe.parallel)
    trainer = Trainer(model, data, recipe, world, folder, resume)
    trainer.plan()  # a backend that cannot run is refused before anything is written
    if world.rank == 0 and not resume:  # with --force, the old run must not pass for the new one
        saving.remove_tensors(out)
    return trainer


def _recipe(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a new run."""
    from nsa_models.lm.recipe import Recipe

    same = ("batch", "warmup", "weight_decay", "clip", "seed", *options.CHANGEABLE_ON_RESUME)
    return Recipe(
        learning_rate=values["lr"],
        precision=one_dtype(values["dtype"]),
        **{name: values[name] for name in same},
    )


def _check_data(data: Data, saved: Fingerprint, out: Path, world: World) -> None:
    """Refuse to resume on other data."""
    # One process reads the files.
    if changes := world.collect(data.changes(saved) if world.rank == 0 else [])[0]:
        shown = "; ".join(changes[:4]) + (f"; and {len(changes) - 4} more" if changes[4:] else "")
        raise InvalidInput(
            f"the data has changed since the run was saved: {shown}. Put the data back, or start"
            f" another run from its weights with --checkpoint {shlex.quote(str(out))} and another"
            " --out"
        )


def _check_tokens(
    spec: DataSpec, tokenizer: Tokenizer | None, folder: ModelFolder, option: str
) -> None:
    """Refuse data whose tokens are not those of the model of an option."""
    from nsa_models.lm.task import TASKS

    is_task = spec.data in TASKS
    if not is_task and tokenizer is None:
        raise InvalidInput(
            f"{option}: {folder.path} has no tokenizer.json, and a text needs the tokenizer of the"
            " model: put it there, or give a task as --data"
        )
    vocabulary = folder.config.vocab_size
    used = spec.vocab_size if is_task else getattr(tokenizer, "ids", 256)  # bytes have 256
    if used > vocabulary:
        fix = (
            f"give --vocab {vocabulary}"
            if option == "--checkpoint"
            else "put back the files of one run"
        )
        raise InvalidInput(
            f"{option}: {folder.path} has a vocabulary of {vocabulary:,}, but the data has ids up"
            f" to {used - 1:,}; {fix}"
        )


def _model(
    values: Mapping[str, Any], vocab_size: int, folder: ModelFolder | None, world: World, kind: str
) -> LanguageModel:
    import torch

    from nsa_models.lm.config import size
    from nsa_models.lm.model import LanguageModel

    backends = parse_backends(values["backends"])
    if folder is not None:  # the trainer reads the weights
        sharded = world.size > 1 and kind == "fsdp"
        with torch.device("meta" if sharded else "cpu"):
            return LanguageModel(folder.config, backends)
    config = size(values["size"], vocab_size=vocab_size, attention=values["attention"])
    torch.manual_seed(values["seed"])
    return LanguageModel(config, backends)


def _run(trainer: Trainer, out: Path) -> list[Progress]:
    from nsa_models.lm.train import train as run

    held_out = ""

    def show_progress(step: Progress) -> None:
        nonlocal held_out
        if step.held_out_loss is not None:
            held_out = f", held out {step.held_out_loss:.3f}"
        if step.step:
            advance(f"loss {step.loss:.3f}{held_out}, {step.tokens_per_s:,.0f} tokens/s")

    if trainer.world.rank:
        return run(trainer, out)
    with output.progress(max(1, trainer.recipe.steps - trainer.step_number)) as advance:
        return run(trainer, out, show_progress)


def _print_summary(
    history: list[Progress],
    trainer: Trainer,
    training: train_interrupted.Training,
    accuracy: float | None,
) -> None:
    console, out = output.console(), training.context.params["out"]
    columns = ("step", "loss", "held out", "lr", "tokens/s", "of peak rate", "MiB")
    rows = []
    for p in (p for p in history if p.held_out_loss is not None):
        cells = [
            f"{p.loss:.4f}",
            f"{p.held_out_loss:.4f}",
            f"{p.learning_rate:.2e}",
            f"{p.tokens_per_s:,.0f}",
        ]
        cells = cells if p.step else ["", cells[1], "", ""]
        if p.matrix_share is not None:
            matrix_share = f"{p.matrix_share:.1%}"
        else:
            matrix_share = "measurement failed" if p.step else ""
        rows.append([str(p.step), *cells, matrix_share, f"{p.memory_bytes / 2**20:,.0f}"])
    if history:
        output.print_table(console, columns, rows)
    else:
        step, steps = trainer.step_number, trainer.recipe.steps
        done = f"nothing to do up to --steps {steps}: step {step} is done; give more --steps"
        output.print_text(console, done)
    if accuracy is not None:
        console.print(f"right answers on held-out rows: {accuracy:.2%}")
    if trainer.data.tokenizer is not None:
        from nsa_models.lm.data import unigram_entropy

        console.print(
            "held-out loss of a model that knows only how often each token occurs:"
            f" {unigram_entropy(trainer.data.held_out):.4f}"
        )
    if trainer.data.spec.data == "uniform":
        last_losses = [p.loss for p in history if p.step][-100:]
        floor = f"ln {trainer.data.vocab_size} = {math.log(trainer.data.vocab_size):.4f}"
        if last_losses:
            mean = sum(last_losses) / len(last_losses)
            console.print(
                f"mean loss of the last {len(last_losses)} steps: {mean:.4f}; no model expects less"
                f" than {floor}, but a sample may have less"
            )
    data = trainer.data.spec.data
    text = f"Trained on {trainer.tokens:,} tokens of {data}; the model is in {out}"
    console.print(text, style="bold green")
    if trainer.data.tokenizer is None:  # a task has no text to continue
        more = str(2 * max(trainer.step_number, trainer.recipe.steps))
        output.print_next([*training.resume_command(), "--steps", more])
    else:
        output.print_next(["nsa", "generate", "--checkpoint", str(out), "--prompt", "The "])


def _plot_losses(out: Path, png: Path | None, svg: Path | None, force: bool) -> None:
    for file, kind in ((png, "png"), (svg, "svg")):
        if file is not None:
            from nsa_models.lm.loss_plot import save

            save(out, file, kind, force)
