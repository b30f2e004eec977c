"""PlanOptions, the choices of a caller about a plan, and the checks of backends and device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

import torch

from nsa_core.contract import SLOTS
from nsa_core.errors import BackendUnavailable, InvalidInput
from nsa_core.util.text import describe_error, did_you_mean

Backends: TypeAlias = str | Mapping[str, str | None] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The choices of a caller about a plan, besides the layer's configuration and the registry.

    :func:`nsa_core.resolve` checks the values.

    Attributes:
        device: Device of the tensors: "cpu", "cuda", "cuda:1" or a torch.device.
        dtype: dtype of q, k and v: "bfloat16", "float16", "float32", "float64" or a torch.dtype.
        backends: Backend of each slot. A name sets all slots; a mapping sets single slots, and the
            slots that it leaves out are "auto". None or "auto" takes, for each slot, the accepting
            backend of the highest rank.
        needs_grad: Plan the backward pass too.
        deterministic: Require bitwise-identical results in every run. None follows
            ``torch.are_deterministic_algorithms_enabled()``.
        varlen: Plan for packed documents.
        partial: Plan for queries that begin inside a sequence.
        phase: "prefill", or "decode" for the decode forms over a cache.
        batch: Number of sequences, or of packed documents; None if unknown.
        seq_len: Tokens per sequence, or in all packed documents together; None if unknown.
        page_size: Tokens per page of the cache, for decode only; None if each sequence is
            contiguous.
        kv_dtype: dtype of quantized pages, "float8_e4m3fn", "int8" or a torch.dtype, for decode
            only; None if pages have the dtype of q.
    """

    device: str | torch.device = "cpu"
    dtype: str | torch.dtype = "float32"
    backends: Backends = None
    needs_grad: bool = False
    deterministic: bool | None = None
    varlen: bool = False
    partial: bool = False
    phase: str = "prefill"
    batch: int | None = None
    seq_len: int | None = None
    page_size: int | None = None
    kv_dtype: str | torch.dtype | None = None


def backends_problems(backends: object) -> list[str]:
    """Return what is wrong with ``backends``, the argument of resolve(); [] if it is valid.

    The result does not depend on the installed backends: an unknown name is not a problem here.
    """
    if backends is None or isinstance(backends, str):
        return []
    if not isinstance(backends, Mapping):
        return [f"backends must be None, a name, or a mapping of slots to names, got {backends!r}"]
    problems = [
        f"unknown slot {slot!r}{did_you_mean(str(slot), SLOTS)}"
        for slot in backends
        if slot not in SLOTS
    ]
    invalid_names = {
        slot: name for slot, name in backends.items() if not (name is None or isinstance(name, str))
    }
    return problems + [
        f"the backend of slot {slot!r} must be a name, got {name!r}"
        for slot, name in invalid_names.items()
    ]


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
    if isinstance(device, str) and str(parsed) != device:  # torch keeps 8 bits of the index
        raise InvalidInput(f"device {device!r} does not exist: torch has indices up to 127 only")
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
