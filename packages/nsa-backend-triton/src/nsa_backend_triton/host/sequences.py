"""Host side of a launch: the sequences of a call, and what the kernels are told about them."""

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
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 when triton
    was imported).
    """
    # Triton read the variable when it defined its own functions. Its interpreter is not imported
    # here: it needs numpy.
    return not isinstance(tl.max, JITFunction)


_described: list[int] = []


@contextlib.contextmanager
def described(architecture: int) -> Iterator[None]:
    """Tensors on the meta device count as lying on a GPU of ``architecture`` inside the block."""
    _described.append(architecture)
    try:
        yield
    finally:
        _described.pop()


def architecture(device: torch.device) -> int:
    """Compute capability of ``device`` as one number, 90 for sm_90; 0 in the interpreter."""
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
# GB10): so what is told of a GPU that is not there is a bound.
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
    """Streaming multiprocessors of ``device``; 3 in the interpreter.

    Without data: those of the current GPU where it is of the described architecture, or of the
    largest one of it.
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
    """What scores and sums are kept in: fp32, fp64 for fp64 (the interpreter's)."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def band(width: int) -> int:
    """Columns of a band of rows ``width`` wide, see shared/rows.py: a power of two that holds them,
    or a third of them.
    """
    whole = max(16, 1 << (width - 1).bit_length())
    return whole // 4 if whole >= 64 and 4 * width <= 3 * whole else whole


Shape: TypeAlias = Sequence[int]


class Sequences(NamedTuple):
    """The sequences of a call, dense or packed, as kernels take them.

    Attributes:
        cu: int32 [n + 1] first token of each document; dense: any tensor, not read.
        cu_cmp: int32 [n + 1] first compressed row of each document; dense: not read.
        n: sequences (batch entries or documents).
        seq_len: tokens of each, dense; packed: all tokens T.
        packed: whether cu_seqlens was given.
    """

    cu: Tensor
    cu_cmp: Tensor
    n: int
    seq_len: int
    packed: bool

    @classmethod
    def of(cls, q: Tensor, call: SlotCall, *, compressed: bool = False) -> Sequences:
        """The sequences of ``q`` [B, S, ...] or [T, ...]; ``compressed`` computes cu_cmp too, on
        the device.
        """
        if call.cu_seqlens is None:
            return cls(q, q, q.shape[0], q.shape[1], False)
        cu = call.cu_seqlens
        return cls(
            cu,
            compressed_starts(cu, call.geometry) if compressed else cu,
            len(cu) - 1,
            q.shape[0],
            True,
        )

    def tiles(self, size: int) -> int:
        """Programs that cover every sequence with tiles of ``size`` rows (rows.place tells each
        which).
        """
        if self.packed:
            return self.seq_len // size + self.n
        return self.n * -(-self.seq_len // size)


launch_cache.READ[Sequences] = lambda x: (x.n, x.seq_len, x.packed)


MOST_TOKENS = 256  # of a tile: no table has more


def strides(x: Tensor, packed: bool, *, far: bool = False) -> tuple[int, int, int]:
    """(sequence, token, head) strides of x [B, S, H, D], packed [T, H, D]. One sequence: stride 0,
    never multiplied.

    A stride past 2^31 is an int64 argument, which would be a binary of its own for each long batch
    of one.

    Args:
        far: for a kernel whose products of token and stride hold whatever it is; else those inside
            a tile are 32 bits.

    Raises:
        ValueError: heads, or the tokens of a tile, lie further apart than the kernels' 32-bit
            products hold.
    """
    counts = {
        "heads": x.shape[-2],
        "neighbouring tokens": 0 if far else min(x.shape[-3], MOST_TOKENS),
    }
    for (name, count), step in zip(counts.items(), (x.stride(-2), x.stride(-3))):
        if (count - 1) * step >= 2**31:
            raise ValueError(
                f"{count} {name} of a tensor {list(x.shape)} with strides {list(x.stride())} must"
                " lie within 2^31 elements: pass it as x.contiguous(), tokens before heads"
            )
    if packed:
        return 0, x.stride(0), x.stride(1)
    return x.stride(0) if x.shape[0] > 1 else 0, x.stride(1), x.stride(2)


def new_strides(shape: Shape, packed: bool) -> tuple[int, int, int]:
    """:func:`strides` of a new tensor of ``shape``."""
    *batch, tokens, heads, width = shape
    return 0 if packed or batch[0] == 1 else tokens * heads * width, heads * width, width


def lse_strides(lse: Tensor, packed: bool) -> tuple[int, int]:
    """(sequence, head) strides of lse [B, H, S], packed [H, T]; tokens are adjacent."""
    return (0, lse.stride(0)) if packed else (lse.stride(0), lse.stride(1))


def new_lse_strides(shape: Shape, packed: bool) -> tuple[int, int]:
    """:func:`lse_strides` of a new tensor of ``shape``."""
    heads, tokens = shape[-2:]
    return 0 if packed else heads * tokens, tokens
