"""Models of transformers in which some layers have NSA and the others dense attention."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import nsa_models.hf as hf
from hf_models import DENSE_CONFIGS, NSA, SIZES, SIZES_OF_KIND, nsa_model, padded_batch, randomize
from nsa_core import InvalidInput, NSAttention
from test_hf_doors import DOCUMENTS, DOORS, PACKING, PADDING
from test_hf_doors import _batch as batch_of

# (type of the model, its layers with NSA)
HYBRIDS: dict[str, tuple[str, Any]] = {
    "dense first": ("llama", [1, 3]),
    "dense last": ("qwen2", "every_4th_dense"),
    "one NSA layer": ("qwen3", [0]),
}
LIMIT = 3e-6  # transformers computes the angles of dense layers in single precision


class _PlainNSA(nn.Module):
    """NSAttention of nsa_core, called as an attention layer of transformers."""

    def __init__(self, attn: NSAttention) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, hidden_states: torch.Tensor, **other: Any) -> tuple[torch.Tensor, None]:
        return NSAttention.forward(self.attn, hidden_states), None


def hybrid(name: str, **changes: Any) -> Any:
    kind, nsa_layers = HYBRIDS[name]
    values = {"num_hidden_layers": 4, "initializer_range": 0.3, **changes}
    return nsa_model(kind, torch.float64, nsa_layers=nsa_layers, **values)


def reference(model: Any) -> Any:
    """Return the dense model of transformers with plain NSAttention in the layers with NSA."""
    kind = model.config.model_type.removeprefix("nsa_")
    values = {**SIZES, **SIZES_OF_KIND[kind], "num_hidden_layers": 4}
    dense = AutoModelForCausalLM.from_config(DENSE_CONFIGS[kind](**values)).to(torch.float64)
    dense.load_state_dict(model.state_dict(), strict=False)
    for number in model.config.nsa_layers:
        dense.model.layers[number].self_attn = _PlainNSA(model.model.layers[number].self_attn)
    return dense.eval()


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Return a hybrid model and its reference, for one document and no cache."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hybrid(request.param)
        return model, reference(model)


def alone(plain: Any, document: torch.Tensor) -> torch.Tensor:
    """Return the logits [S, vocabulary] of a document [1, S], or of rows [B, S] end to end."""
    logits: torch.Tensor = plain(document, use_cache=False).logits.flatten(0, 1)
    return logits


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=LIMIT * float(b.detach().abs().max()))


# (door, hybrid)
CALLS = [
    *(("model", name) for name in HYBRIDS),
    *((door, "dense first") for door in ("decoder", "LoRA", "replica")),
    *(pytest.param(d, "dense first", marks=pytest.mark.slow) for d in ("compiled", "embeddings")),
]


@pytest.mark.parametrize(("door", "pair"), CALLS, indirect=["pair"])
def test_every_door_gives_the_numbers_of_each_document_alone(door, pair):
    model, plain = pair
    call, wrong = DOORS[door](model), []
    for name in itertools.product(DOCUMENTS, PADDING, PACKING):
        with torch.no_grad():
            batch = batch_of(plain, *name)
        # nn.DataParallel would divide the boundaries, and a replica refuses them
        if batch is None or (door == "replica" and "cu_seq_lens_q" in batch.arguments):
            continue
        if not close(call(**batch.arguments)[batch.is_token], batch.expected):
            wrong.append(name)
    assert not wrong


@torch.no_grad()
@pytest.mark.parametrize("split", [0, 5, 20, 29])
@pytest.mark.parametrize("pair", ["dense first", "one NSA layer"], indirect=True)
def test_padding_on_any_side_goes_with_a_cache(split, pair):
    """In one call, and in two, of which the second may have no mask if it has no padding."""
    model, plain = pair
    for rows, padding, packing in itertools.product(DOCUMENTS, PADDING, ("", "at 0")):
        batch = batch_of(plain, rows, padding, packing)
        mask = batch.arguments.get("attention_mask")
        is_whole = bool(batch.is_token[:, split:].all())
        for drops_mask in {False, is_whole and split > 0}:
            cache, logits = model.new_cache(), []
            for start, end in ((0, split), (split, batch.is_token.shape[1])):
                part = {key: x[:, start:end] for key, x in batch.arguments.items()}
                if mask is not None:
                    part["attention_mask"] = None if drops_mask and start else mask[:, :end]
                if end:
                    logits.append(model(**part, past_key_values=cache).logits)
            actual = torch.cat(logits, 1)[batch.is_token]
            assert close(actual, batch.expected), (rows, padding, packing, drops_mask)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("pair", ["dense first"], indirect=True)
def test_gradients_with_checkpointing_are_those_of_the_documents(layout, pair):
    model, plain = (copy.deepcopy(one).train() for one in pair)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with torch.no_grad():
        batch = batch_of(plain, 2, *(("both", "positions") if layout == "packed" else ("left", "")))
    documents = [document[None] for row in batch.documents for document in row]
    torch.cat([alone(plain, document) for document in documents]).square().sum().backward()
    model(**batch.arguments).logits[batch.is_token].square().sum().backward()
    parameters = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        number = int(name.split(".")[2]) if ".self_attn." in name else None
        if number in model.config.nsa_layers:
            name = name.replace(".self_attn.", ".self_attn.attn.")
        assert close(parameter.grad, parameters[name].grad), name


@torch.no_grad()
@pytest.mark.parametrize("pair", HYBRIDS, indirect=True)
def test_a_cache_grows_is_copied_cropped_reordered_and_continued(pair):
    model, plain = pair
    ids = torch.randint(1, 61, (2, 120))
    expected = plain(ids).logits
    cache = model.new_cache(max_len=10, max_rollback=7)
    steps = [
        model(part, past_key_values=cache).logits
        for part in (ids[:, :50], *ids[:, 50:60].split(1, 1))
    ]
    assert close(torch.cat(steps, 1), expected[:, :60])
    assert cache.get_seq_length() == 60
    copied = copy.deepcopy(cache)
    model(ids[:, :7], past_key_values=cache)
    with pytest.raises(InvalidInput, match="max_rollback is 7"):
        cache.crop(-8)
    cache.crop(-7)
    for one in (cache, copied, copy.deepcopy(cache)):
        for end in (61, 70, 120):
            part = ids[:, one.get_seq_length() : end]
            logits = model(part, past_key_values=one).logits
            assert close(logits, expected[:, end - part.shape[1] : end])
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    again = model(ids[:1, :1].expand(3, -1), past_key_values=cache).logits
    row = plain(torch.cat([ids[1:], ids[:1, :1]], 1)).logits[:, -1:]
    assert close(again, row.expand(3, -1, -1))
    cache.reset()
    assert close(model(ids[[0, 1, 1]], past_key_values=cache).logits[:2], expected)


@torch.no_grad()
@pytest.mark.parametrize("pair", ["dense first"], indirect=True)
def test_a_refused_operation_leaves_the_cache_unchanged(pair):
    model, plain = pair
    ids, cache = torch.randint(1, 61, (2, 41)), model.new_cache()
    model(ids[:, :40], past_key_values=cache)
    for operation, argument in (
        (cache.batch_select_indices, torch.tensor([-1])),
        (cache.batch_repeat_interleave, 0),
        (cache.reorder_cache, torch.tensor([0])),
    ):
        with pytest.raises(InvalidInput):
            operation(argument)
    logits = model(ids[:, 40:], past_key_values=cache).logits
    for row in range(2):
        assert close(logits[row], alone(plain, ids[row : row + 1])[40:])


@torch.no_grad()
@pytest.mark.parametrize("pair", ["dense first", "one NSA layer"], indirect=True)
def test_the_tokens_of_a_second_turn_may_be_padded_too(pair):
    model, plain = pair
    ids, mask, _ = padded_batch((30, 18))
    more, more_mask, _ = padded_batch((20, 33), "right")
    both, cache = torch.cat([mask, more_mask], 1), model.new_cache(max_rollback=1)
    model(ids, attention_mask=mask, past_key_values=cache)
    for one in (copy.deepcopy(cache), cache):
        logits = model(more, attention_mask=both, past_key_values=one).logits
        for row in range(2):
            tokens = torch.cat([ids[row][mask[row] > 0], more[row][more_mask[row] > 0]])
            count = int(more_mask[row].sum())
            assert close(logits[row, :count], alone(plain, tokens[None])[-count:])
    cache.crop(-1)  # the last column is a token of row 1 alone
    assert cache.get_seq_length() == 62
    logits = model(more[:, :1], past_key_values=cache).logits[1, -1]
    tokens = torch.cat([ids[1][mask[1] > 0], more[1, :32], more[1, :1]])
    assert close(logits, alone(plain, tokens[None])[-1])


DECODING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "chunked prefill": {"prefill_chunk_size": 16},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "without a cache": {"use_cache": False},
}


@torch.no_grad()
@pytest.mark.parametrize("decoding", DECODING)
@pytest.mark.parametrize("pair", ["dense first", "one NSA layer"], indirect=True)
def test_generated_tokens_are_those_of_the_dense_and_nsa_layers_alone(decoding, pair):
    model, plain = pair
    options = {"max_new_tokens": 16, "do_sample": False, **DECODING[decoding]}
    if decoding == "prompt lookup":
        ids = torch.randint(1, 61, (1, 25)).repeat(1, 2)
        prompts, mask = [ids], torch.ones_like(ids)
    else:
        ids, mask, prompts = padded_batch((50, 27))
    tokens = model.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    assert len(tokens.unique()) > 1
    for row, prompt in zip(tokens, prompts):
        if "num_beams" in options:  # teacher forcing cannot follow the beams
            expected = plain.generate(prompt, use_cache=False, **options)[0, prompt.shape[1] :]
        else:
            logits = alone(plain, torch.cat([prompt[0], row])[None])
            expected = logits[prompt.shape[1] - 1 : -1].argmax(-1)
        assert torch.equal(row, expected)


def test_a_call_that_failed_leaves_no_wrong_cache():
    model, ids = hybrid("dense first"), torch.randint(1, 61, (1, 30))
    cache = model.new_cache()
    with pytest.raises(InvalidInput, match="no gradient flows through a cache"):
        model(ids, past_key_values=cache)
    with torch.no_grad():
        with pytest.raises(InvalidInput, match=r"layers with 0 and with 30 tokens, .* its reset"):
            model(ids, past_key_values=cache)
        cache.reset()
        assert torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)


# nsa_layers of convert for eight layers -> the numbers that config.json has
CHOICES: dict[str, tuple[Any, list[int] | None]] = {
    "default": (None, None),
    "all": ("all", list(range(8))),
    "every_4th_dense": ("every_4th_dense", [0, 1, 2, 4, 5, 6]),
    "a list": ([5, 1], [1, 5]),
    "a tuple": ((0,), [0]),
    "a function": (lambda number: number >= 6, [6, 7]),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_the_chosen_layers_are_stored_and_the_others_are_those_of_the_dense_model(choice, tmp_path):
    nsa_layers, numbers = CHOICES[choice]
    values = {**SIZES, "num_hidden_layers": 8}
    dense = AutoModelForCausalLM.from_config(DENSE_CONFIGS["qwen2"](**values)).eval()
    randomize(dense)
    model, carried, new = hf.convert(dense, NSA, nsa_layers=nsa_layers)
    chosen = range(8) if numbers is None else numbers
    assert carried == [name for name, _ in dense.named_parameters(remove_duplicate=False)]
    assert {int(name.split(".")[2]) for name in new} == {*chosen}
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config.get("nsa_layers") == numbers
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    ids = torch.randint(1, 61, (2, 30))
    assert torch.equal(again(ids).logits, model(ids).logits)
    x, position = torch.randn(2, 30, 32), torch.arange(30)[None]
    angles = dense.model.rotary_emb(x, position)
    for number, (layer, plain) in enumerate(zip(again.model.layers, dense.model.layers)):
        if number in chosen:
            assert isinstance(layer.self_attn, hf.NSASelfAttention)
        else:  # bit by bit
            a, b = (
                one(x, attention_mask=None, position_embeddings=angles) for one in (layer, plain)
            )
            assert torch.equal(a, b)


WRONG: dict[str, tuple[Any, str]] = {
    "empty": ([], r"got \[\]"),
    "too large": ([0, 4], r"from 0 to 3, got \[0, 4\]"),
    "negative": ([-1], r"got \[-1\]"),
    "twice": ([1, 1], r"got \[1, 1\]"),
    "no integer": ([1.0], r"got \[1\.0\]"),
    "a bool": ([True], r"got \[True\]"),
    "another word": ("every_3rd_dense", r"got 'every_3rd_dense'"),
    "a number": (2, "got 2"),
    "a function for none": (lambda number: False, "got a function that chooses none"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_choices_are_refused_in_one_sentence(case):
    nsa_layers, message = WRONG[case]
    message = f"^nsa_layers must be 'all', 'every_4th_dense' or a list of one or .*{message}$"
    values = {**SIZES, "num_hidden_layers": 4}
    dense = AutoModelForCausalLM.from_config(DENSE_CONFIGS["llama"](**values))
    with pytest.raises(InvalidInput, match=message):
        hf.convert(dense, NSA, nsa_layers=nsa_layers)
    with pytest.raises(InvalidInput, match=message):
        hf.NSALlamaConfig(**values, nsa_layers=nsa_layers)


def test_every_4th_dense_needs_four_layers():
    with pytest.raises(
        InvalidInput, match="a model of 3 layers, got 'every_4th_dense', which needs 4"
    ):
        hf.NSALlamaConfig(num_hidden_layers=3, nsa_layers="every_4th_dense")


def test_the_implementation_nsa_is_for_nsa_models_only():
    dense = AutoModelForCausalLM.from_config(DENSE_CONFIGS["llama"](**SIZES))
    dense.config._attn_implementation = "nsa"
    with pytest.raises(InvalidInput, match="is for the models nsa_llama"):
        dense(torch.ones(1, 9, dtype=torch.long))


def test_the_first_stage_trains_the_nsa_layers_only():
    model = hybrid("dense first").float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    text = torch.randint(1, 61, (20,)).repeat(6)
    *_, last = hf.train_new_parameters(model, [text[None]] * 2, learning_rate=0.05, measure=text)
    assert last.step == 2
    assert len(hf.selected_mass(model, text)) == 2
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert {int(name.split(".")[2]) for name in changed} == {1, 3}
