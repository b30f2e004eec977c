"""A wrapper around each call of a backend's function; nsa_verify installs one to check the call.

Without a wrapper a call costs one test of a list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nsa_core.contract import import_named
from nsa_core.util.global_state import is_new, loading

# Backend, slot, and "forward", "backward" or "decode". For other functions of a plugin: backend,
# "module:function", and "import" or "plugin" (a call of its probe, rank or detail).
Where = tuple[str, str, str]
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
    where: Where,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> Any:
    """Return ``function(*arguments, **options)``, called through the wrapper if there is one."""
    if not _wrappers:
        return function(*arguments, **options)
    return _wrappers[-1](where, function, arguments, options)


def import_function(backend: str, path: str) -> Any:
    """Import the function of ``backend`` that ``path``, "module:function", names."""
    with loading(backend) if is_new(path) else contextlib.nullcontext():
        return call_function((backend, path, "import"), import_named, (path,), {})
