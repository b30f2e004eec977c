"""A request in numbers: what the workspace formulas count in."""

from __future__ import annotations

import dataclasses

import torch

from nsa_backend_sdpa import engine
from nsa_core.contract import Request


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A request in numbers."""

    request: Request

    @property
    def dtype(self) -> torch.dtype:
        """Of q."""
        return (
            torch.float64 if self.request.dtype == "float64" else getattr(torch, self.request.dtype)
        )

    @property
    def item(self) -> int:
        """Bytes of an element of q."""
        return self.dtype.itemsize

    @property
    def stat(self) -> int:
        """Bytes of a score."""
        return engine.stats_dtype(self.dtype).itemsize

    @property
    def operand(self) -> int:
        """Bytes of an element inside a product."""
        return self.item if self.request.device in engine.NARROW_DEVICES else self.stat

    @property
    def narrow(self) -> int:
        """Bytes of an element of P once rounded for its product; 0: P is not copied."""
        return self.operand if self.operand != self.stat else 0

    @property
    def budget(self) -> int:
        """The bound on one tile of scores, in bytes."""
        return engine.score_bytes(self.request.device)

    @property
    def documents(self) -> int:
        """Sequences, or documents when packed; at least 1."""
        return max(1, self.request.batch or 1)

    @property
    def tokens(self) -> int:
        """All rows: T."""
        seq_len = self.request.seq_len or 0
        return seq_len if self.request.varlen else seq_len * self.documents

    @property
    def compressed(self) -> int:
        """All rows of k_cmp."""
        geometry = self.request.geometry
        if self.request.varlen:
            return geometry.max_compressed(self.tokens)
        return self.documents * geometry.num_compressed(self.longest)

    @property
    def longest(self) -> int:
        """Tokens of a sequence; packed, lengths are not told: of all documents together."""
        return self.request.seq_len or 0

    @property
    def heads(self) -> int:
        """Query heads of a group: h."""
        return self.request.n_heads // self.request.n_kv_heads

    @property
    def outputs(self) -> int:
        """o and lse."""
        return (
            self.tokens * self.request.n_heads * (self.request.v_head_dim * self.item + self.stat)
        )

    @property
    def width(self) -> int:
        """Dk + Dv."""
        return self.request.head_dim + self.request.v_head_dim

    def attend(self, rows: int, scores: int) -> int:
        """What engine.attend allocates for ``rows`` query heads."""
        return scores * (self.stat + self.narrow) + rows * self.request.v_head_dim * self.stat

    def attend_backward(self, rows: int, keys: int, scores: int) -> int:
        """What engine.attend_backward allocates for ``rows`` query heads and ``keys`` keys, all kv
        heads together.
        """
        d_k, d_v = self.request.head_dim, self.request.v_head_dim
        middle = 2 * scores * self.stat + keys * d_v * self.stat
        return max(middle, scores * self.operand + (keys * self.width + rows * d_k) * self.stat)

    def delta(self, rows: int) -> int:
        """rowsum(do * o): a product, do widened, o gathered."""
        return (
            rows
            * self.request.v_head_dim
            * (self.stat + (self.stat if self.narrow else 0) + self.operand)
        )
