"""Attention of large scores as kernels compute it, with faults that show only there.

Every score is a float32 sum in sequence, the least precise order, and the backward adds in the
opposite order. exp and its products flush to 0 below 2^-126, as exp2 does on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

LOG2E = math.log2(math.e)
TILE = 16
Tensors = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def rounded_to(dtype: torch.dtype) -> Change:
    return lambda x: x.to(dtype).float()


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 10 bits of a TF32 mantissa."""
    mantissa, exponent = x.frexp()
    return torch.ldexp((mantissa * 2**11).round(), exponent - 11)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One head of attention, with options that plant a fault.

    Attributes:
        dtype: Tested dtype.
        scale: Softmax scale.
        factor: Rounding of the factor scale * log2(e).
        operand: Rounding of q and k, each multiplied by the root of the scale; None multiplies the
            scores.
        score: Rounding of the scores.
        prob: Rounding of P, on top of that to the dtype.
        value: Rounding of V in the forward.
        stored_lse: Rounding of the LSE that the backward reads.
        first_tile: Whether the maximum is that of the first tile of keys.
    """

    dtype: torch.dtype
    scale: float
    factor: Change = unchanged
    operand: Change | None = None
    score: Change = unchanged
    prob: Change = unchanged
    value: Change = unchanged
    stored_lse: Change = unchanged
    first_tile: bool = False

    def _scores(
        self, q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, *, backward: bool
    ) -> torch.Tensor:
        """Return the scores [R, L], multiplied by log2(e)."""
        factor = self.factor(torch.tensor(self.scale * LOG2E))
        if self.operand is not None:
            q, k = (self.operand(x * self.scale**0.5) for x in (q, k))
            factor = torch.tensor(LOG2E)
        s, width = torch.zeros(len(q), len(k)), q.shape[1]
        for d in reversed(range(width)) if backward else range(width):
            s = torch.addcmul(s, q[:, d, None], k[:, d])
        return self.score(s * factor).masked_fill(~seen, -math.inf)

    def run(
        self,
        q: torch.Tensor,  # [R, D]
        k: torch.Tensor,  # [L, D]
        v: torch.Tensor,  # [L, D]
        seen: torch.Tensor,  # bool [R, L], at least one key in each row
        do: torch.Tensor,  # [R, D]
    ) -> Tensors:
        """Return o, dq, dk and dv in float32, and lse [R]."""
        q, k, v, do = (x.float() for x in (q, k, v, do))
        store, prob = rounded_to(self.dtype), lambda x: self.prob(x.to(self.dtype).float())
        s = self._scores(q, k, seen, backward=False)
        top, total, acc = s.new_full((len(q), 1), -math.inf), torch.zeros(len(q), 1), 0.0
        for a in range(0, len(k), TILE):
            part = s[:, a : a + TILE]
            new = torch.maximum(top, part.amax(-1, keepdim=True))
            new = top if self.first_tile and a else new
            base = new.masked_fill(new == -math.inf, 0.0)
            p, old = _flushed((part - base).exp2()), _flushed((top - base).exp2())
            total = total * old + p.sum(-1, keepdim=True)
            acc = acc * old + prob(p) @ self.value(v[a : a + TILE])
            top = new
        o, lse = store(acc / total), (top + total.log2()) / LOG2E
        s = self._scores(q, k, seen, backward=True)
        p = _flushed((s - self.stored_lse(lse) * LOG2E).exp2())
        ds = store(p * (do @ v.T - (do * o).sum(-1, keepdim=True)))
        grads = {"dq": self.scale * (ds @ k), "dk": self.scale * (ds.T @ q), "dv": prob(p).T @ do}
        return {"o": o, "lse": lse[:, 0], **grads}


def _flushed(p: torch.Tensor) -> torch.Tensor:
    return p.masked_fill(p < 2.0**-126, 0.0)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Tested dtype, and the options of the kernel.
FAULTS: dict[str, tuple[torch.dtype, dict[str, object]]] = {
    "factor of exp2 rounded to bf16": (FP32, {"factor": rounded_to(BF16)}),
    "factor of exp2 rounded to fp16": (FP32, {"factor": rounded_to(FP16)}),
    "factor of exp2 rounded to bf16, in bf16": (BF16, {"factor": rounded_to(BF16)}),
    "factor of exp2 rounded to fp16, in fp16": (FP16, {"factor": rounded_to(FP16)}),
    "scores rounded to bf16": (FP32, {"score": rounded_to(BF16)}),
    "scores rounded to bf16, in bf16": (BF16, {"score": rounded_to(BF16)}),
    "scores rounded to tf32": (FP32, {"score": tf32}),
    "q and k multiplied by the root of the scale in fp16": (FP16, {"operand": rounded_to(FP16)}),
    "q and k in tf32": (FP32, {"operand": tf32}),
    "P in tf32": (FP32, {"prob": tf32}),
    "V in tf32": (FP32, {"value": tf32}),
    "LSE rounded to bf16": (BF16, {"stored_lse": rounded_to(BF16)}),
    "LSE rounded to fp16": (FP32, {"stored_lse": rounded_to(FP16)}),
    "maximum of the first tile": (FP32, {"first_tile": True}),
}
