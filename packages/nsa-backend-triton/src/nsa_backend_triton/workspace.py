"""Peak bytes of each slot beyond its inputs: outputs, what is kept for backward, gradients, buffers between kernels.

Forward runs first; where the request needs gradients its outputs stay alive while backward runs. Kernels keep their
tiles in registers and shared memory, so this is every tensor that a slot's host code makes, no more.
Packed: ``batch`` counts documents.
"""

from __future__ import annotations

import dataclasses

from nsa_core.contract import Request

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A request in numbers."""

    request: Request

    @property
    def item(self) -> int:
        """Bytes of an element of q."""
        return _ITEMSIZE[self.request.dtype]

    @property
    def stat(self) -> int:
        """Bytes of a score, an LSE, a gate or a sum."""
        return max(4, self.item)

    @property
    def documents(self) -> int:
        """Sequences: batch entries or documents."""
        return max(1, self.request.batch or 1)

    @property
    def tokens(self) -> int:
        """Rows of all sequences: T, or B * S."""
        seq_len = self.request.seq_len or 0
        return seq_len if self.request.varlen else seq_len * (1 if self.request.batch is None else self.request.batch)

    @property
    def compressed(self) -> int:
        """Rows of k_cmp in all."""
        geometry, seq_len = self.request.geometry, self.request.seq_len or 0
        if self.request.varlen:
            return geometry.max_compressed(seq_len)
        return geometry.num_compressed(seq_len) * self.documents

    @property
    def rows(self) -> int:
        """(token, query head) rows."""
        return self.tokens * self.request.n_heads

    @property
    def outputs(self) -> int:
        """o and lse."""
        return self.rows * (self.request.v_head_dim * self.item + self.stat)

    def gradients(self, keys: int) -> int:
        """dq, dk and dv of ``keys`` rows of keys."""
        width = self.request.head_dim + self.request.v_head_dim
        return (self.rows * self.request.head_dim + keys * self.request.n_kv_heads * width) * self.item

    def peak(self, forward: int, backward: int) -> int:
        """``forward`` holds its outputs; ``backward`` is what comes on top of them."""
        return max(forward, self.outputs + backward) if self.request.needs_grad else forward


def combine(request: Request) -> int:
    """o; backward: three gradients and dgates."""
    size = Sizes(request)
    o = size.rows * request.v_head_dim * size.item
    return o + (3 * (o + size.rows * size.stat) if request.needs_grad else 0)
