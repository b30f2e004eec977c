"""`nsa inspect`: show which blocks a model selects over a text, as pictures and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nsa_cli import output
from nsa_cli.choices import (
    DTYPE_CHOICES,
    Backends,
    Device,
    Threads,
    check_checkpoint,
    errors_name_options,
    one_dtype,
    options_on_command_line,
    parse_backends,
    pick_device,
    read_text,
    tokens,
)
from nsa_cli.extras import need_extras
from nsa_cli.result_files import ResultFiles
from nsa_core.errors import InvalidInput

if TYPE_CHECKING:
    from nsa_models.inspect import Inspection


def inspect(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Output folder for the page and the pictures."),
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text file that the model reads. Default: the documentation that ships with"
            " Python."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of a model with NSA, of nsa train, nsa convert or save_pretrained."
            " Default: a small untrained model.",
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Layer of the detailed picture. Default: the one that gains most.", min=0
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Read at most this many tokens. Default: a training row, or twice the tokens that"
            " a query selects; at most 2k.",
            metavar="TOKENS",
            parser=tokens(),
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the pictures in the folder.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(help="Dtype of the model.", **DTYPE_CHOICES),
    ] = "fp32",
    seed: Annotated[int, typer.Option(help="Seed of the untrained weights.")] = 0,
    device: Device = "auto",
    threads: Threads = 1,
    backends: Backends = "auto",
) -> None:
    """Show what a model selects: the blocks of each query, its gates, and what it leaves out.

    Writes inspect.html (all layers, interactive, one file), and as PNG and SVG: selection (one
    layer in detail) and layers (all layers).
    """
    name, content = read_text(text)
    if checkpoint is not None:
        if "seed" in options_on_command_line(context):
            raise InvalidInput(
                "--seed sets untrained weights, and --checkpoint has trained ones; leave one of"
                " them out"
            )
        check_checkpoint(checkpoint)
    chosen, torch_dtype_name = parse_backends(backends), one_dtype(dtype)
    need_extras("nsa inspect", ["matplotlib", "jinja2"])
    output.check_out(out, force, "--force to overwrite its pictures")
    names = {name: name for name in ("checkpoint", "layer", "max_tokens")}
    with errors_name_options({**names, "the text": "text"}):
        torch_device = pick_device(device, threads)
        import torch

        from nsa_models.inspect import inspect_text, open_subject
        from nsa_models.inspect.save import save
        from nsa_models.lm.config import check_layer

        subject = open_subject(
            checkpoint,
            seed=seed,
            device=torch_device,
            dtype=getattr(torch, torch_dtype_name),
            backends=chosen,
        )
        config = subject.model.config
        check_layer(layer, config.nsa_layers or range(config.n_layers))
        characters = content.decode(errors="replace")  # no UTF-8: U+FFFD
        inspection = inspect_text(characters, subject, source=name, max_tokens=max_tokens)
        files = ResultFiles()
        files.write(out, lambda folder: save(inspection, folder, layer, force))
    _print_summary(inspection, files.written, max_tokens)
    files.exit_code(0)


def _print_summary(inspection: Inspection, folders: list[Path], max_tokens: int | None) -> None:
    from nsa_models.inspect.findings import UNTRAINED, sentences
    from nsa_models.inspect.save import FILES

    console = output.console()
    for sentence in sentences(inspection):
        output.print_text(console, sentence, indent="")
    length, total = len(inspection.tokens), inspection.total_tokens
    if length < total:
        limit = "--max-tokens" if max_tokens is not None else "by default"
        hint = "" if max_tokens is not None else "; give --max-tokens to read more"
        output.print_text(
            console, f"Cut to the first {length:,} of {total:,} tokens ({limit}){hint}."
        )
    if not inspection.trained:
        output.print_text(console, UNTRAINED, "yellow")
    for folder in folders:
        output.print_text(console, f"Written to {folder}: {', '.join(FILES)}", "bold green")
        output.print_next(["python", "-m", "webbrowser", str(folder / FILES[0])])
    if not inspection.trained:
        output.print_next(["nsa", "train", "--out", output.unused("run")])
