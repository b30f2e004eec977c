"""Libraries that a part of this one needs and the rest does without."""

from __future__ import annotations

import importlib
from typing import Any

from nsa_core.errors import BackendUnavailable


def needed(module: str, purpose: str, extra: str) -> Any:
    """The module called ``module``; ``purpose`` is the subject of the error ("checkpoints need
    ..."), with its verb.

    Raises:
        BackendUnavailable: it is not installed; the message says what to type.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise BackendUnavailable(
            f"{purpose} {package}, which is not installed; pip install '{extra}'"
        ) from error
