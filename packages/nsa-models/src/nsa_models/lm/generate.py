"""Generate tokens from a language model with the caches of its layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nsa_core.errors import InvalidInput
from nsa_core.limits import integer_problems
from nsa_models.lm.model import Cache, LanguageModel


@torch.no_grad()
def advance(model: LanguageModel, caches: Sequence[Cache], tokens: torch.Tensor) -> torch.Tensor:
    """Append tokens to the caches and return the logits of the next token.

    Args:
        model: The language model.
        caches: From :meth:`LanguageModel.new_caches`; they are extended.
        tokens: int64 [B, n], the next tokens of each sequence.

    Returns:
        fp32 [B, vocab_size].
    """
    last = model.hidden(tokens, caches=caches)[:, -1]
    return torch.nn.functional.linear(last, model.embed.weight).float()


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: torch.Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    end: int | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Generate tokens after a prompt.

    Args:
        model: The language model.
        prompt: int64 [B, S], S >= 1.
        max_new_tokens: Maximum number of new tokens.
        temperature: Sampling temperature; 0 takes the most likely token.
        top_k: Sample from the k most likely tokens only.
        end: Token id that ends a sequence; later tokens of that sequence are ``end`` too.
            Generation stops when every sequence has ended.
        seed: Seed of the sampling, which runs on the CPU and ignores PyTorch's random state.

    Returns:
        The new tokens, int64 [B, n] with n <= max_new_tokens.

    Raises:
        InvalidInput: An argument is out of range; the message names every such argument.
        Unsupported: No backend can decode here.

    Example:
        >>> model = LanguageModel(size("tiny"))
        >>> generate(model, torch.zeros(1, 1, dtype=torch.long), 8)
    """
    errors = []
    if prompt.dim() != 2 or prompt.shape[1] < 1:
        errors.append(f"prompt must be [B, S] with S >= 1, got {list(prompt.shape)}")
    errors += integer_problems("max_new_tokens", max_new_tokens, 0)
    if not 0 <= temperature < float("inf"):
        errors.append(f"temperature must be finite and >= 0, got {temperature}")
    errors += integer_problems("top_k", top_k, optional=True)
    errors += integer_problems("seed", seed, 0)
    if errors:
        raise InvalidInput("; ".join(errors))
    generator = torch.Generator().manual_seed(seed)
    generated = prompt.new_empty((len(prompt), 0))
    ended = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    tokens, caches = prompt, model.new_caches(len(prompt), prompt.shape[1] + max_new_tokens)
    for _ in range(max_new_tokens):
        logits = advance(model, caches, tokens)
        next_token = _sample(logits.cpu(), temperature, top_k, generator).to(prompt.device)
        if end is not None:
            next_token = next_token.masked_fill(ended, end)
            ended |= next_token == end
        tokens = next_token[:, None]
        generated = torch.cat((generated, tokens), dim=1)
        if bool(ended.all()):
            break
    return generated


def _sample(
    logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> torch.Tensor:
    """Sample one token per sequence: logits [B, V] -> int64 [B]."""
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    # Subtract the maximum first: a logit divided by a temperature near 0 could overflow to inf, and
    # softmax would return NaN. The clamp keeps the temperature from rounding to 0 in float32.
    shifted = logits - logits.amax(-1, keepdim=True)
    probabilities = (shifted / max(temperature, torch.finfo(shifted.dtype).tiny)).softmax(-1)
    tokens: torch.Tensor = torch.multinomial(probabilities, 1, generator=generator)
    return tokens[:, 0]
