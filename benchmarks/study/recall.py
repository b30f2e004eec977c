"""Questions about something far back in a row of tokens, and the score of a model's answers.

A question is a prompt, then the answer, in the forms of source code, as the model knows no others:

- ``key_value``: one of 8 definitions ``#define KEY_48213 7390`` begins again, without its value.
- ``variable``: of 4 chains such as ``int var_31140 = 7390;``, ``int var_58221 = var_31140;``, ``int
  var_77403 = var_58221;``, one is asked for the value of its last: ``assert(var_77403 ==``.
- ``common_words``: in a list of words, one occurs 9 times as often as each of the 64 others.
- ``copy``: 8 tokens of the text itself occur again; the answer is the 24 tokens that follow them.

The first two hide their statements in text, by overwriting it. A model that sees only that a value
is due, and takes any of those stated, is right in an eighth and in a quarter of the questions.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from nsa_core.errors import InvalidInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from nsa_models.lm.model import LanguageModel

# Chains, statements of a chain, the start and the end of a statement, and the question's start.
_STATED = {
    "key_value": (8, 1, "\n#define KEY_{}", "\n", "\n#define KEY_{}"),
    "variable": (4, 3, "\nint var_{} =", ";\n", "\nassert(var_{} =="),
}
TASKS = (*_STATED, "common_words", "copy")
_OTHER_WORDS, _OFTEN, _CUE, _COPIED, _ATTEMPTS = 64, 9, 8, 24, 200


class Example(NamedTuple):
    """One question: ``tokens``, int64 [length], of which the last ``answer`` are the answer.

    ``depth`` is the place of the definition, the first statement of the chain, the part of the list
    with the common word, or the copied text: 0 at the start of the prompt, 1 at its end.
    """

    task: str
    length: int
    depth: float
    tokens: np.ndarray
    answer: int


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Writes the body of a question, its cue and its answer."""

    tokenizer: Tokenizer
    filler: np.ndarray
    length: int
    depth: float

    def stated(self, rng: np.random.Generator, task: str) -> tuple[Any, ...]:
        count, links, start, end, cue = _STATED[task]
        names = rng.choice(np.arange(10_000, 100_000), (count, links), replace=False)
        values = rng.choice(np.arange(1_000, 10_000), count, replace=False)
        statements = [
            self.encode(start.format(name), f" {source}", end)
            for chain, value in zip(names, values)
            for name, source in zip(chain, (value, *(f"var_{name}" for name in chain)))
        ]
        question = self.encode(cue.format(names[0, -1])), self.encode(f" {values[0]}")
        body = self.text(rng, len(question[0] + question[1]))
        # The first chain starts at the depth and reaches the end; the others are anywhere.
        width = max(map(len, statements))
        first = round(self.depth * (len(body) - links * width))
        asked = first + np.arange(links) * ((len(body) - first) // links)
        grid = np.arange(0, len(body) - width + 1, width)
        free = grid[(abs(grid[:, None] - asked) >= width).all(1)]
        others = np.sort(rng.choice(free, (count - 1, links), replace=False))
        for place, statement in zip(np.vstack((asked, others)).flat, statements):
            body[place : place + len(statement)] = statement
        return body, *question

    def common_words(self, rng: np.random.Generator) -> tuple[Any, ...]:
        common, *others = rng.choice(self.words, 1 + _OTHER_WORDS, replace=False)
        heading, cue = self.encode("List of words:"), self.encode("\nThe most common word is")
        room = self.length - len(heading) - len(cue) - 1
        times = room * _OFTEN // (_OFTEN + _OTHER_WORDS)
        first = round(self.depth * (room - 2 * times))
        words = rng.permutation(np.resize(others, room - times))
        words = np.insert(words, first + np.arange(times), common)  # every second word of one part
        return np.concatenate((heading, words)), cue, [common]

    def copy(self, rng: np.random.Generator) -> tuple[Any, ...]:
        end = self.encode("\n\n")
        body = self.text(rng, len(end) + _CUE + _COPIED)
        first = round(self.depth * (len(body) - _CUE - _COPIED))
        cue, answer, _ = np.split(body[first:], (_CUE, _CUE + _COPIED))
        return body, [*end, *cue], answer

    def encode(self, *texts: str) -> list[int]:
        """Return the tokens of each text, so that the same text always has the same tokens."""
        encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [token for text in encoded for token in text.ids]

    @functools.cached_property
    def words(self) -> list[int]:
        """The tokens that are a space and a word of at least 4 letters."""
        ids = range(self.tokenizer.get_vocab_size())
        return [i for i in ids if re.fullmatch(" [a-z]{4,}", self.tokenizer.decode([i]))]

    def text(self, rng: np.random.Generator, rest: int) -> np.ndarray:
        """Return a random piece of the filler, for a prompt with ``rest`` other tokens."""
        first = rng.integers(len(self.filler) - self.length + 1)
        return self.filler[first : first + self.length - rest].astype(np.int64)


def examples(
    task: str,
    tokenizer: Tokenizer,
    filler: np.ndarray,
    length: int,
    depth: float,
    count: int,
    seed: int,
) -> list[Example]:
    """Return ``count`` questions, the same for the same arguments.

    Args:
        task: One of :data:`TASKS`.
        tokenizer: The tokenizer of the model, a byte-level BPE.
        filler: Token ids [N] of held-out text, at least ``length``.
        length: Number of tokens of each question, with its answer; at least 512.
        depth: See :class:`Example`.
        count: Number of questions; a larger one adds to those of a smaller one.
        seed: A number >= 0.

    Raises:
        InvalidInput: The filler repeats itself.
    """
    writer = _Writer(tokenizer, filler, length, depth)
    key = (seed, TASKS.index(task), length, round(1e6 * depth))
    found: list[Example] = []
    for index in range(count):
        for attempt in range(_ATTEMPTS):
            rng = np.random.default_rng([*key, index, attempt])
            draft = writer.stated(rng, task) if task in _STATED else getattr(writer, task)(rng)
            body, cue, answer = (text.strip() for text in tokenizer.decode_batch(draft))
            once = {"copy": (cue, answer), "common_words": ()}.get(task, (answer,))
            if all(body.count(text) == 1 for text in once):
                tokens = np.concatenate(draft).astype(np.int64)
                found.append(Example(task, length, depth, tokens, len(draft[-1])))
                break
        else:
            raise InvalidInput(f"filler repeats itself: in {_ATTEMPTS} texts, no answer was unique")
    return found


@torch.no_grad()
def score(model: LanguageModel, examples: Sequence[Example], batch: int) -> dict[str, Any]:
    """Return how well a model answers questions of one length, ``batch`` at a time.

    The prompt and the right answer go through the model in one pass: greedy generation gives the
    right answer if and only if each of its tokens is the most likely one here.

    Returns:
        The task, length and depth of the questions, their ``count``, ``correct``, the share of
        right answers, its ``standard_error`` over questions, and ``loss`` in nats per answer token.
    """
    device, facts = model.output_weight.device, examples[0]._asdict()
    right, loss = 0, 0.0
    for start in range(0, len(examples), batch):
        part = examples[start : start + batch]
        tokens = torch.from_numpy(np.stack([example.tokens for example in part])).to(device)
        answers = torch.tensor([example.answer for example in part], device=device)
        longest = int(answers.max())
        # The logits of the last tokens alone: those of a whole row would fill gigabytes.
        hidden = model.hidden(tokens)[:, -longest - 1 : -1]
        logits, targets = F.linear(hidden, model.output_weight).float(), tokens[:, -longest:]
        asked = torch.arange(longest, 0, -1, device=device) <= answers[:, None]
        loss += float(F.cross_entropy(logits[asked], targets[asked], reduction="sum"))
        right += int(((logits.argmax(-1) == targets) | ~asked).all(1).sum())
    share = right / len(examples)
    return {name: facts[name] for name in ("task", "length", "depth")} | {
        "count": len(examples),
        "correct": share,
        "standard_error": (share * (1 - share) / len(examples)) ** 0.5,
        "loss": loss / sum(example.answer for example in examples),
    }
