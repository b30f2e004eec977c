"""Attention of one query row and its gradient in float64, over an explicit list of keys."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch

from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry

Keys = slice | torch.Tensor  # distinct positions, int64 [n]
Visibility = Callable[[int, int], Keys]  # (token, kv head) -> visible keys of the document; the
# token is a position in the document
MAX_BYTES = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class Truth:
    """The correct result of a slot, in float64 on the CPU.

    Attributes:
        o: Output [B, S, Hq, Dv], packed [T, Hq, Dv].
        lse: Natural log-sum-exp [B, Hq, S], packed [Hq, T]; -inf where no key is visible. None for
            combine.
        grads: Gradients as "d" + the input's name, in the shape of that input. Empty without
            ``do``.
    """

    o: torch.Tensor
    lse: torch.Tensor | None
    grads: dict[str, torch.Tensor]


def f64(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in float64 on the CPU, detached from autograd."""
    return x.detach().to("cpu", torch.float64)


def token_bounds(cu_seqlens: torch.Tensor | None) -> list[int] | None:
    """Return ``cu_seqlens`` as a list of integers; None if dense."""
    return None if cu_seqlens is None else [int(x) for x in cu_seqlens.tolist()]


def compressed_count(length: int, geometry: BlockGeometry) -> int:
    """Count the compression blocks [i*d, i*d + l) that fit into ``length`` tokens."""
    size, stride = geometry.compress_block_size, geometry.compress_stride
    return sum(1 for start in range(0, length, stride) if start + size <= length)


def compressed_bounds(bounds: list[int] | None, geometry: BlockGeometry) -> list[int] | None:
    """Return the first compressed row of each packed document, and the end of the last one."""
    if bounds is None:
        return None
    counts = [compressed_count(b - a, geometry) for a, b in itertools.pairwise(bounds)]
    return [0, *itertools.accumulate(counts)]


def documents(x: torch.Tensor, bounds: list[int] | None) -> list[torch.Tensor]:
    """Return one view per batch entry of [B, S, ...], or per document of packed [T, ...]."""
    if bounds is None:
        return [x[b] for b in range(x.shape[0])]
    return [x[a:b] for a, b in itertools.pairwise(bounds)]


@dataclasses.dataclass(frozen=True)
class Queries:
    """The rows of q that each batch entry or document has.

    Attributes:
        bounds: First row of q of each packed document, and the end of the last one; None if dense.
        first: Position of its first row of q, in each batch entry or document.
    """

    bounds: list[int] | None
    first: list[int]


def queries_of(
    q: torch.Tensor, cu_seqlens: torch.Tensor | None, first_query: int | None
) -> Queries:
    """Return the rows of ``q`` [B, S, Hq, Dk] or [T, Hq, Dk] that each document has.

    Args:
        q: Queries.
        cu_seqlens: Document bounds of the axis of the keys; None if dense.
        first_query: Position of row 0 of q on that axis; None: q has all of its rows.

    Raises:
        InvalidInput: ``first_query`` is negative, or a row of q lies behind the last document.
    """
    bounds, first = token_bounds(cu_seqlens), first_query or 0
    if first < 0:
        raise InvalidInput(f"first_query must be >= 0, got {first}")
    if bounds is None:
        return Queries(None, [first] * q.shape[0])
    if first_query is None:
        return Queries(bounds, [0] * (len(bounds) - 1))
    rows = q.shape[0]
    if first + rows > bounds[-1]:
        raise InvalidInput(
            f"{rows} queries from row {first} on need {first + rows} rows of keys, but cu_seqlens"
            f" ends at {bounds[-1]}"
        )
    return Queries(
        [min(max(bound - first, 0), rows) for bound in bounds],
        [max(first - start, 0) for start in bounds[:-1]],
    )


def document_rows(
    rows: Sequence[int] | torch.Tensor | None, lengths: Sequence[int], bounds: list[int] | None
) -> list[list[int]]:
    """Return the query rows to evaluate in each document, counted from its first row of q.

    ``rows`` are rows of q: of every batch entry of [B, S, ...], or of packed [T, ...]; None
    evaluates all.

    Raises:
        InvalidInput: A row is outside the tensor.
    """
    if rows is None:
        return [list(range(length)) for length in lengths]
    distinct = sorted({int(r) for r in rows})
    total = (lengths[0] if lengths else 0) if bounds is None else bounds[-1]
    if distinct and (distinct[0] < 0 or distinct[-1] >= total):
        raise InvalidInput(f"rows must lie in [0, {total}), got {distinct[0]} .. {distinct[-1]}")
    if bounds is None:
        return [distinct for _ in lengths]
    return [[r - a for r in distinct if a <= r < b] for a, b in itertools.pairwise(bounds)]


def check_size(rows: list[list[int]], keys: Sequence[int], heads: int) -> None:
    """Refuse a computation whose float64 scores exceed MAX_BYTES.

    Raises:
        InvalidInput: The scores are too large; the message gives the bytes and suggests ``rows=``.
    """
    size = sum(len(r) * n for r, n in zip(rows, keys)) * heads * 8
    if size > MAX_BYTES:
        count = sum(len(r) for r in rows)
        raise InvalidInput(
            f"the oracle would compute {size} bytes of float64 scores ({count} rows, {heads} heads,"
            f" up to {max(keys)} keys), the limit is {MAX_BYTES}; judge sampled rows instead: pass"
            " rows=[...]"
        )


def _take(x: torch.Tensor, keys_seen: Keys) -> torch.Tensor:
    return x[keys_seen] if isinstance(keys_seen, slice) else x.index_select(0, keys_seen)


def _add(x: torch.Tensor, keys_seen: Keys, y: torch.Tensor) -> None:
    if isinstance(keys_seen, slice):
        x[keys_seen] += y
    else:
        x.index_add_(0, keys_seen, y)


def _accumulate_row(
    q: torch.Tensor,  # [h, Dk] the query heads of one group
    k: torch.Tensor,  # [L, Dk]
    v: torch.Tensor,  # [L, Dv]
    keys_seen: Keys,
    scale: float,
    do: torch.Tensor | None,  # [h, Dv]
    grads: tuple[torch.Tensor, ...],  # dq [h, Dk], dk [L, Dk], dv [L, Dv], added to in place
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [h, Dv] and lse [h] of one row over its visible keys; add to the gradients.

    Forward: p = softmax(scale q k), o = p v. Backward: dp = do v, ds = p (dp - sum p dp),
    dv += p do, dq += scale ds k, dk += scale ds q.
    """
    k_seen, v_seen = _take(k, keys_seen), _take(v, keys_seen)
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
        _add(dk, keys_seen, scale * (ds.T @ q))
        _add(dv, keys_seen, p.T @ do)
    return p @ v_seen, (top + total.log()).squeeze(-1)


def _attend_document(
    q: torch.Tensor,  # [S, Hq, Dk]
    k: torch.Tensor,  # [L, G, Dk]
    v: torch.Tensor,  # [L, G, Dv]
    o: torch.Tensor,  # [S, Hq, Dv], written in place
    lse: torch.Tensor,  # [S, Hq], written in place
    do: torch.Tensor | None,  # [S, Hq, Dv]
    grads: tuple[torch.Tensor, ...],  # dq, dk, dv, written in place; empty without do
    visible: Visibility,
    scale: float,
    rows: list[int],
    first: int,
) -> None:
    """Evaluate ``rows`` of one document and write o, lse and the gradients.

    Row 0 of q is the token ``first`` of the document.
    """
    heads, groups = q.shape[1], k.shape[1]
    # A contiguous copy per kv head, because gathering strided rows costs more than the arithmetic.
    per_group = [[x[:, g].contiguous() for x in (k, v, *grads[1:])] for g in range(groups)]
    for row, g in itertools.product(rows, range(groups)):
        group = slice(g * (heads // groups), (g + 1) * (heads // groups))
        keys_seen = visible(first + row, g)
        if (keys_seen.stop if isinstance(keys_seen, slice) else len(keys_seen)) == 0:
            lse[row, group] = -torch.inf
            continue
        keys, values, *key_grads = per_group[g]
        row_do = do[row, group] if do is not None else None
        row_grads = (grads[0][row, group], *key_grads) if grads else ()
        o[row, group], lse[row, group] = _accumulate_row(
            q[row, group], keys, values, keys_seen, scale, row_do, row_grads
        )
    for g, (_, _, *key_grads) in enumerate(per_group):
        for grad, group_grad in zip(grads[1:], key_grads):
            grad[:, g] = group_grad


def attend(
    q: torch.Tensor,  # [B, S, Hq, Dk], packed [T, Hq, Dk]
    k: torch.Tensor,  # [B, L, G, Dk], packed [.., G, Dk]
    v: torch.Tensor,  # [B, L, G, Dv]
    visible: Callable[[int], Visibility],  # document -> its visibility
    scale: float,
    *,
    queries: Queries,
    key_bounds: list[int] | None,  # of documents; None if dense
    do: torch.Tensor | None,  # [B, S, Hq, Dv]
    rows: Sequence[int] | torch.Tensor | None,  # None evaluates all
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Compute attention of the evaluated rows over their visible keys.

    Returns:
        (o, lse, grads) with grads = (dq, dk, dv), or () without ``do``. Rows that are not evaluated
        are 0. Rows without a visible key have o = 0 and lse = -inf.
    """
    bounds = queries.bounds
    evaluated = document_rows(rows, [len(x) for x in documents(q, bounds)], bounds)
    check_size(evaluated, [len(x) for x in documents(k, key_bounds)], q.shape[-2])
    q, k, v = f64(q), f64(k), f64(v)
    o, lse = q.new_zeros((*q.shape[:-1], v.shape[-1])), q.new_zeros(q.shape[:-1])
    grads = (
        (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)) if do is not None else ()
    )
    per_token = [documents(x, bounds) for x in (q, o, lse, *grads[:1])]
    per_key = [documents(x, key_bounds) for x in (k, v, *grads[1:])]
    per_do = documents(f64(do), bounds) if do is not None else [None] * len(evaluated)
    for index, rows_ in enumerate(evaluated):
        (q_, o_, lse_, *dq_), (k_, v_, *dkv_) = (
            [x[index] for x in per_token],
            [x[index] for x in per_key],
        )
        grads_, first = (*dq_, *dkv_), queries.first[index]
        _attend_document(
            q_, k_, v_, o_, lse_, per_do[index], grads_, visible(index), scale, rows_, first
        )
    return o, lse.transpose(-1, -2).contiguous(), grads
