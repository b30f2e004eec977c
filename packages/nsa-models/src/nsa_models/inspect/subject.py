"""The model that is inspected: of a checkpoint, or with untrained weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from nsa_core import NSAttention
from nsa_core.errors import InvalidInput
from nsa_core.limits import integer_problems
from nsa_models.inspect.collect import Inspection, inspect_model
from nsa_models.lm.config import size
from nsa_models.lm.config_json import NSA_TYPES
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.run_folder import ON_TASK
from nsa_models.lm.tokens import ByteTokenizer, Tokenizer

DEFAULT_TOKENS, _MAX_DEFAULT_TOKENS = 1024, 2048


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model and the facts that its pictures state.

    Attributes:
        model: The model, on its device and in its dtype.
        tokenizer: Its tokenizer.
        weights: Description of the weights.
        trained: Whether the weights were trained.
        max_tokens: Number of tokens to which a text is cut by default: the length of a row in
            training, or twice the tokens that a query selects if that is more, at most 2048; 1024
            for untrained weights.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    weights: str
    trained: bool
    max_tokens: int


def open_subject(
    checkpoint: str | Path | None = None,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    backends: str | Mapping[str, str] | None = None,
) -> Subject:
    """Open a model folder, or build the model `tiny` with untrained weights.

    Args:
        checkpoint: A model folder with NSA; None builds an untrained model over bytes.
        seed: Seed of the untrained weights.
        device: Device of the model.
        dtype: Dtype of the model.
        backends: As in :class:`nsa_core.NSAttention`.

    Raises:
        InvalidInput: The folder cannot be read, its model has dense attention, or it has no
            tokenizer.
        BackendUnavailable: safetensors or tokenizers is not installed.
    """
    if checkpoint is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = LanguageModel(size("tiny"), backends)
        weights = f"untrained weights, seed {seed}"
        return Subject(model.to(device, dtype), ByteTokenizer(), weights, False, DEFAULT_TOKENS)
    folder = open_folder(checkpoint, types=NSA_TYPES)
    tokenizer, training = folder.tokenizer(), folder.training
    if tokenizer is None:
        reason = "has no tokenizer.json; give a folder that has one"
        reason = ON_TASK if training is not None else reason
        raise InvalidInput(f"checkpoint: {folder.path} {reason}")
    weights, length = f"{folder.config.n_layers} layers", _MAX_DEFAULT_TOKENS
    if training is not None:
        name = Path(training.data.data).name
        weights += f", trained for {training.step:,} steps on {name}"
        length = training.data.length
    model = folder.model(backends).to(device, dtype)
    # Queries choose beyond n * l' tokens; a model trained on shorter rows never has.
    configs = [module.config for module in model.modules() if isinstance(module, NSAttention)]
    chosen = [config.num_selected_blocks * config.select_block_size for config in configs]
    length = max(length, 2 * min(chosen))
    return Subject(model, tokenizer, weights, True, min(length, _MAX_DEFAULT_TOKENS))


def inspect_text(
    text: str,
    checkpoint: str | Path | Subject | None = None,
    *,
    source: str = "text",
    max_tokens: int | None = None,
) -> Inspection:
    """Run a model over a text and record the selection of every layer.

    The model reads the token at the start of a document before the text, as in training.

    Args:
        text: The text.
        checkpoint: A model folder, or a model of :func:`open_subject`; None takes an untrained
            model, whose pictures say so.
        source: Name of the text, for titles.
        max_tokens: Maximum number of tokens; the text is cut after them. The default is
            :attr:`Subject.max_tokens`.

    Returns:
        The selections, gates and shares of dense attention's probability.

    Raises:
        InvalidInput: The text is empty or too short, or the folder cannot be used.
        BackendUnavailable: A required library is not installed.

    Example:
        >>> inspection = inspect_text("a text of many words " * 20)
        >>> len(inspection.layers), inspection.trained
        (2, False)
    """
    if problems := integer_problems("max_tokens", max_tokens, optional=True):
        raise InvalidInput(problems[0])
    if not text.strip():
        raise InvalidInput(f"{source} must contain text, got only white space; give another text")
    subject = checkpoint if isinstance(checkpoint, Subject) else open_subject(checkpoint)
    tokens = [subject.tokenizer.end, *subject.tokenizer.encode(text)]
    limit = subject.max_tokens if max_tokens is None else max_tokens
    return inspect_model(
        subject.model,
        torch.tensor(tokens[:limit]),
        subject.tokenizer,
        source=source,
        weights=subject.weights,
        trained=subject.trained,
        total_tokens=len(tokens),
    )
