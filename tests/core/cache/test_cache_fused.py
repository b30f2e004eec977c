"""Fused decode forms in a layer's step: the same results, gates by them where they may be, few
operators a token.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from caches import assert_equal, layer_of, poisoned_cache, tokens
from nsa_core.cache import step
from nsa_core.layer.gating import LinearGate

ROOM = 40


@pytest.mark.parametrize("max_step", [3, 64])
@pytest.mark.parametrize(
    "changes", [{}, {"rope_before_compress": True}, {"rope": False}, {"shared_kv": True}], ids=str
)
def test_fused_forms(changes, max_step):
    """A plan's own forms, here as loops over the contract's words, give what the slots and the
    layer give.
    """
    attn = layer_of(**changes)
    x = tokens(attn, 2, ROOM)
    caches = [poisoned_cache(attn, 2, ROOM, page_size=16, max_step=max_step) for _ in range(2)]
    plan, called = caches[0].plan, []

    def append(q, k, v, raw, sel, win, *, rope, rotate_raw, call):
        called.append("append")
        q, size, half = q.clone(), sel[0].shape[1], q.shape[-1] // 2

        def turned(row, t):
            if rope is None:
                return row
            assert all(table.shape[1:] == (half,) for table in rope)
            one, other = row[..., :half], row[..., half:]
            return torch.cat(
                (one * rope[0][t] - other * rope[1][t], other * rope[0][t] + one * rope[1][t]), -1
            )

        for b in range(q.shape[0]):
            for r in range(int(call.lengths[b] - call.starts[b])):
                t = int(call.starts[b]) + r
                q[b, r] = turned(q[b, r], t)
                page = int(call.block_table[b, t // size])
                raw[0][b, t % raw[0].shape[1]] = turned(k[0][b, r], t) if rotate_raw else k[0][b, r]
                sel[0][page, t % size], win[0][b, t % win[0].shape[1]] = (
                    turned(k[1][b, r], t),
                    turned(k[2][b, r], t),
                )
                raw[1][b, t % raw[1].shape[1]] = v[0][b, r]
                sel[1][page, t % size], win[1][b, t % win[1].shape[1]] = v[1][b, r], v[2][b, r]
        return q

    def fused_step(q, gates, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, *, call):
        called.append("step")
        o_cmp, lse = plan.cmp(q, k_cmp, v_cmp, call=call)
        blocks = plan.select(q, k_cmp, lse, call=call)
        others = (
            plan.sel(q, k_sel, v_sel, blocks, call=call)[0],
            plan.win(q, k_win, v_win, call=call)[0],
        )
        return plan.combine(gates, o_cmp, *others), blocks

    def gates(rows, weight, bias, *, call):
        called.append("gates")
        return (rows[:, :, None] * weight).sum(-1).add(bias).sigmoid().view(*rows.shape[:2], -1, 3)

    made = {"append": append, "gates": gates, "step": fused_step}
    kernels = {
        n: dataclasses.replace(plan.cmp, slot=n, function=function) for n, function in made.items()
    }
    fused = dataclasses.replace(plan, fused=MappingProxyType(kernels))
    for part, new in (
        (x[:, :11], None),
        (x[:, 11:12], None),
        (x[:, 12:17], [5, 2]),
        (x[:, 17:18], None),
    ):
        steps = part.shape[1] < 11
        y = attn(part, cache=caches[0], new=new, plan=fused if steps else None)
        assert_equal(y, attn(part, cache=caches[1], new=new))
    assert called == ["gates", "append", "step"] * 3


class OtherGate(LinearGate):
    """Its own product, for all that anyone knows."""


def _hooked(gate):
    gate.register_forward_hook(lambda module, given, out: out)


def _replaced(gate):
    gate.forward = LinearGate.forward.__get__(gate)


def _subclass(gate):
    gate.__class__ = OtherGate


@pytest.mark.parametrize(
    "change", [_hooked, _replaced, _subclass, lambda gate: None, "mlp", "many tokens"]
)
def test_a_gate_that_may_be_more_than_its_formula_is_called(change, monkeypatch):
    attn = layer_of(torch.float32, **({"gate": "mlp"} if change == "mlp" else {}))
    if callable(change):
        change(attn.gate)
    if change == "many tokens":
        monkeypatch.setattr(step, "FEW_TOKENS", 1)
    cache, called = attn.new_cache(2, ROOM), []
    plan = bare(cache)
    form = dataclasses.replace(
        plan.fused["step"],
        slot="gates",
        function=lambda x, *rest, call: called.append(1) or torch.zeros(2, 1, 4, 3),
    )
    plan = dataclasses.replace(plan, fused=MappingProxyType({**plan.fused, "gates": form}))
    attn(tokens(attn, 2, 1), cache=cache, plan=plan)
    assert bool(called) == (getattr(change, "__name__", "") == "<lambda>")


VIEWS = {
    "view",
    "_unsafe_view",
    "t",
    "expand",
    "alias",
    "split_with_sizes",
    "select",
    "slice",
    "unsqueeze",
    "transpose",
    "unbind",
    "split",
    "empty_like",
}


class Counted(TorchDispatchMode):
    """The operators that ran, views and mere allocations left out."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.names += [] if name in VIEWS else [name]
        return function(*args, **(kwargs or {}))


def bare(cache):
    """The plan of a cache whose fused forms do nothing: what is left is the layer's."""
    o, blocks = torch.zeros(2, 1, 4, 6), torch.zeros(2, 1, 2, 3, dtype=torch.int32)
    made = {"append": lambda q, *rest, **options: q, "step": lambda *tensors, call: (o, blocks)}
    kernels = {
        n: dataclasses.replace(cache.plan.cmp, slot=n, function=function)
        for n, function in made.items()
    }
    return dataclasses.replace(cache.plan, fused=MappingProxyType(kernels))


@pytest.mark.parametrize(("compress", "phi"), [("mean", 18), ("mlp", 24)])
def test_a_token_costs_few_operators(compress, phi, monkeypatch):
    """Beside the backend's forms: qkv, gates, their sigmoid, out, and two for the lengths; ``phi``
    when a block ends.

    A captured step has phi always, four more for the lengths, and one for the page.
    """
    attn = layer_of(torch.float32, compress=compress).requires_grad_(False)
    cache, x = attn.new_cache(2, ROOM), tokens(attn, 2, ROOM)
    attn(x[:, :20], cache=cache)
    plan, costs = bare(cache), []
    for t in range(20, 28):
        row = x[:, t : t + 1].contiguous()
        with Counted() as counted:
            attn(row, cache=cache, plan=plan)
        costs.append(len(counted.names))
    assert costs == [6, 6, 6, 6 + phi] * 2, counted.names
    monkeypatch.setattr(step, "capturing", lambda device: True)
    cache = attn.new_cache(2, ROOM, page_size=16)
    plan = bare(cache)
    with Counted() as counted:
        attn(row, cache=cache, plan=plan)
    assert len(counted.names) == 6 + 4 + phi + 1, counted.names
