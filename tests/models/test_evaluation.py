"""`nsa_models.evaluation`: scores equal those computed by hand; errors name what is wrong."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pathlib
import sys
import types
from typing import Any

import pytest
import torch

from evaluation_tasks import CHOICES, DATA, QUESTIONS, write_tasks
from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_models.evaluation.run import evaluate
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.tokens import ByteTokenizer


@pytest.fixture
def task_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_tasks(tmp_path / "tasks")


@pytest.fixture
def trained(write_checkpoint: Any, config: Any) -> pathlib.Path:
    """Return a checkpoint of `nsa train` on bytes, with random weights."""
    model = LanguageModel(config)
    with torch.no_grad():  # logits of some size
        for parameter in model.parameters():
            parameter.mul_(3)
    path: pathlib.Path = write_checkpoint(model, ByteTokenizer(), length=64)
    return path


@pytest.fixture
def llama(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a folder of transformers: a tiny Llama over bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", pad_token="<e>")
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=256,
        bos_token_id=256,
        pad_token_id=256,
        initializer_range=0.3,
    )
    folder = tmp_path / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def log_probability(logits: torch.Tensor, tokens: list[int], count: int) -> float:
    """Return the log-probability of the last ``count`` tokens; logits [S, V] of tokens[:-1]."""
    rows = logits[-count:].double().log_softmax(-1)
    return float(rows.gather(1, torch.tensor(tokens[-count:])[:, None]).sum())


def by_hand(logits_of: Any, encode: Any, end: int | None) -> dict[str, float]:
    """Return the accuracy and the bits per byte; ``end`` begins each text if not None."""
    hits, total = 0, 0.0
    start = [] if end is None else [end]
    for i, question in enumerate(QUESTIONS):
        scores = []
        for choice in CHOICES:
            tokens = [*start, *encode(f"{question} {choice}")]
            logits = logits_of(tokens[:-1])
            scores.append(log_probability(logits, tokens, len(choice) + 1))
        hits += scores.index(max(scores)) == i
        tokens = [256 if end is None else end, *encode(question)]
        total += log_probability(logits_of(tokens[:-1]), tokens, len(tokens) - 1)
    size = sum(len(question) for question in QUESTIONS)
    return {"acc": hits / 3, "bits_per_byte": -total / size / math.log(2)}


def check_scores(scores: list[Any], expected: dict[str, float]) -> None:
    assert [(score.task, score.metric) for score in scores] == [
        ("capitals", "acc"),
        ("text", "bits_per_byte"),
    ]
    accuracy, bits = scores
    assert accuracy.value == pytest.approx(expected["acc"])
    assert accuracy.stderr is not None
    assert accuracy.examples == 3
    assert accuracy.higher_is_better is True
    assert bits.value == pytest.approx(expected["bits_per_byte"], rel=1e-5)
    assert bits.stderr is None
    assert bits.higher_is_better is False


@pytest.mark.slow
@torch.no_grad()
def test_a_model_of_transformers_scores_as_by_hand(llama, task_folder, monkeypatch, caplog, capfd):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    imported, import_module = [], importlib.import_module

    def record(name: str, *rest: Any) -> Any:
        imported.append(name)
        return import_module(name, *rest)

    monkeypatch.setattr(importlib, "import_module", record)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained
    encode = tokenizer(llama).encode
    expected = by_hand(lambda ids: model(torch.tensor([ids])).logits[0], encode, None)
    for batch in (1, 4):
        scores = evaluate(llama, ["capitals", "text"], task_folder=task_folder, batch=batch)
        check_scores(scores, expected)
    (score,) = evaluate(llama, ["capitals"], task_folder=task_folder, limit=2)
    assert score.examples == 2
    (short,) = evaluate(llama, ["text"], task_folder=task_folder, lengths=[8, 4])
    assert short.value != pytest.approx(expected["bits_per_byte"], rel=1e-5)
    # what tasks that make their texts, such as ruler, read
    options = json.loads((task_folder / "options.json").read_text())
    assert options["max_seq_lengths"] == [8, 4]
    assert options["tokenizer"] == str(llama)
    (low,) = evaluate(llama, ["text"], task_folder=task_folder, dtype="bfloat16")
    assert low.value == pytest.approx(expected["bits_per_byte"], rel=0.05)
    assert low.value != pytest.approx(expected["bits_per_byte"], rel=1e-5)
    assert imported.count("nsa_models.hf") == 5  # registers its models
    assert not [record for record in caplog.records if "pretrained" in record.message]
    assert not [record for record in caplog.records if "--metadata" in record.message]
    assert "requests" not in capfd.readouterr().err  # no progress bars in a pipe


@pytest.mark.slow
@torch.no_grad()
def test_a_checkpoint_of_nsa_train_scores_as_by_hand(trained, task_folder, capfd):
    from nsa_models.lm import checkpoint

    model = checkpoint.read(trained).model().eval()
    tokenizer = ByteTokenizer()
    head = model.embed.weight
    expected = by_hand(
        lambda ids: model.hidden(torch.tensor([ids]))[0] @ head.mT, tokenizer.encode, tokenizer.end
    )
    for batch in (1, 4):
        scores = evaluate(trained, ["capitals", "text"], task_folder=task_folder, batch=batch)
        check_scores(scores, expected)
    folder = evaluate(
        trained.parent, ["capitals"], task_folder=task_folder, backends={"sel": "sdpa"}
    )
    assert folder == scores[:1]
    (low,) = evaluate(trained, ["text"], task_folder=task_folder, dtype="bfloat16")
    assert low.value == pytest.approx(expected["bits_per_byte"], rel=0.05)
    assert low.value != pytest.approx(expected["bits_per_byte"], rel=1e-5)
    with pytest.raises(InvalidInput, match="nothere"):
        evaluate(trained, ["text"], task_folder=task_folder, backends={"sel": "nothere"})


@pytest.mark.slow
def test_texts_longer_than_the_model_reads_are_cut(trained):
    """Scores of the last tokens of a text use the tokens before them only."""
    from nsa_models.evaluation.trained import TrainedModel

    long, short = TrainedModel(trained), TrainedModel(trained, max_length=8)
    assert long.max_length == 64
    tokens = long.tok_encode("a text of more than eight bytes")
    assert tokens[0] == long.eot_token_id
    assert long.tok_encode("ab", add_special_tokens=False) == [97, 98]
    logits = long.model.hidden(torch.tensor([tokens]))[0, -1] @ long.model.embed.weight.mT
    likely = int(logits.argmax())
    other = [("", tokens, [(likely + 1) % 256])]
    pairs = long._loglikelihood_tokens([("", tokens, [likely]), *other])
    assert [greedy for _, greedy in pairs] == [True, False]
    (cut,) = short._loglikelihood_tokens([("", tokens[:-3], tokens[-3:])])
    (end,) = long._loglikelihood_tokens([("", tokens[-9:-3], tokens[-3:])])
    assert cut == pytest.approx(end)
    request = types.SimpleNamespace(args=("a text of more than eight bytes",))
    (whole,), (windows,) = (m.loglikelihood_rolling([request]) for m in (long, short))
    assert whole != pytest.approx(windows)
    (sum_of_all,) = long._loglikelihood_tokens([("", tokens[:1], tokens[1:])])
    assert whole == pytest.approx(sum_of_all[0], rel=1e-6)


@pytest.mark.slow
def test_continuations_end_at_the_first_stop_string(trained, monkeypatch):
    from nsa_models.evaluation import trained as module

    model, calls = module.TrainedModel(trained, max_length=20), []

    def generate(lm: Any, prompt: torch.Tensor, count: int, **options: Any) -> torch.Tensor:
        calls.append((prompt.shape[1], count, options["temperature"], options["end"]))
        return torch.tensor([list(b"one. two; three")])

    monkeypatch.setattr(module, "generate", generate)
    options = [
        {"until": [";", "."], "max_gen_toks": 6},
        {"until": "two", "do_sample": True, "temperature": 0.7},
        {"temperature": 0.7},
    ]
    requests = [types.SimpleNamespace(args=("a long text of many words", o)) for o in options]
    assert model.generate_until(requests) == ["one", "one. ", "one. two; three"]
    # the context leaves room for the new tokens
    assert calls == [(14, 6, 0.0, 255), (1, 19, 0.7, 255), (1, 19, 0.0, 255)]


@pytest.mark.slow
def test_generated_answers_are_compared(trained, task_folder, monkeypatch):
    from nsa_models.evaluation import trained as module

    answer = torch.tensor([list(b" Rome.")])
    monkeypatch.setattr(module, "generate", lambda *_, **__: answer)
    (score,) = evaluate(trained, ["spell"], task_folder=task_folder)
    assert (score.metric, score.value) == ("exact_match", pytest.approx(0.0))
    answer = torch.tensor([list(b"Rome.")])
    (score,) = evaluate(trained, ["spell"], task_folder=task_folder)
    assert score.value == pytest.approx(1 / 3)


@pytest.mark.slow
@pytest.mark.parametrize(("own", "fewshot", "count"), [(None, None, 0), (1, None, 1), (1, 2, 2)])
def test_solved_examples_stand_before_the_question(
    trained, task_folder, monkeypatch, own, fewshot, count
):
    from nsa_models.evaluation.trained import TrainedModel

    file, contexts = task_folder / "capitals.yaml", []

    def record(model: TrainedModel, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        contexts.extend(context for (context, _), *_ in requests)
        return [(0.0, False)] * len(requests)

    if own is not None:
        file.write_text(f"{file.read_text()}num_fewshot: {own}\n")
    monkeypatch.setattr(TrainedModel, "_loglikelihood_tokens", record)
    evaluate(trained, ["capitals"], task_folder=task_folder, fewshot=fewshot)
    assert {context.count("The capital of") for context in contexts} == {count + 1}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2, 9])
def test_a_limit_takes_examples_of_every_length(trained, task_folder, monkeypatch, limit):
    """ruler lists all examples of one length before those of the next."""
    from nsa_models.evaluation.trained import TrainedModel

    contexts: list[str] = []

    def record(model: TrainedModel, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        contexts.extend(context for (context, _), *_ in requests)
        return [(0.0, False)] * len(requests)

    monkeypatch.setattr(TrainedModel, "_loglikelihood_tokens", record)
    scores = evaluate(trained, ["made"], task_folder=task_folder, lengths=[32, 64], limit=limit)
    assert {score.examples for score in scores} == {2 * min(limit, 3)}
    expected = [f"{q} of {n} tokens" for n in (32, 64) for q in "abc"[:limit]]
    assert sorted(contexts) == sorted(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ("OSError('no network')", BackendUnavailable, "data of offline cannot be .*no network"),
        ("FileNotFoundError(2, 'gone')", BackendUnavailable, "data of offline .* gone"),
        ("ImportError('no jieba')", BackendUnavailable, "offline needs more libraries.*no jieba"),
        ("ValueError('too short')", InvalidInput, "offline cannot run on this model.*too short"),
        ("OSError(28, 'disk full')", OSError, "disk full"),
    ],
)
def test_errors_of_a_task_name_it(trained, task_folder, error, kind, message):
    (task_folder / "data.py").write_text(DATA.replace("ERROR", error))
    with pytest.raises(kind, match=message):
        evaluate(trained, ["offline"], task_folder=task_folder)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "nn"])
def test_a_dtype_that_parameters_cannot_have_is_named(trained, dtype):
    with pytest.raises(InvalidInput, match=f"dtype must be .*, got '{dtype}'"):
        evaluate(trained, ["text"], dtype=dtype)


@pytest.mark.slow
def test_unknown_tasks_are_named(trained, task_folder):
    with pytest.raises(InvalidInput, match=r"got 'capitols', 'x-y'; did you mean 'capitals'\?"):
        evaluate(trained, ["capitols", "text", "x-y"], task_folder=task_folder)


@pytest.mark.slow
def test_a_folder_that_transformers_cannot_load_is_named(tmp_path, task_folder):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(InvalidInput, match=f"transformers cannot load checkpoint {tmp_path}"):
        evaluate(tmp_path, ["capitals"], task_folder=task_folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_model_without_a_tokenizer_is_named(tmp_path, task_folder, kind):
    """transformers builds an empty tokenizer for Qwen2, with which every text has loss 0."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=257, num_key_value_heads=1, **sizes)
    folder = tmp_path / kind
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    with pytest.raises(InvalidInput, match=f"{folder} has no tokenizer that can be read"):
        evaluate(folder, ["text"], task_folder=task_folder)


@pytest.mark.slow
@torch.no_grad()
def test_a_converted_model_scores_as_by_hand(llama, task_folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import nsa_models.hf as hf
    from hf_models import NSA

    folder = tmp_path / "nsa"
    hf.convert_checkpoint(llama, folder, NSA)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, hf.NSALlamaForCausalLM)
    encode = AutoTokenizer.from_pretrained(folder).encode
    expected = by_hand(lambda ids: model(torch.tensor([ids])).logits[0], encode, None)
    for batch in (1, 4):
        scores = evaluate(folder, ["capitals", "text"], task_folder=task_folder, batch=batch)
        check_scores(scores, expected)
    (score,) = evaluate(folder, ["spell"], task_folder=task_folder, batch=3)
    assert score.examples == 3


@pytest.mark.slow
def test_a_checkpoint_without_text_is_refused(write_checkpoint, config, task_folder):
    path = write_checkpoint(LanguageModel(config), data="uniform")
    with pytest.raises(InvalidInput, match="trained on the task uniform: it has no text"):
        evaluate(path, ["capitals"], task_folder=task_folder)


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(InvalidInput, match="got nowhere, which does not exist"):
        evaluate("nowhere", ["capitals"])
    with pytest.raises(InvalidInput, match=r"must hold config\.json.* got " + str(tmp_path)):
        evaluate(tmp_path, ["capitals"])


def test_arguments_that_do_not_fit_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        InvalidInput, match=r"backends must be None .* got {'sel': 'sdpa'}; .*config\.json"
    ):
        evaluate(tmp_path, ["capitals"], backends={"sel": "sdpa"})
    with pytest.raises(InvalidInput, match="task_folder must be a folder, got missing"):
        evaluate(tmp_path, ["capitals"], task_folder="missing")
    with pytest.raises(InvalidInput, match=r"tasks must name tasks .* got none"):
        evaluate(tmp_path, [])


@pytest.mark.parametrize("library", ["lm_eval", "transformers"])
def test_missing_libraries_are_named(trained, monkeypatch, library):
    monkeypatch.setitem(sys.modules, "lm_eval", types.ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(BackendUnavailable, match=rf"needs {library}, .*'nsa-models\[eval\]'"):
        evaluate(trained, ["capitals"])


def test_a_score_is_json() -> None:
    from nsa_models.evaluation.run import _scores

    results = {
        "results": {
            "t": {"alias": "t", "acc,none": 0.5, "acc_stderr,none": "N/A", "em,strict": 1},
            "ruler": {"4096,none": 0.25, "8192,none": -1},
        },
        "groups": {"g": {"acc,none": 0.5, "acc_stderr,none": 0.1}},
        "higher_is_better": {"t": {"acc": True}},
        "n-samples": {"t": {"original": 9, "effective": 4}},
    }
    rows = [tuple(dataclasses.asdict(score).values()) for score in _scores(results)]
    assert rows == [
        ("t", "acc", 0.5, None, True, 4),
        ("t", "em (strict)", 1.0, None, None, 4),
        ("ruler", "4096", 0.25, None, None, None),
        ("g", "acc", 0.5, 0.1, None, None),
    ]
