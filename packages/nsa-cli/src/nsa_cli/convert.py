"""`nsa convert`: convert a dense model of Hugging Face transformers to NSA."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsa_cli import output
from nsa_cli.choices import (
    DTYPE_CHOICES,
    Backends,
    Device,
    Threads,
    advanced,
    check_checkpoint,
    completion,
    errors_name_options,
    one_dtype,
    options_on_command_line,
    parse_backends,
    pick_device,
    read_file,
    refuse_options,
    tokens,
)
from nsa_cli.extras import need_extras
from nsa_core.errors import InvalidInput
from nsa_models.lm.tokens import TOKENIZER

if TYPE_CHECKING:
    import torch

    from nsa_models.hf.conversion import Conversion
    from nsa_models.hf.first_stage import StageProgress
    from nsa_models.lm.model_folder import ModelFolder

_STAGE = ("steps", "length", "batch", "lr")  # options of the first stage


def convert(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Folder of a dense Llama, Qwen2 or Qwen3, or a run of nsa train --attention dense:"
            " config.json and safetensors.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Folder for the model with NSA; new or empty."),
    ],
    nsa: Annotated[
        list[str] | None,
        typer.Option(
            "--nsa",
            metavar="NAME=VALUE",
            help="Field of NSAConfig, such as window_size=512. May be repeated. Default:"
            " shared_kv=true and compress=mean, and otherwise those of NSAConfig.",
        ),
    ] = None,
    nsa_layers: Annotated[
        str,
        typer.Option(
            metavar="LAYERS",
            help="Layers that get NSA; the others stay dense: all, every_4th_dense (layers 3, 7, 11"
            " and so on stay dense), or numbers such as 0,2,4-7.",
            autocompletion=completion("all", "every_4th_dense"),
        ),
    ] = "all",
    dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of the model. Default: that of --checkpoint.", **DTYPE_CHOICES),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file: train the new parameters on it, with all else frozen."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps on --text.", min=1)] = 200,
    length: Annotated[
        int,
        typer.Option(
            help="Tokens per row of --text, such as 4k.", metavar="TOKENS", parser=tokens(2)
        ),
    ] = 4096,
    batch: Annotated[int, typer.Option(help="Rows per training step.", min=1)] = 1,
    lr: Annotated[float, typer.Option(help="Learning rate on --text.")] = 1e-3,
    seed: Annotated[int, advanced(help="Seed of the new parameters and of the rows.")] = 0,
    device: Device = "auto",
    threads: Threads = 1,
    backends: Backends = "auto",
) -> None:
    """Convert a dense model of Hugging Face transformers to NSA.

    All parameters of the dense model are carried over. The gates are new, and so is
    phi with --nsa compress=mlp: train the model before you use it. --text does the first part.
    """
    if text is None:
        unused = options_on_command_line(context) & set(_STAGE)
        refuse_options(sorted(unused), "there is no training without --text")
    if not lr > 0:
        raise InvalidInput(f"--lr must be finite and > 0, got {lr}")
    need_extras("nsa convert", ["transformers"])
    fields, layers = _fields(nsa or []), _layers(nsa_layers)
    check_checkpoint(checkpoint)
    output.check_out(out)
    chosen = parse_backends(backends)
    dtype = "auto" if dtype is None else one_dtype(dtype)
    content = None if text is None else read_file("--text", text)
    torch_device = pick_device(device, threads)
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    from nsa_models.hf.conversion import convert as convert_model
    from nsa_models.hf.conversion import fields_for, open_dense, write
    from nsa_models.hf.folder import load_model

    folder = open_dense(checkpoint)
    with errors_name_options({name: name for name in ("nsa", "nsa_layers")}):
        fields = fields_for(folder, fields, layers)
    tokens = None
    if text is not None and content is not None:
        if length <= (selected := _selected_tokens(fields)):
            raise InvalidInput(
                f"--length must be > {selected:,}, the tokens that a query selects, got {length:,};"
                " or select fewer with --nsa num_selected_blocks=N"
            )
        tokens = _read_tokens(folder, text, content, length)
    torch.manual_seed(seed)
    dense = load_model(folder, dtype)
    conversion = convert_model(dense, fields, chosen, layers)
    del dense
    _print_conversion(conversion)
    if tokens is not None:
        conversion.model.to(torch_device)
        _train(conversion, tokens, (steps, length, batch, lr, seed))
        conversion.model.to("cpu")
    write(conversion.model, folder, out)
    output.print_text(output.console(), f"Written to {out}", "bold green")
    output.print_next(["nsa", "train", *_training(conversion, out)])


def _training(conversion: Conversion, out: Path) -> list[str]:
    """Return the options that train the converted model, on rows in which it selects blocks."""
    selected = _selected_tokens(conversion.model.config.nsa)
    data = "python-docs" if (out / TOKENIZER).exists() else "recall"
    words = ["--checkpoint", str(out), "--data", data, "--out", output.unused(f"{out}-trained")]
    return words + ["--length", str(4 * selected)] * (4 * selected > 256)


def _selected_tokens(nsa: Mapping[str, Any]) -> int:
    selected: int = nsa.get("num_selected_blocks", 16) * nsa.get("select_block_size", 64)
    return selected


def _fields(pairs: Sequence[str]) -> dict[str, Any]:
    """Return the fields NAME=VALUE; a value is JSON, or else a string."""
    fields: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise InvalidInput(f"--nsa must be NAME=VALUE such as window_size=512, got {pair!r}")
        if name in fields:
            raise InvalidInput(f"--nsa: {name} stands twice; give it once")
        try:
            fields[name] = json.loads(value)
        except (ValueError, RecursionError):
            fields[name] = value
    return fields


def _layers(text: str) -> str | list[int] | None:
    """Return --nsa-layers as the argument of :func:`nsa_models.hf.convert`."""
    if text in ("all", "every_4th_dense"):
        return None if text == "all" else text
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part, re.ASCII)
        layers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not layers:
            raise InvalidInput(
                "--nsa-layers must be all, every_4th_dense or layer numbers such as 0,2,4-7, got"
                f" {text!r}"
            )
        numbers += layers
    return numbers


def _print_conversion(conversion: Conversion) -> None:
    console, model = output.console(), conversion.model
    parameters = dict(model.named_parameters())
    total = sum(parameter.numel() for parameter in parameters.values())
    new = sum(parameters[name].numel() for name in conversion.new)
    first = ".".join(conversion.new[0].split(".")[:3]) + "."  # model.layers.0.
    layers = f"{model.config.num_hidden_layers} layers"
    if (chosen := model.config.nsa_layers) is not None:
        layers += f", {len(chosen)} of them with NSA"
    shares = bool((model.config.nsa or {}).get("shared_kv"))
    branches = "All branches share" if shares else "Each branch has a copy of"
    output.print_text(
        console,
        f"{model.config.model_type}: {total:,} parameters, {layers}. Carried over and"
        f" compared: all {len(conversion.carried):,} tensors of the dense model. {branches} the"
        " dense projections of keys and values.",
        indent="",
    )
    rows = [
        [name.removeprefix(first), "x".join(map(str, parameters[name].shape))]
        for name in conversion.new
        if name.startswith(first)
    ]
    of = "layer" if chosen is None else "layer with NSA"
    title = f"New in each {of}, {new:,} parameters in all ({new / total:.2%}):"
    output.print_table(console, ("parameter", "shape"), rows, title)


def _read_tokens(folder: ModelFolder, text: Path, content: bytes, length: int) -> torch.Tensor:
    """Return the tokens of the text [T], by the tokenizer of the dense model."""
    import torch

    from nsa_models.hf.folder import load_tokenizer, text_ids

    try:
        tokenizer = load_tokenizer(folder)
    except InvalidInput as error:
        raise InvalidInput(f"--checkpoint: {error}; --text needs it") from error
    tokens = torch.tensor(text_ids(tokenizer, content.decode(errors="replace")))
    if len(tokens) < 2 * length:
        raise InvalidInput(
            f"--text: {text} has {len(tokens):,} tokens, but rows of --length {length:,} and a"
            f" measurement need {2 * length:,}: give a longer text or a smaller --length"
        )
    return tokens


def _rows(tokens: torch.Tensor, steps: int, length: int, batch: int) -> Iterator[torch.Tensor]:
    """Yield ``steps`` batches of random rows [batch, length]."""
    import torch

    for _ in range(steps):
        starts = torch.randint(len(tokens) - length + 1, (batch,)).tolist()
        yield torch.stack([tokens[start : start + length] for start in starts])


def _train(
    conversion: Conversion, tokens: torch.Tensor, sizes: tuple[int, int, int, float, int]
) -> None:
    """Train the new parameters on all tokens but the last row, which measures the mass."""
    import torch

    from nsa_models.hf.first_stage import train_new_parameters

    steps, length, batch, lr, seed = sizes
    torch.manual_seed(seed)
    stages = train_new_parameters(
        conversion.model,
        _rows(tokens[:-length], steps, length, batch),
        learning_rate=lr,
        measure=tokens[-length:],
        measure_every=max(1, -(-steps // 8)),
    )
    measured: list[StageProgress] = []
    with output.progress(steps) as advance:
        for progress in stages:
            if progress.selected_mass is not None:
                measured.append(progress)
            if progress.step and not (measured[1:] and measured[-2].step == progress.step):
                advance(f"loss {progress.loss:.3f}, selected mass {measured[-1].selected_mass:.1%}")
    rows = [
        [
            str(progress.step),
            f"{progress.loss:.4f}" if progress.step else "",
            f"{progress.selected_mass:.1%}",
            f"{progress.random_mass:.1%}",
        ]
        for progress in measured
    ]
    title = "Share of dense attention's probability in selected and in random blocks:"
    output.print_table(output.console(), ("step", "loss", "selected", "random"), rows, title)
