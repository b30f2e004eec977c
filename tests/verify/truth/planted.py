"""The experiment's material: a tiled online-softmax attention, faults to plant in it, and known
rules.

The attention is what a tensor-core kernel does: products in fp32 of inputs in the dtype, P and dS
rounded to it, keys in tiles with a running maximum. A fault is a change of what it sees (its mask)
or of how it computes (its knobs).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass
class Attention:
    """One slot's problem, batch entry dropped: q [Hq, S, D], k, v [G, L, D], seen bool [G, S, L],
    do [Hq, S, D].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    seen: torch.Tensor
    do: torch.Tensor
    scale: float
    dtype: torch.dtype
    counts: torch.Tensor | None = None  # [G, S, L] how often a key is counted: once, where right
    tile: int = 64
    store: Callable[[torch.Tensor], torch.Tensor] | None = None  # how P is rounded
    partial: bool = False  # sums kept in the dtype between tiles
    rescale: bool = True  # the accumulator follows the maximum
    patch: Callable[[Tensors], None] | None = None  # applied to the results

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).float()

    def _parts(self) -> tuple[torch.Tensor, ...]:
        """q, k, v in fp32, a row per query head; how often each key is counted, and which are seen
        at all.
        """
        h = len(self.q) // len(self.k)
        counts = self.seen.float() if self.counts is None else self.counts.float() * self.seen
        return self.q.float(), *(
            x.repeat_interleave(h, 0) for x in (self.k.float(), self.v.float(), counts, self.seen)
        )

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """o [Hq, S, D] in the dtype, and lse [Hq, S]."""
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
            late = a + self.tile >= k.shape[1] and not self.rescale
            acc = acc * (1.0 if late else old[..., None]) + store(p) @ v[:, part]
            acc, top = self.rounded(acc) if self.partial else acc, new
        lse = (top + total.log()).masked_fill(total == 0, -math.inf)
        o = acc / total.masked_fill(total == 0, 1.0)[..., None]
        return self.rounded(o).to(self.dtype), lse

    def _backward(self, o: torch.Tensor, lse: torch.Tensor) -> Tensors:
        """dq [Hq, S, D], and dk, dv [Hq, L, D] per query head, fp32."""
        q, k, v, counts, seen = self._parts()
        do = self.do.float()
        s = q @ k.transpose(1, 2) * self.scale - lse.masked_fill(lse == -math.inf, 0.0)[..., None]
        p = s.masked_fill(~seen, -math.inf).exp() * counts
        ds = self.rounded(p * (do @ v.transpose(1, 2) - (do * o.float()).sum(-1, keepdim=True)))
        dk, dv = self.scale * (ds.transpose(1, 2) @ q), self.rounded(p).transpose(1, 2) @ do
        return {"dq": self.scale * (ds @ k), "dk": dk, "dv": dv}

    def results(self, gradients: bool = True) -> Tensors:
        """o [1, S, Hq, D] and, if asked for, dq [1, S, Hq, D] and dk, dv [1, L, G, D], all in the
        dtype.
        """
        h, (o, lse) = len(self.q) // len(self.k), self.forward()
        out = {"o": o.float()} | (self._backward(o, lse) if gradients else {})
        if self.patch is not None:
            self.patch(out)
        out |= {
            name: out[name].unflatten(0, (-1, h)).sum(1) for name in ("dk", "dv") if name in out
        }
        return {name: x.transpose(0, 1)[None].to(self.dtype) for name, x in out.items()}


def truncated(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounding towards zero to ``dtype``; for fp32 to 20 of its 24 bits, since exactly fp32 cannot
    be truncated.
    """
    mask = {torch.bfloat16: ~0xFFFF, torch.float32: ~0xF}[dtype]
    return lambda x: (x.contiguous().view(torch.int32) & mask).view(torch.float32)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault: the slot it is in, the results it spoils, and the change."""

    slot: str
    spoils: tuple[str, ...]
    plant: Callable[[Attention], Attention]


def _seen(
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[Attention], Attention]:
    """A fault in what is seen: change(seen [G, S, L], t [S, 1], j [L]) -> seen."""

    def plant(a: Attention) -> Attention:
        t, j = torch.arange(a.seen.shape[1])[:, None], torch.arange(a.seen.shape[2])
        return dataclasses.replace(a, seen=change(a.seen.clone(), t, j).expand_as(a.seen))

    return plant


def _knob(**knobs: object) -> Callable[[Attention], Attention]:
    return lambda a: dataclasses.replace(a, **knobs)


def _patch(change: Callable[[Tensors], None]) -> Callable[[Attention], Attention]:
    """A fault in the results, which ``change`` edits in place: o, dq, dk, dv, all [Hq, rows, D]
    fp32.
    """
    return lambda a: dataclasses.replace(a, patch=change)


def _row(seen: torch.Tensor) -> int:
    return int(0.8 * seen.shape[1])


def _lost_block(seen: torch.Tensor, t: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """The second 64 keys that row 0.8 S sees, gone for one group."""
    keys = seen[0, _row(seen)].nonzero().flatten()
    seen[0, _row(seen), keys[64:128]] = False
    return seen


def _lost_key(seen: torch.Tensor, t: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """One key, gone for one row of one group."""
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
    """dk, dv without the last, partial query tile; o and dq whole."""
    do = a.do.clone()
    do[:, -(a.do.shape[1] % 64 or 64) :] = 0
    short = dataclasses.replace(a, do=do)

    def patch(r: Tensors) -> None:
        missing = short.results()
        h = len(a.q) // len(a.k)
        for name in ("dk", "dv"):
            r[name].zero_()
            r[name][::h] = missing[name][0].float().transpose(0, 1)

    return dataclasses.replace(a, patch=patch)


def _lost_update(a: Attention) -> Attention:
    """One query row's share of dk and dv lost for one head: a race between two atomic adds."""
    row = a.do.shape[1] // 2
    do = torch.zeros_like(a.do)
    do[1, row] = a.do[1, row]
    lone = dataclasses.replace(a, do=do)

    def patch(r: Tensors) -> None:
        share = lone.results()
        for name in ("dk", "dv"):
            r[name][1] -= share[name][0, :, 0].float()

    return dataclasses.replace(a, patch=patch)


O, KV, DQ = ("o",), ("dk", "dv"), ("dq",)  # noqa: E741
W, STRIDE, BLOCK = 256, 16, 32  # w, d, l of the experiment

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
    "accumulator not rescaled in the last tile": Fault("win", O, _knob(rescale=False)),
    "o of one row from its neighbour": Fault("win", O, _patch(_neighbour("o"))),
    "dq of one row from its neighbour": Fault("win", DQ, _patch(_neighbour("dq"))),
    "last tile of queries left out of dk, dv": Fault("win", KV, _drop_last_rows),
    "one atomic update lost": Fault("sel", KV, _lost_update),
}
# In fp32 everyone keeps sums in fp32, so this is a fault of low precision only, and as small as the
# rounding that it is measured by.
MINOR = {"partial sums kept in the dtype": Fault("win", O, _knob(partial=True))}


def two_times_max(a: torch.Tensor, g: torch.Tensor, r: torch.Tensor, dtype: torch.dtype) -> bool:
    """FlashAttention-2's tests: max error <= 2 x a low-precision reference's max error + 1e-5."""
    return bool((a - g).abs().max() <= 2 * (r - g).abs().max() + 1e-5)


def rmse_ratio(a: torch.Tensor, g: torch.Tensor, r: torch.Tensor, dtype: torch.dtype) -> bool:
    """flash-linear-attention's tests: rms error over rms < 0.005, over the whole tensor."""
    return bool((a - g).square().mean().sqrt() < 0.005 * g.square().mean().sqrt())


def one_percent(a: torch.Tensor, g: torch.Tensor, r: torch.Tensor, dtype: torch.dtype) -> bool:
    """rtol = atol = 1e-2."""
    return torch.allclose(a, g, rtol=1e-2, atol=1e-2)


def assert_close(a: torch.Tensor, g: torch.Tensor, r: torch.Tensor, dtype: torch.dtype) -> bool:
    """torch.testing.assert_close with its defaults for the dtype."""
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
