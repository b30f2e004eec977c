"""Tiny models in folders, 32 ragged requests, and the greedy tokens of `generate`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_models import nsa_model

VOCAB = 101
PREFIX = 200  # tokens, of which every request has a part


class Request(NamedTuple):
    prompt: list[int]
    new: int  # tokens to generate


def saved_model(folder: Path, kind: str, **changes: Any) -> Any:
    """Save a model with a tokenizer whose words are w0, w1, ..., and return it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "max_position_embeddings": 1024}
    # Large weights, so that greedy tokens vary and no two logits are close.
    model = nsa_model(kind, initializer_range=0.25, **sizes, **changes)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return model


def requests(count: int = 32) -> list[Request]:
    """Requests of 2 to 230 tokens, which begin with parts of one prefix."""
    rng = random.Random(0)
    prefix = [rng.randrange(1, VOCAB) for _ in range(PREFIX)]
    drawn = []
    for _ in range(count):
        shared = rng.choice((1, 5, 16, 40, 70, 130, PREFIX))
        own = [rng.randrange(1, VOCAB) for _ in range(rng.choice((1, 3, 17, 30)))]
        drawn.append(Request(prefix[:shared] + own, rng.choice((4, 12, 40))))
    return drawn


@torch.no_grad()
def greedy(model: Any, request: Request) -> list[int]:
    """Return the tokens of `generate` for one request alone."""
    prompt = torch.tensor([request.prompt])
    tokens = model.generate(prompt, max_new_tokens=request.new, do_sample=False)
    new: list[int] = tokens[0, len(request.prompt) :].tolist()
    return new
