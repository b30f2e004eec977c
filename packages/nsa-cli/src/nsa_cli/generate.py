"""`nsa generate`: generate text with the model of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nsa_cli import output
from nsa_cli.choices import (
    Backends,
    Device,
    Threads,
    check_checkpoint,
    parse_backends,
    pick_device,
    tokens,
)
from nsa_cli.extras import need_extras
from nsa_core.errors import InvalidInput
from nsa_core.util.text import escape_control

# Below it, logits divided by it overflow, and the most likely token has all the probability.
_COLDEST = 1e-6


def generate(
    checkpoint: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Model folder, of nsa train, nsa convert or save_pretrained."
        ),
    ],
    prompt: Annotated[
        str, typer.Option(help="Text to continue. Empty: start a new document.")
    ] = "",
    max_new_tokens: Annotated[
        int,
        typer.Option(
            help="Maximum number of tokens to generate.", metavar="TOKENS", parser=tokens()
        ),
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
    try:
        prompt.encode()
    except UnicodeEncodeError:  # Python holds bytes that are no text as surrogates
        raise InvalidInput(f"--prompt must be UTF-8, got {prompt!r:.80}") from None
    check_checkpoint(checkpoint)
    chosen = parse_backends(backends)  # None: those that the folder names
    need_extras("nsa generate", ["safetensors", "transformers"])
    torch_device = pick_device(device, threads)
    import torch
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    from nsa_models.hf.folder import load_model, load_tokenizer, new_text_ids
    from nsa_models.lm.model_folder import open_folder

    folder = open_folder(checkpoint)
    with output.naming("--checkpoint:"):
        tokenizer = load_tokenizer(folder)
    options: dict[str, Any] = {} if chosen is None else {"nsa_backends": chosen}
    model = load_model(folder, **options).to(torch_device).eval()
    tokens = torch.tensor([new_text_ids(tokenizer, prompt)], device=torch_device)
    torch.manual_seed(seed)
    is_sampled = temperature >= _COLDEST
    sampling = {"temperature": temperature, "top_k": top_k or 0} if is_sampled else {}
    # The folder's own generation_config.json has no effect: the options say what happens.
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=is_sampled,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    new_tokens = []
    if max_new_tokens:
        mask = torch.ones_like(tokens)
        try:
            all_tokens = model.generate(tokens, attention_mask=mask, generation_config=config)
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise InvalidInput(
                f"{checkpoint}: the model gives numbers that are not finite; put back its"
                " files, or give an earlier save"
            ) from error
        new_tokens = all_tokens[0, tokens.shape[1] :].tolist()
    print(escape_control(prompt + tokenizer.decode(new_tokens, skip_special_tokens=True)))
    if folder.config.attention == "nsa":
        words = [
            "--checkpoint",
            str(checkpoint),
            "--out",
            output.unused(f"{checkpoint}-blocks"),
        ]
        output.print_next(["nsa", "inspect", *words], target=output.console(stderr=True))
