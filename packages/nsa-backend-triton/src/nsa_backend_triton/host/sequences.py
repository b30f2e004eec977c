"""The sequences of a call, dense or packed."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nsa_backend_triton.host import launch_cache
from nsa_backend_triton.host.document_starts import compressed_starts
from nsa_core.contract import SlotCall


def _ascending(boundaries: Tensor) -> Tensor:
    """Return ``boundaries`` without those below 0 or below an earlier one."""
    return boundaries.clamp(min=0).cummax(0).values


class Sequences(NamedTuple):
    """The sequences of a call, dense or packed, as kernels take them.

    Attributes:
        cu: int32 [n + 1], first token of each document; dense: any tensor, never read.
        cu_cmp: int32 [n + 1], first compressed row of each document; dense: never read.
        n: number of sequences (batch entries or documents).
        seq_len: rows of q: dense: S of each sequence; packed: T of all together.
        packed: whether the call has cu_seqlens.
        first_query: position of row 0 of q, see SlotCall; 0 unless ``partial``.
        partial: whether q holds only some rows of its sequences. Kernels are compiled for it.
        apart: whether a batch entry must give the same bits beside any other entries.
    """

    cu: Tensor
    cu_cmp: Tensor
    n: int
    seq_len: int
    packed: bool
    first_query: int = 0
    partial: bool = False
    apart: bool = False

    @classmethod
    def of(cls, q: Tensor, k: Tensor, call: SlotCall, *, compressed: bool = False) -> Sequences:
        """Return the sequences of ``q`` [B, S, ...] or [T, ...].

        ``k`` is the slot's k or k_cmp. ``compressed``: it is k_cmp, and cu_cmp is computed, on the
        device.
        """
        length, geometry, packed = q.shape[-3], call.geometry, call.cu_seqlens is not None
        if compressed:
            count = geometry.max_compressed if packed else geometry.num_compressed
            whole = count(length)
        else:
            whole = length
        partial = call.first_query > 0 or k.shape[-3] != whole
        place = (call.first_query, partial)
        if call.cu_seqlens is None:
            return cls(q, q, q.shape[0], length, False, *place, call.deterministic)
        cu = call.cu_seqlens
        if partial:
            # Kernels find the document of a tile of queries, and of a tile of keys. Malformed
            # boundaries that do not ascend could give two documents, and rows outside q.
            cu = _ascending(cu)
        end = call.first_query + length
        cu_cmp = compressed_starts(cu, geometry, end) if compressed else cu
        return cls(cu, cu_cmp, len(cu) - 1, length, True, *place)

    def disjoint(self) -> Sequences:
        """Return the sequences with boundaries that ascend, so that no two documents share a row.

        This takes two launches if the call is packed, and changes malformed boundaries only.
        """
        if not self.packed or self.partial:  # those of a partial call ascend already
            return self
        return self._replace(cu=_ascending(self.cu))

    @property
    def end(self) -> int:
        """Rows of the axis of the keys up to the last query; later keys are never seen."""
        return self.first_query + self.seq_len

    @property
    def divided(self) -> Sequences:
        """The sequences whose amount of work sets the number of parts of a sum.

        With ``apart``, this is one sequence: other entries must not change where its sums are cut.
        """
        return self._replace(n=min(self.n, 1)) if self.apart else self

    def num_keys(self, compress_block: int, stride: int) -> int:
        """Return the number of keys up to the last query, if keys are counted as in span.geometry.

        Those of a dense sequence, or, with 1 and 1, of the whole packed axis.
        """
        return max((self.end - compress_block) // stride + 1, 0)

    def tiles(self, size: int) -> int:
        """Return the number of tiles of ``size`` rows that cover every sequence.

        shared.rows.place_queries computes the position of each tile.
        """
        if self.packed:
            return self.seq_len // size + self.n
        return self.n * -(-self.seq_len // size)

    def key_tiles(self, size: int) -> int:
        """Return the number of tiles of ``size`` rows that cover the keys up to the last query.

        shared.rows.place computes the position of each tile.
        """
        return self._replace(seq_len=self.end, first_query=0).tiles(size)


launch_cache.METADATA[Sequences] = lambda x: (
    x.n,
    x.seq_len,
    x.packed,
    x.first_query,
    x.partial,
    x.apart,
)
