"""Check that PyTorch can use a device."""

from __future__ import annotations

import torch

from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_core.util.text import describe_error


def usable_device(device: str | torch.device) -> torch.device:
    """Return ``device`` as a torch.device if PyTorch can use it.

    The function queries CUDA only for a CUDA device.

    Args:
        device: Device or its name, such as "cpu" or "cuda:1".

    Raises:
        InvalidInput: PyTorch does not know the device, or its index is too large.
        BackendUnavailable: The device is a GPU, and PyTorch cannot use any GPU.
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput(
            f"device {device!r} is not one that torch knows: {describe_error(error)}"
        ) from None
    if parsed.type != "cuda":
        return parsed
    if not torch.cuda.is_available():
        cause = (
            "is built without CUDA"
            if torch.version.cuda is None
            else "finds no CUDA GPU and driver"
        )
        raise BackendUnavailable(
            f"device {str(parsed)!r} cannot be used: torch {torch.__version__} {cause}"
        )
    count = torch.cuda.device_count()
    if parsed.index is not None and parsed.index >= count:
        raise InvalidInput(
            f"device {str(parsed)!r} does not exist: there are {count} CUDA devices, numbered from"
            " 0"
        )
    return parsed
