"""Packed documents: the document and the position of each token and compressed token, computed on
the device without a synchronisation.

``cu_seqlens`` int32 [documents + 1] holds the first token of each document and, last, the number of
tokens T.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from nsa_core.errors import InvalidInput, Unsupported
from nsa_core.layout import BlockGeometry
from nsa_core.util.text import dtype_name


class TokenPlaces(NamedTuple):
    """For each of T rows, all int64 [T]: its document, its position inside it, and the document's
    first row.
    """

    document: torch.Tensor
    position: torch.Tensor
    start: torch.Tensor


def token_places(cu_seqlens: torch.Tensor, total: int) -> TokenPlaces:
    """Document and position of each of ``total`` rows; rows past the last boundary fall in the last
    document.

    Malformed boundaries give wrong places, never an index outside [0, documents).
    """
    rows = torch.arange(total, device=cu_seqlens.device)
    # All boundaries, not the inner ones: torch 2.11's inductor cannot search a slice of what it
    # computes.
    document = torch.searchsorted(cu_seqlens, rows.to(cu_seqlens.dtype), right=True)
    document = (document - 1).clamp_(0, max(len(cu_seqlens) - 2, 0))
    start = cu_seqlens.long()[document]
    return TokenPlaces(document, rows - start, start)


def compressed_cu_seqlens(cu_seqlens: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """First compressed row of each document, int32 [documents + 1]: sums of
    :meth:`BlockGeometry.num_compressed`.
    """
    lengths = cu_seqlens.diff()
    counts = ((lengths - geometry.compress_block_size) // geometry.compress_stride + 1).clamp(min=0)
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


# cu_seqlens -> (its version, its values then)
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def host_boundaries(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """``cu_seqlens`` on the host, for a backend that declares ``reads_boundaries``; reading it from
    a GPU synchronises.

    A tensor is read once for all layers and passes, and again after torch changed it in place. A
    tensor made under inference_mode has no version that counts changes, so it is read every time.

    Raises:
        Unsupported: a CUDA graph is being captured. Its replays would use the present boundaries.
    """
    if _on_gpu(cu_seqlens) and torch.cuda.is_current_stream_capturing():
        why = "packed documents whose boundaries the host reads cannot be captured in a CUDA graph"
        raise Unsupported(
            f"{why}: take a backend that leaves them on the device for slot 'cmp', as triton"
        )
    if (
        not _on_gpu(cu_seqlens) or cu_seqlens.is_inference()
    ):  # elsewhere reading is free, and numpy may write unseen
        return tuple(cu_seqlens.tolist())
    cached: tuple[int, tuple[int, ...]] | None = _read.get(cu_seqlens)
    if cached is None or cached[0] != cu_seqlens._version:
        _read[cu_seqlens] = cached = cu_seqlens._version, tuple(cu_seqlens.tolist())
    return cached[1]


def _on_gpu(cu_seqlens: torch.Tensor) -> bool:
    return cu_seqlens.device.type == "cuda"


def unpad(
    x: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Drop padding: turn x [B, S, ...] and a mask into packed rows.

    Args:
        x: [B, S, ...].
        attention_mask: [B, S], bool or integers; False or 0 marks padding.

    Returns:
        rows [T, ...], cu_seqlens int32 [B + 1], the longest length, and indices int64 [T] that
        :func:`pad` takes. Synchronises, because T is a shape.

    Raises:
        InvalidInput: the mask is not [B, S], not of bool or integers, or keeps tokens that are not
            contiguous in a row.
    """
    for name, argument in (("x", x), ("attention_mask", attention_mask)):
        if not isinstance(argument, torch.Tensor):
            raise InvalidInput(f"{name} must be a tensor, got {type(argument).__name__}")
    if attention_mask.shape != x.shape[:2]:
        raise InvalidInput(
            f"attention_mask must be {list(x.shape[:2])}, got {list(attention_mask.shape)}"
        )
    if (
        attention_mask.is_floating_point() or attention_mask.is_complex()
    ):  # an additive one holds 0 where it keeps
        raise InvalidInput(
            "attention_mask must be bool, or integers 0 and 1, got"
            f" {dtype_name(attention_mask.dtype)}: pass mask == 0 for one that is added to scores"
            " (0 keeps), mask != 0 for one of zeros and ones"
        )
    keep = attention_mask.bool()
    breaks = (keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, :1].sum(1)
    if bool((breaks > 1).any()):
        raise InvalidInput(
            f"attention_mask row {int((breaks > 1).nonzero()[0])} has a gap: kept tokens must be"
            " contiguous"
        )
    lengths = keep.sum(1)
    indices = keep.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return x.flatten(0, 1)[indices], cu_seqlens, longest, indices


def pad(rows: torch.Tensor, indices: torch.Tensor, batch: int, seq_len: int) -> torch.Tensor:
    """Inverse of :func:`unpad`: packed rows [T, ...] to [batch, seq_len, ...], zero where there was
    padding.

    Raises:
        InvalidInput: ``indices`` has another length than ``rows``.
    """
    if len(indices) != len(rows):
        raise InvalidInput(
            f"indices must have one entry per row, got {len(indices)} for {len(rows)} rows"
        )
    out = rows.new_zeros((batch * seq_len, *rows.shape[1:]))
    filled: torch.Tensor = out.index_copy(0, indices, rows).unflatten(0, (batch, seq_len))
    return filled
