"""A wrapper around every call of a backend's function; nsa_verify installs one to check the call.

Without a wrapper a call costs one test of a list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Where = tuple[str, str, str]  # backend, slot, and "forward", "backward" or "decode"
Wrapper = Callable[[Where, Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]

_wrappers: list[Wrapper] = []


@contextlib.contextmanager
def wrapped_calls(wrapper: Wrapper) -> Iterator[None]:
    """Run every call of a backend's function inside the block, in any thread, through ``wrapper``.

    Args:
        wrapper: ``wrapper(where, function, arguments, options)`` calls the function and returns its
            result. An inner wrapper replaces an outer one.
    """
    _wrappers.append(wrapper)
    try:
        yield
    finally:
        _wrappers.remove(wrapper)


def call_function(
    where: Where, function: Callable[..., Any], arguments: Sequence[Any], **options: Any
) -> Any:
    """Return ``function(*arguments, **options)``, called through the wrapper if there is one."""
    if not _wrappers:
        return function(*arguments, **options)
    return _wrappers[-1](where, function, arguments, options)
