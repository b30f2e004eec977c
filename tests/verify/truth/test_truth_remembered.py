"""Results found again by the bits that went in."""

from __future__ import annotations

import itertools

import pytest
import torch

from nsa_verify.judge import truth_cache
from nsa_verify.judge.truth_cache import recall, remembering


def test_same_bits_are_found_again_and_others_are_not() -> None:
    count = itertools.count()

    def ask(*given: object, what: str = "a") -> int:
        return recall((what,), given, lambda: next(count))

    x = torch.arange(6.0).view(2, 3)
    with remembering():
        first = ask(x, None)
        assert ask(x.clone(), None) == first
        assert ask(x.t().contiguous().t(), None) == first
        others = [
            ask(x, None, what="b"),
            ask(x, 1),
            ask(None, x),
            ask(x.double(), None),
            ask(x.view(3, 2), None),
            ask(x),
            ask(x.view(torch.int32), None),
            ask(x + 1e-6, None),
            ask(x[:0], None),
            ask(x[:0].view(3, 0), None),
        ]
        assert len({first, *others}) == 1 + len(others)
        x[1, 2] = 7
        assert ask(x, None) not in (first, *others)


def test_nothing_is_remembered_outside() -> None:
    count = itertools.count()
    x = torch.ones(2)
    with remembering():
        assert recall((), [x], lambda: next(count)) == 0
    assert recall((), [x], lambda: next(count)) == 1
    with remembering():
        assert recall((), [x], lambda: next(count)) == 2


def test_the_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth_cache, "MOST_BYTES", 3 * 400)
    made = []

    def ask(name: int) -> None:
        recall((name,), (), lambda: made.append(name) or {"grads": (torch.zeros(100),)})

    with remembering():
        for name in (1, 2, 3, 1, 4, 1, 3, 2):
            ask(name)
    assert made == [1, 2, 3, 4, 2]
