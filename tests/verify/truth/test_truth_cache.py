"""The truth cache returns a result again for inputs with the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch

from nsa_verify.judge import truth_cache
from nsa_verify.judge.truth_cache import cached, caching


def test_results_are_cached_by_the_bits_of_their_inputs() -> None:
    count = itertools.count()

    def compute(*inputs: object, name: str = "a") -> int:
        return cached((name,), inputs, lambda: next(count))

    x = torch.arange(6.0).view(2, 3)
    with caching():
        first = compute(x, None)
        assert compute(x.clone(), None) == first
        assert compute(x.t().contiguous().t(), None) == first
        others = [
            compute(x, None, name="b"),
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
    x = torch.ones(2)
    with caching():
        assert cached((), [x], lambda: next(count)) == 0
    assert cached((), [x], lambda: next(count)) == 1
    with caching():
        assert cached((), [x], lambda: next(count)) == 2


def test_least_recently_used_result_is_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth_cache, "MAX_BYTES", 3 * 400)
    computed = []

    def compute(name: int) -> None:
        cached((name,), (), lambda: computed.append(name) or {"grads": (torch.zeros(100),)})

    with caching():
        for name in (1, 2, 3, 1, 4, 1, 3, 2):
            compute(name)
    assert computed == [1, 2, 3, 4, 2]
