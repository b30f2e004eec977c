"""Load the model and the tokenizer of a folder with transformers, as data of a stranger.

transformers gets tensors, a configuration of known fields and a tokenizer.json, and no path: beside
the files of a model it would read adapters, code and kernels that the folder names.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_core.util.text import describe_error
from nsa_models.hf.configs import ATTENTION
from nsa_models.hf.models import MODELS
from nsa_models.lm.model_folder import ModelFolder
from nsa_models.lm.run_folder import ON_TASK
from nsa_models.lm.tokens import TOKENIZER, TOKENIZER_CONFIG, encoding


def load_model(folder: ModelFolder, dtype: str | torch.dtype = "auto", **options: Any) -> Any:
    """Load the model of a checked folder.

    Nothing is downloaded, no code and no kernel that the folder names is loaded, and only
    safetensors are read.

    Args:
        folder: The folder.
        dtype: The dtype of the model; "auto": that of config.json, or of the weights.
        **options: Fields of the configuration in place of those of config.json.

    Raises:
        InvalidInput: transformers cannot build the model.
    """
    is_nsa = folder.config.attention == "nsa"
    model_class = MODELS[folder.values["model_type"].removeprefix("nsa_")]
    if not is_nsa:
        model_class = model_class.__bases__[1]
    try:
        config = model_class.config_class.from_dict({**folder.values, **options})
        return model_class.from_pretrained(
            None,
            config=config,
            state_dict=folder.tensors(),
            dtype=dtype,
            attn_implementation=ATTENTION if is_nsa else "sdpa",
        )
    except (InvalidInput, BackendUnavailable):
        raise
    except Exception as error:  # the checks of transformers raise errors of several libraries
        raise InvalidInput(f"{folder.path} cannot be read: {describe_error(error)}") from error


def load_tokenizer(folder: ModelFolder) -> Any:
    """Load the tokenizer.json of a checked folder; tokenizer_config.json names its special tokens.

    Raises:
        InvalidInput: The folder has no tokenizer.json; or it cannot be read, has no vocabulary, or
            has ids that the model does not have.
    """
    if folder.training is not None and folder.training.tokenizer is None:
        raise InvalidInput(f"{folder.path} {ON_TASK}")
    own = folder.file_tokenizer()
    if own is None:
        raise InvalidInput(
            f"{folder.path} has no tokenizer that can be read: copy the {TOKENIZER} of the model"
            " there"
        )
    values = folder.companion(TOKENIZER_CONFIG)
    specials = {}
    for name in ("bos_token", "eos_token"):
        token = values.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and own.library.token_to_id(text) is not None:
            specials[name] = text
    return PreTrainedTokenizerFast(tokenizer_object=own.library, **specials)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text.

    Raises:
        InvalidInput: The tokenizer has no id for a part of the text.
    """
    with encoding():
        ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
    return ids


def new_text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text at the start of a document, as the model saw them in training."""
    ids = text_ids(tokenizer, text)
    first = tokenizer.bos_token_id
    if first is not None and ids[:1] != [first]:
        ids = [first, *ids]
    if not ids and tokenizer.eos_token_id is not None:  # an empty prompt
        ids = [tokenizer.eos_token_id]
    if not ids:
        raise InvalidInput("the prompt has no tokens; give a prompt")
    return ids
