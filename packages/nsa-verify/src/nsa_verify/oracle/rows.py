"""One query row of attention and its gradient, in float64, over an explicit list of the keys it
sees.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch

from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry

Keys = slice | torch.Tensor  # distinct positions, int64 [n]
See = Callable[[int, int], Keys]  # (token, kv head) -> the keys of its document that it sees
MAX_BYTES = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class Truth:
    """What a slot must return, in float64 on the CPU.

    Attributes:
        o: [B, S, Hq, Dv], packed [T, Hq, Dv].
        lse: [B, Hq, S], packed [Hq, T], natural log, -inf where no key is visible; None for
            combine.
        grads: "d" + the input's name -> tensor of that input's shape; empty where no ``do`` was
            given.
    """

    o: torch.Tensor
    lse: torch.Tensor | None
    grads: dict[str, torch.Tensor]


def f64(x: torch.Tensor) -> torch.Tensor:
    """``x`` in float64 on the CPU, cut from autograd."""
    return x.detach().to("cpu", torch.float64)


def token_bounds(cu_seqlens: torch.Tensor | None) -> list[int] | None:
    """The documents' first tokens, and the end of the last one, as host integers; None where
    nothing is packed.
    """
    return None if cu_seqlens is None else [int(x) for x in cu_seqlens.tolist()]


def compressed_count(length: int, geometry: BlockGeometry) -> int:
    """How many compression blocks [i*d, i*d + l) lie wholly inside ``length`` tokens."""
    size, stride = geometry.compress_block_size, geometry.compress_stride
    return sum(1 for start in range(0, length, stride) if start + size <= length)


def compressed_bounds(bounds: list[int] | None, geometry: BlockGeometry) -> list[int] | None:
    """First compressed row of each packed document, and the end of the last one's."""
    if bounds is None:
        return None
    counts = [compressed_count(b - a, geometry) for a, b in itertools.pairwise(bounds)]
    return [0, *itertools.accumulate(counts)]


def documents(x: torch.Tensor, bounds: list[int] | None) -> list[torch.Tensor]:
    """One view per batch entry of [B, S, ...], or per document of packed [T, ...]."""
    if bounds is None:
        return [x[b] for b in range(x.shape[0])]
    return [x[a:b] for a, b in itertools.pairwise(bounds)]


def document_rows(
    rows: Sequence[int] | torch.Tensor | None, lengths: Sequence[int], bounds: list[int] | None
) -> list[list[int]]:
    """The query rows to evaluate in each document, counted from its first token.

    ``rows`` are positions in every batch entry of [B, S, ...], or rows of the packed [T, ...]; None
    means all.

    Raises:
        InvalidInput: a row is outside the tensor.
    """
    if rows is None:
        return [list(range(length)) for length in lengths]
    wanted = sorted({int(r) for r in rows})
    total = (lengths[0] if lengths else 0) if bounds is None else bounds[-1]
    if wanted and (wanted[0] < 0 or wanted[-1] >= total):
        raise InvalidInput(f"rows must lie in [0, {total}), got {wanted[0]} .. {wanted[-1]}")
    if bounds is None:
        return [wanted for _ in lengths]
    return [[r - a for r in wanted if a <= r < b] for a, b in itertools.pairwise(bounds)]


def refuse_absurd(rows: list[list[int]], keys: Sequence[int], heads: int) -> None:
    """Refuse work that would not end.

    Raises:
        InvalidInput: the float64 scores pass MAX_BYTES; the message gives the bytes and names
            ``rows=``.
    """
    size = sum(len(r) * n for r, n in zip(rows, keys)) * heads * 8
    if size > MAX_BYTES:
        count = sum(len(r) for r in rows)
        raise InvalidInput(
            f"the oracle would compute {size} bytes of float64 scores ({count} rows, {heads} heads,"
            f" up to {max(keys)} keys), limit {MAX_BYTES}; judge sampled rows instead: pass"
            " rows=[...]"
        )


def _take(x: torch.Tensor, seen: Keys) -> torch.Tensor:
    return x[seen] if isinstance(seen, slice) else x.index_select(0, seen)


def _add(x: torch.Tensor, seen: Keys, y: torch.Tensor) -> None:
    if isinstance(seen, slice):
        x[seen] += y
    else:
        x.index_add_(0, seen, y)


def _accumulate_row(
    q: torch.Tensor,  # [h, Dk] the query heads of one group
    k: torch.Tensor,  # [L, Dk]
    v: torch.Tensor,  # [L, Dv]
    seen: Keys,
    scale: float,
    do: torch.Tensor | None,  # [h, Dv]
    grads: tuple[torch.Tensor, ...],  # dq [h, Dk], dk [L, Dk], dv [L, Dv], added to in place
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [h, Dv] and lse [h] of one row over the keys it sees.

    p = softmax(scale q k), o = p v; dv += p do, ds = p (dp - sum p dp) with dp = do v, dq += scale
    ds k, dk += scale ds q.
    """
    k_seen, v_seen = _take(k, seen), _take(v, seen)
    s = scale * (q @ k_seen.T)
    top = s.amax(-1, keepdim=True)
    p = (s - top).exp()
    total = p.sum(-1, keepdim=True)
    p = p / total
    if do is not None:
        dp = do @ v_seen.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        dq, dk, dv = grads
        dq += scale * (ds @ k_seen)
        _add(dk, seen, scale * (ds.T @ q))
        _add(dv, seen, p.T @ do)
    return p @ v_seen, (top + total.log()).squeeze(-1)


def _attend_document(
    q: torch.Tensor,  # [S, Hq, Dk]
    k: torch.Tensor,  # [L, G, Dk]
    v: torch.Tensor,  # [L, G, Dv]
    o: torch.Tensor,  # [S, Hq, Dv], written in place, as is all below
    lse: torch.Tensor,  # [S, Hq]
    do: torch.Tensor | None,  # [S, Hq, Dv]
    grads: tuple[torch.Tensor, ...],  # dq, dk, dv; empty without do
    see: See,
    scale: float,
    rows: list[int],
) -> None:
    heads, groups = q.shape[1], k.shape[1]
    # One contiguous copy per kv head: gathering rows of a strided one costs more than the
    # arithmetic.
    of_group = [[x[:, g].contiguous() for x in (k, v, *grads[1:])] for g in range(groups)]
    for t, g in itertools.product(rows, range(groups)):
        group = slice(g * (heads // groups), (g + 1) * (heads // groups))
        seen = see(t, g)
        if (seen.stop if isinstance(seen, slice) else len(seen)) == 0:
            lse[t, group] = -torch.inf
            continue
        keys, values, *key_grads = of_group[g]
        row_do = do[t, group] if do is not None else None
        row_grads = (grads[0][t, group], *key_grads) if grads else ()
        o[t, group], lse[t, group] = _accumulate_row(
            q[t, group], keys, values, seen, scale, row_do, row_grads
        )
    for g, (_, _, *key_grads) in enumerate(of_group):
        for whole, part in zip(grads[1:], key_grads):
            whole[:, g] = part


def attend(
    q: torch.Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: torch.Tensor,  # [B, L, G, Dk], packed [.., G, Dk]
    v: torch.Tensor,  # [B, L, G, Dv]
    see: Callable[[int], See],  # document -> its See
    scale: float,
    *,
    bounds: list[int] | None,
    key_bounds: list[int] | None,
    do: torch.Tensor | None,
    rows: Sequence[int] | torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Softmax attention of every evaluated row over the keys that ``see`` lists, and its gradients
    dq, dk, dv.

    Rows that are not evaluated, or see nothing, are 0; the latter's lse is -inf.
    """
    evaluated = document_rows(rows, [len(x) for x in documents(q, bounds)], bounds)
    refuse_absurd(evaluated, [len(x) for x in documents(k, key_bounds)], q.shape[-2])
    q, k, v = f64(q), f64(k), f64(v)
    o, lse = q.new_zeros((*q.shape[:-1], v.shape[-1])), q.new_zeros(q.shape[:-1])
    grads = (
        (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)) if do is not None else ()
    )
    per_token = [documents(x, bounds) for x in (q, o, lse, *grads[:1])]
    per_key = [documents(x, key_bounds) for x in (k, v, *grads[1:])]
    per_do = documents(f64(do), bounds) if do is not None else [None] * len(evaluated)
    for index, rows_here in enumerate(evaluated):
        (q_, o_, lse_, *dq_), (k_, v_, *dkv_) = (
            [x[index] for x in per_token],
            [x[index] for x in per_key],
        )
        here = (*dq_, *dkv_)
        _attend_document(q_, k_, v_, o_, lse_, per_do[index], here, see(index), scale, rows_here)
    return o, lse.transpose(-1, -2).contiguous(), grads
