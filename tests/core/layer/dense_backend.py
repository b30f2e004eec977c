"""A test backend with dense masks in plain PyTorch: short forwards, backwards by torch.func.vjp.

Dense inputs are converted to packed inputs whose documents are the batch entries, so there is one
code path.
"""

from __future__ import annotations

from typing import Any

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS, SlotCall, SlotSpec
from nsa_core.dtypes import stats_dtype
from nsa_core.packing import compressed_cu_seqlens, token_positions
from nsa_core.plan.candidates import request_of
from nsa_core.plan.plan import Plan
from nsa_core.torch_ops.kernel import Kernel
from nsa_core.torch_ops.slot_op import slot_op


def _rows(
    tensors: tuple[torch.Tensor, ...], call: SlotCall
) -> tuple[list[torch.Tensor], Any, Any, torch.Tensor]:
    """Tensors as rows, positions of tokens and compressed tokens, and which of the latter exist."""
    q = tensors[0]
    if call.cu_seqlens is not None:
        cu, flat = call.cu_seqlens, list(tensors)
        ccu = compressed_cu_seqlens(cu, call.geometry)
        rows = call.geometry.max_compressed(q.shape[0])
    else:
        batch, length = q.shape[:2]
        steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        cu, ccu = steps * length, steps * call.geometry.num_compressed(length)
        flat, rows = [t.flatten(0, 1) for t in tensors], int(ccu[-1])
    exists = torch.arange(rows, device=q.device) < ccu[-1]
    return flat, token_positions(cu, flat[0].shape[0]), token_positions(ccu, rows), exists


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> Any:
    """Attention under a mask [T, G, keys]; keys that no query sees may be NaN.

    Returns:
        o [T, Hq, Dv], lse [Hq, T].
    """
    high, group = stats_dtype(q.dtype), q.shape[1] // k.shape[1]
    q, k, v = (t.to(high) for t in (q, k, v))
    seen = mask.any((0, 1))[:, None, None]
    k, v = (torch.where(seen, t, 0).repeat_interleave(group, 1) for t in (k, v))
    mask = mask.repeat_interleave(group, 1).transpose(0, 1)  # [Hq, T, keys]
    logits = torch.einsum("thd,khd->htk", q, k) * scale
    lse = (
        torch.where(mask, logits, -torch.inf).logsumexp(-1)
        if mask.shape[-1]
        else logits.new_full(q.shape[1::-1], -torch.inf)
    )
    p = torch.where(mask, (logits - torch.where(lse.isinf(), 0, lse)[..., None]).exp(), 0)
    return torch.einsum("htk,khd->thd", p, v), lse


def _restore(
    o: torch.Tensor, lse: torch.Tensor, q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.dim() == 4:
        o, lse = o.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return o.to(q.dtype).contiguous(), lse.contiguous()


def _same_document(tokens: Any, keys: Any) -> torch.Tensor:
    return tokens.document[:, None] == keys.document[None, :]


def cmp_forward(q, k, v, *, call):
    (fq, fk, fv), tokens, blocks, exists = _rows((q, k, v), call)
    g = call.geometry
    last = blocks.position * g.compress_stride + g.compress_block_size - 1
    mask = _same_document(tokens, blocks) & exists & (last[None, :] <= tokens.position[:, None])
    return _restore(*_attend(fq, fk, fv, mask[:, None].expand(-1, k.shape[-2], -1), call.scale), q)


def win_forward(q, k, v, *, call):
    (fq, fk, fv), tokens, _, _ = _rows((q, k, v), call)
    back = tokens.position[:, None] - tokens.position[None, :]
    mask = _same_document(tokens, tokens) & (back >= 0) & (back < call.geometry.window_size)
    return _restore(*_attend(fq, fk, fv, mask[:, None].expand(-1, k.shape[-2], -1), call.scale), q)


def sel_forward(q, k, v, blocks, *, call):
    (fq, fk, fv, fb), tokens, _, _ = _rows((q, k, v, blocks), call)
    key_block = tokens.position // call.geometry.select_block_size
    chosen = (fb[..., None] == key_block).any(-2)  # [T, G, keys]
    causal = _same_document(tokens, tokens) & (tokens.position[None, :] <= tokens.position[:, None])
    return _restore(*_attend(fq, fk, fv, chosen & causal[:, None], call.scale), q)


def select_forward(q, k, lse, *, call):
    flat_lse = lse if q.dim() == 3 else lse.transpose(0, 1).flatten(1)
    (fq, fk), tokens, blocks, exists = _rows((q, k), call)
    g, high = call.geometry, stats_dtype(q.dtype)
    group = q.shape[-2] // k.shape[-2]
    last = blocks.position * g.compress_stride + g.compress_block_size - 1
    mask = _same_document(tokens, blocks) & exists & (last[None, :] <= tokens.position[:, None])
    logits = (
        torch.einsum("thd,khd->htk", fq.to(high), fk.to(high).repeat_interleave(group, 1))
        * call.scale
    )
    p = torch.where(mask, (logits - torch.where(flat_lse.isinf(), 0, flat_lse)[..., None]).exp(), 0)
    count = g.num_select_blocks(int(tokens.position.max()) + 1)
    j = torch.arange(count, device=q.device)
    weight = torch.zeros(len(blocks.position), count, dtype=high, device=q.device)
    for i, value in g.overlap_weights():
        weight += value * (
            blocks.position[:, None] == j * (g.select_block_size // g.compress_stride) + i
        )
    # [T, G, NB]
    scores = torch.einsum("htk,kj->htj", p, weight).unflatten(0, (-1, group)).sum(1).transpose(0, 1)
    current = tokens.position[:, None, None] // g.select_block_size
    scores = torch.where((j < g.init_blocks) | (j > current - g.local_blocks), torch.inf, scores)
    scores = torch.where(j <= current, scores, -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True)
    selected = torch.where(
        best.values[..., : g.num_selected_blocks] == -torch.inf,
        count,
        best.indices[..., : g.num_selected_blocks],
    )
    selected = (
        torch.nn.functional.pad(
            selected, (0, g.num_selected_blocks - selected.shape[-1]), value=count
        )
        .sort(-1)
        .values
    )
    out = torch.where(selected == count, -1, selected).to(torch.int32)
    return out if q.dim() == 3 else out.unflatten(0, q.shape[:2])


def combine_forward(gates, o_cmp, o_sel, o_win, *, call):
    high = gates.dtype
    total = sum(gates[..., c, None] * o.to(high) for c, o in enumerate((o_cmp, o_sel, o_win)))
    return total.to(o_cmp.dtype)


def _vjp(forward, grad, inputs, *others, call):
    def output(*inputs):
        result = forward(*inputs, *others, call=call)
        return result[0] if isinstance(result, tuple) else result

    return torch.func.vjp(output, *inputs)[1](grad)


def cmp_backward(do, q, k, v, o, lse, *, call):
    return _vjp(cmp_forward, do, (q, k, v), call=call)


def win_backward(do, q, k, v, o, lse, *, call):
    return _vjp(win_forward, do, (q, k, v), call=call)


def sel_backward(do, q, k, v, blocks, o, lse, *, call):
    return _vjp(sel_forward, do, (q, k, v), blocks, call=call)


def combine_backward(do, gates, o_cmp, o_sel, o_win, *, call):
    return _vjp(combine_forward, do, (gates, o_cmp, o_sel, o_win), call=call)


def _spec(slot: str) -> SlotSpec:
    backward = None if slot == "select" else f"{__name__}:{slot}_backward"
    return SlotSpec(f"{__name__}:{slot}_forward", backward)


def dense_plan(
    config: NSAConfig,
    dtype: torch.dtype = torch.float64,
    *,
    varlen: bool = False,
    needs_grad: bool = True,
    device: str = "cpu",
) -> Plan:
    """A plan that runs every slot with the functions of this module."""
    requests = {
        slot: request_of(
            config, slot, dtype=dtype, device=device, needs_grad=needs_grad, varlen=varlen
        )
        for slot in SLOTS
    }
    kernels = {
        slot: Kernel(
            "dense",
            slot,
            slot_op("dense", slot, _spec(slot)).op,
            config.softmax_scale,
            tuple(config.geometry.as_ints()),
            False,
        )
        for slot in SLOTS
    }
    return Plan(config, requests, choices={}, _slots={}, **kernels)
