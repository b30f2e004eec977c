"""Check that a call refuses a number at once and allocates nothing for it."""

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa_core.errors import InvalidInput

LIMIT_S = 0.05
LIMIT_BYTES = 1 << 20


class SmallTensors(TorchDispatchMode):
    """Inside the block no operator of torch gets a size beyond 1 Mi, so that none allocates it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbers = [x for x in tree_leaves((args, kwargs)) if isinstance(x, int)]
        assert not [x for x in numbers if abs(x) > LIMIT_BYTES], f"{func} runs before the refusal"
        return func(*args, **(kwargs or {}))


def assert_refused(call: Callable[[], object], *words: str) -> None:
    """Assert that ``call`` raises InvalidInput with ``words``, within 50 ms and 1 MiB."""
    seconds = []
    for _ in range(3):  # the first call imports modules, and other processes may take the core
        started = time.perf_counter()
        with pytest.raises(InvalidInput) as caught:
            call()
        seconds.append(time.perf_counter() - started)
        if seconds[-1] < LIMIT_S:
            break
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput), SmallTensors():
            call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, (missing, str(caught.value))
    assert min(seconds) < LIMIT_S, seconds
    assert peak < LIMIT_BYTES, peak
