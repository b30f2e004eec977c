"""Packed documents: boundaries, token positions, and conversion from and to padded batches.

``cu_seqlens`` int32 [documents + 1] contains the first row of each document and, last, the number
of rows T. Positions are computed on the device, without synchronisation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from nsa_core.dtypes import dtype_name
from nsa_core.errors import InvalidInput, Unsupported
from nsa_core.layout import BlockGeometry
from nsa_core.limits import integer_problems, too_large


class TokenPositions(NamedTuple):
    """The document and position of each of T rows; all fields are int64 [T].

    Attributes:
        document: index of the row's document.
        position: position of the row inside its document.
        start: first row of the row's document.
    """

    document: torch.Tensor
    position: torch.Tensor
    start: torch.Tensor


def token_positions(cu_seqlens: torch.Tensor, total: int, first: int = 0) -> TokenPositions:
    """Compute the document and position of each of the rows ``first`` .. ``first + total - 1``.

    Rows after the last boundary belong to the last document. Malformed boundaries give meaningless
    positions, but every document index is inside [0, documents).

    Args:
        cu_seqlens: int32 [documents + 1].
        total: number of rows, T.
        first: the first row.
    """
    rows = torch.arange(first, first + total, device=cu_seqlens.device)
    # Search all boundaries, not only the inner ones: inductor of torch 2.11 cannot lower a search
    # in a slice of a computed tensor.
    document = torch.searchsorted(cu_seqlens.contiguous(), rows.to(cu_seqlens.dtype), right=True)
    document = (document - 1).clamp_(0, max(len(cu_seqlens) - 2, 0))
    start = cu_seqlens.long()[document]
    return TokenPositions(document, rows - start, start)


def compressed_cu_seqlens(cu_seqlens: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """Compute the first compressed row of each document, int32 [documents + 1].

    The last entry is the total number of compressed tokens.
    """
    lengths = cu_seqlens.diff()
    counts = ((lengths - geometry.compress_block_size) // geometry.compress_stride + 1).clamp(min=0)
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


# cu_seqlens -> (tensor version, values of that version)
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def host_boundaries(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """Return the values of ``cu_seqlens``, for a backend that declares ``reads_boundaries``.

    For a GPU tensor this synchronises. Values are cached per tensor, so that all layers and passes
    share one read; an in-place change by torch invalidates the cache. A tensor created under
    inference_mode has no version counter and is read on every call. Boundaries that are not
    contiguous are read once per layer, because a backend gets a copy.

    Raises:
        Unsupported: a CUDA graph is being captured. Its replays would use the current boundaries.
    """
    if _on_gpu(cu_seqlens) and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "a backend reads cu_seqlens on the host, which cannot be captured in a CUDA graph: use"
            " a backend that keeps cu_seqlens on the device for slot 'cmp', for example triton"
        )
    # Host tensors are not cached: reading them is free, and numpy can write to them without a new
    # version.
    if not _on_gpu(cu_seqlens) or cu_seqlens.is_inference():
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
    """Remove padding: convert a padded batch to packed rows.

    Synchronises, because the number of tokens T is a shape.

    Args:
        x: [B, S, ...], any dtype.
        attention_mask: [B, S], bool, or integers 0 and 1; False or 0 marks padding. The tokens of a
            sequence must be contiguous.

    Returns:
        A tuple (rows, cu_seqlens, max_seqlen, indices):
        rows, the packed tokens [T, ...];
        cu_seqlens, int32 [B + 1], the first row of each sequence and T;
        max_seqlen, the length in tokens of the longest sequence, a host integer;
        indices, int64 [T], the positions of the rows in x.flatten(0, 1), for :func:`pad`.

    Raises:
        InvalidInput: x or the mask is not a tensor; or the mask has another shape or dtype, other
            numbers than 0 and 1, or a gap between the tokens of a sequence.

    Example:
        >>> rows, cu_seqlens, max_seqlen, indices = unpad(x, attention_mask)
        >>> y = pad(attn(rows, cu_seqlens, max_seqlen), indices, *x.shape[:2])
    """
    for name, argument in (("x", x), ("attention_mask", attention_mask)):
        if not isinstance(argument, torch.Tensor):
            raise InvalidInput(f"{name} must be a tensor, got {type(argument).__name__}")
    if attention_mask.dim() != 2 or attention_mask.shape != x.shape[:2]:
        raise InvalidInput(
            f"attention_mask must be [B, S] for x [B, S, ...], got {list(attention_mask.shape)} for"
            f" x {list(x.shape)}"
        )
    # A floating-point mask is ambiguous: an additive mask has 0 for tokens.
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise InvalidInput(
            "attention_mask must be bool, or integers 0 and 1, got"
            f" {dtype_name(attention_mask.dtype)}: pass mask == 0 for an additive mask (0 marks"
            " tokens), or mask != 0 for a mask of zeros and ones"
        )
    is_token = attention_mask.bool()
    others = (attention_mask.long() != is_token).nonzero()
    if len(others):  # merged documents would attend to each other
        first = others[0].tolist()
        raise InvalidInput(
            "attention_mask must be bool, or integers 0 and 1, got"
            f" {attention_mask[tuple(first)].item()} at index {first}: if each token has the number"
            " of its document, pass cu_seqlens with their boundaries; else pass mask != 0"
        )
    runs = (is_token[:, 1:] & ~is_token[:, :-1]).sum(1) + is_token[:, :1].sum(1)
    if bool((runs > 1).any()):
        raise InvalidInput(
            f"attention_mask: row {int((runs > 1).nonzero()[0])} has a gap: the tokens of a row"
            " must be contiguous"
        )
    lengths = is_token.sum(1)
    indices = is_token.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return x.flatten(0, 1)[indices], cu_seqlens, longest, indices


def pad(rows: torch.Tensor, indices: torch.Tensor, batch: int, seq_len: int) -> torch.Tensor:
    """Restore padding: convert packed rows to a padded batch. The inverse of :func:`unpad`.

    Args:
        rows: [T, ...], any dtype.
        indices: int64 [T], from :func:`unpad`.
        batch: number of sequences, B.
        seq_len: tokens per padded sequence, S.

    Returns:
        [B, S, ...], zero where there is padding.

    Raises:
        InvalidInput: ``indices`` are not int64 or not one per row, or a size is out of range.
    """
    if not isinstance(batch, torch.SymInt) and not isinstance(seq_len, torch.SymInt):
        problems = integer_problems("batch", batch, 0) + integer_problems("seq_len", seq_len, 0)
        if problems := problems or too_large("batch * seq_len", batch * seq_len):
            raise InvalidInput("; ".join(problems))
    if indices.dtype != torch.int64 or indices.dim() != 1 or len(indices) != len(rows):
        raise InvalidInput(
            f"indices must be int64 with one entry per row, got {dtype_name(indices.dtype)}"
            f" {list(indices.shape)} for {len(rows)} rows"
        )
    out = rows.new_zeros((batch * seq_len, *rows.shape[1:]))
    padded: torch.Tensor = out.index_copy(0, indices, rows).unflatten(0, (batch, seq_len))
    return padded
