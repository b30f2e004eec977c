"""Optional libraries of commands: name the missing ones before any work."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

_EXTRA_OF = {
    "safetensors": "train",
    "tokenizers": "train",
    "transformers": "hf",
    "matplotlib": "plot",
    "jinja2": "plot",
}


def need_extras(command: str, modules: Sequence[str]) -> None:
    """Check that optional libraries are installed; this imports none of them.

    Raises:
        BackendUnavailable: Some are not; the message names all of them and the pip command.
    """
    from nsa_core.errors import BackendUnavailable

    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({_EXTRA_OF[name] for name in missing}, reverse=True))
        names = ", ".join(missing)
        are = "which is" if len(missing) == 1 else "which are"
        raise BackendUnavailable(
            f"{command} needs {names}, {are} not installed:\n  pip install 'nsa-cli[{extras}]'"
        )
