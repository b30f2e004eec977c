"""The layer on plans of the sdpa backend, compared with the dense test backend."""

import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import nsa_core
from cases import boundaries, inputs, small
from dense_backend import dense_plan
from nsa_core import NSAttention, nsa_attention, nsa_attention_with_lse
from nsa_core.layer.phi.kinds import mean_compress

CONFIG = small()


@pytest.mark.parametrize("backend", ["dense", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backends_run_without_autocast(backend, dtype):
    tensors = inputs(CONFIG, 2, 37, dtype=dtype, requires_grad=True)
    plan = dense_plan(CONFIG, dtype)
    if backend == "sdpa":
        plan = nsa_core.resolve(CONFIG, backends="sdpa", dtype=dtype, needs_grad=True)
    k_cmp, v_cmp = (mean_compress(x[0], CONFIG.geometry) for x in (tensors.k, tensors.v))
    wrt = [tensors.q, *tensors.k, *tensors.v, tensors.gates]

    def run():
        o, lse, _ = nsa_attention_with_lse(
            *tensors, config=CONFIG, plan=plan, k_cmp=k_cmp, v_cmp=v_cmp
        )
        return [o, *lse, *torch.autograd.grad(o.float().sum(), wrt, retain_graph=True)]

    plain = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(map(torch.equal, run(), plain))


@pytest.mark.parametrize("packed", [False, True])
def test_two_backends_agree(packed):
    lead, cu = ((50,), boundaries(30, 0, 13, 7)) if packed else ((2, 25), None)
    tensors = inputs(CONFIG, *lead, requires_grad=True)
    wrt = [tensors.q, *tensors.k, *tensors.v, tensors.gates]
    results = []
    for plan in (None, dense_plan(CONFIG, varlen=packed)):
        o, lse, blocks = nsa_attention_with_lse(*tensors, config=CONFIG, cu_seqlens=cu, plan=plan)
        results.append((o, *lse, blocks, *torch.autograd.grad(o.sin().sum(), wrt)))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


def test_plan_of_a_layer_names_the_backends_that_ran():
    attn = NSAttention(CONFIG, backends={"win": "sdpa"})
    assert attn.plan.choices["win"].explicit
    assert not attn.plan.choices["sel"].explicit
    with nsa_core.torch_ops.backend_call.record_dispatch() as calls:
        attn(torch.randn(1, 70, 24))  # sel is causal attention in shorter sequences
    assert {c.slot: c.backend for c in calls} == {
        slot: choice.backend for slot, choice in attn.plan.choices.items()
    }


def test_row_29_meta_tensors_use_the_plan_of_the_cpu():
    with torch.device("meta"):
        attn = NSAttention(CONFIG)
        assert attn(torch.empty(2, 37, 24)).shape == (2, 37, 24)
    assert attn.plan.requests["cmp"].device == "cpu"


def test_check_on_an_sdpa_plan():
    attn, x = NSAttention(CONFIG, layer=5, check=True), torch.randn(1, 20, 24)
    attn(x)
    with torch.no_grad():
        attn.qkv.weight[-1] = torch.inf  # a row of v_win
    for plan in (None, nsa_core.resolve(CONFIG, needs_grad=True)):
        with pytest.raises(nsa_core.NSAError, match="layer 5, branch 'win', backend 'sdpa'"):
            attn(x, plan=plan)
    attn.layer = None
    with pytest.raises(nsa_core.NSAError, match=r"^branch 'win', backend 'sdpa'"):
        attn(x)


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


def test_report_row_20_gradcheck_of_all_branches_through_the_packed_form():
    config = small(
        n_heads=2, n_kv_heads=1, head_dim=2, v_head_dim=2, compress_block_size=4, compress_stride=2
    )
    cu = boundaries(9, 0, 3, 13)
    tensors = inputs(config, 25, requires_grad=True)
    # Fixed blocks, because the selection is not continuous.
    blocks = nsa_attention_with_lse(*tensors, config=config, cu_seqlens=cu).blocks

    def run(q, k0, k1, k2, v0, v1, v2, gates):
        return nsa_attention(
            q, (k0, k1, k2), (v0, v1, v2), gates, config=config, cu_seqlens=cu, blocks=blocks
        )

    assert torch.autograd.gradcheck(
        run, (tensors.q, *tensors.k, *tensors.v, tensors.gates), fast_mode=True
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
