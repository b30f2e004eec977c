"""nsa_attention while it runs: grad modes, strides, transforms, fake tensors and torch.compile."""

import contextlib

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode

from cases import boundaries, inputs, small
from dense_backend import dense_plan
from nsa_core import InvalidInput, NSAError, NSAttention, Unsupported, nsa_attention
from nsa_core.contract import SlotSpec
from nsa_core.torch_ops.autograd import unseen
from nsa_core.torch_ops.slot_op import slot_op

CONFIG = small()


def attend(given, config=CONFIG, **others):
    others.setdefault("plan", dense_plan(config, given.q.dtype, varlen=True))
    return nsa_attention(*given, config=config, **others)


def test_row_33_42_the_same_bits_in_every_grad_mode():
    given = inputs(CONFIG, 1, 37, dtype=torch.float32)
    expected, blocks = attend(given, return_blocks=True)
    for wanted in range(8):  # some inputs need no gradient
        leaves = [
            x.clone().requires_grad_(bool(wanted >> i & 1))
            for i, x in enumerate((given.q, given.k[1], given.gates))
        ]
        some = given._replace(q=leaves[0], k=(given.k[0], leaves[1], given.k[2]), gates=leaves[2])
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            with mode():
                got, chosen = attend(some, return_blocks=True)
            assert torch.equal(got, expected)
            assert torch.equal(chosen, blocks)
        if wanted:
            attend(some).sum().backward()
            assert [leaf.grad is not None for leaf in leaves] == [
                bool(wanted >> i & 1) for i in range(3)
            ]


def _observing_select(q, k_cmp, lse, *, call):
    _observed.append((q * 2).requires_grad)
    return q.new_zeros(
        (*q.shape[:2], k_cmp.shape[2], call.geometry.num_selected_blocks), dtype=torch.int32
    )


_observed: list[bool] = []


def test_select_records_nothing_of_what_it_does_inside():
    op = slot_op("observer", "select", SlotSpec(f"{__name__}:_observing_select", None)).op
    q, k = torch.randn(1, 40, 4, 6, requires_grad=True), torch.randn(1, 9, 2, 6, requires_grad=True)
    blocks = op(q, k, torch.zeros(1, 4, 40), None, 40, 1.0, CONFIG.geometry.as_ints(), False)
    assert _observed == [False]
    assert not blocks.requires_grad


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_operators_are_called_where_somebody_looks_on_and_change_no_bit(monkeypatch):
    stock, called, results = torch._ops.OpOverload.__call__, [], []
    monkeypatch.setattr(
        torch._ops.OpOverload,
        "__call__",
        lambda op, *args, **kwargs: called.append(op) or stock(op, *args, **kwargs),
    )
    given = inputs(CONFIG, 1, 37, dtype=torch.float32, requires_grad=True)
    alone, profiled = contextlib.nullcontext, torch.profiler.profile
    onlookers = [
        (alone, alone, 0),
        (profiled, profiled, 9),
        (Looking, alone, 5),
        (lambda: torch.device("cpu"), alone, 5),
    ]
    for forward, backward, expected in onlookers:
        called.clear()
        with forward():
            o = attend(given)
        with backward():
            grads = torch.autograd.grad(
                o, [given.q, *given.k, *given.v, given.gates], torch.ones_like(o)
            )
        assert len({op.name() for op in called if op.name().startswith("nsa_dense::")}) == expected
        results.append([o, *grads])
    for got in zip(*results):
        assert all(torch.equal(x, got[0]) for x in got)


class Special(torch.Tensor):
    pass


def traced(function):
    # which calls it outside of the trace, too
    return lambda x: torch.jit.trace(function, x, check_trace=False)


@pytest.mark.parametrize("over", [torch.func.vmap, torch.func.grad, traced])
def test_transforms_and_traces_look_on(over):
    told = []
    shape = (4, 3) if over is torch.func.vmap else (3,)
    over(lambda x: (told.append(unseen(x)), x.sum())[1])(torch.ones(shape))
    assert told
    assert not any(told)


def test_a_kind_of_tensor_of_its_own_is_seen():
    x = torch.ones(3)
    assert unseen(x, torch.nn.Parameter(x))
    assert not unseen(x, x.as_subclass(Special))


def test_lazily_negated_inputs():
    given = inputs(CONFIG, 1, 37, dtype=torch.float32)
    lazy = torch.view_as_complex(torch.stack((torch.zeros_like(given.q), -given.q), -1)).conj().imag
    assert lazy.is_neg()
    assert not unseen(lazy)  # a kernel would read its memory as it is
    assert unseen(given.q, None)
    assert torch.equal(attend(given._replace(q=lazy)), attend(given))


def test_row_25_gradient_of_any_stride():
    given = inputs(CONFIG, 1, 20, requires_grad=True)
    wrt = [given.q, *given.k, *given.v, given.gates]
    do = torch.randn(1, 4, 6, 20, dtype=torch.float64).permute(0, 3, 1, 2)
    expected = torch.autograd.grad(attend(given), wrt, do.contiguous())
    assert all(map(torch.equal, torch.autograd.grad(attend(given), wrt, do), expected))
    ones = torch.autograd.grad(attend(given), wrt, torch.ones_like(do))
    assert all(map(torch.equal, torch.autograd.grad(attend(given).sum(), wrt), ones))  # stride 0


def test_rows_16_23_strided_and_expanded_inputs():
    given = inputs(CONFIG, 1, 20)
    expected = attend(given)
    bhsd = type(given)(
        *(
            x.transpose(1, 2).contiguous().transpose(1, 2)
            if isinstance(x, torch.Tensor)
            else [y.transpose(1, 2).contiguous().transpose(1, 2) for y in x]
            for x in given
        )
    )
    assert torch.equal(attend(bhsd), expected)
    one = given.k[1][:, :, :1].detach().requires_grad_()
    o = attend(given._replace(k=(given.k[0], one.expand(-1, -1, 2, -1), given.k[2])))
    whole = one.detach().repeat(1, 1, 2, 1).requires_grad_()
    twin = attend(given._replace(k=(given.k[0], whole, given.k[2])))
    assert torch.equal(o, twin)
    do = torch.randn_like(o)
    torch.testing.assert_close(
        torch.autograd.grad(o, one, do)[0],
        torch.autograd.grad(twin, whole, do)[0].sum(2, keepdim=True),
    )


def test_an_undefined_gradient_stays_undefined():
    given = inputs(CONFIG, 1, 12, requires_grad=True)
    o, _ = dense_plan(CONFIG, given.q.dtype).win(given.q, given.k[2], given.v[2])
    (nothing,) = torch.autograd.grad(
        torch._C._functions.UndefinedGrad()(o).sum(), given.q, allow_unused=True
    )
    assert nothing is None


def test_row_31_double_backward_is_an_error():
    given = inputs(CONFIG, 1, 12, requires_grad=True)
    (dq,) = torch.autograd.grad(attend(given).square().sum(), given.q, create_graph=True)
    with pytest.raises(NSAError, match="differentiable once"):
        dq.sum().backward()


def test_row_31_vmap_is_right_and_its_gradient_an_error():
    given, q = inputs(CONFIG, 1, 12), torch.randn(3, 1, 12, 4, 8, dtype=torch.float64)

    def one(x):
        return attend(given._replace(q=x))

    torch.testing.assert_close(
        torch.func.vmap(one)(q), torch.stack([one(x) for x in q]), rtol=1e-14, atol=1e-14
    )
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.vmap(torch.func.grad(lambda x: one(x).sum()))(q)


def test_row_31_forward_mode_is_an_error():
    given = inputs(CONFIG, 1, 12)
    with pytest.raises(Unsupported, match="forward-mode"):
        torch.func.jvp(lambda x: attend(given._replace(q=x)), (given.q,), (given.q,))


def test_row_31_dtensor_is_refused():
    from torch import distributed
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        given = inputs(CONFIG, 1, 12)
        q = distribute_tensor(given.q, DeviceMesh("cpu", [0]), [Replicate()])
        with pytest.raises(InvalidInput, match=r"q must be a tensor, got DTensor .*to_local"):
            attend(given._replace(q=q))
    finally:
        distributed.destroy_process_group()


def test_row_32_in_place_change_of_a_saved_tensor():
    given = inputs(CONFIG, 1, 12, requires_grad=True)
    q = given.q * 1
    o = attend(given._replace(q=q))
    q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_row_29_meta_tensors_give_shapes(planned):
    given = inputs(CONFIG, 2, 37)
    meta = type(given)(
        *(x.to("meta") if isinstance(x, torch.Tensor) else [y.to("meta") for y in x] for x in given)
    )
    o, lse, blocks = nsa_attention(*meta, config=CONFIG, return_lse=True, return_blocks=True)
    assert (o.shape, o.dtype, o.device.type) == ((2, 37, 4, 6), torch.float64, "meta")
    assert lse[1].shape == (2, 4, 37)
    assert blocks.shape == (2, 37, 2, 4)


@pytest.mark.parametrize("packed", [False, True])
def test_row_29_fake_tensors_give_shapes(planned, packed):
    with torch._subclasses.FakeTensorMode():
        lead, cu = ((37,), boundaries(30, 7)) if packed else ((2, 37), None)
        given = inputs(CONFIG, *lead, requires_grad=True)
        o = nsa_attention(*given, config=CONFIG, cu_seqlens=cu)
        o.sum().backward()
        assert o.shape == (*lead, 4, 6)
        assert given.k[0].grad.shape == given.k[0].shape


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_row_29_compiles_whole_with_dynamic_length(planned, packed):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def layer(given, cu):
        return nsa_attention(*given, config=CONFIG, cu_seqlens=cu).sin()

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for length in (40, 64, 33, 51):
        given = inputs(CONFIG, *((length,) if packed else (2, length)), requires_grad=True)
        cu = boundaries(length - 5, 5) if packed else None
        got, expected = compiled(given, cu), layer(given, cu)
        assert torch.equal(got, expected)
        wrt = [given.q, *given.k, *given.v, given.gates]
        grads = torch.autograd.grad(got.sum(), wrt)
        torch.testing.assert_close(
            grads, torch.autograd.grad(expected.sum(), wrt), rtol=1e-12, atol=1e-12
        )
    assert counter.frame_count <= 2


def test_compiled_caller_may_bring_its_own_plan():
    plan, given = dense_plan(CONFIG), inputs(CONFIG, 1, 20)
    compiled = torch.compile(
        lambda *x: nsa_attention(*x, config=CONFIG, plan=plan), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*given), attend(given))


def test_a_layer_compiles_where_every_integer_is_a_symbol():
    """Those of its configuration are, too, under dynamic=True."""
    torch._dynamo.reset()
    layer, tokens = NSAttention(CONFIG), [torch.randn(1, n, CONFIG.dim) for n in (40, 70, 33)]
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for x in tokens:
        torch.testing.assert_close(compiled(x), layer(x))
