"""Host side of a launch: sequences of a call, strides, and properties of the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from nsa_backend_triton.host import launch_cache
from nsa_backend_triton.host.document_starts import compressed_starts
from nsa_core.contract import SlotCall


@functools.cache
def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors.

    They do if TRITON_INTERPRET=1 was set when triton was imported.
    """
    # Triton reads the variable when it defines its own functions. Importing its interpreter instead
    # would need numpy.
    return not isinstance(tl.max, JITFunction)


_described: list[int] = []


@contextlib.contextmanager
def described(architecture: int) -> Iterator[None]:
    """Treat tensors on the meta device as if on a GPU of ``architecture`` inside the block."""
    _described.append(architecture)
    try:
        yield
    finally:
        _described.pop()


def architecture(device: torch.device) -> int:
    """Return the compute capability of ``device``, 90 for sm_90; 0 in the interpreter."""
    if device.type == "meta" and _described:
        return _described[-1]
    return _capability(device)


@functools.cache
def _capability(device: torch.device) -> int:
    if interpreted():
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# Of the largest GPU of each architecture (A100, A40, Orin, L40S, H200, B200, B300, RTX PRO 6000,
# GB10): an upper bound for a GPU that is described, but not present.
_MULTIPROCESSORS = {
    80: 108,
    86: 84,
    87: 16,
    89: 142,
    90: 132,
    100: 148,
    103: 160,
    120: 188,
    121: 48,
}


def multiprocessors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of ``device``; 3 in the interpreter.

    For the meta device, that of the current GPU if it has the described architecture, otherwise
    that of the largest GPU of this architecture.
    """
    if device.type == "cuda":
        return _count(device)
    described = architecture(device)
    if described and torch.cuda.is_available():
        current = torch.device("cuda", torch.cuda.current_device())
        if _capability(current) == described:
            return _count(current)
    return _MULTIPROCESSORS.get(described, max(_MULTIPROCESSORS.values())) if described else 3


def _count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of scores and sums: fp32, or fp64 for fp64 (in the interpreter)."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def band(width: int) -> int:
    """Return the columns of a band of rows ``width`` wide (see shared/rows.py), a power of two.

    One band holds all columns, or three bands do.
    """
    padded = max(16, 1 << (width - 1).bit_length())
    return padded // 4 if padded >= 64 and 4 * width <= 3 * padded else padded


def value_band(k_band: int, v_band: int, architecture: int, *, use_tma: bool) -> int:
    """Return the band of V for kernels that multiply tiles of K, then of V, in a loop.

    It is ``v_band``; on sm_90 at least ``k_band``, up to 64 columns (the 128 bytes of the widest
    swizzle). Without TMA, tiles of K and V that cannot be copied asynchronously share their place
    in shared memory, and if V's are narrower, the ptxas of CUDA 12.8, which Triton 3.6 brings,
    computes the addresses of V's products from a register that holds something else. The ptxas of
    CUDA 12.9 translates the same PTX correctly. tests/triton/tools/sass.py finds such products.
    """
    least = min(k_band, 64) if architecture == 90 and not use_tma else 0
    return max(v_band, least)


Shape: TypeAlias = Sequence[int]


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


MAX_TILE_TOKENS = 256  # no table has larger tiles


def strides(x: Tensor, packed: bool, *, int64_products: bool = False) -> tuple[int, int, int]:
    """Return the (batch, token, head) strides of x [B, S, H, D], packed [T, H, D].

    The batch stride of a single sequence is 0: kernels multiply it by 0. Its real value may exceed
    2^31, which would make it an int64 argument and need another binary for each long batch of one.

    Args:
        int64_products: The kernel multiplies tokens and strides in 64 bits. By default, products
            inside a tile have 32 bits.

    Raises:
        ValueError: Heads, or the tokens of a tile, are further apart than 32-bit products allow.
    """
    counts = {
        "heads": x.shape[-2],
        "neighbouring tokens": 0 if int64_products else min(x.shape[-3], MAX_TILE_TOKENS),
    }
    for (name, count), stride in zip(counts.items(), (x.stride(-2), x.stride(-3))):
        if (count - 1) * stride >= 2**31:
            raise ValueError(
                f"{count} {name} of a tensor of shape {list(x.shape)} and strides"
                f" {list(x.stride())} must lie within 2^31 elements: pass x.contiguous(), with"
                " tokens before heads"
            )
    if packed:
        return 0, x.stride(0), x.stride(1)
    return x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2)


def batch_apart(stride: tuple[int, int, int]) -> tuple[int, tuple[int, int]]:
    """Return (batch stride, (token, head) strides), which shared.rows.with_batch joins again."""
    return stride[0], stride[1:]


def new_strides(shape: Shape, packed: bool) -> tuple[int, int, int]:
    """Return :func:`strides` of a new contiguous tensor of ``shape``."""
    *batch, tokens, heads, width = shape
    return 0 if packed or batch[0] == 1 else tokens * heads * width, heads * width, width


def lse_strides(lse: Tensor, packed: bool) -> tuple[int, int]:
    """Return the (batch, head) strides of lse [B, H, S], packed [H, T]; tokens are adjacent."""
    return (0, lse.stride(0)) if packed else (lse.stride(0), lse.stride(1))


def new_lse_strides(shape: Shape, packed: bool) -> tuple[int, int]:
    """Return :func:`lse_strides` of a new contiguous tensor of ``shape``."""
    heads, tokens = shape[-2:]
    return 0 if packed else heads * tokens, tokens
