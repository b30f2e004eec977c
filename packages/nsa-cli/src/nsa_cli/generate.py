"""`nsa generate`: text from a checkpoint of `nsa train`."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Annotated

import typer

from nsa_cli import output
from nsa_cli import train_options as options
from nsa_cli.choices import named_backends, pick_device, said_as_options


def generate(
    checkpoint: Annotated[Path, typer.Option(help="A checkpoint, or the folder of a run.")],
    prompt: Annotated[
        str, typer.Option(help="Text to go on from; empty: the beginning of a document.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to make at most.", min=0)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0.0)] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw among the k likeliest.", min=1, show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0, max=2**63 - 1)] = 0,
    device: options.Device = "auto",
    threads: options.Threads = 1,
    backends: options.Backends = "auto",
) -> None:
    """Print the prompt and what a model makes of it, to the end of the document or to
    --max-new-tokens.
    """
    with output.exit_codes():
        place = pick_device(device, threads)
        import torch

        from nsa_core.errors import InvalidInput
        from nsa_models.lm.checkpoint import read
        from nsa_models.lm.generate import generate as made

        kept = read(checkpoint)
        tokenizer = kept.text()
        if tokenizer is None:
            raise InvalidInput(
                f"{kept.path} was trained on the task {kept.facts['data']['data']}: it has no text"
            )
        model = kept.model(named_backends(backends)).to(place).eval()
        tokens = torch.tensor([[tokenizer.end, *tokenizer.encode(prompt)]], device=place)
        end = tokenizer.end
        with said_as_options(
            {name: name for name in ("max_new_tokens", "temperature", "top_k", "seed")}
        ):
            new = made(
                model,
                tokens,
                max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                end=end,
                seed=seed,
            )
        print(_shown(prompt + tokenizer.decode(new[0].tolist())))


def _shown(text: str) -> str:
    """A model's text: what moves a terminal's cursor or hides, beyond line ends and tabs, as its
    escape.
    """
    hidden = {"Cc", "Cf", "Cs"}
    return "".join(
        c
        if c in "\n\t" or unicodedata.category(c) not in hidden
        else c.encode("unicode_escape").decode()
        for c in text
    )
