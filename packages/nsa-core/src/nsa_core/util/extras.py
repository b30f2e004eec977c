"""Optional libraries, which only some features need."""

from __future__ import annotations

import importlib
from typing import Any

from nsa_core.errors import BackendUnavailable


def require_module(module: str, purpose: str, extra: str) -> Any:
    """Import and return an optional module.

    Args:
        module: name of the module.
        purpose: subject and verb of the error message, for example "checkpoints need".
        extra: the requirement to install, for the error message.

    Raises:
        BackendUnavailable: the module is not installed; the message has the pip command.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise BackendUnavailable(
            f"{purpose} {package}, which is not installed; pip install '{extra}'"
        ) from error
