"""`nsa generate`: generate text from a checkpoint of `nsa train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsa_cli import output
from nsa_cli.choices import (
    Backends,
    Device,
    Threads,
    errors_name_options,
    parse_backends,
    pick_device,
    tokens,
)
from nsa_cli.extras import need_extras


def generate(
    checkpoint: Annotated[Path, typer.Option(help="Checkpoint file, or the folder of a run.")],
    prompt: Annotated[
        str, typer.Option(help="Text to continue. Empty: start a new document.")
    ] = "",
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens to generate.", parser=tokens(0))
    ] = 200,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature. 0: always the most likely token.", min=0.0)
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the k most likely tokens.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    device: Device = "auto",
    threads: Threads = 1,
    backends: Backends = "auto",
) -> None:
    """Print the prompt and its continuation, up to the end of the document or --max-new-tokens."""
    with output.exit_codes():
        need_extras("nsa generate", ["safetensors"])
        torch_device = pick_device(device, threads)
        import torch

        from nsa_core.errors import InvalidInput
        from nsa_core.util.text import escape_control
        from nsa_models.lm.checkpoint import read
        from nsa_models.lm.generate import generate as generate_tokens

        saved = read(checkpoint)
        need_extras("nsa generate", saved.libraries)
        tokenizer = saved.load_tokenizer()
        if tokenizer is None:
            raise InvalidInput(
                f"{saved.path} was trained on the task {saved.facts['data']['data']}: it has no"
                " text; give the checkpoint of a run on text"
            )
        model = saved.model(parse_backends(backends)).to(torch_device).eval()
        tokens = torch.tensor([[tokenizer.end, *tokenizer.encode(prompt)]], device=torch_device)
        end = tokenizer.end
        with errors_name_options(
            {name: name for name in ("max_new_tokens", "temperature", "top_k", "seed")}
        ):
            new_tokens = generate_tokens(
                model,
                tokens,
                max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                end=end,
                seed=seed,
            )
        print(escape_control(prompt + tokenizer.decode(new_tokens[0].tolist())))
