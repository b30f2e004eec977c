"""generate of the NSA models of transformers, with and without the cache."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import set_seed

from hf_models import NSA_MODELS, nsa_model, padded_batch
from nsa_core import InvalidInput
from nsa_core.cache.cache import resized

DECODING = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 10},
    "beams": {"do_sample": False, "num_beams": 3},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 16},
}


def generate(model, ids, mask=None, seed=0, **options):
    set_seed(seed)
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=24, **options)[:, ids.shape[1] :]


@pytest.mark.few_cases("chunked prefill-llama")
@pytest.mark.parametrize("kind", NSA_MODELS)
@pytest.mark.parametrize("decoding", DECODING)
def test_the_cache_does_not_change_the_tokens(kind, decoding):
    # the usual weights of a new model are small: it repeats one token
    model = nsa_model(kind, torch.float64, initializer_range=0.3)
    ids, options = torch.randint(1, 61, (2, 50)), DECODING[decoding]
    without = {k: v for k, v in options.items() if k != "prefill_chunk_size"}
    expected = generate(model, ids, use_cache=False, **without)
    assert torch.equal(generate(model, ids, **options), expected)
    assert len(expected.unique()) > 5


@pytest.mark.few_cases("prompt lookup")
@pytest.mark.parametrize("assistant", ["same", "other", "prompt lookup"])
def test_assisted_generation_gives_the_greedy_tokens(assistant):
    model, ids = nsa_model(dtype=torch.float64), torch.randint(1, 61, (1, 40)).repeat(1, 2)
    options = {"prompt_lookup_num_tokens": 4}
    if assistant != "prompt lookup":
        torch.manual_seed(1)
        helper = model if assistant == "same" else nsa_model("qwen2", torch.float64)
        options = {"assistant_model": copy.deepcopy(helper)}
    expected = generate(model, ids, do_sample=False)
    assert torch.equal(generate(model, ids, do_sample=False, **options), expected)


@pytest.mark.few_cases("None")
@pytest.mark.parametrize("nsa_layers", [None, [0, 2], [1]])
def test_drafts_of_the_first_layers_give_the_greedy_tokens(nsa_layers):
    model = nsa_model(dtype=torch.float64, num_hidden_layers=3, nsa_layers=nsa_layers)
    ids = torch.randint(1, 61, (1, 40))
    expected = generate(model, ids, do_sample=False)
    for layers in (1, 2):
        if layers == 1 and nsa_layers == [1]:
            with pytest.raises(InvalidInput, match="assistant_early_exit must be greater than 1"):
                generate(model, ids, do_sample=False, assistant_early_exit=1)
        else:
            drafted = generate(model, ids, do_sample=False, assistant_early_exit=layers)
            assert torch.equal(drafted, expected)
        assert model.config.num_hidden_layers == 3


@pytest.mark.parametrize("states_mask", [True, False])
def test_an_assistant_drafts_for_a_text_that_holds_the_padding_id(states_mask):
    model, ids = nsa_model(dtype=torch.float64), torch.randint(1, 61, (1, 40)).repeat(1, 2)
    ids[0, [11, 50, 51, 77, 78]] = model.config.pad_token_id
    options = {"attention_mask": torch.ones_like(ids)} if states_mask else {}
    expected = model.generate(ids, max_new_tokens=24, do_sample=False, **options)
    torch.manual_seed(1)
    for helper in (model, nsa_model("qwen2", torch.float64)):
        assistant = copy.deepcopy(helper)
        tokens = model.generate(
            ids, max_new_tokens=24, do_sample=False, assistant_model=assistant, **options
        )
        assert torch.equal(tokens, expected)


def test_bfloat16_logits_of_cache_and_forward_agree():
    model, ids = nsa_model(dtype=torch.bfloat16), torch.randint(1, 61, (2, 60))
    with torch.no_grad():
        expected, cache = model(ids).logits, model.new_cache()
        parts = [model(part, past_key_values=cache).logits for part in ids.split([50, 1, 9], 1)]
    assert torch.allclose(torch.cat(parts, 1), expected, rtol=0, atol=0.02)
    assert expected.float().std() > 0.05


@torch.no_grad()
@pytest.mark.parametrize(("new", "end", "room"), [(8, 48, 47), (40, 49, 56), (40, 80, 79)])
def test_a_cache_of_generate_is_never_larger_than_the_limit(monkeypatch, new, end, room):
    """transformers passes no mask to the model if all tokens of the prompts count."""
    monkeypatch.setattr("nsa_models.hf.cache.NEW_TOKENS", 16)
    model, ids = nsa_model(), torch.randint(1, 61, (2, 40))
    output = model.generate(
        ids,
        max_new_tokens=new,
        stopping_criteria=[lambda tokens, scores, **_: torch.full((2,), tokens.shape[1] == end)],
        do_sample=False,
        return_dict_in_generate=True,
    )
    cache = output.past_key_values
    assert cache.layers[0].state.max_len == room
    model(ids, past_key_values=cache)  # beyond the limit, a cache doubles
    assert cache.layers[0].state.max_len == 2 * room


@pytest.mark.parametrize("states_mask", [True, False])
def test_a_limit_that_no_memory_holds_takes_that_of_the_tokens(states_mask):
    model, (ids, mask, _) = nsa_model(dtype=torch.float64), padded_batch((40, 33))
    options = {"attention_mask": mask} if states_mask else {}
    expected = generate(model, ids, mask, do_sample=False)
    output = model.generate(
        ids,
        max_new_tokens=2**31,
        stopping_criteria=[lambda tokens, scores, **_: torch.full((2,), tokens.shape[1] == 64)],
        do_sample=False,
        return_dict_in_generate=True,
        **options,
    )
    assert torch.equal(output.sequences[:, 40:], expected)
    assert output.past_key_values.layers[0].state.max_len == 40 + 4096


@torch.no_grad()
@pytest.mark.parametrize("count", range(1, 13))
@pytest.mark.parametrize("side", ["left", "right", "gaps"])
def test_crop_removes_columns_with_their_padding(side, count):
    """Two calls; a crop removes a part of the second one, or all of it and a part of the first."""
    model = nsa_model(dtype=torch.float64)
    ids, mask, _ = padded_batch((30, 21), "right" if side == "right" else "left")
    if side == "gaps":
        mask[:, 20:] = torch.rand(2, 10) < 0.5
    expected = model(torch.cat([ids, ids], 1), attention_mask=torch.cat([mask, mask], 1)).logits
    cache, kept = model.new_cache(max_rollback=12), 30 - count
    model(ids[:, :25], attention_mask=mask[:, :25], past_key_values=cache)
    model(ids[:, 25:], attention_mask=mask, past_key_values=cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices([1, 0, 0])
    copied, rows = copy.deepcopy(cache), [0, 1, 1]
    for one in (cache, copied):
        one.crop(-count)
        both = torch.cat([mask[:, :kept], mask[:, kept:], mask], 1)[rows]
        rest = torch.cat([ids[:, kept:], ids], 1)[rows]
        logits = model(rest, attention_mask=both, past_key_values=one).logits
        assert torch.allclose(logits, expected[rows, kept:], rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_crop_out_of_range_is_refused():
    model, ids = nsa_model(), torch.randint(1, 61, (1, 30))
    cache = model.new_cache(max_rollback=20)
    model(ids, past_key_values=cache)
    for count, message in (
        (31, "crop: tokens_to_remove must be from -30 to 0, got -31"),
        (-1, "crop: tokens_to_remove must be from -30 to 0, got 1"),
    ):
        with pytest.raises(InvalidInput, match=message):
            cache.crop(-count)
        assert cache.get_seq_length() == 30
    cache.crop(-5)


def test_other_caches_are_refused_by_generate():
    model, ids = nsa_model(), torch.ones(1, 20, dtype=torch.long)
    with pytest.raises(InvalidInput, match=r"cache_implementation must be None .* got 'static'"):
        generate(model, ids, cache_implementation="static")
    with pytest.raises(InvalidInput, match="no gradient flows through a cache"):
        model(ids, use_cache=True)


def test_assisted_generation_refuses_a_cache_without_rollback_before_it_changes():
    model, ids = nsa_model(), torch.randint(1, 61, (1, 20))
    options = {"do_sample": False, "prompt_lookup_num_tokens": 4}
    expected = generate(model, ids, **options)
    cache = model.new_cache()
    with pytest.raises(InvalidInput, match="past_key_values must have max_rollback > 0"):
        generate(model, ids, past_key_values=cache, **options)
    assert (cache.get_seq_length(), cache.is_croppable) == (0, False)
    cache = model.new_cache(max_rollback=8)
    assert torch.equal(generate(model, ids, past_key_values=cache, **options), expected)


def test_resized_refuses_what_it_cannot_copy():
    attn = nsa_model().model.layers[0].self_attn
    cache = attn.new_cache(2, 40)
    with torch.no_grad():
        super(type(attn), attn).forward(torch.randn(2, 30, 32), cache=cache)
    for arguments, message in (
        ((20,), "30 tokens are more than max_len 20"),
        ((40, [2]), "numbered 0 to 1"),
    ):
        with pytest.raises(InvalidInput, match=message):
            resized(cache, *arguments)
    paged = attn.new_cache(2, 40, page_size=16)
    with pytest.raises(InvalidInput, match="a cache with pages cannot be copied"):
        resized(paged, 80)
