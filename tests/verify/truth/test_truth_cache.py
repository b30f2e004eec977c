"""The truth cache returns a result again for inputs with the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch

from nsa_verify.judge import truth_cache
from nsa_verify.judge.truth_cache import cached, caching


def test_results_are_cached_by_the_bits_of_their_inputs() -> None:
    count = itertools.count()

    @cached
    def compute(*inputs: object, **named: object) -> int:
        return next(count)

    x = torch.arange(6.0).view(2, 3)
    with caching():
        first = compute(x, None)
        assert compute(x.clone(), None) == first
        assert compute(x.t().contiguous().t(), None) == first
        others = [
            compute(x, name=None),
            compute(x, other=None),
            compute((x, None)),
            compute([], [x, None]),
            compute({"a": x}),
            compute({"b": x}),
            compute({"b": x + 1}),
            compute(x, 1),
            compute(None, x),
            compute(x.double(), None),
            compute(x.view(3, 2), None),
            compute(x),
            compute(x.view(torch.int32), None),
            compute(x + 1e-6, None),
            compute(x[:0], None),
            compute(x[:0].view(3, 0), None),
        ]
        assert len({first, *others}) == 1 + len(others)
        x[1, 2] = 7
        assert compute(x, None) not in (first, *others)


def test_results_are_cached_only_inside_the_block() -> None:
    count = itertools.count()
    compute = cached(lambda x: next(count))
    x = torch.ones(2)
    with caching():
        assert compute(x) == compute(x) == 0
    assert compute(x) == 1
    with caching():
        assert compute(x) == 2


def test_functions_have_results_of_their_own() -> None:
    with caching():
        assert cached(max)((1, 2)) == 2
        assert cached(min)((1, 2)) == 1


def test_least_recently_used_result_is_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth_cache, "MAX_BYTES", 3 * 400)
    computed = []

    @cached
    def compute(name: int) -> dict[str, tuple[torch.Tensor]]:
        computed.append(name)
        return {"grads": (torch.zeros(100),)}

    with caching():
        for name in (1, 2, 3, 1, 4, 1, 3, 2):
            compute(name)
    assert computed == [1, 2, 3, 4, 2]
