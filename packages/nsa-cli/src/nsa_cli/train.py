"""`nsa train`: train a small language model, on NSA or dense attention, and log, plot and keep what
comes of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa_cli import output
from nsa_cli import train_options as options
from nsa_cli.choices import named_backends, options_said, pick_device, said_as_options, spelt

if TYPE_CHECKING:
    from nsa_models.lm.checkpoint import Checkpoint
    from nsa_models.lm.model import LanguageModel
    from nsa_models.lm.parallel import World
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
    vocab: options.Vocab = 64,
    steps: options.Steps = 1000,
    batch: options.Batch = 8,
    accumulate: options.Accumulate = 1,
    lr: options.Rate = 3e-3,
    warmup: options.Warmup = 50,
    weight_decay: options.WeightDecay = 0.1,
    clip: options.Clip = 1.0,
    dtype: options.Dtype = "float32",
    recompute: options.Recompute = False,
    compile: options.Compile = False,
    graph: options.Graph = False,
    parallel: options.Parallel = "ddp",
    eval_every: options.EvalEvery = 100,
    save_every: options.SaveEvery = 500,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    threads: options.Threads = 1,
    backends: options.Backends = "auto",
    from_dense: options.FromDense = None,
    resume: options.Resume = False,
    force: options.Force = False,
    png: options.Png = None,
    svg: options.Svg = None,
) -> None:
    """Train a small decoder language model on text, or on a task whose best loss is known.

    Documents are packed with their boundaries and none is cut off; a document is trained on or held
    out, never both. Under torchrun the same command trains on several GPUs. Ctrl-C and SIGTERM
    save; --resume goes on where a run was.
    """
    # as typer converts: Paths
    given = {name: value for name, value in locals().items() if name != "context"}
    said = options_said(context)
    with output.exit_codes():
        _check(given, said)
        with said_as_options({name: name for name in given} | options.RENAMED):
            world, trainer = _prepared(given, said)
        try:
            done = _run(trainer, out)
            if world.rank == 0:
                _summary(done, trainer, out)
                _plot(out, png, svg, force or resume)
        except SystemExit:  # SIGTERM: a cluster's log should say what is left
            if world.rank == 0:
                output.console(stderr=True).print(
                    f"nsa: ended by SIGTERM; step {trainer.step_number} is saved, --resume goes on"
                )
            raise
        finally:
            world.close()


def _check(given: Mapping[str, Any], said: Set[str]) -> None:
    """Refuse, before torch loads, what could not be written or is said twice."""
    from nsa_core.errors import InvalidInput

    out, resume = given["out"], given["resume"]
    if resume and (twice := [name for name in options.FIXED if name in said]):
        raise InvalidInput(f"{spelt(twice)}: with --resume the checkpoint says so; leave it out")
    if out.exists() and not out.is_dir():
        raise InvalidInput(f"{out} is not a folder")
    if not out.exists():
        output.check_writable(out)
    elif not resume and not given["force"] and any(out.iterdir()):
        raise InvalidInput(
            f"{out} is not empty; give --resume to go on with it or --force to replace what is"
            " there"
        )
    for file in (given["png"], given["svg"]):
        output.check_writable(file, given["force"] or resume)
    if given["png"] or given["svg"]:
        from nsa_bench.render.style import need_matplotlib

        need_matplotlib()


def _check_use(given: Mapping[str, Any], said: Set[str]) -> None:
    """Refuse options that this run would not look at."""
    from nsa_core.errors import InvalidInput
    from nsa_models.lm.task import TASKS

    data, tasks = given["data"], " and ".join(TASKS)
    named, what = (options.TEXT_ONLY, "text") if data in TASKS else (options.TASKS_ONLY, tasks)
    if unused := [name for name in named if name in said]:
        raise InvalidInput(
            f"{spelt(unused)}: goes with {what}, not with --data {data}; leave it out"
        )
    if given["from_dense"] is not None and given["attention"] != "nsa":
        raise InvalidInput(
            f"--from-dense begins a model with NSA: --attention {given['attention']} is not for it"
        )


def _prepared(given: Mapping[str, Any], said: Set[str]) -> tuple[World, Trainer]:
    place = pick_device(given["device"], given["threads"])
    from nsa_core.util.safetensors_io import need_safetensors
    from nsa_models.lm import checkpoint
    from nsa_models.lm.parallel import join
    from nsa_models.lm.recipe import Recipe
    from nsa_models.lm.task import DataSpec, open_data
    from nsa_models.lm.tokens import read_tokenizer
    from nsa_models.lm.trainer import Trainer

    need_safetensors()
    kept = checkpoint.read(given["out"]) if given["resume"] else None
    words: Tokenizer | None = None
    if kept is None:
        _check_use(given, said)
        spec = DataSpec(
            given["data"],
            given["length"],
            given["text_field"],
            given["held_out"],
            given["seed"],
            given["vocab"],
            given["held_out_rows"],
        )
        recipe = Recipe(
            batch=given["batch"],
            learning_rate=given["lr"],
            warmup=given["warmup"],
            weight_decay=given["weight_decay"],
            clip=given["clip"],
            precision=given["dtype"],
            seed=given["seed"],
            **{n: given[n] for n in options.FREE},
        )
        if given["tokenizer"] is not None:
            words = read_tokenizer(given["tokenizer"])
    else:
        spec, words = DataSpec(**kept.facts["data"]), kept.text()
        recipe = Recipe(**kept.facts["train"] | {n: given[n] for n in options.FREE if n in said})
    world = join(place)
    rows = open_data(spec, words)
    model = _model(given, rows.vocab_size, kept)
    trainer = Trainer(model, rows, recipe, world, kept)
    trainer.plan()  # a backend that cannot run is refused before anything is written
    if world.rank == 0:
        given["out"].mkdir(exist_ok=True)
        if (
            kept is None
        ):  # --force: what a run begun anew has not saved yet is not to be taken for its own
            (given["out"] / checkpoint.FILE).unlink(missing_ok=True)
    return world, trainer


def _model(given: Mapping[str, Any], vocab_size: int, kept: Checkpoint | None) -> LanguageModel:
    import torch

    from nsa_models.lm.config import size
    from nsa_models.lm.model import LanguageModel
    from nsa_models.lm.start import from_dense, read_dense

    named = named_backends(given["backends"])
    if kept is not None:
        return kept.model(named)
    config = size(given["size"], vocab_size=vocab_size, attention=given["attention"])
    torch.manual_seed(given["seed"])
    if given["from_dense"] is not None:
        return from_dense(read_dense(given["from_dense"]), config, named)
    return LanguageModel(config, named)


def _run(trainer: Trainer, out: Path) -> list[Progress]:
    from nsa_models.lm.train import train as run

    held_out = ""

    def tell(p: Progress) -> None:
        nonlocal held_out
        if p.held_out_loss is not None:
            held_out = f", held out {p.held_out_loss:.3f}"
        if p.step:
            advance(
                f"loss {p.loss:.3f}{held_out}, {p.tokens_per_s:,.0f} tokens/s, {p.matrix_share:.1%}"
                " of matrix rate"
            )

    if trainer.world.rank:
        return run(trainer, out)
    with output.progress(max(1, trainer.recipe.steps - trainer.step_number)) as advance:
        return run(trainer, out, tell)


def _summary(done: list[Progress], trainer: Trainer, out: Path) -> None:
    console = output.console()
    table = output.plain_table(
        "step", "loss", "held out", "lr", "tokens/s", "of matrix rate", "MiB"
    )
    for p in (p for p in done if p.held_out_loss is not None):
        shown = [
            f"{p.loss:.4f}",
            f"{p.held_out_loss:.4f}",
            f"{p.learning_rate:.2e}",
            f"{p.tokens_per_s:,.0f}",
        ]
        shown = shown if p.step else ["", shown[1], "", ""]
        share = f"{p.matrix_share:.1%}" if p.step else ""
        table.add_row(str(p.step), *shown, share, f"{p.memory_bytes / 2**20:,.0f}")
    if done:
        console.print(table)
    else:
        step, steps = trainer.step_number, trainer.recipe.steps
        console.print(
            f"nothing was left to do: step {step} of {steps} is done; give more --steps to go on"
        )
    if trainer.data.spec.data == "recall":
        console.print(f"right answers on held-out rows: {trainer.accuracy():.2%}")
    if trainer.data.tokenizer is not None:
        from nsa_models.lm.data import unigram_entropy

        console.print(
            f"unigram entropy of the held-out text: {unigram_entropy(trainer.data.held_out):.4f}"
        )
    if trainer.data.spec.data == "uniform":
        last = [p.loss for p in done if p.step][-100:]
        floor = f"ln {trainer.data.vocab_size} = {math.log(trainer.data.vocab_size):.4f}"
        if last:
            console.print(
                f"mean loss of the last {len(last)} steps: {sum(last) / len(last):.4f}; nothing"
                f" gets below {floor}"
            )
    facts = dataclasses.asdict(trainer.data.spec)
    console.print(
        f"{trainer.tokens:,} tokens of {facts['data']}, kept in {out}", style="bold green"
    )


def _plot(out: Path, png: Path | None, svg: Path | None, force: bool) -> None:
    for file, kind in ((png, "png"), (svg, "svg")):
        if file is not None:
            from nsa_models.lm.loss_plot import save

            save(out, file, kind, force)
