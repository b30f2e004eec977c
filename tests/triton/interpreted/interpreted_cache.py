"""Decode steps of a layer on the Triton backend, whose fused forms also fill the cache."""

from __future__ import annotations

import pytest
import torch

from caches import OPTIONS, assert_equal, layer_of, poisoned_cache, tokens, whole
from nsa_core.plan.registry import default_registry

SPEC = default_registry().get("triton").spec
LENGTH = 30
OPTIONS_AND_PAGES = (
    ("mlp", None),
    ("rotary before phi", 32),
    ("no rotary, odd widths", 32),
    ("one pair", None),
    ("l=l', w=1", 16),
)


@pytest.mark.slow
@pytest.mark.skipif(SPEC is None or not SPEC.fused, reason="the triton backend is unavailable here")
@pytest.mark.parametrize(
    ("option", "page_size"),
    [
        pytest.param(*c, marks=[pytest.mark.slow] if i > 1 else [])
        for i, c in enumerate(OPTIONS_AND_PAGES)
    ],
)
def test_decode_steps_equal_the_forward_of_the_whole_sequence(option, page_size):
    """Steps of one token, of several, and of fewer than x has rows.

    They cross the edge of a block and of a page. The stores hold NaN before they are written.
    """
    attn = layer_of(**OPTIONS.get(option, {}))
    attn.backends = "sdpa"
    x = tokens(attn, 2, LENGTH + 8)
    expected = whole(attn, x)
    attn.backends = "triton"
    # with max_step 2, a step of three tokens runs in chunks
    cache = poisoned_cache(attn, 2, LENGTH + 8, page_size=page_size, max_step=4 if page_size else 2)
    assert set(cache.plan.fused) == {"append", "gates", "step", "compress"}
    attn.backends = "sdpa"
    attn(x[:, :LENGTH], cache=cache)
    parts = [attn(x[:, t : t + 1], cache=cache) for t in (LENGTH, LENGTH + 1)]
    parts.append(attn(x[:, LENGTH + 2 : LENGTH + 5], cache=cache))
    last = attn(x[:, LENGTH + 5 :], cache=cache, new=[3, 1])
    assert_equal(torch.cat(parts, 1), expected[:, LENGTH : LENGTH + 5])
    assert_equal(last[:1], expected[:1, LENGTH + 5 :])
    assert_equal(last[1:, :1], expected[1:, LENGTH + 5 : LENGTH + 6])
    assert (last[1, 1:] == 0).all()
