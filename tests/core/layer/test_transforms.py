"""torch.func: grad, vjp and per-sample gradients equal autograd, sample by sample."""

import warnings

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, jacrev, vjp, vmap

from cases import boundaries, inputs, layer_of, small
from nsa_core import Unsupported, block_attention, nsa_attention, nsa_attention_with_lse
from nsa_core.config import COMPRESS_KINDS
from nsa_core.plan.default_plan import default_plan
from nsa_core.torch_ops.backend_call import record_dispatch

CONFIG = small()
SAMPLES = 3
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-4}


def parameters_of(attn):
    return {name: p.detach() for name, p in attn.named_parameters()}


def loss_of(attn):
    return lambda parameters, x: functional_call(attn, parameters, (x[None],)).sin().sum()


def gradients(loss, parameters, x):
    """Gradients of one sample from torch.autograd, zero where autograd has none."""
    leaves = {n: p.clone().requires_grad_() for n, p in parameters.items()}
    x = x.clone().requires_grad_()
    wrt = [*leaves.values(), x]
    values = torch.autograd.grad(loss(leaves, x), wrt, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wrt, values)]


def assert_close(actual, expected, dtype=torch.float64):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.few_cases
@pytest.mark.parametrize("length", [37, 5])  # with compressed tokens, and without
@pytest.mark.parametrize("compress", COMPRESS_KINDS)
def test_per_sample_gradients_equal_a_loop(compress, length):
    dtype = torch.float32 if compress == "conv" else torch.float64
    attn = layer_of(dtype, compress=compress)
    parameters, x = parameters_of(attn), torch.randn(SAMPLES, length, 24, dtype=dtype)
    loss = loss_of(attn)
    expected = [gradients(loss, parameters, sample) for sample in x]
    one = grad(loss, argnums=(0, 1))
    of_parameters, of_x = one(parameters, x[0])
    assert_close([*of_parameters.values(), of_x], expected[0], dtype)
    assert list(of_parameters) == list(parameters)
    of_parameters, of_x = vmap(one, in_dims=(None, 0))(parameters, x)
    for index, sample in enumerate(expected):
        assert_close([g[index] for g in (*of_parameters.values(), of_x)], sample, dtype)


@pytest.mark.parametrize(
    "options",
    [{"shared_kv": True}, {"rope_before_compress": True, "gate": "mlp", "qk_norm": True}],
    ids=["shared_kv", "norms"],
)
def test_per_sample_gradients_with_other_options(options):
    attn = layer_of(**options)
    parameters, x = parameters_of(attn), torch.randn(SAMPLES, 37, 24, dtype=torch.float64)
    of_parameters, of_x = vmap(grad(loss_of(attn), argnums=(0, 1)), in_dims=(None, 0))(
        parameters, x
    )
    for index in range(SAMPLES):
        expected = gradients(loss_of(attn), parameters, x[index])
        assert_close([g[index] for g in (*of_parameters.values(), of_x)], expected)


@pytest.mark.parametrize("packed", [False, True])
def test_vjp_equals_autograd_inside_and_after_the_transform(packed):
    lead, cu = ((30,), boundaries(19, 11)) if packed else ((2, 30), None)
    tensors = inputs(CONFIG, *lead, requires_grad=True)
    flat = [tensors.q, *tensors.k, *tensors.v, tensors.gates]

    def attend(q, k1, k2, k3, v1, v2, v3, gates):
        return nsa_attention(q, (k1, k2, k3), (v1, v2, v3), gates, config=CONFIG, cu_seqlens=cu)

    o = attend(*flat)
    do = torch.randn_like(o)
    expected = torch.autograd.grad(o, flat, do)
    output, pull = vjp(attend, *[t.detach() for t in flat])
    assert_close([output], [o])
    assert_close(pull(do), expected)


@pytest.mark.parametrize("in_dim", [0, 2])
def test_vmap_folds_the_samples_into_one_call_per_slot(in_dim):
    tensors, q = inputs(CONFIG, 2, 70), torch.randn(SAMPLES, 2, 70, 4, 8, dtype=torch.float64)

    def attend(q):
        return nsa_attention_with_lse(*tensors._replace(q=q), config=CONFIG)

    with record_dispatch() as calls, warnings.catch_warnings(action="error"):
        o, lse, blocks = vmap(attend, in_dims=in_dim)(q.movedim(0, in_dim))
    assert [call.slot for call in calls] == ["cmp", "select", "sel", "win", "combine"]
    for index in range(SAMPLES):
        expected = attend(q[index])
        assert_close([o[index], *(x[index] for x in lse)], [expected[0], *expected[1]])
        assert torch.equal(blocks[index], expected[2])


def test_nested_vmap_and_jacrev():
    tensors = inputs(CONFIG, 1, 9)

    def attend(q):
        return nsa_attention(*tensors._replace(q=q), config=CONFIG)

    q = torch.randn(2, SAMPLES, 1, 9, 4, 8, dtype=torch.float64)
    nested = vmap(vmap(attend))(q)
    assert_close([nested[1, 2]], [attend(q[1, 2])])
    jacobian = jacrev(lambda x: attend(x)[0, 5, 1])(tensors.q)
    leaf = tensors.q.clone().requires_grad_()
    rows = [torch.autograd.grad(attend(leaf)[0, 5, 1, i], leaf)[0] for i in range(6)]
    assert_close([jacobian], [torch.stack(rows)])


def test_a_gradient_of_torch_func_has_no_gradient_of_autograd():
    tensors = inputs(CONFIG, 1, 9)

    def attend(q):
        return nsa_attention(*tensors._replace(q=q), config=CONFIG).square().sum()

    with pytest.raises(Unsupported, match="differentiable once"):
        grad(attend)(tensors.q.requires_grad_()).sum().backward()


def test_gradients_reach_the_outer_levels():
    """The value inside a transform is differentiable by the outer transform and by autograd."""
    attn, x = layer_of(), torch.randn(20, 24, dtype=torch.float64, requires_grad=True)
    loss, parameters = loss_of(attn), parameters_of(attn)
    expected = gradients(loss, parameters, x.detach())[-1]

    def value(x):
        return grad_and_value(loss)(parameters, x)[1]

    value(x).backward()
    assert_close([x.grad, grad(value)(x.detach())], [expected, expected])


def test_packed_documents_under_vmap_are_refused():
    attn, tensors = layer_of(), inputs(CONFIG, 30)
    x, cu = torch.randn(SAMPLES, 30, 24).double(), boundaries(20, 10)
    message = r"^packed documents \(cu_seqlens\) are not supported under torch.func.vmap: map over"
    win = default_plan(CONFIG, x.device, x.dtype, True, True).win
    for function, mapped in (
        (lambda sample: attn(sample, cu), x),
        (lambda bounds: attn(x[0], bounds), cu.repeat(SAMPLES, 1)),
        (
            lambda q: nsa_attention(*tensors._replace(q=q), config=CONFIG, cu_seqlens=cu),
            tensors.q.repeat(SAMPLES, 1, 1, 1),
        ),
        (
            lambda q: win(q, tensors.k[2], tensors.v[2], cu_seqlens=cu),
            tensors.q.repeat(SAMPLES, 1, 1, 1),
        ),
    ):
        with pytest.raises(Unsupported, match=message):
            vmap(function)(mapped)


@pytest.mark.parametrize("kind", ["layer", "nsa_attention", "block_attention"])
def test_a_trace_of_one_call_is_refused_by_name(kind):
    """It would hold the sizes of one input as constants."""
    attn, (q, k, v, gates) = layer_of(torch.float64), inputs(CONFIG, 1, 20)[:4]
    blocks = torch.zeros(1, 20, q.shape[2], 1, dtype=torch.int64)
    function, x = {
        "layer": (attn, torch.randn(1, 20, CONFIG.dim, dtype=torch.float64)),
        "nsa_attention": (lambda x: nsa_attention(x, k, v, gates, config=CONFIG), q),
        "block_attention": (lambda x: block_attention(x, x, x, blocks, block_size=8), q),
    }[kind]
    with pytest.raises(
        Unsupported, match=r"torch\.jit\.trace.* use torch\.export or torch\.compile"
    ):
        torch.jit.trace(function, x)
