"""PlanOptions: what a caller may choose about a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

Backends: TypeAlias = str | Mapping[str, str | None] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a caller may choose about a plan, beside the layer's configuration and the registry.

    Values are checked when a plan is made, by :func:`nsa_core.resolve`.

    Attributes:
        device: where the plan runs: "cpu", "cuda", "cuda:1" or a torch.device.
        dtype: dtype of q, k and v: "bfloat16", "float16", "float32", "float64" or a torch.dtype.
        backends: None or "auto" for the accepting backend of the highest rank in every slot, one
            name for all slots, or a mapping of slots to names; a slot left out is auto.
        needs_grad: plan the backward too.
        deterministic: demand the same bits in every run. None takes
            ``torch.are_deterministic_algorithms_enabled()``.
        varlen: packed documents.
        phase: "prefill", or "decode" for the decode forms over a cache.
        batch: number of sequences, or of documents when packed; None if unknown.
        seq_len: tokens per sequence, or in all when packed; None if unknown.
        page_size: tokens per page of the cache, decode only; None if each sequence is contiguous.
    """

    device: str | torch.device = "cpu"
    dtype: str | torch.dtype = "float32"
    backends: Backends = None
    needs_grad: bool = False
    deterministic: bool | None = None
    varlen: bool = False
    phase: str = "prefill"
    batch: int | None = None
    seq_len: int | None = None
    page_size: int | None = None
