"""The fold without its copies, for one sequence: the d residues as a batch axis over shared keys.

Token l-1 + r*d + j (run r, place j) sees compressed tokens 0..r. Of one sequence, the tokens of
place j lie at one stride, so q, o and do are read where they are, as [d places, runs, Hq, D],
causal over K and V that all places share by stride 0. The tokens of an unfinished last run see all
keys: a second, small call without a mask. Only dq is copied into its place; dk and dv come per
place and are added in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_backend_fa2.operands import attend, attend_backward, fit, width_of
from nsa_backend_fa2.providers import Attention
from nsa_core.contract import SlotCall


class _Part(NamedTuple):
    """Tokens ``first .. last-1`` of the sequence in ``places`` interleaved rows, and the keys they
    see.
    """

    first: int
    last: int
    places: int
    keys: int
    how: Attention

    def rows(
        self,
        x: Tensor,  # [1, S, Hq, D]
    ) -> Tensor:  # [places, rows, Hq, D], a view
        runs: Tensor = x[0, self.first : self.last].unflatten(0, (-1, self.places))
        return runs.transpose(0, 1)

    def stats(
        self,
        lse: Tensor,  # [1, Hq, S]
    ) -> Tensor:  # [places, Hq, rows], a view
        runs: Tensor = lse[0, :, self.first : self.last].unflatten(1, (-1, self.places))
        return runs.permute(2, 0, 1)

    def shared(
        self,
        x: Tensor,  # [1, I, G, D]
    ) -> Tensor:  # [places, keys, G, D], stride 0
        return x[:, : self.keys].expand(self.places, -1, -1, -1)


def _parts(length: int, call: SlotCall) -> Iterator[_Part]:
    geometry, skip = call.geometry, call.geometry.compress_block_size - 1
    whole, rest = divmod(length - skip, geometry.compress_stride)
    how = Attention(call.scale, deterministic=call.deterministic)
    if whole:
        yield _Part(skip, length - rest, geometry.compress_stride, whole, how)
    if rest:
        unmasked = Attention(call.scale, causal=False, deterministic=call.deterministic)
        yield _Part(length - rest, length, 1, whole + 1, unmasked)


def forward(
    q: Tensor,  # [1, S, Hq, Dk]
    k_cmp: Tensor,  # [1, I, G, Dk]
    v_cmp: Tensor,  # [1, I, G, Dv]
    call: SlotCall,
) -> tuple[Tensor, Tensor]:
    """o [1, S, Hq, Dv] and lse [1, Hq, S]."""
    _, length, heads, _ = q.shape
    skip, width = call.geometry.compress_block_size - 1, width_of(q.shape[-1], v_cmp.shape[-1])
    o = q.new_empty((1, length, heads, v_cmp.shape[-1]))
    lse = torch.empty((1, heads, length), dtype=torch.float32, device=q.device)
    o[:, :skip] = 0
    lse[:, :, :skip] = -torch.inf
    # before they are shared: padding would copy every share
    keys, values = (
        fit(k_cmp, width),
        fit(v_cmp, width),
    )
    for part in _parts(length, call):
        out, stats = attend(part.rows(q), part.shared(keys), part.shared(values), part.how)
        part.rows(o).copy_(out[..., : o.shape[-1]])
        part.stats(lse).copy_(stats)
    return o, lse


def backward(
    do: Tensor,  # [1, S, Hq, Dv]
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    o: Tensor,
    lse: Tensor,
    call: SlotCall,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk_cmp, dv_cmp in the shapes of q, k_cmp, v_cmp."""
    length, width = q.shape[1], width_of(q.shape[-1], v_cmp.shape[-1])
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dq[:, : call.geometry.compress_block_size - 1] = 0
    sums = [torch.zeros(x.shape[1:], dtype=torch.float32, device=q.device) for x in (k_cmp, v_cmp)]
    keys, values = fit(k_cmp, width), fit(v_cmp, width)
    for part in _parts(length, call):
        grads = attend_backward(
            part.rows(do),
            part.rows(q),
            part.shared(keys),
            part.shared(values),
            part.rows(o),
            part.stats(lse),
            part.how,
        )
        part.rows(dq).copy_(grads[0])
        for total, grad in zip(sums, grads[1:]):
            total[: part.keys] += grad[..., : total.shape[-1]].sum(0, dtype=torch.float32)
    dk, dv = (total.to(q.dtype).unsqueeze(0) for total in sums)
    return dq, dk, dv
