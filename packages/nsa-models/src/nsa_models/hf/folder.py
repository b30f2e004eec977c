"""Load the model and the tokenizer of a folder with transformers, as data of a stranger."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nsa_core.errors import InvalidInput
from nsa_core.util.text import describe_error
from nsa_models.hf.decoder import ATTENTION
from nsa_models.lm.model_folder import ModelFolder
from nsa_models.lm.tokens import TOKENIZER


def load_model(folder: ModelFolder, dtype: str | torch.dtype = "auto", **options: Any) -> Any:
    """Load the model of a checked folder.

    Nothing is downloaded, no code and no kernel that the folder names is loaded, and only
    safetensors are read.

    Args:
        folder: The folder.
        dtype: The dtype of the model; "auto": that of the weights.
        **options: Other arguments of ``from_pretrained``.

    Raises:
        InvalidInput: transformers cannot read the folder.
    """
    attention = ATTENTION if folder.config.attention == "nsa" else "sdpa"
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder.path,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            **options,
        )
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, ImportError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{folder.path} cannot be read: {describe_error(error)}") from error


def load_tokenizer(folder: ModelFolder) -> Any:
    """Load the tokenizer of a checked folder.

    Without files of a vocabulary, transformers builds tokenizers of some models with special tokens
    only, which encode every text as nothing. This function refuses them.

    Raises:
        InvalidInput: The folder has no tokenizer, one without a vocabulary, or one with ids that
            the model does not have.
    """
    remedy = f"copy the {TOKENIZER} of the model there"
    if folder.training is not None and folder.training.tokenizer is None:
        raise InvalidInput(
            f"{folder.path} was trained on a task, which has no tokenizer; give a run on text"
        )
    folder.tokenizer_texts()  # refuses links out of the folder
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise InvalidInput(
            f"{folder.path} has no tokenizer that can be read: {remedy} ({describe_error(error)})"
        ) from error
    vocabulary = tokenizer.get_vocab()
    if vocabulary.keys() <= set(tokenizer.all_special_tokens):
        raise InvalidInput(
            f"{folder.path} has no tokenizer that can be read, because its vocabulary is missing:"
            f" {remedy}"
        )
    if (largest := max(vocabulary.values())) >= folder.config.vocab_size:
        raise InvalidInput(
            f"{folder.path}: the tokenizer has ids up to {largest:,}, but the model has a"
            f" vocabulary of {folder.config.vocab_size:,}; put back the tokenizer of this model"
        )
    return tokenizer


def new_text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text at the start of a document, as the model saw them in training."""
    ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    first = tokenizer.bos_token_id
    if first is not None and ids[:1] != [first]:
        ids = [first, *ids]
    if not ids and tokenizer.eos_token_id is not None:  # an empty prompt
        ids = [tokenizer.eos_token_id]
    if not ids:
        raise InvalidInput("the prompt has no tokens; give a prompt")
    return ids
