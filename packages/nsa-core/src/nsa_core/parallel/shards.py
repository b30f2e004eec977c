"""Shards: the rows of a sequence that each rank holds, and the choice of a layout.

:mod:`nsa_core.parallel.layouts` describes the layouts. The work of a row grows with its position,
because cmp and select read all compressed tokens before it. In the layout head_tail every rank has
an early and a late chunk, so that the ranks are equally loaded for one long document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from nsa_core.config import NSAConfig, check_config
from nsa_core.errors import InvalidInput
from nsa_core.flops import visible_pairs
from nsa_core.layout import BlockGeometry
from nsa_core.limits import check_integers
from nsa_core.parallel.collectives import gather_rows, group_name, group_size
from nsa_core.parallel.layouts import (
    LAYOUTS,
    check_layout,
    chunks_of,
    in_order,
    pieces_per_rank,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Time per key of sel and win in units of the time per compressed key of cmp and select together, of
# forward and backward on an H200 at 64k random tokens, with 64 query heads, 4 kv heads and head
# width 128.
_KEY_COST = 2


def pad_to(total: int, world: int, layout: str = "head_tail") -> int:
    """Return the smallest number of rows >= ``total`` that ``world`` ranks can share.

    Pad the sequence with rows of any content. For packed documents, append a document that holds
    them to ``cu_seqlens``, so that no other document changes; without documents, later rows change
    nothing, because attention is causal.

    Args:
        total: number of rows.
        world: number of ranks.
        layout: "head_tail" or "contiguous".

    Raises:
        InvalidInput: an argument is out of range.

    Example:
        >>> pad_to(1000, 3, "contiguous"), pad_to(1000, 3, "head_tail")
        (1002, 1002)
    """
    check_layout(layout)
    check_integers({"world": world}, {"total": total})
    chunks = world * pieces_per_rank(layout)
    return -(-total // chunks) * chunks


@dataclasses.dataclass(frozen=True)
class Shards:
    """The rows of a sequence, or of packed documents, that one rank holds.

    Args:
        total: number of rows of all ranks together, T; a multiple of ``world``, and of 2 ``world``
            in the layout head_tail. :func:`pad_to` gives the next multiple.
        world: number of ranks, P.
        rank: this rank, 0 .. P - 1.
        layout: "head_tail" or "contiguous"; the layout of the layers
            (:class:`nsa_core.parallel.ContextParallel`).

    Raises:
        InvalidInput: an argument is out of range, or the rows do not divide over the ranks.

    Example:
        >>> shards = Shards(total=16, world=2, rank=0)
        >>> shards.pieces
        ((0, 4), (12, 16))
        >>> shards.take(torch.arange(16)).tolist()
        [0, 1, 2, 3, 12, 13, 14, 15]
    """

    total: int
    world: int
    rank: int
    layout: str = "head_tail"

    def __post_init__(self) -> None:
        check_layout(self.layout)
        check_integers({"world": self.world}, {"total": self.total, "rank": self.rank})
        if self.rank >= self.world:
            raise InvalidInput(f"rank must be below world = {self.world}, got {self.rank}")
        if self.total % self.chunks:
            padded = pad_to(self.total, self.world, self.layout)
            raise InvalidInput(
                f"total must be a multiple of {self.chunks} for {self.world} ranks and layout"
                f" {self.layout!r}, got {self.total}: pad the rows to pad_to({self.total},"
                f" {self.world}, {self.layout!r}) = {padded}"
            )

    @property
    def chunks(self) -> int:
        """Number of chunks of all ranks together."""
        return self.world * pieces_per_rank(self.layout)

    @property
    def chunk(self) -> int:
        """Number of rows of a chunk."""
        return self.total // self.chunks

    @property
    def rows(self) -> int:
        """Number of rows of a rank."""
        return self.total // self.world

    @property
    def numbers(self) -> tuple[int, ...]:
        """The chunks of this rank, in the order of its rows."""
        return chunks_of(self.rank, self.world, self.layout)

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """The rows of this rank as ranges (first, end), in order."""
        return tuple((k * self.chunk, (k + 1) * self.chunk) for k in self.numbers)

    def positions(self, device: str | torch.device | None = None) -> torch.Tensor:
        """Return the rows of this rank as an int64 tensor [T / P].

        Args:
            device: device of the result.
        """
        return torch.cat([torch.arange(first, end, device=device) for first, end in self.pieces])

    def take(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return the rows of this rank, a copy in the layout head_tail and a view otherwise.

        Args:
            x: a tensor of all T rows, of any dtype.
            dim: the axis of the rows.

        Raises:
            InvalidInput: the axis does not have T rows.
        """
        if x.shape[dim] != self.total:
            raise InvalidInput(
                f"x must have {self.total} rows on axis {dim}, got {list(x.shape)}: pass the rows"
                " of all ranks"
            )
        parts = [x.narrow(dim, first, end - first) for first, end in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def whole(
        self, local: torch.Tensor, dim: int = 0, group: ProcessGroup | None = None
    ) -> torch.Tensor:
        """Gather the rows of all ranks: the inverse of :meth:`take`, on every rank.

        All ranks must call it. Gradients flow back to every rank, summed over the ranks.

        Args:
            local: the rows of this rank. The group must gather their dtype; gloo: not int16, fp8.
            dim: the axis of the rows.
            group: the ranks; default: all processes.

        Returns:
            All T rows.

        Raises:
            InvalidInput: ``local`` does not have T / P rows, or the group does not have P ranks.
        """
        if local.shape[dim] != self.rows:
            raise InvalidInput(
                f"local must have {self.rows} rows on axis {dim}, got {list(local.shape)}: pass the"
                " rows of this rank"
            )
        if self.world == 1:
            return local
        name = self.checked_group(group)
        rows = local.movedim(dim, 0)
        gathered = gather_rows(rows.contiguous(), name, torch.float32)
        return in_order(gathered, self.world, self.layout).movedim(0, dim)

    def checked_group(self, group: ProcessGroup | None) -> str:
        """Return the name under which the collectives find ``group``; None: all processes.

        Raises:
            InvalidInput: the group does not have P ranks.
        """
        name = group_name(group)
        if group_size(name) != self.world:
            raise InvalidInput(
                f"group must have the {self.world} ranks of these shards, got {group_size(name)}:"
                " pass the group of the context-parallel mesh, group=mesh.get_group()"
            )
        return name


def choose_layout(lengths: Sequence[int], world: int, config: NSAConfig) -> str:
    """Return the layout whose slowest rank has the least work, computed on the host.

    A row costs the compressed tokens that it sees, plus twice the keys of sel and win: the ratio of
    their times on an H200. One long document makes head_tail faster. Many short documents load all
    ranks equally in both layouts, and contiguous needs half as many calls of the kernels.

    Args:
        lengths: lengths in tokens of the documents in their order, padding included.
        world: number of ranks.
        config: the config of the layers.

    Returns:
        "head_tail" or "contiguous". If only one of them divides the rows, that one.

    Raises:
        InvalidInput: an argument is out of range, or ``world`` does not divide the rows.

    Example:
        >>> config = NSAConfig(dim=768, n_heads=12, n_kv_heads=2)
        >>> choose_layout([65536], 2, config), choose_layout([4096] * 16, 2, config)
        ('head_tail', 'contiguous')
    """
    check_config(config)
    check_integers({}, {f"lengths[{index}]": length for index, length in enumerate(lengths)})
    total = sum(lengths)
    contiguous = Shards(total, world, 0, "contiguous")
    if total % (2 * contiguous.world):
        return "contiguous"
    costs = {layout: max(rank_costs(lengths, world, config, layout)) for layout in LAYOUTS}
    return "head_tail" if costs["head_tail"] < costs["contiguous"] else "contiguous"


def rank_costs(lengths: Sequence[int], world: int, config: NSAConfig, layout: str) -> list[int]:
    """Return the work of each rank, in compressed keys of cmp and select.

    Args:
        lengths: lengths in tokens of the documents in their order.
        world: number of ranks.
        config: the config of the layers.
        layout: "head_tail" or "contiguous".
    """
    chunk = Shards(sum(lengths), world, 0, layout).chunk
    of_chunk = [0] * (world * pieces_per_rank(layout))
    for number, start, end in _chunk_spans(lengths, chunk):
        of_chunk[number] += _cost(end, config.geometry) - _cost(start, config.geometry)
    return [sum(of_chunk[k] for k in chunks_of(r, world, layout)) for r in range(world)]


def _chunk_spans(lengths: Sequence[int], chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yield (chunk, first position, end) of the parts into which chunks cut the documents."""
    row = 0
    for length in lengths:
        position = 0
        while position < length:
            number, offset = divmod(row, chunk)
            part = min(chunk - offset, length - position)
            yield number, position, position + part
            position, row = position + part, row + part


def _cost(length: int, geometry: BlockGeometry) -> int:
    """Return the cost of the first ``length`` rows of a document."""
    pairs = visible_pairs(geometry, length)
    return pairs["cmp"] + _KEY_COST * (pairs["sel"] + pairs["win"])
