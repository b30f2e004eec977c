"""Devices that a plan may be made for."""

from __future__ import annotations

import torch

from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_core.util.text import describe_error


def known_device(device: str | torch.device) -> torch.device:
    """``device``, if it can be used here; touches CUDA only when a CUDA device is named.

    Raises:
        InvalidInput: torch knows no such device, or there are fewer of them.
        BackendUnavailable: it is a GPU, and this torch has none.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(
            f"device {device!r} is not one that torch knows: {describe_error(error)}"
        ) from None
    if place.type != "cuda":
        return place
    if not torch.cuda.is_available():
        why = (
            "is built without CUDA"
            if torch.version.cuda is None
            else "finds no CUDA GPU and driver"
        )
        raise BackendUnavailable(
            f"device {str(place)!r} cannot be used: torch {torch.__version__} {why}"
        )
    count = torch.cuda.device_count()
    if place.index is not None and place.index >= count:
        raise InvalidInput(
            f"device {str(place)!r} does not exist: there are {count} CUDA devices, numbered from 0"
        )
    return place
