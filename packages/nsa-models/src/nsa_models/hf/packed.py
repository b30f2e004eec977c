"""The documents of each row, and the positions of tokens, in a call of a decoder."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.packing import token_positions
from nsa_core.torch_ops.torch_state import checks_values, is_capturing
from nsa_models.hf.cache import NSAModelCache

Lengths = list[list[int]]  # of the documents in each row, in tokens
_ONE_DOCUMENT = (
    "packed documents and a cache are not supported: pass use_cache=False, or one document per row"
)


class Call(NamedTuple):
    """A call of a decoder.

    Attributes:
        size: Shape of the input, [B, S].
        attention_mask: [B, S] with the columns of the cache before the input, or None.
        position_ids: The argument of the decoder. A token whose position does not follow that of
            the token before it starts a document.
        cache: The cache of the call.
        options: Other arguments of the decoder.
    """

    size: torch.Size
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    cache: NSAModelCache | None
    options: dict[str, Any]

    @property
    def boundaries(self) -> Any:
        """The boundaries of packed documents, as passed; None without them."""
        return self.options.get("cu_seq_lens_q")

    def positions(self) -> torch.Tensor:
        """Return the positions as [B, S].

        Raises:
            InvalidInput: They have another shape, or are no integers.
        """
        size, positions = self.size, self.position_ids
        assert positions is not None  # the caller knows
        if positions.shape not in (size, (1, size[1])):
            raise InvalidInput(
                f"position_ids must be {list(size)} or {[1, size[1]]}, like the input, got"
                f" {list(positions.shape)}"
            )
        if positions.is_floating_point() or positions.is_complex():
            raise InvalidInput(f"position_ids must be integers, got {positions.dtype}")
        return positions.expand(size)

    def tokens(self) -> torch.Tensor:
        """Return the rows of the input that are tokens, bool [B, S] on the CPU."""
        if self.attention_mask is None:
            return torch.ones(self.size, dtype=torch.bool, device="cpu")
        return self.attention_mask[:, self.attention_mask.shape[1] - self.size[1] :].cpu().bool()


def packed_documents(call: Call, layer: NSAConfig) -> dict[str, Any]:
    """Divide the rows of a call into documents.

    Args:
        call: The call.
        layer: The layers of the decoder.

    Returns:
        Arguments of the layers, ``cu_seq_lens_q`` and ``max_length_q``; empty if no row has several
        documents.

    Raises:
        InvalidInput: The arguments contradict each other, the boundaries do not divide each of
            several rows, several documents share a row of a cache, or NSA does not compute
            attention at these positions. Positions beside boundaries are checked on the CPU, and on
            a GPU with NSA_CHECK=1.
    """
    boundaries = call.boundaries
    if boundaries is None:
        if call.options.get("cu_seq_lens_k") is not None:
            raise InvalidInput(
                "cu_seq_lens_k is passed without cu_seq_lens_q: pass the boundaries of the packed"
                " documents as cu_seq_lens_q"
            )
        if call.position_ids is None:
            return {}
        arguments: dict[str, Any] = _from_positions(call, layer)
        return arguments
    if call.cache is not None:
        raise InvalidInput(f"cu_seq_lens_q is passed with a cache: {_ONE_DOCUMENT}")
    if not isinstance(boundaries, torch.Tensor) or boundaries.dim() != 1:
        is_tensor = isinstance(boundaries, torch.Tensor)
        passed = list(boundaries.shape) if is_tensor else type(boundaries).__name__
        raise InvalidInput(f"cu_seq_lens_q must be a tensor [documents + 1], got {passed}")
    if boundaries.is_floating_point():
        raise InvalidInput(f"cu_seq_lens_q must be integers, got {boundaries.dtype}")
    if call.position_ids is not None and checks_values(call.positions()):
        _check_documents(call, layer)
    if call.size[0] != 1 or call.attention_mask is not None:
        arguments = _from_boundaries(call)
        return arguments
    longest = call.options.get("max_length_q")
    return {
        "cu_seq_lens_q": boundaries.to(torch.int32),
        "max_length_q": None if longest is None else int(longest),
    }


def _arguments(size: torch.Size, lengths: Lengths, device: torch.device) -> dict[str, Any]:
    """Return the arguments of the layers, for rows whose tokens come before their padding."""
    with_padding = [n for row in lengths for n in (*row, size[1] - sum(row)) if n]
    boundaries = torch.tensor([0, *with_padding], device="cpu").cumsum(0, dtype=torch.int32)
    return {
        "cu_seq_lens_q": boundaries.to(device, non_blocking=True),
        "max_length_q": max(with_padding, default=0),
    }


@torch.compiler.disable(reason="it reads the boundaries on the host")
def _from_boundaries(call: Call) -> dict[str, Any]:
    """Return the arguments of the layers for documents between boundaries. Synchronises.

    Raises:
        InvalidInput: They descend, start or end elsewhere, or a document has tokens of two rows.
    """
    (rows, columns), boundaries = call.size, call.boundaries
    starts_of_rows = range(0, rows * columns + 1, columns)
    _check_readable("cu_seq_lens_q of several rows, or of rows with padding,", boundaries)
    bounds = boundaries.tolist()
    is_ascending = bounds == sorted(bounds) and {*bounds[:1], *bounds[-1:]} == {0, rows * columns}
    if not is_ascending or not set(starts_of_rows) <= set(bounds):
        raise InvalidInput(
            f"cu_seq_lens_q must hold the boundaries of the {rows} rows laid end to end, ascending"
            f" from 0 to {rows} * {columns} = {rows * columns} with every multiple of {columns},"
            f" got {bounds}"
        )
    document = token_positions(boundaries.cpu(), rows * columns).document.view(call.size)
    lengths = [
        row[is_token].unique_consecutive(return_counts=True)[1].tolist()
        for row, is_token in zip(document, call.tokens())
    ]
    return _arguments(call.size, lengths, boundaries.device)


@torch.compiler.disable(reason="it reads the positions on the host")
def _check_documents(call: Call, layer: NSAConfig) -> None:
    """Check that positions count up by 1 in each document; see :func:`_check_start`."""
    positions = call.positions().flatten().cpu()
    documents = token_positions(call.boundaries.cpu(), len(positions))
    if call.attention_mask is not None:
        is_token = call.tokens().flatten()
        documents = type(documents)(*(x[is_token] for x in documents))
        positions = positions[is_token]
    is_first = documents.document.diff(prepend=documents.document.new_tensor([-1])) != 0
    if bool((positions.diff() != 1)[~is_first[1:]].any()):
        raise InvalidInput(
            "position_ids must count up by 1 in each document of cu_seq_lens_q, because NSA rotates"
            " at these positions: leave them out"
        )
    for start in positions[is_first].tolist():
        _check_start(start, layer)


def _check_readable(name: str, tensor: torch.Tensor) -> None:
    if is_capturing(tensor.device):
        raise InvalidInput(
            f"{name} cannot be read while a CUDA graph is captured: leave the argument out"
        )


@torch.compiler.disable(reason="it reads the positions on the host")
def _from_positions(call: Call, layer: NSAConfig) -> dict[str, Any]:
    """Return the arguments of the layers for the documents that positions mark. Synchronises."""
    all_positions, cache = call.positions(), call.cache
    _check_readable("position_ids", all_positions)
    batch, columns = call.size[0], 0 if cache is None else cache.get_seq_length()
    held = [0] * batch if cache is None else cache.host_lengths(batch)
    lengths: Lengths = []
    positions = all_positions.cpu()
    for b, is_token in enumerate(call.tokens()):
        column = is_token.nonzero().flatten()
        position = positions[b, column]
        if not len(column):
            lengths.append([])
            continue
        steps, between = position.diff(), column.diff()
        if bool(((steps == between) & (between > 1)).any()):
            raise InvalidInput(
                f"position_ids of sequence {b} count the padding between its tokens, but the"
                " positions of NSA count tokens: pass attention_mask.cumsum(-1) - 1, or leave them"
                " out"
            )
        bounds = [0, *((steps != 1).nonzero().flatten() + 1).tolist(), len(column)]
        lengths.append([end - start for start, end in pairwise(bounds)])
        first, *starts = position[bounds[:-1]].tolist()
        if starts and cache is not None:
            raise InvalidInput(
                f"position_ids of sequence {b} start several documents beside a cache:"
                f" {_ONE_DOCUMENT}"
            )
        # Some callers count the padding before a sequence too.
        padded = columns + int(column[0])
        if cache is not None and first not in (held[b], padded):
            or_padded = f" (or at {padded}, if they count padding)" * (padded != held[b])
            raise InvalidInput(
                f"position_ids of sequence {b} begin at {first}, but beside a cache of"
                f" {held[b]} tokens they must begin at {held[b]}{or_padded}"
            )
        for start in (first - held[b], *starts):
            _check_start(start, layer)
    is_packed = max(map(len, lengths), default=0) > 1
    return _arguments(call.size, lengths, all_positions.device) if is_packed else {}


def _check_start(position: int, layer: NSAConfig) -> None:
    """Check that documents may start at a position.

    Rotary scores depend on differences of positions only, so a document may start anywhere if phi
    compresses keys before their rotation, or their mean.

    Raises:
        InvalidInput: They may start at 0 only.
    """
    if position and layer.rope and layer.rope_before_compress and layer.compress != "mean":
        raise InvalidInput(
            f"position_ids start a document at {position}, but must start it at 0, because phi"
            f" compresses rotated keys (rope_before_compress, compress={layer.compress!r}), and its"
            " results depend on the position: subtract the first position of each document"
        )
