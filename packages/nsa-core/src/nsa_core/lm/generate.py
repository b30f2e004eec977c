"""Tokens one after another from a language model.

:func:`advance` is the only place that knows how what came before is kept. Today it keeps the tokens and reads them all
again at every step.
"""

from __future__ import annotations

import torch

from nsa_core.errors import InvalidInput
from nsa_core.lm.model import LanguageModel

Cache = torch.Tensor  # int64 [B, S]: every token so far


def advance(model: LanguageModel, cache: Cache | None, tokens: torch.Tensor) -> tuple[torch.Tensor, Cache]:
    """Read ``tokens`` int64 [B, n] behind what ``cache`` holds.

    Returns:
        logits fp32 [B, vocab_size] of the token after the last, and the cache that holds them too.
    """
    cache = tokens if cache is None else torch.cat((cache, tokens), dim=1)
    last = model.hidden(cache)[:, -1]
    return torch.nn.functional.linear(last, model.embed.weight).float(), cache


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: torch.Tensor,  # int64 [B, S], S >= 1
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    end: int | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """The new tokens, int64 [B, n], n <= max_new_tokens: fewer when every sequence has come to ``end``.

    What follows ``end`` in a sequence is ``end``. Temperature 0 takes the likeliest token; ``top_k`` draws among the k
    likeliest. The draws are the seed's, whatever was drawn before; they are made on the CPU.

    Raises:
        InvalidInput: an argument is out of range; all of them are named.
    """
    wrong = []
    if prompt.dim() != 2 or prompt.shape[1] < 1:
        wrong.append(f"prompt must be [B, S] with S >= 1, got {list(prompt.shape)}")
    if max_new_tokens < 0:
        wrong.append(f"max_new_tokens must be >= 0, got {max_new_tokens}")
    if not 0 <= temperature < float("inf"):
        wrong.append(f"temperature must be finite and >= 0, got {temperature}")
    if top_k is not None and top_k < 1:
        wrong.append(f"top_k must be >= 1, got {top_k}")
    if wrong:
        raise InvalidInput("; ".join(wrong))
    generator = torch.Generator().manual_seed(seed)
    made = prompt.new_empty((len(prompt), 0))
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    tokens, cache = prompt, None
    for _ in range(max_new_tokens):
        logits, cache = advance(model, cache, tokens)
        drawn = _draw(logits.cpu(), temperature, top_k, generator).to(prompt.device)
        if end is not None:
            drawn = drawn.masked_fill(ended, end)
            ended |= drawn == end
        tokens = drawn[:, None]
        made = torch.cat((made, tokens), dim=1)
        if bool(ended.all()):
            break
    return made


def _draw(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> torch.Tensor:
    """logits [B, V] -> int64 [B]."""
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    drawn: torch.Tensor = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
    return drawn[:, 0]
