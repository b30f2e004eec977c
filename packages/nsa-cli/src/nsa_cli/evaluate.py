"""`nsa eval`: score a checkpoint on tasks of the lm-evaluation-harness."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_cli import output
from nsa_cli import train_options as options
from nsa_cli.choices import errors_name_options, parse_backends, pick_device, split_commas
from nsa_cli.extras import need_extras
from nsa_cli.result_files import ResultFiles

if TYPE_CHECKING:
    from nsa_models.evaluation.run import Score

SCHEMA_VERSION = 1


def evaluate(
    checkpoint: Annotated[
        Path, typer.Option(help="Folder of transformers, or of a run of `nsa train` on text.")
    ],
    tasks: Annotated[
        str,
        typer.Option(
            help="Comma-separated tasks or groups of the lm-evaluation-harness, such as"
            " ruler,hellaswag."
        ),
    ],
    length: Annotated[
        str,
        typer.Option(
            help=(
                "Longest text in tokens. Several, such as 4k,16k: the lengths of tasks that"
                " make their texts (ruler). Default: as the model was trained."
            ),
            show_default=False,
        ),
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option(
            help="Number of examples per task, and per --length of tasks that make their texts."
            " Default: all.",
            min=1,
            show_default=False,
        ),
    ] = None,
    fewshot: Annotated[
        int | None,
        typer.Option(
            help="Solved examples before each question. Default: as the task says.",
            min=0,
            show_default=False,
        ),
    ] = None,
    task_folder: Annotated[
        Path | None,
        typer.Option(help="Folder with definitions of further tasks.", show_default=False),
    ] = None,
    batch: Annotated[int, typer.Option(help="Examples per forward pass.", min=1)] = 1,
    dtype: Annotated[
        str, typer.Option(help="auto (that of the checkpoint), float32, bfloat16 or float16.")
    ] = "auto",
    device: options.Device = "auto",
    threads: options.Threads = 1,
    backends: options.Backends = "auto",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the scores to this file.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the --json file.")] = False,
) -> None:
    """Score a checkpoint on tasks of the lm-evaluation-harness.

    The harness downloads the data of a task when it first runs.
    """
    with output.exit_codes():
        from nsa_bench.shapes import parse_lengths

        lengths, names = parse_lengths(length, 2) if length else [], split_commas(tasks)
        output.check_writable(json_file, force)
        need_extras("nsa eval", ["lm_eval", "transformers"])
        _quieten()
        torch_device = pick_device(device, threads)
        from nsa_models.evaluation.run import evaluate as evaluate_checkpoint

        fields = {name: name for name in ("checkpoint", "tasks", "task_folder", "backends")}
        with errors_name_options(fields):
            scores = evaluate_checkpoint(
                checkpoint,
                names,
                lengths=lengths,
                limit=limit,
                fewshot=fewshot,
                task_folder=task_folder,
                batch=batch,
                dtype=dtype,
                device=torch_device,
                backends=parse_backends(backends),
            )
        files = ResultFiles()
        settings = {
            "checkpoint": str(checkpoint),
            "tasks": names,
            "lengths": lengths,
            "limit": limit,
            "fewshot": fewshot,
            "dtype": dtype,
            "device": torch_device,
            "backends": backends,
        }
        text = json.dumps(_document(settings, scores), indent=1) + "\n"
        files.write(json_file, lambda f: output.write_atomic(f, text, force), keep=True)
        _print(scores)
        files.exit_code(0)


def _quieten() -> None:
    """Ask libraries for no progress bars in files and pipes, before torch is imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")


def _document(settings: dict[str, Any], scores: list[Score]) -> dict[str, Any]:
    import dataclasses
    from importlib.metadata import version

    libraries = {name: version(name) for name in ("lm_eval", "transformers")}
    return {
        "schema_version": SCHEMA_VERSION,
        "settings": settings,
        "scores": [dataclasses.asdict(score) for score in scores],
        "libraries": libraries,
        "environment": output.environment(),
    }


def _print(scores: list[Score]) -> None:
    arrows = {True: "higher", False: "lower", None: ""}
    rows = [
        [
            score.task,
            score.metric,
            f"{score.value:.4f}",
            "-" if score.stderr is None else f"{score.stderr:.4f}",
            "-" if score.examples is None else str(score.examples),
            arrows[score.higher_is_better],
        ]
        for score in scores
    ]
    columns = ["task", "metric", "value", "std. error", "examples", "better"]
    output.print_table(output.console(), columns, rows, wrapped=["task", "metric"])
