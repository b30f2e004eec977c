"""Attention and selection by dense masks, so that a mutant can state a wrong mask in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from semantic.model import Fault, View

# (view, positions of the queries [S], keys [n], piece or sequence index) -> bool [S, n], or
# [S, G, n] where the groups differ
Visible = Callable[[View, torch.Tensor, torch.Tensor, int], torch.Tensor]


def probabilities(
    q: torch.Tensor,
    k: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    weight: torch.Tensor | None = None,
    hidden: float = -torch.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P and the LSE in float64.

    Shapes:
        q [S, Hq, Dk], k [n, G, Dk], visible [S, n] or [S, G, n]; ``weight``, the factor of
        exp(score), like visible. Returns P [S, G, h, n] and lse [S, G, h].
    """
    split = q.unflatten(1, (k.shape[1], -1)).double()
    scores = torch.einsum("sghd,ngd->sghn", split, k.double()) * scale
    if visible.dim() == 2:
        visible = visible[:, None]
    if weight is not None:
        scores = scores + (weight if weight.dim() == 3 else weight[:, None])[:, :, None].log()
    scores = scores.masked_fill(~visible[:, :, None], hidden)
    lse = scores.logsumexp(-1)
    # Not exp(scores - lse): the rounding of a large lse would scale the whole row.
    return scores.softmax(-1).masked_fill(lse[..., None] == -torch.inf, 0), lse


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [S, Hq, Dv] and lse [Hq, S] in float64; ``mask`` as in :func:`probabilities`."""
    p, lse = probabilities(q, k, *mask)
    o = torch.einsum("sghn,ngd->sghd", p, v.double())
    return o.flatten(1, 2), lse.flatten(1, 2).T


def gradients(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    *options: Any,
) -> list[torch.Tensor]:
    """Return dq, dk and dv of :func:`attend` in float64, for float64 inputs."""
    p, _ = probabilities(q, k, visible, scale, *options)
    split, split_do = (x.unflatten(1, (k.shape[1], -1)) for x in (q, do))
    dp = torch.einsum("sghd,ngd->sghn", split_do, v)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    return [
        torch.einsum("sghn,ngd->sghd", ds, k).flatten(1, 2),
        torch.einsum("sghn,sghd->ngd", ds, split),
        torch.einsum("sghn,sghd->ngd", p, split_do),
    ]


def masked(c: View, visible: Visible, **options: Any) -> list[torch.Tensor]:
    """Compute cmp, sel or win with the mask of ``visible``, forward or backward.

    Options are ``scale``, ``hidden`` of :func:`attend`, and ``weight``, a function like visible.
    """
    q, k, v = c["q"], c[c.key_name], c[c.value_name]
    stats = torch.float64 if c.dtype == torch.float64 else torch.float32
    scale = options.get("scale", c.scale)
    o = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=c.dtype)
    lse_shape = (q.shape[1], q.shape[0]) if c.packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.full(lse_shape, -torch.inf, dtype=stats)
    grads = [torch.zeros(x.shape, dtype=x.dtype) for x in (q, k, v)]
    for piece in c.pieces():
        parts = [x.double() for x in (q[piece.rows], k[piece.keys], v[piece.keys])]
        if not piece.length or not len(parts[1]):
            continue
        token, key = torch.arange(piece.length), torch.arange(len(parts[1]))
        seen = visible(c, token, key, piece.index)
        weight = options["weight"](c, token, key, piece.index) if "weight" in options else None
        hidden = options.get("hidden", -torch.inf)
        do = None if c.phase == "forward" else c["do"][piece.rows].double()
        for group in range(c.groups):  # one kv head at a time, for memory
            heads = slice(group * c.per_group, (group + 1) * c.per_group)
            one = slice(group, group + 1)
            few = [parts[0][:, heads], parts[1][:, one], parts[2][:, one]]
            mask = [x[:, one] if x is not None and x.dim() == 3 else x for x in (seen, weight)]
            if do is None:
                part_o, part_lse = attend(*few, mask[0], scale, mask[1], hidden)
                o[piece.rows][:, heads] = part_o.to(c.dtype)
                lse[piece.lse_rows][heads] = part_lse.to(stats)
                continue
            found = gradients(do[:, heads], *few, mask[0], scale, mask[1], hidden)
            grads[0][piece.rows][:, heads] = found[0].to(c.dtype)
            for grad, part in zip(grads[1:], found[1:]):
                grad[piece.keys][:, one] = part.to(c.dtype)
    return [o, lse] if c.phase == "forward" else grads


# The healthy masks.
def cmp_mask(c: View, token: torch.Tensor, key: torch.Tensor, index: int) -> torch.Tensor:
    return key * c.stride + c.size - 1 <= token[:, None]


def win_mask(c: View, token: torch.Tensor, key: torch.Tensor, index: int) -> torch.Tensor:
    return (key <= token[:, None]) & (key > token[:, None] - c.window)


def chosen(c: View, index: int, blocks: torch.Tensor | None = None) -> torch.Tensor:
    """Return the blocks [S, G, n] of one sequence or document, int64."""
    blocks = c["blocks"] if blocks is None else blocks
    for piece in [] if c.phase == "decode" else c.pieces():
        if piece.index == index:
            return blocks[piece.rows].long()
    return blocks[index].long()


def counts(blocks: torch.Tensor, total: int) -> torch.Tensor:
    """Count how often each of ``total`` blocks occurs in blocks [S, G, n]."""
    out = blocks.new_zeros((*blocks.shape[:-1], total + 1))
    inside = torch.where((blocks >= 0) & (blocks < total), blocks, total)
    return out.scatter_add_(-1, inside, torch.ones_like(inside))[..., :total]


def sel_mask(
    c: View,
    token: torch.Tensor,
    key: torch.Tensor,
    index: int,
    blocks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mask of sel, [S, G, n]; ``blocks`` [S, G, n] replaces the call's."""
    mine = chosen(c, index) if blocks is None else blocks
    mine = mine[: len(token)]
    member = counts(mine, len(key) // c.block + 1) > 0
    return member[..., key // c.block] & (key <= token[:, None])[:, None]


# Decode forms.
Place = tuple[torch.Tensor, torch.Tensor]


class Sequence(NamedTuple):
    """The rows and keys of one sequence of a decode step."""

    index: int
    rows: slice
    token: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def located(c: View, store: torch.Tensor, index: int, place: torch.Tensor) -> Place:
    """Return the page and the row of the rows ``place`` of sequence ``index``."""
    table, per_page = c.call.table(c.branch)[index].long(), store.shape[1]
    return table[place // per_page % len(table)], place % per_page


def stored(c: View, name: str, index: int, place: torch.Tensor) -> torch.Tensor:
    """Return the keys or values of the rows ``place`` of sequence ``index``, dequantized."""
    store, scales = c[name], c.call.scales
    page, row = located(c, store, index, place)
    if scales is None:
        return store[page, row]
    codes = store.view(torch.uint8)[page, row].view(store.dtype)
    return codes.float() * getattr(scales, c.branch)[page][..., int(name != c.key_name), None]


def sequences(c: View) -> Iterator[Sequence]:
    """Yield the sequences of a decode step that have a new token, with their keys in order."""
    names = [name for name in (c.key_name, c.value_name) if name in c.tensors]
    for index, (start, length) in enumerate(zip(c.call.starts.tolist(), c.call.lengths.tolist())):
        if start == length:
            continue
        if c.slot == "win":
            token = torch.arange(max(0, start - c.window + 1), length)
        else:
            count = c.geometry.num_compressed(length) if c.slot in ("cmp", "select") else length
            token = torch.arange(count)
        parts = [stored(c, name, index, token) for name in names]
        yield Sequence(
            index, slice(0, length - start), torch.arange(start, length), parts[0], parts[-1]
        )


def key_gradients(visible: Visible, **options: Any) -> Fault:
    """The healthy dq, and dk and dv of another mask; options as in :func:`masked`."""
    return lambda c: [c.run()[0], *masked(c, visible, **options)[1:]]


def masked_decode(c: View, visible: Visible, **options: Any) -> list[torch.Tensor]:
    """Compute the decode form of cmp, sel or win with the mask of ``visible``.

    The keys of win start at the first token that the first row sees.
    """
    q, v = c["q"], c[c.value_name]
    stats = torch.float64 if c.dtype == torch.float64 else torch.float32
    o = torch.zeros((*q.shape[:-1], v.shape[-1]), dtype=c.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=stats)
    for one in sequences(c):
        if not len(one.k):
            continue
        first = max(0, int(one.token[0]) - c.window + 1) if c.slot == "win" else 0
        key = torch.arange(len(one.k)) + first
        seen = visible(c, one.token, key, one.index)
        part_o, part_lse = attend(
            q[one.index, one.rows], one.k, one.v, seen, options.get("scale", c.scale)
        )
        o[one.index, one.rows] = part_o.to(c.dtype)
        lse[one.index, :, one.rows] = part_lse.to(stats)
    return [o, lse]


def newest_row_masks(c: View, mask: Visible) -> list[torch.Tensor]:
    """All rows of a step see what its last row sees."""
    return masked_decode(c, lambda c, token, *rest: mask(c, token[-1:].expand_as(token), *rest))


# Selection.
def weights(c: View) -> list[tuple[int, int]]:
    return list(c.geometry.overlap_weights())


def group_scores(
    c: View,
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    token: torch.Tensor,
    *,
    taps: list[tuple[int, int]] | None = None,
    heads: int | None = None,
    scale: float | None = None,
    prefix_sums: bool = False,
) -> torch.Tensor:
    """Score the selection blocks of one sequence, [S, G, J]; q [S, Hq, Dk], k [n_c, G, Dk]."""
    stats = torch.float64 if c.dtype == torch.float64 else torch.float32
    groups, n_c = k.shape[1], len(k)
    total = c.geometry.num_select_blocks(int(token[-1]) + 1)
    split = q.unflatten(1, (groups, -1)).to(stats)
    scores = torch.einsum("sghd,ngd->sghn", split, k.to(stats))
    scores = scores * (c.scale if scale is None else scale)
    p = (scores - lse.T.unflatten(1, (groups, -1))[..., None].to(stats)).exp()
    visible = torch.arange(n_c) * c.stride + c.size - 1 <= token[:, None]
    p = p.masked_fill(~visible[:, None, None], 0)
    step = c.block // c.stride
    out = p.new_zeros((*p.shape[:-1], total))
    sums = torch.nn.functional.pad(p.cumsum(-1), (1, 0))
    for tap, weight in taps or weights(c):
        index = torch.arange(total) * step + tap
        inside = (index >= 0) & (index < n_c)
        place = index.clamp(0, max(n_c - 1, 0))
        if not n_c:
            continue
        value = sums[..., place + 1] - sums[..., place] if prefix_sums else p[..., place]
        out += weight * value.masked_fill(~inside, 0)
    result = out[..., 0, :].clone()
    for head in range(1, heads or out.shape[-2]):
        result += out[..., head, :]
    return result


def choose(
    c: View,
    scores: torch.Tensor,
    token: torch.Tensor,
    *,
    init: int | None = None,
    local: int | None = None,
    n: int | None = None,
    higher: bool = False,
    nan: float = -1.0,
    candidates: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose blocks from scores [S, G, J] as the contract says, [S, G, n] int32 ascending."""
    init = c.geometry.init_blocks if init is None else init
    local = c.geometry.local_blocks if local is None else local
    n = c.n if n is None else n
    total = scores.shape[-1]
    block, current = torch.arange(total), (token // c.block)[:, None]
    allowed = block <= current if candidates is None else candidates
    forced = allowed & ((block < init) | (block > current - local))
    rank = scores.double().nan_to_num(nan, posinf=torch.inf)
    rank = rank.masked_fill(forced[:, None], torch.inf).masked_fill(~allowed[:, None], -torch.inf)
    if higher:
        order = total - 1 - rank.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    else:
        order = rank.sort(dim=-1, descending=True, stable=True).indices
    order = order[..., :n]
    taken = rank.gather(-1, order) > -torch.inf
    order = order.masked_fill(~taken, 2**30).sort(-1).values
    order = order.masked_fill(order == 2**30, -1)
    return torch.nn.functional.pad(order, (0, c.n - order.shape[-1]), value=-1).int()


Rule = Callable[..., torch.Tensor]


def selected(
    c: View, rule: Rule | None = None, score: dict[str, Any] | None = None, **options: Any
) -> list[torch.Tensor]:
    """Compute select, prefill or decode.

    Args:
        c: The call.
        rule: Replaces :func:`choose`; receives (c, scores, token).
        score: Options of :func:`group_scores`.
        **options: Options of :func:`choose`.
    """
    q, k = c["q"], c["k_cmp"]
    blocks = torch.full((*q.shape[:-2], k.shape[-2], c.n), -1, dtype=torch.int32)

    def one(rows: Any, part_q: Any, part_k: Any, part_lse: Any, token: Any) -> None:
        scores = group_scores(c, part_q, part_k, part_lse, token, **(score or {}))
        blocks[rows] = rule(c, scores, token) if rule else choose(c, scores, token, **options)

    if c.phase == "decode":
        for s in sequences(c):
            part_lse = c["lse"][s.index, :, s.rows]
            one((s.index, s.rows), q[s.index, s.rows], s.k, part_lse, s.token)
        return [blocks]
    for piece in c.pieces():
        if piece.length:
            token = torch.arange(piece.length)
            one(piece.rows, q[piece.rows], k[piece.keys], c["lse"][piece.lse_rows], token)
    return [blocks]
