"""Tiled online-softmax attention with faults to plant in it, and the usual tolerance rules.

The attention computes like a tensor-core kernel: float32 products of inputs in the dtype, P and dS
rounded to the dtype, and tiles of keys with a running maximum. A fault changes the mask or the
arithmetic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass
class Attention:
    """One slot on one sequence, with options that plant a fault.

    Attributes:
        q: Queries [Hq, S, D].
        k: Keys [G, L, D].
        v: Values [G, L, D].
        seen: Visible keys, bool [G, S, L].
        do: Gradient of o [Hq, S, D].
        scale: Softmax scale.
        dtype: Tested dtype.
        counts: How often each key counts, [G, S, L]; None counts visible keys once.
        tile: Keys per tile.
        store: Rounding of P; None rounds to the dtype.
        partial: Whether the accumulator is rounded to the dtype after each tile.
        rescale: Whether the last tile rescales the accumulator to the new maximum.
        patch: Edits the results in place.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seen: torch.Tensor
    do: torch.Tensor
    scale: float
    dtype: torch.dtype
    counts: torch.Tensor | None = None
    tile: int = 64
    store: Callable[[torch.Tensor], torch.Tensor] | None = None
    partial: bool = False
    rescale: bool = True
    patch: Callable[[Tensors], None] | None = None

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).float()

    def _parts(self) -> tuple[torch.Tensor, ...]:
        """Return q, k, v in float32, counts and visibility, each with one entry per query head."""
        h = len(self.q) // len(self.k)
        counts = self.seen.float() if self.counts is None else self.counts.float() * self.seen
        return self.q.float(), *(
            x.repeat_interleave(h, 0) for x in (self.k.float(), self.v.float(), counts, self.seen)
        )

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return o [Hq, S, D] in the dtype, and lse [Hq, S]."""
        store, (q, k, v, counts, seen) = self.store or self.rounded, self._parts()
        top = torch.full(q.shape[:2], -math.inf)
        total, acc = torch.zeros(q.shape[:2]), torch.zeros(*q.shape[:2], v.shape[-1])
        for a in range(0, k.shape[1], self.tile):
            part = slice(a, a + self.tile)
            s = (q @ k[:, part].transpose(1, 2) * self.scale).masked_fill(
                ~seen[..., part], -math.inf
            )
            new = torch.maximum(top, s.amax(-1))
            base = new.masked_fill(new == -math.inf, 0.0)
            p, old = (s - base[..., None]).exp() * counts[..., part], (top - base).exp()
            total = total * old + p.sum(-1)
            skip_rescale = a + self.tile >= k.shape[1] and not self.rescale
            acc = acc * (1.0 if skip_rescale else old[..., None]) + store(p) @ v[:, part]
            acc, top = self.rounded(acc) if self.partial else acc, new
        lse = (top + total.log()).masked_fill(total == 0, -math.inf)
        o = acc / total.masked_fill(total == 0, 1.0)[..., None]
        return self.rounded(o).to(self.dtype), lse

    def _backward(self, o: torch.Tensor, lse: torch.Tensor) -> Tensors:
        """Return dq [Hq, S, D], and dk and dv [Hq, L, D] per query head, in float32."""
        q, k, v, counts, seen = self._parts()
        do = self.do.float()
        s = q @ k.transpose(1, 2) * self.scale - lse.masked_fill(lse == -math.inf, 0.0)[..., None]
        p = s.masked_fill(~seen, -math.inf).exp() * counts
        ds = self.rounded(p * (do @ v.transpose(1, 2) - (do * o.float()).sum(-1, keepdim=True)))
        dk, dv = self.scale * (ds.transpose(1, 2) @ q), self.rounded(p).transpose(1, 2) @ do
        return {"dq": self.scale * (ds @ k), "dk": dk, "dv": dv}

    def results(self, gradients: bool = True) -> Tensors:
        """Return o and dq [1, S, Hq, D], and dk and dv [1, L, G, D], in the dtype."""
        h, (o, lse) = len(self.q) // len(self.k), self.forward()
        out = {"o": o.float()} | (self._backward(o, lse) if gradients else {})
        if self.patch is not None:
            self.patch(out)
        out |= {
            name: out[name].unflatten(0, (-1, h)).sum(1) for name in ("dk", "dv") if name in out
        }
        return {name: x.transpose(0, 1)[None].to(self.dtype) for name, x in out.items()}


def truncated(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that rounds float32 towards zero to ``dtype``.

    For float32 it keeps 20 of the 24 bits, because float32 itself needs no rounding.
    """
    mask = {torch.bfloat16: ~0xFFFF, torch.float32: ~0xF}[dtype]
    return lambda x: (x.contiguous().view(torch.int32) & mask).view(torch.float32)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        slot: Slot with the fault.
        spoils: Results that are wrong.
        plant: Returns the attention with the fault.
    """

    slot: str
    spoils: tuple[str, ...]
    plant: Callable[[Attention], Attention]


def _seen(
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[Attention], Attention]:
    """Plant a fault in the mask: change(seen [G, S, L], t [S, 1], j [L]) -> seen."""

    def plant(a: Attention) -> Attention:
        t, j = torch.arange(a.seen.shape[1])[:, None], torch.arange(a.seen.shape[2])
        return dataclasses.replace(a, seen=change(a.seen.clone(), t, j).expand_as(a.seen))

    return plant


def _option(**options: object) -> Callable[[Attention], Attention]:
    return lambda a: dataclasses.replace(a, **options)


def _patch(change: Callable[[Tensors], None]) -> Callable[[Attention], Attention]:
    """Plant a fault in the results: ``change`` edits o, dq, dk, dv [Hq, rows, D] in place."""
    return lambda a: dataclasses.replace(a, patch=change)


def _row(seen: torch.Tensor) -> int:
    return int(0.8 * seen.shape[1])


def _lost_block(seen: torch.Tensor, t: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Hide the second 64 visible keys of row 0.8 S from one group."""
    keys = seen[0, _row(seen)].nonzero().flatten()
    seen[0, _row(seen), keys[64:128]] = False
    return seen


def _lost_key(seen: torch.Tensor, t: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Hide one key from one row of one group."""
    seen[0, _row(seen), int(seen[0, _row(seen)].nonzero()[-2])] = False
    return seen


def _double_first_block(a: Attention) -> Attention:
    counts = torch.ones(a.seen.shape)
    counts[:, int(0.9 * a.seen.shape[1]) :, :64] = 2
    return dataclasses.replace(a, counts=counts)


def _neighbours_values(a: Attention) -> Attention:
    v = a.v.clone()
    v[0, 192:256] = a.v[1, 192:256]
    return dataclasses.replace(a, v=v)


def _neighbour(name: str) -> Callable[[Tensors], None]:
    def patch(r: Tensors) -> None:
        row = int(0.7 * r[name].shape[1])
        r[name][1, row] = r[name][1, row - 1]

    return patch


def _drop_last_rows(a: Attention) -> Attention:
    """Omit the last, partial query tile from dk and dv; o and dq are complete."""
    do = a.do.clone()
    do[:, -(a.do.shape[1] % 64 or 64) :] = 0
    without_last_tile = dataclasses.replace(a, do=do)

    def patch(r: Tensors) -> None:
        incomplete = without_last_tile.results()
        h = len(a.q) // len(a.k)
        for name in ("dk", "dv"):
            r[name].zero_()
            r[name][::h] = incomplete[name][0].float().transpose(0, 1)

    return dataclasses.replace(a, patch=patch)


def _lost_update(a: Attention) -> Attention:
    """Omit one query row from dk and dv of one head, as a race between two atomic adds would."""
    row = a.do.shape[1] // 2
    do = torch.zeros_like(a.do)
    do[1, row] = a.do[1, row]
    single_row = dataclasses.replace(a, do=do)

    def patch(r: Tensors) -> None:
        lost = single_row.results()
        for name in ("dk", "dv"):
            r[name][1] -= lost[name][0, :, 0].float()

    return dataclasses.replace(a, patch=patch)


O, KV, DQ = ("o",), ("dk", "dv"), ("dq",)  # noqa: E741
W, STRIDE, BLOCK = 256, 16, 32  # w, d, l

FAULTS: dict[str, Fault] = {
    "window one key short": Fault("win", O, _seen(lambda m, t, j: m & (t - j < W - 1))),
    "window one key long": Fault("win", O, _seen(lambda m, t, j: m | (t - j == W))),
    "window start rounded down to a tile": Fault(
        "win", O, _seen(lambda m, t, j: (j <= t) & (j >= (t - W + 1) // 64 * 64) | m)
    ),
    "one tile lost in one row of one head": Fault("win", O, _seen(_lost_block)),
    "own key dropped on the last row of each tile": Fault(
        "win", O, _seen(lambda m, t, j: m & ((t != j) | (t % 64 != 63)))
    ),
    "next key seen on the last row of each tile": Fault(
        "win", O, _seen(lambda m, t, j: m | ((j == t + 1) & (t % 64 == 63)))
    ),
    "one key lost in one row": Fault("win", O, _seen(_lost_key)),
    "next key seen in one row": Fault(
        "win", O, _seen(lambda m, t, j: m | ((j == t + 1) & (t == len(t) - 70)))
    ),
    "window one key short from row 0.9 S on": Fault(
        "win", O, _seen(lambda m, t, j: m & ((t - j < W - 1) | (t < 0.9 * len(t))))
    ),
    "top-left causal": Fault("win", O, _seen(lambda m, t, j: (m & False) | (j == 0))),
    "last partial tile of keys never read": Fault(
        "win", O, _seen(lambda m, t, j: m & ((j < len(j) // 64 * 64) | (t == j)))
    ),
    "compressed token visible one token early": Fault(
        "cmp", O, _seen(lambda m, t, j: j * STRIDE + BLOCK - 1 <= t + 1)
    ),
    "compressed token visible one token late": Fault(
        "cmp", O, _seen(lambda m, t, j: m & (j * STRIDE + BLOCK - 1 < t))
    ),
    "softmax over all compressed tokens": Fault(
        "cmp", O, _seen(lambda m, t, j: (m | True) & (t >= BLOCK - 1))
    ),
    "last compressed token never read": Fault(
        "cmp", O, _seen(lambda m, t, j: m & (j < len(j) - 1))
    ),
    "one compressed token lost in one row": Fault("cmp", O, _seen(_lost_key)),
    "first token's value where nothing is visible": Fault(
        "cmp", O, _seen(lambda m, t, j: m | ((t < BLOCK - 1) & (j == 0)))
    ),
    "one block lost in one row of one group": Fault("sel", O, _seen(_lost_block)),
    "one key lost in one row of the selection": Fault("sel", O, _seen(_lost_key)),
    "current block not cut at the token": Fault(
        "sel", O, _seen(lambda m, t, j: m | ((j // 64 == t // 64) & (t % 64 == 60)))
    ),
    "a block listed twice counted twice": Fault("sel", O, _double_first_block),
    "blocks of the other group from row 3/4 on": Fault(
        "sel", O, _seen(lambda m, t, j: torch.where(t >= 3 * len(t) // 4, m.flip(0), m))
    ),
    "values of the other group in one tile": Fault("sel", O, _neighbours_values),
    "scale off by a percent": Fault(
        "win", O, lambda a: dataclasses.replace(a, scale=a.scale * 1.01)
    ),
    "P truncated, not rounded": Fault(
        "win", O, lambda a: dataclasses.replace(a, store=truncated(a.dtype))
    ),
    "accumulator not rescaled in the last tile": Fault("win", O, _option(rescale=False)),
    "o of one row from its neighbour": Fault("win", O, _patch(_neighbour("o"))),
    "dq of one row from its neighbour": Fault("win", DQ, _patch(_neighbour("dq"))),
    "last tile of queries left out of dk, dv": Fault("win", KV, _drop_last_rows),
    "one atomic update lost": Fault("sel", KV, _lost_update),
}
# Kernels for fp32 keep sums in fp32, so this fault exists only in low precision. It is as small as
# the rounding noise.
MINOR = {"partial sums kept in the dtype": Fault("win", O, _option(partial=True))}


def two_times_max(a: torch.Tensor, g: torch.Tensor, r: torch.Tensor, dtype: torch.dtype) -> bool:
    """Apply FlashAttention-2's rule: max error <= 2 x max error of the rounded result + 1e-5."""
    return bool((a - g).abs().max() <= 2 * (r - g).abs().max() + 1e-5)


def rmse_ratio(a: torch.Tensor, g: torch.Tensor, r: torch.Tensor, dtype: torch.dtype) -> bool:
    """Apply the rule of flash-linear-attention: rms error / rms < 0.005 over the tensor."""
    return bool((a - g).square().mean().sqrt() < 0.005 * g.square().mean().sqrt())


def one_percent(a: torch.Tensor, g: torch.Tensor, r: torch.Tensor, dtype: torch.dtype) -> bool:
    """Apply rtol = atol = 1e-2."""
    return torch.allclose(a, g, rtol=1e-2, atol=1e-2)


def assert_close(a: torch.Tensor, g: torch.Tensor, r: torch.Tensor, dtype: torch.dtype) -> bool:
    """Apply torch.testing.assert_close with its defaults for the dtype."""
    try:
        torch.testing.assert_close(a.to(dtype), g.to(dtype))
    except AssertionError:
        return False
    return True


RULES = {
    "2 x max error + 1e-5": two_times_max,
    "global RMSE ratio < 0.005": rmse_ratio,
    "rtol = atol = 1e-2": one_percent,
    "assert_close": assert_close,
}
