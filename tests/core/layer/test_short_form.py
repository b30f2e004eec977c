"""nsa_attention with block sizes as keywords, and the config that they stand for."""

import warnings

import pytest
import torch

from cases import SMALL, boundaries, inputs, small
from nsa_core import NSAConfig, nsa_attention, nsa_attention_with_lse, resolve
from nsa_core.layer import short_config
from nsa_core.layer.short_config import NUMBERS

CONFIG = small()
SIZES = {name: SMALL[name] for name in NUMBERS if name in SMALL}


@pytest.mark.parametrize("scale", [None, 0.3, 0])
@pytest.mark.parametrize("lead", [(2, 37), (37,)], ids=["dense", "packed"])
def test_the_short_form_equals_the_call_with_a_config(lead, scale):
    tensors = inputs(CONFIG, *lead)
    packing = {"cu_seqlens": boundaries(20, 17)} if len(lead) == 1 else {}
    other = {"window_size": 5, "init_blocks": 2, "local_blocks": 1, "scale": scale}
    expected = nsa_attention_with_lse(*tensors, config=small(**other), **packing)
    got = nsa_attention_with_lse(*tensors, **{**SIZES, **other}, **packing)
    assert torch.equal(got.blocks, expected.blocks)
    o = nsa_attention(*tensors, **{**SIZES, **other}, **packing)
    assert all(torch.equal(x, expected.o) for x in (got.o, o))


def test_keywords_default_to_the_fields_of_a_config():
    config = NSAConfig(dim=32, n_heads=4, n_kv_heads=2)
    tensors = inputs(config, 1, 600)
    assert torch.equal(nsa_attention(*tensors), nsa_attention(*tensors, config=config))


def test_the_config_is_built_once_per_tuple_of_values(monkeypatch):
    built = []
    build = short_config.build_config
    monkeypatch.setattr(
        short_config, "build_config", lambda *values: built.append(values) or build(*values)
    )
    short_config._configs.get.cache_clear()
    for length in (12, 12, 20):
        nsa_attention(*inputs(CONFIG, 1, length), **SIZES)
    nsa_attention(*inputs(CONFIG, 1, 12), **{**SIZES, "window_size": 5})
    assert len(built) == 2


def test_a_plan_brings_its_config_and_fits_calls_of_the_same_sizes():
    tensors, plan = inputs(CONFIG, 1, 37), resolve(CONFIG, dtype="float64")
    expected = nsa_attention(*tensors, config=CONFIG, plan=plan)
    assert torch.equal(nsa_attention(*tensors, plan=plan), expected)
    assert torch.equal(nsa_attention(*tensors, plan=plan, **SIZES), expected)


@pytest.mark.slow
def test_the_short_form_compiles_without_breaks_for_changing_sizes():
    torch._dynamo.reset()

    def attend(q, k, v, gates, window_size, scale):
        return nsa_attention(
            q, k, v, gates, **{**SIZES, "window_size": window_size, "scale": scale}
        )

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length, heads, window, scale in (
            (20, 4, 9, 0.5),
            (20, 8, 5, 0.25),
            (20, 6, 3, 0.125),
        ):
            tensors = inputs(small(n_heads=heads), 1, length)
            expected = attend(*tensors, window, scale)
            torch.testing.assert_close(compiled(*tensors, window, scale), expected)
