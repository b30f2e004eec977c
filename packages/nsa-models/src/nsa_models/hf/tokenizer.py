"""The tokenizer in the folder of a model of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from nsa_core.errors import InvalidInput
from nsa_core.util.text import describe_error
from nsa_models.hf.trained_run import run_tokenizer
from nsa_models.lm.run_folder import is_run


def read_tokenizer(folder: Path) -> Any:
    """Read the tokenizer of a model.

    Without files of a vocabulary, transformers builds tokenizers of some models with special tokens
    only, which encode every text as nothing. This function refuses them.

    Args:
        folder: The folder of the model, or a run of `nsa train`.

    Raises:
        InvalidInput: The folder has no tokenizer, or one without a vocabulary.
    """
    if is_run(folder):
        tokenizer_of_run = run_tokenizer(folder)
        if tokenizer_of_run is None:
            raise InvalidInput(
                f"{folder} was trained on a task, which has no tokenizer; give a run on text"
            )
        return tokenizer_of_run
    remedy = "copy the tokenizer.json of the model there"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidInput(
            f"{folder} has no tokenizer that can be read: {remedy} ({describe_error(error)})"
        ) from error
    if tokenizer.get_vocab().keys() <= set(tokenizer.all_special_tokens):
        raise InvalidInput(
            f"{folder} has no tokenizer that can be read, because its vocabulary is missing:"
            f" {remedy}"
        )
    return tokenizer
