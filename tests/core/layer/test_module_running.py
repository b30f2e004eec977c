"""NSAttention under dtypes, checkpointing, grad modes and compilers; its plan and its checks."""

import copy
import math
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

from cases import boundaries, layer_of, small
from nsa_core import NSAError, NSAttention, resolve
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_core.torch_ops.core_node import run_core
from nsa_core.torch_ops.slot_op import slot_op

CONFIG = small()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_dtypes_forward_and_backward(dtype):
    attn, x = (
        layer_of(dtype, gate="mlp", qk_norm=True),
        torch.randn(2, 37, 24).to(dtype).requires_grad_(),
    )
    y = attn(x)
    assert y.dtype == dtype
    y.sum().backward()
    assert torch.isfinite(x.grad).all()
    assert all(p.grad.dtype == dtype and torch.isfinite(p.grad).all() for p in attn.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_row_42_checkpoint_recomputes_the_same_selection_and_bits(reentrant, planned, monkeypatch):
    attn, x = layer_of(torch.float32), torch.randn(2, 60, 24)
    chosen = []

    def spy(*arguments):
        results = run_core(*arguments)
        chosen.append(results.blocks)
        return results

    monkeypatch.setattr("nsa_core.layer.projection.run_core", spy)

    def grads(run):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), [leaf, *attn.parameters()])]

    if reentrant:  # autograd.grad is not for reentrant checkpoints

        def grads(run):
            leaf = x.clone().requires_grad_()
            attn.zero_grad()
            y = run(leaf)
            y.sin().sum().backward()
            return [y.detach(), leaf.grad, *(p.grad.clone() for p in attn.parameters())]

    plain = grads(attn)
    again = grads(lambda leaf: checkpoint(attn, leaf, use_reentrant=reentrant))
    assert len(chosen) == 3
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], chosen[2])
    assert all(map(torch.equal, plain, again))
    assert len(planned) == 1  # one plan with and without gradient


def test_rows_33_42_grad_modes_give_the_same_bits(planned):
    attn, x = layer_of(torch.float32), torch.randn(2, 60, 24)
    expected = attn(x)
    with torch.no_grad():
        assert torch.equal(attn(x), expected)
    with torch.inference_mode():
        assert torch.equal(attn(x), expected)
    assert len(planned) == 1
    attn.requires_grad_(False)
    assert torch.equal(attn(x), expected)
    attn.gate.requires_grad_(True)
    attn(x).sum().backward()
    assert attn.gate.weight.grad is not None
    assert attn.qkv.weight.grad is None


def test_plan_is_the_plan_of_the_last_call(planned):
    attn = NSAttention(small(), backends={"sel": "sdpa"}).double()
    assert attn.plan.requests["cmp"].dtype == "float64"  # before any forward
    assert planned[-1]["backends"] == {"sel": "sdpa"}
    assert attn.plan is attn.plan
    attn(torch.randn(9, 24).double(), boundaries(9))
    assert attn.plan.requests["cmp"].varlen
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attn.float()(torch.randn(1, 9, 24))
    assert attn.plan.requests["cmp"].dtype == "bfloat16"


def test_row_32_in_place_change_of_the_input_is_an_error():
    attn, x = layer_of(), torch.randn(1, 20, 24, dtype=torch.float64)
    y = attn(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("slot", ["cmp", "sel", "win", "combine"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_check_names_layer_branch_and_backend(slot, value, monkeypatch):
    attn = NSAttention(small(), layer="model.layers.7", check=True).double()
    x = torch.randn(1, 40, 24, dtype=torch.float64)  # sel is causal attention in shorter sequences
    unchecked = copy.deepcopy(attn)
    unchecked.check = False
    assert torch.equal(attn(x), unchecked(x))
    plan = attn.plan
    assert plan is unchecked.plan
    op = slot_op("sdpa", slot, plan._slots[slot])
    original = op._forward

    def poison(*tensors, call):
        result = original(*tensors, call=call)
        (result if slot == "combine" else result[0])[0, 13, 1, 2] = value
        return result

    monkeypatch.setattr(op, "_forward", poison)
    unchecked(x)
    with pytest.raises(NSAError) as caught:
        attn(x)
    for text in (
        "layer model.layers.7",
        f"branch '{slot}'",
        "backend 'sdpa'",
        "[0, 13, 1, 2]",
        "its inputs are finite",
    ):
        assert text in str(caught.value)


def test_check_names_the_first_branch_with_nan():
    attn = NSAttention(small(), check=True).double()
    x = torch.randn(1, 40, 24, dtype=torch.float64)
    x[0, 30] = math.nan
    with pytest.raises(NSAError, match="branch 'cmp'") as caught:
        attn(x)
    assert "inputs are finite" not in str(caught.value)


def test_row_29_meta_device_gives_shapes():
    with torch.device("meta"):
        attn = NSAttention(small())
        assert attn(torch.empty(2, 37, 24)).shape == (2, 37, 24)
        cu = torch.empty(4, dtype=torch.int32)
        assert attn(torch.empty(37, 24), cu, 20).shape == (37, 24)
    assert attn.plan.requests["cmp"].device == "cpu"


def test_rows_01_02_04_empty_and_short_inputs():
    attn = layer_of()
    for lead in ((2, 0), (0, 5), (1, 1), (1, 3), (1, 7)):
        x = torch.randn(*lead, 24, dtype=torch.float64, requires_grad=True)
        y = attn(x)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad.shape == x.shape
    x = torch.randn(0, 24, dtype=torch.float64)
    assert attn(x, boundaries(0, 0)).shape == (0, 24)


def test_backward_does_not_save_the_fused_projection():
    attn, x, saved = layer_of(torch.float32), torch.randn(1, 64, 24), {}
    projection_bytes = sum(attn._widths) * 64 * 4

    def keep(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        attn(x)
    assert saved
    assert projection_bytes not in saved.values()


def test_repr_shows_fields_that_differ_from_the_defaults():
    assert "window_size=9" in repr(layer_of())
    assert "rope_base" not in repr(layer_of())


def test_check_on_an_explicit_plan_and_without_a_name():
    attn, x = NSAttention(CONFIG, layer=5, check=True), torch.randn(1, 20, 24)
    attn(x)
    with torch.no_grad():
        attn.qkv.weight[-1] = torch.inf  # a row of v_win
    for plan in (None, resolve(CONFIG, needs_grad=True)):
        with pytest.raises(NSAError, match="layer 5, branch 'win', backend 'sdpa'"):
            attn(x, plan=plan)
    attn.layer = None
    with pytest.raises(NSAError, match=r"^branch 'win', backend 'sdpa'"):
        attn(x)


def test_plan_of_a_layer_names_the_backends_that_ran():
    attn = NSAttention(CONFIG, backends={"win": "sdpa"})
    assert attn.plan.choices["win"].explicit
    assert not attn.plan.choices["sel"].explicit
    with record_dispatch() as calls:
        attn(torch.randn(1, 70, 24))  # sel is causal attention in shorter sequences
    assert {c.slot: c.backend for c in calls} == {
        slot: choice.backend for slot, choice in attn.plan.choices.items()
    }


def test_default_plan_follows_deterministic_algorithms():
    attn, x = NSAttention(CONFIG), torch.randn(1, 20, 24)
    attn(x)
    assert not attn.plan.requests["cmp"].deterministic
    torch.use_deterministic_algorithms(True)
    try:
        attn(x)
        assert attn.plan.requests["cmp"].deterministic
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_compiles_under_autocast_and_checkpoint():
    torch._dynamo.reset()
    attn = NSAttention(CONFIG)
    x = torch.randn(1, 40, 24)

    def run(layer):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(layer, leaf, use_reentrant=False)
        return y, *torch.autograd.grad(y.float().sum(), [leaf, *attn.parameters()])

    compiled = torch.compile(lambda leaf: attn(leaf), backend="aot_eager", fullgraph=True)
    eager, traced = run(attn), run(compiled)
    assert traced[0].dtype == torch.bfloat16
    for eager_result, compiled_result in zip(eager, traced):
        torch.testing.assert_close(
            compiled_result.float(),
            eager_result.float(),
            rtol=0.05,
            atol=0.05 * eager_result.detach().abs().max().item(),
        )


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_row_29_layer_compiles_without_graph_breaks_with_dynamic_length(packed):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    attn = NSAttention(small(qk_norm=True)).double()
    compiled = torch.compile(attn, backend=counter, fullgraph=True)
    for length in (40, 64, 33):
        x = torch.randn(
            *((length,) if packed else (2, length)), 24, dtype=torch.float64, requires_grad=True
        )
        cu = boundaries(length - 5, 5) if packed else None
        got, expected = compiled(x, cu), attn(x, cu)
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
        wrt = [x, *attn.parameters()]
        grads = [torch.autograd.grad(y.sum(), wrt) for y in (got, expected)]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_layers_of_one_config_share_a_compilation():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    layers = [NSAttention(small(), layer=index) for index in range(3)]
    for attn in (*layers, copy.deepcopy(layers[0]), *pickle.loads(pickle.dumps(layers))):
        torch.compile(attn, backend=counter, fullgraph=True)(torch.randn(1, 20, 24))
    assert counter.frame_count == 1
