"""PlanOptions: the choices of a caller about a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

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
