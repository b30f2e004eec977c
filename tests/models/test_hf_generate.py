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
    assert len(expected.unique()) > 10


@pytest.mark.slow
@pytest.mark.parametrize("decoding", ["greedy", "beams"])
def test_prompts_of_a_padded_batch_are_continued_as_alone(decoding):
    model = nsa_model("qwen3", torch.float64)
    ids, mask, prompts = padded_batch((70, 33, 2))
    together = generate(model, ids, mask, **DECODING[decoding])
    for row, prompt in enumerate(prompts):
        alone = generate(model, prompt, **DECODING[decoding])
        assert torch.equal(together[row], alone[0])


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


def test_bfloat16_logits_of_cache_and_forward_agree():
    model, ids = nsa_model(dtype=torch.bfloat16), torch.randint(1, 61, (2, 60))
    with torch.no_grad():
        expected, cache = model(ids).logits, model.new_cache()
        parts = [model(part, past_key_values=cache).logits for part in ids.split([50, 1, 9], 1)]
    assert torch.allclose(torch.cat(parts, 1), expected, rtol=0, atol=0.02)
    assert expected.float().std() > 0.05


@torch.no_grad()
def test_a_cache_grows_is_copied_cropped_and_continued():
    model, ids = nsa_model(dtype=torch.float64), torch.randint(1, 61, (2, 120))
    expected = model(ids).logits
    cache = model.new_cache(max_len=10, max_rollback=7)
    first = model(ids[:, :60], past_key_values=cache)
    assert first.past_key_values is cache
    assert cache.get_seq_length() == 60
    copied = copy.deepcopy(cache)
    model(ids[:, :7], past_key_values=cache)
    cache.crop(-7)
    with_room = copy.deepcopy(cache)
    for end in (61, 70, 120):
        for one in (cache, copied, with_room):
            start = one.get_seq_length()
            logits = model(ids[:, start:end], past_key_values=one).logits
            assert torch.allclose(logits, expected[:, start:end], rtol=0, atol=1e-10)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(3)
    again = model(ids[1:].expand(3, -1)[:, :1], past_key_values=cache).logits
    alone = model(torch.cat([ids[1:], ids[1:, :1]], 1)).logits[:, -1:]
    assert torch.allclose(again, alone.expand(3, -1, -1), rtol=0, atol=1e-10)
    with pytest.raises(InvalidInput, match="crop"):
        cache.crop(-100)
    cache.reset()
    assert torch.allclose(model(ids[[0, 1, 1]], past_key_values=cache).logits[:2], expected)


@torch.no_grad()
def test_the_tokens_of_a_second_turn_may_be_padded_too():
    model = nsa_model(dtype=torch.float64)
    ids, mask, _ = padded_batch((30, 18))
    more, more_mask, _ = padded_batch((20, 33), "right")
    cache = model.new_cache()
    model(ids, attention_mask=mask, past_key_values=cache)
    both = torch.cat([mask, more_mask], 1)
    logits = model(more, attention_mask=both, past_key_values=cache).logits
    for row in range(2):
        tokens = torch.cat([ids[row][mask[row] > 0], more[row][more_mask[row] > 0]])
        count = int(more_mask[row].sum())
        expected = model(tokens[None]).logits[0, -count:]
        assert torch.allclose(logits[row, :count], expected, rtol=0, atol=1e-10)
    with pytest.raises(InvalidInput, match="columns with padding stay"):
        cache.crop(-1)


def test_other_caches_are_refused_by_generate():
    model, ids = nsa_model(), torch.ones(1, 20, dtype=torch.long)
    with pytest.raises(InvalidInput, match=r"cache_implementation must be None .* got 'static'"):
        generate(model, ids, cache_implementation="static")
    with pytest.raises(InvalidInput, match="no gradient flows through a cache"):
        model(ids, use_cache=True)


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
