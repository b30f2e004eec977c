"""Integer metadata of any strides on the sdpa backend, and in graphs."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import strided_suite as suite


class TestSdpa(suite.StridedMetadata):
    backend = "sdpa"
    decode_forms = frozenset({"cmp", "select", "sel", "win"})


def test_a_graph_of_contiguous_boundaries_takes_others() -> None:
    """Tracing leaves out the copies that the traced tensor does not need."""
    attn, (x,) = suite.layer("sdpa"), suite.tensors((suite.TOKENS, 8))
    bounds = suite.bounds_of(suite.LENGTHS)
    with torch.no_grad():
        graph = make_fx(attn)(x, bounds)
        with suite.contiguous_metadata() as ran:
            actual = graph(x, suite.column(bounds))
        assert {slot for slot, _ in ran} == {"cmp", "select", "sel", "win", "combine"}
    suite.assert_right([actual], suite.documents_alone(suite.LENGTHS)[:1])
