"""nsa_attention under grad modes, strides, transforms, fake tensors and torch.compile."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode

from cases import boundaries, inputs, sdpa_plan, small
from nsa_core import InvalidInput, NSAttention, nsa_attention, nsa_attention_with_lse
from nsa_core.contract import SlotSpec
from nsa_core.layer.phi.kinds import mean_compress
from nsa_core.torch_ops.autograd import is_unobserved
from nsa_core.torch_ops.slot_op import slot_op

CONFIG = small()


def attend(tensors, config=CONFIG, **options):
    options.setdefault("plan", sdpa_plan(config, tensors.q.dtype, varlen=True))
    return nsa_attention(*tensors, config=config, **options)


def attend_with_lse(tensors):
    return nsa_attention_with_lse(
        *tensors, config=CONFIG, plan=sdpa_plan(CONFIG, tensors.q.dtype, varlen=True)
    )


def test_row_33_42_same_bits_in_every_grad_mode():
    tensors = inputs(CONFIG, 1, 37, dtype=torch.float32)
    expected, _, blocks = attend_with_lse(tensors)
    for needs_grad in range(8):  # bit i: whether input i needs a gradient
        leaves = [
            x.clone().requires_grad_(bool(needs_grad >> i & 1))
            for i, x in enumerate((tensors.q, tensors.k[1], tensors.gates))
        ]
        some = tensors._replace(
            q=leaves[0], k=(tensors.k[0], leaves[1], tensors.k[2]), gates=leaves[2]
        )
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            with mode():
                got, _, chosen = attend_with_lse(some)
            assert torch.equal(got, expected)
            assert torch.equal(chosen, blocks)
        if needs_grad:
            attend(some).sum().backward()
            assert [leaf.grad is not None for leaf in leaves] == [
                bool(needs_grad >> i & 1) for i in range(3)
            ]


def _observing_select(q, k_cmp, lse, *, call):
    _observed.append((q * 2).requires_grad)
    return q.new_zeros(
        (*q.shape[:2], k_cmp.shape[2], call.geometry.num_selected_blocks), dtype=torch.int32
    )


_observed: list[bool] = []


def test_select_runs_without_gradient():
    op = slot_op("observer", "select", SlotSpec(f"{__name__}:_observing_select", None)).op
    q, k = torch.randn(1, 40, 4, 6, requires_grad=True), torch.randn(1, 9, 2, 6, requires_grad=True)
    blocks = op(q, k, torch.zeros(1, 4, 40), None, 40, 1.0, CONFIG.geometry.as_ints(), False, None)
    assert _observed == [False]
    assert not blocks.requires_grad


class PassThroughMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_operators_are_dispatched_under_profilers_and_modes_with_the_same_bits(monkeypatch):
    original_call, dispatched, results = torch._ops.OpOverload.__call__, [], []
    monkeypatch.setattr(
        torch._ops.OpOverload,
        "__call__",
        lambda op, *args, **kwargs: dispatched.append(op) or original_call(op, *args, **kwargs),
    )
    tensors = inputs(CONFIG, 1, 37, dtype=torch.float32, requires_grad=True)
    no_context, profiled = contextlib.nullcontext, torch.profiler.profile
    contexts = [
        (no_context, no_context, 0),
        (profiled, profiled, 9),
        (PassThroughMode, no_context, 5),
        (lambda: torch.device("cpu"), no_context, 5),
    ]
    for forward, backward, expected in contexts:
        dispatched.clear()
        with forward():
            o = attend(tensors)
        with backward():
            grads = torch.autograd.grad(
                o, [tensors.q, *tensors.k, *tensors.v, tensors.gates], torch.ones_like(o)
            )
        assert (
            len({op.name() for op in dispatched if op.name().startswith("nsa_sdpa::")}) == expected
        )
        results.append([o, *grads])
    for got in zip(*results):
        assert all(torch.equal(x, got[0]) for x in got)


class Special(torch.Tensor):
    pass


def traced(function):
    # torch.jit.trace also calls the function outside of the trace.
    return lambda x: torch.jit.trace(function, x, check_trace=False)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, traced])
def test_transforms_and_traces_need_operators(transform):
    bypassed = []
    shape = (4, 3) if transform is torch.func.vmap else (3,)
    transform(lambda x: (bypassed.append(is_unobserved(x)), x.sum())[1])(torch.ones(shape))
    assert bypassed
    assert not any(bypassed)


def test_tensor_subclasses_need_operators():
    x = torch.ones(3)
    assert is_unobserved(x, torch.nn.Parameter(x))
    assert not is_unobserved(x, x.as_subclass(Special))


def test_lazily_negated_inputs():
    tensors = inputs(CONFIG, 1, 37, dtype=torch.float32)
    lazy = (
        torch.view_as_complex(torch.stack((torch.zeros_like(tensors.q), -tensors.q), -1))
        .conj()
        .imag
    )
    assert lazy.is_neg()
    assert not is_unobserved(lazy)  # a kernel would read memory without the negation
    assert is_unobserved(tensors.q, None)
    assert torch.equal(attend(tensors._replace(q=lazy)), attend(tensors))


def test_row_25_gradient_of_any_stride():
    tensors = inputs(CONFIG, 1, 20, requires_grad=True)
    wrt = [tensors.q, *tensors.k, *tensors.v, tensors.gates]
    do = torch.randn(1, 4, 6, 20, dtype=torch.float64).permute(0, 3, 1, 2)
    expected = torch.autograd.grad(attend(tensors), wrt, do.contiguous())
    assert all(map(torch.equal, torch.autograd.grad(attend(tensors), wrt, do), expected))
    ones = torch.autograd.grad(attend(tensors), wrt, torch.ones_like(do))
    assert all(map(torch.equal, torch.autograd.grad(attend(tensors).sum(), wrt), ones))  # stride 0


def test_rows_16_23_strided_and_expanded_inputs():
    tensors = inputs(CONFIG, 1, 20)
    expected = attend(tensors)
    bhsd = type(tensors)(
        *(
            x.transpose(1, 2).contiguous().transpose(1, 2)
            if isinstance(x, torch.Tensor)
            else [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]
            for x in tensors
        )
    )
    assert torch.equal(attend(bhsd), expected)
    one = tensors.k[1][:, :, :1].detach().requires_grad_()
    o = attend(tensors._replace(k=(tensors.k[0], one.expand(-1, -1, 2, -1), tensors.k[2])))
    repeated = one.detach().repeat(1, 1, 2, 1).requires_grad_()
    expected = attend(tensors._replace(k=(tensors.k[0], repeated, tensors.k[2])))
    assert torch.equal(o, expected)
    do = torch.randn_like(o)
    torch.testing.assert_close(
        torch.autograd.grad(o, one, do)[0],
        torch.autograd.grad(expected, repeated, do)[0].sum(2, keepdim=True),
    )


def test_undefined_gradient_stays_undefined():
    tensors = inputs(CONFIG, 1, 12, requires_grad=True)
    o, _ = sdpa_plan(CONFIG, tensors.q.dtype).win(tensors.q, tensors.k[2], tensors.v[2])
    (grad,) = torch.autograd.grad(
        torch._C._functions.UndefinedGrad()(o).sum(), tensors.q, allow_unused=True
    )
    assert grad is None


def test_row_31_dtensor_is_refused():
    from torch import distributed
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        tensors = inputs(CONFIG, 1, 12)
        q = distribute_tensor(tensors.q, DeviceMesh("cpu", [0]), [Replicate()])
        with pytest.raises(InvalidInput, match=r"q must be a tensor, got DTensor .*to_local"):
            attend(tensors._replace(q=q))
    finally:
        distributed.destroy_process_group()


def test_row_32_in_place_change_of_a_saved_tensor():
    tensors = inputs(CONFIG, 1, 12, requires_grad=True)
    q = tensors.q * 1
    o = attend(tensors._replace(q=q))
    q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_row_29_meta_tensors_give_shapes(planned):
    tensors = inputs(CONFIG, 2, 37)
    meta = type(tensors)(
        *(
            x.to("meta") if isinstance(x, torch.Tensor) else [y.to("meta") for y in x]
            for x in tensors
        )
    )
    o, lse, blocks = nsa_attention_with_lse(*meta, config=CONFIG)
    assert (o.shape, o.dtype, o.device.type) == ((2, 37, 4, 6), torch.float64, "meta")
    assert lse[1].shape == (2, 4, 37)
    assert blocks.shape == (2, 37, 2, 4)


@pytest.mark.parametrize("packed", [False, True])
def test_row_29_fake_tensors_give_shapes(planned, packed):
    with torch._subclasses.FakeTensorMode():
        lead, cu = ((37,), boundaries(30, 7)) if packed else ((2, 37), None)
        tensors = inputs(CONFIG, *lead, requires_grad=True)
        o = nsa_attention(*tensors, config=CONFIG, cu_seqlens=cu)
        o.sum().backward()
        assert o.shape == (*lead, 4, 6)
        assert tensors.k[0].grad.shape == tensors.k[0].shape


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_row_29_compiles_without_graph_breaks_with_dynamic_length(planned, packed):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(tensors, cu):
        return nsa_attention(*tensors, config=CONFIG, cu_seqlens=cu).sin()

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for length in (40, 64, 33, 51):
        tensors = inputs(CONFIG, *((length,) if packed else (2, length)), requires_grad=True)
        cu = boundaries(length - 5, 5) if packed else None
        got, expected = compiled(tensors, cu), layer(tensors, cu)
        assert torch.equal(got, expected)
        wrt = [tensors.q, *tensors.k, *tensors.v, tensors.gates]
        grads = torch.autograd.grad(got.sum(), wrt)
        torch.testing.assert_close(
            grads, torch.autograd.grad(expected.sum(), wrt), rtol=1e-12, atol=1e-12
        )
    assert counter.frame_count <= 2


def test_explicit_plan_in_compiled_code():
    plan, tensors = sdpa_plan(CONFIG), inputs(CONFIG, 1, 20)
    compiled = torch.compile(
        lambda *x: nsa_attention(*x, config=CONFIG, plan=plan), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*tensors), attend(tensors))


@pytest.mark.slow
def test_layer_compiles_with_symbolic_integers():
    """With dynamic=True the integers of the config are symbols too."""
    torch._dynamo.reset()
    layer, tokens = NSAttention(CONFIG), [torch.randn(1, n, CONFIG.dim) for n in (40, 70, 33)]
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for x in tokens:
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["config", "keywords", "frequencies"])
def test_function_compiles_with_symbolic_integers(how):
    torch._dynamo.reset()
    scaled = replace(CONFIG, rope_frequencies=tuple(0.5**i for i in range(CONFIG.qk_dim // 2)))
    options = {
        "config": {"config": CONFIG},
        "keywords": {"window_size": 16},
        "frequencies": {"config": scaled},
    }[how]

    def call(tensors):
        return nsa_attention(*tensors, **options)

    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for shape in ((2, 40), (3, 51)):
        tensors = inputs(CONFIG, *shape)
        torch.testing.assert_close(compiled(tensors), call(tensors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slots_run_without_autocast(dtype):
    tensors, plan = inputs(CONFIG, 2, 37, dtype=dtype, requires_grad=True), sdpa_plan(CONFIG, dtype)
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
