"""benchmarks/study/recall.py: solvers find each answer in the decoded prompt; scores are right."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recall
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nsa_core.errors import InvalidInput

ROOT = Path(__file__).resolve().parents[2]
LENGTH, DEPTHS = 2048, (0.0, 0.3, 1.0)
# At most so many tokens from the place at the depth to the end of what must be found.
SPAN = {"key_value": 16, "variable": 48, "common_words": LENGTH * 18 // 73, "copy": 32}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of the sources of one package."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    files = sorted(ROOT.glob("packages/nsa-bench/src/**/*.py"))
    tokenizer.train([str(file) for file in files], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def filler(tokenizer: Tokenizer) -> Any:
    """Token ids of another package."""
    files = sorted(ROOT.glob("packages/nsa-verify/src/**/*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return np.array(tokenizer.encode(text).ids, np.uint16)


def value_of_key(prompt: str) -> tuple[str, str]:
    """Return the answer and the text whose place is the depth."""
    asked = re.findall(r"#define KEY_(\d+)$", prompt)[0]
    stated = dict(re.findall(r"\n#define KEY_(\d+)( \d+)\n", prompt))
    assert len(stated) == len(set(stated.values())) == 8
    return stated[asked], f"\n#define KEY_{asked}{stated[asked]}\n"


def value_of_variable(prompt: str) -> tuple[str, str]:
    (name,) = re.findall(r"\nassert\((var_\d+) ==$", prompt)
    stated = re.findall(r"\nint (var_\d+) = (\w+);\n", prompt)
    assert len(stated) == len(dict(stated)) == 12
    assert sum(value.isdigit() for _, value in stated) == 4
    assert name not in dict(stated).values()  # the last of its chain
    known: list[str] = []
    for variable, source in stated:
        assert source.isdigit() or source in known
        known.append(variable)
    while not name.isdigit():
        name, source = dict(stated)[name], name
    return f" {name}", f"\nint {source} = {name};\n"


def most_common_word(prompt: str) -> tuple[str, str]:
    (words,) = re.findall(r"^List of words:(.*)\nThe most common word is$", prompt)
    (first, often), (_, rarely) = Counter(words.split()).most_common(2)
    assert often >= 8 * rarely > 0
    return f" {first}", f" {first} "


def copied_text(tokenizer: Tokenizer, tokens: list[int]) -> tuple[str, str]:
    cue = tokenizer.decode(tokens[-32:-24])
    text = tokenizer.decode(tokens[:-34])
    assert text.count(cue) == 1
    # The copy ends where 24 tokens end; the text after it is not part of the answer.
    end = len(tokenizer.decode(tokens[-24:]))
    place = text.index(cue) + len(cue)
    return text[place : place + end], cue


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("task", recall.TASKS)
def test_a_solver_finds_each_answer_at_its_depth(
    task: str, depth: float, tokenizer: Tokenizer, filler: Any
) -> None:
    solvers = {"key_value": value_of_key, "variable": value_of_variable}
    solvers["common_words"] = most_common_word
    made = recall.examples(task, tokenizer, filler, LENGTH, depth, 4, 0)
    assert len({tuple(example.tokens) for example in made}) == 4
    for example in made:
        assert example[:3] == (task, LENGTH, depth)
        assert example.tokens.shape == (LENGTH,)
        tokens = example.tokens.tolist()
        prompt, answer = map(
            tokenizer.decode, (tokens[: -example.answer], tokens[-example.answer :])
        )
        solve = solvers.get(task)
        expected, start = solve(prompt) if solve else copied_text(tokenizer, tokens)
        assert answer == expected
        place = len(tokenizer.encode(prompt[: prompt.index(start)]).ids)
        assert place == pytest.approx(depth * (LENGTH - SPAN[task]), abs=LENGTH / 50)
        if task != "common_words":
            assert prompt.count(answer.strip()) == 1


def test_examples_depend_on_their_arguments_alone(tokenizer: Tokenizer, filler: Any) -> None:
    def rows(task: str, count: int, seed: int) -> list[list[int]]:
        made = recall.examples(task, tokenizer, filler, 512, 0.5, count, seed)
        return [example.tokens.tolist() for example in made]

    for task in recall.TASKS:
        assert rows(task, 2, 0) == rows(task, 3, 0)[:2] != rows(task, 2, 1)


@pytest.mark.parametrize("task", ["key_value", "variable"])
def test_the_text_does_not_have_the_answer(task: str, tokenizer: Tokenizer) -> None:
    numbers = np.random.default_rng(0).integers(1000, 10_000, 4000)
    filler = np.array(tokenizer.encode(" ".join(map(str, numbers))).ids)
    for example in recall.examples(task, tokenizer, filler, LENGTH, 0.5, 40, 0):
        answer = tokenizer.decode(example.tokens[-example.answer :]).strip()
        assert tokenizer.decode(example.tokens).count(answer) == 2


def test_text_that_repeats_itself_is_an_error(tokenizer: Tokenizer, filler: Any) -> None:
    with pytest.raises(InvalidInput, match="filler repeats itself"):
        recall.examples("copy", tokenizer, np.resize(filler[:50], 600), 512, 0, 1, 0)


VOCABULARY = 16


class FakeModel:
    """Predicts token 0 in the prompt and the right token in the answer, but for the errors."""

    output_weight = torch.eye(VOCABULARY)

    def __init__(self, answer: dict[tuple[int, ...], int], scale: float = 50.0) -> None:
        self.answer, self.scale = answer, scale

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        following = tokens.roll(-1, 1)
        for row, predicted in zip(tokens.tolist(), following):
            predicted[: -self.answer[tuple(row)] - 1] = 0
        return self.scale * torch.nn.functional.one_hot(following, VOCABULARY).float()


@pytest.fixture
def questions() -> list[recall.Example]:
    """Five questions of 32 tokens, with answers of 1 to 5."""
    rng = np.random.default_rng(0)
    return [
        recall.Example("copy", 32, 0.0, rng.integers(1, VOCABULARY, 32), answer)
        for answer in (3, 1, 5, 2, 4)
    ]


def score(model: Any, questions: list[recall.Example]) -> dict[str, Any]:
    return recall.score(model, questions, 2)


def test_a_model_that_knows_every_answer(questions: list[recall.Example]) -> None:
    model = FakeModel({tuple(q.tokens): q.answer for q in questions})
    result = score(model, questions)
    assert result.pop("loss") == pytest.approx(0, abs=1e-6)
    facts = {"task": "copy", "length": 32, "depth": 0.0, "count": 5}
    assert result == {**facts, "correct": 1.0, "standard_error": 0.0}


@pytest.mark.parametrize("wrong", range(5))
def test_one_wrong_token_makes_one_answer_wrong(
    wrong: int, questions: list[recall.Example]
) -> None:
    # The model knows one token less of this answer than it needs.
    known = {tuple(q.tokens): q.answer - (i == wrong) for i, q in enumerate(questions)}
    result = score(FakeModel(known), questions)
    assert result["correct"] == 0.8
    assert result["standard_error"] == pytest.approx(math.sqrt(0.8 * 0.2 / 5))
    assert result["loss"] == pytest.approx(50 / 15)  # of 15 answer tokens


def test_a_model_that_knows_nothing_has_the_loss_of_chance(
    questions: list[recall.Example],
) -> None:
    result = score(FakeModel({tuple(q.tokens): q.answer for q in questions}, 0.0), questions)
    assert result["loss"] == pytest.approx(math.log(VOCABULARY))
    assert result["correct"] == 0
