"""Fused decode forms in a layer's step: results, when each is used, number of operators."""

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


def plain_compress(k, v, k_cmp, v_cmp, phi_k, phi_v, *, rope, call):
    """Compress the block that each sequence completes, in blocks of 8 tokens with stride 4."""
    for b in range(k.shape[0]):
        block = call.geometry.num_compressed(int(call.starts[b]))
        if block * 4 + 8 > int(call.lengths[b]):
            continue
        page, row = divmod(block, k_cmp.shape[1])
        for x, out, weights in ((k, k_cmp, phi_k), (v, v_cmp, phi_v)):
            block_tokens = x[b, torch.arange(block * 4, block * 4 + 8) % x.shape[1]]
            y = block_tokens.mean(0)
            if weights:
                position, weight, bias, *down = weights
                y = (block_tokens.transpose(0, 1) + position).flatten(1) @ weight.mT + bias
                if down:
                    y = torch.nn.functional.gelu(y) @ down[0].mT + down[1]
            if rope is not None and x is k:
                (y1, y2), (cos, sin) = y.chunk(2, -1), (table[block * 4] for table in rope)
                y = torch.cat((y1 * cos - y2 * sin, y2 * cos + y1 * sin), -1)
            out[int(call.tables.cmp[b, page]), row] = y


@pytest.mark.few_cases
@pytest.mark.parametrize("max_step", [3, 64])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_before_compress": True},
        {"rope": False, "compress": "linear"},
        {"shared_kv": True},
        {"compress": "mean"},
        {"compress": "conv"},
    ],
    ids=str,
)
def test_fused_forms_equal_the_slots_and_the_layer(changes, max_step):
    """The fused forms are written here as loops over the contract's definitions."""
    attn = layer_of(**changes)
    x = tokens(attn, 2, ROOM)
    caches = [poisoned_cache(attn, 2, ROOM, page_size=16, max_step=max_step) for _ in range(2)]
    plan, calls = caches[0].plan, []

    def append(q, k, v, raw, sel, win, *, rope, rotate_raw, call):
        calls.append("append")
        q, size, half = q.clone(), sel[0].shape[1], q.shape[-1] // 2

        def rotated(row, t):
            if rope is None:
                return row
            assert all(table.shape[1:] == (half,) for table in rope)
            x1, x2 = row[..., :half], row[..., half:]
            return torch.cat(
                (x1 * rope[0][t] - x2 * rope[1][t], x2 * rope[0][t] + x1 * rope[1][t]), -1
            )

        for b in range(q.shape[0]):
            for r in range(int(call.lengths[b] - call.starts[b])):
                t = int(call.starts[b]) + r
                q[b, r] = rotated(q[b, r], t)
                page = int(call.tables.sel[b, t // size])
                raw[0][b, t % raw[0].shape[1]] = (
                    rotated(k[0][b, r], t) if rotate_raw else k[0][b, r]
                )
                sel[0][page, t % size], win[0][b, t % win[0].shape[1]] = (
                    rotated(k[1][b, r], t),
                    rotated(k[2][b, r], t),
                )
                raw[1][b, t % raw[1].shape[1]] = v[0][b, r]
                sel[1][page, t % size], win[1][b, t % win[1].shape[1]] = v[1][b, r], v[2][b, r]
        return q

    def fused_step(q, gates, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, *, call):
        calls.append("step")
        o_cmp, lse = plan.cmp(q, k_cmp, v_cmp, call=call)
        blocks = plan.select(q, k_cmp, lse, call=call)
        branches = (
            plan.sel(q, k_sel, v_sel, blocks, call=call)[0],
            plan.win(q, k_win, v_win, call=call)[0],
        )
        return plan.combine(gates, o_cmp, *branches), blocks

    def gates(rows, weight, bias, *, call):
        calls.append("gates")
        return (rows[:, :, None] * weight).sum(-1).add(bias).sigmoid().view(*rows.shape[:2], -1, 3)

    def compress(*tensors, **options):
        calls.append("compress")
        plain_compress(*tensors, **options)

    forms = {"append": append, "gates": gates, "step": fused_step, "compress": compress}
    kernels = {
        n: dataclasses.replace(plan.cmp, slot=n, function=function) for n, function in forms.items()
    }
    fused = dataclasses.replace(plan, fused=MappingProxyType(kernels))
    for part, new in (
        (x[:, :11], None),
        (x[:, 11:12], None),
        (x[:, 12:17], [5, 2]),
        (x[:, 17:18], None),
        (x[:, 18:19], None),
    ):
        is_step = part.shape[1] < 11
        y = attn(part, cache=caches[0], new=new, plan=fused if is_step else None)
        assert_equal(y, attn(part, cache=caches[1], new=new))
    # The steps of one token to lengths 12, and 19 and 16, complete a block; five rows may be two.
    completed = [True, False, False, True]
    assert calls == [
        name
        for complete in completed
        for name in ("gates", "append", "compress", "step")
        if name != "compress" or (complete and attn.config.compress != "conv")
    ]


class OtherGate(LinearGate):
    """A subclass with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def _hooked(gate):
    gate.register_forward_hook(lambda module, args, out: out)


def _replaced(gate):
    gate.forward = LinearGate.forward.__get__(gate)


def _subclass(gate):
    gate.__class__ = OtherGate


@pytest.mark.parametrize(
    "change", [_hooked, _replaced, _subclass, lambda gate: None, "mlp", "many tokens"]
)
def test_gate_form_is_used_for_plain_linear_gates_only(change, monkeypatch):
    attn = layer_of(torch.float32, **({"gate": "mlp"} if change == "mlp" else {}))
    if callable(change):
        change(attn.gate)
    if change == "many tokens":
        monkeypatch.setattr(step, "MAX_FUSED_GATE_TOKENS", 1)
    cache, calls = attn.new_cache(2, ROOM), []
    plan = plan_without_work(cache)
    form = dataclasses.replace(
        plan.fused["step"],
        slot="gates",
        function=lambda x, *rest, call: calls.append(1) or torch.zeros(2, 1, 4, 3),
    )
    plan = dataclasses.replace(plan, fused=MappingProxyType({**plan.fused, "gates": form}))
    attn(tokens(attn, 2, 1), cache=cache, plan=plan)
    assert bool(calls) == (getattr(change, "__name__", "") == "<lambda>")


def _hooked_linear(phi):
    phi.up.register_forward_hook(lambda module, args, out: out)


def _parametrised(phi):
    torch.nn.utils.parametrizations.weight_norm(phi.up)


@pytest.mark.parametrize("which", ["phi_k", "phi_v"])
@pytest.mark.parametrize(
    "change",
    [_hooked, _hooked_linear, _parametrised, "conv", "attn_pool", "linear", "mlp", "autocast"],
)
def test_compress_form_is_used_for_plain_phis_only(change, which):
    kind = change if change in ("conv", "attn_pool", "linear") else "mlp"
    attn, dtype = layer_of(torch.float32, compress=kind), torch.float32
    if callable(change):
        change(getattr(attn, which))
    with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"), torch.no_grad():
        if change == "autocast":
            dtype = torch.bfloat16
        cache, calls = attn.new_cache(2, ROOM, dtype=dtype), []

        def compress(k, v, k_cmp, v_cmp, phi_k, phi_v, *, rope, call):
            assert {x.dtype for x in (k, v, k_cmp, v_cmp)} == {dtype}
            assert {x.dtype for x in (*phi_k, *phi_v)} == {torch.float32}
            calls.append(len(phi_k))

        plan = plan_without_work(cache, compress=compress)
        attn(tokens(attn, 2, 7), cache=cache)
        for _ in range(2):  # the first one completes a block
            attn(tokens(attn, 2, 1), cache=cache, plan=plan)
    assert calls == {"linear": [3], "mlp": [5], "autocast": [5]}.get(change, [])


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


class OperatorRecorder(TorchDispatchMode):
    """Record the operators that run, except views and allocations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.names += [] if name in VIEWS else [name]
        return function(*args, **(kwargs or {}))


def plan_without_work(cache, **forms):
    """The plan of a cache with fused forms that do nothing: only the layer's work remains."""
    o = torch.zeros(2, 1, 4, 6, dtype=cache.dtype)
    blocks = torch.zeros(2, 1, 2, 3, dtype=torch.int32)
    forms["append"] = lambda q, *rest, **options: q
    forms["step"] = lambda *tensors, call: (o, blocks)
    kernels = {
        n: dataclasses.replace(cache.plan.cmp, slot=n, function=function)
        for n, function in forms.items()
    }
    return dataclasses.replace(cache.plan, fused=MappingProxyType(kernels))


@pytest.mark.parametrize(
    ("compress", "phi", "captured"), [("mean", 21, 30), ("mlp", 29, 38), ("conv", 37, 46)]
)
def test_number_of_operators_per_token(compress, phi, captured, monkeypatch):
    """A step runs few operators besides the fused forms.

    They are qkv, gates, sigmoid, out, and two operators for the lengths. A step that completes a
    block runs ``phi`` more. A captured step always runs ``captured`` more, and three for the
    lengths: the host does not know which sequences complete a block, and in which page. A fused
    compression replaces them.
    """
    attn = layer_of(torch.float32, compress=compress).requires_grad_(False)
    cache, x = attn.new_cache(2, ROOM), tokens(attn, 2, ROOM)
    attn(x[:, :20], cache=cache)
    plan, counts = plan_without_work(cache), []
    for t in range(20, 28):
        row = x[:, t : t + 1].contiguous()
        with OperatorRecorder() as recorder:
            attn(row, cache=cache, plan=plan)
        counts.append(len(recorder.names))
    assert counts == [6, 6, 6, 6 + phi] * 2, recorder.names
    monkeypatch.setattr(step, "is_capturing", lambda device: True)
    cache = attn.new_cache(2, ROOM, page_size=16)
    plan = plan_without_work(cache)
    with OperatorRecorder() as recorder:
        attn(row, cache=cache, plan=plan)
    assert len(recorder.names) == 6 + 3 + captured, recorder.names
    fused = plan_without_work(cache, compress=lambda *tensors, **options: None)
    with OperatorRecorder() as recorder:
        attn(row, cache=cache, plan=fused)
    assert len(recorder.names) == 6 + 3 + captured * (compress == "conv"), recorder.names
