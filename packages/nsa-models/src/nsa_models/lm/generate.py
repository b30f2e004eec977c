"""Tokens one after another from a language model, over the caches of its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_core.errors import InvalidInput
from nsa_models.lm.model import Cache, LanguageModel


@torch.no_grad()
def advance(model: LanguageModel, caches: Sequence[Cache], tokens: torch.Tensor) -> torch.Tensor:
    """Read ``tokens`` int64 [B, n] behind what ``caches`` hold, and add them: logits fp32 [B,
    vocab_size] of the next.

    ``caches`` are those of :meth:`LanguageModel.new_caches`.
    """
    last = model.hidden(tokens, caches=caches)[:, -1]
    return torch.nn.functional.linear(last, model.embed.weight).float()


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
    """The new tokens, int64 [B, n], n <= max_new_tokens: fewer when every sequence has come to
    ``end``.

    What follows ``end`` in a sequence is ``end``. Temperature 0 takes the likeliest token;
    ``top_k`` draws among the k likeliest. The draws are the seed's, whatever was drawn before; they
    are made on the CPU.

    Raises:
        InvalidInput: an argument is out of range; all of them are named.
        Unsupported: no backend decodes here.
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
    if not 0 <= seed < 2**63:
        wrong.append(f"seed must lie in [0, 2^63), got {seed}")
    if wrong:
        raise InvalidInput("; ".join(wrong))
    generator = torch.Generator().manual_seed(seed)
    made = prompt.new_empty((len(prompt), 0))
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    tokens, caches = prompt, model.new_caches(len(prompt), prompt.shape[1] + max_new_tokens)
    for _ in range(max_new_tokens):
        logits = advance(model, caches, tokens)
        drawn = _draw(logits.cpu(), temperature, top_k, generator).to(prompt.device)
        if end is not None:
            drawn = drawn.masked_fill(ended, end)
            ended |= drawn == end
        tokens = drawn[:, None]
        made = torch.cat((made, tokens), dim=1)
        if bool(ended.all()):
            break
    return made


def _draw(
    logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> torch.Tensor:
    """logits [B, V] -> int64 [B]."""
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # The largest becomes 0: over a temperature near 0 it would be infinite, and NaN as a
    # probability. Over one that float32 rounds to 0, so would 0 be.
    ahead = logits - logits.amax(-1, keepdim=True)
    likely = (ahead / max(temperature, torch.finfo(ahead.dtype).tiny)).softmax(-1)
    drawn: torch.Tensor = torch.multinomial(likely, 1, generator=generator)
    return drawn[:, 0]
