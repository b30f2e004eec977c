"""nsa_attention: composition of the branches, options, errors and default plans."""

import contextlib
import inspect

import pytest
import torch
import torch._dynamo.testing

import nsa_core
import nsa_core.plan.plan
from cases import boundaries, inputs, sdpa_plan, small
from nsa_core import Unsupported, nsa_attention, nsa_attention_with_lse
from nsa_core.contract import PLANNED_LENGTHS
from nsa_core.layer.phi.kinds import mean_compress
from nsa_core.torch_ops.backend_call import record_dispatch

CONFIG = small()


def attend(tensors, config=CONFIG, **options):
    options.setdefault("plan", sdpa_plan(config, tensors.q.dtype, varlen=True))
    return nsa_attention(*tensors, config=config, **options)


def attend_with_lse(tensors, **options):
    plan = sdpa_plan(CONFIG, tensors.q.dtype, varlen=True)
    return nsa_attention_with_lse(*tensors, config=CONFIG, plan=plan, **options)


def test_output_is_the_gated_sum_of_the_branches():
    tensors, plan = inputs(CONFIG, 2, 37), sdpa_plan(CONFIG)
    o, lse, blocks = attend_with_lse(tensors)
    k_cmp, v_cmp = (mean_compress(x[0], CONFIG.geometry) for x in (tensors.k, tensors.v))
    branches = [
        plan.cmp(tensors.q, k_cmp, v_cmp),
        plan.sel(tensors.q, tensors.k[1], tensors.v[1], plan.select(tensors.q, k_cmp, lse[0])),
        plan.win(tensors.q, tensors.k[2], tensors.v[2]),
    ]
    expected = sum(tensors.gates[..., c, None] * o_c for c, (o_c, _) in enumerate(branches))
    torch.testing.assert_close(o, expected, rtol=1e-14, atol=1e-14)
    assert torch.equal(blocks, plan.select(tensors.q, k_cmp, branches[0][1]))
    for got, (_, branch_lse) in zip(lse, branches):
        assert torch.equal(got, branch_lse)


def test_one_tensor_for_all_branches():
    q, k, v, gates = inputs(CONFIG, 1, 30)
    assert torch.equal(
        attend(type(inputs(CONFIG, 1, 1))(q, k[0], v[0], gates)),
        attend(inputs(CONFIG, 1, 30)._replace(q=q, k=[k[0]] * 3, v=[v[0]] * 3, gates=gates)),
    )


@pytest.mark.parametrize("cmp_entry", ["None", "ignored"])
def test_compressed_tensors_replace_the_cmp_entry(cmp_entry):
    tensors = inputs(CONFIG, 1, 30)
    k_cmp, v_cmp = (mean_compress(x[0], CONFIG.geometry) for x in (tensors.k, tensors.v))
    other = None if cmp_entry == "None" else torch.full((3,), torch.nan)
    replaced = tensors._replace(k=(other, *tensors.k[1:]), v=(other, *tensors.v[1:]))
    assert torch.equal(attend(replaced, k_cmp=k_cmp, v_cmp=v_cmp), attend(tensors))


def test_outputs_of_both_functions():
    tensors = inputs(CONFIG, 1, 12)
    got = attend_with_lse(tensors)
    assert torch.equal(got.o, attend(tensors))
    assert got.o.shape == (1, 12, 4, 6)
    assert [tuple(lse.shape) for lse in got.lse] == [(1, 4, 12)] * 3
    assert got.blocks.shape == (1, 12, 2, 4)
    assert got.blocks.dtype == torch.int32
    passed = got.blocks.to(torch.int8)
    assert attend_with_lse(tensors, blocks=passed).blocks is passed


@pytest.mark.parametrize("name", ["nsa_attention", "block_attention", "block_attention_decode"])
def test_both_functions_take_the_same_arguments(name):
    function, with_lse = (getattr(nsa_core, n) for n in (name, f"{name}_with_lse"))
    assert inspect.signature(function).parameters == inspect.signature(with_lse).parameters


def test_selection_gets_no_gradient_and_keys_of_cmp_do():
    tensors = inputs(CONFIG, 1, 40, requires_grad=True)
    o, lse, blocks = attend_with_lse(tensors)
    assert not any(x.requires_grad for x in (*lse, blocks))
    with record_dispatch() as calls:
        o.square().sum().backward()
    assert sorted(c.slot for c in calls) == ["cmp", "combine", "sel", "win"]
    assert all(
        x.grad is not None and x.grad.abs().sum() > 0
        for x in (tensors.q, tensors.gates, *tensors.k, *tensors.v)
    )


@pytest.mark.parametrize("lengths", [(30, 11, 1), (0, 9, 0, 26, 0), (3, 3, 3), (50,)])
@pytest.mark.parametrize("max_seqlen", ["longest", None])
def test_row_18_packed_equals_separate(lengths, max_seqlen):
    cu = boundaries(*lengths)
    tensors = inputs(CONFIG, int(cu[-1]))
    longest = max(lengths) if max_seqlen else None
    packed, _, blocks = attend_with_lse(tensors, cu_seqlens=cu, max_seqlen=longest)
    for a, b in zip(cu.tolist(), cu.tolist()[1:]):
        document = type(tensors)(
            *(
                x[a:b][None] if isinstance(x, torch.Tensor) else [y[a:b][None] for y in x]
                for x in tensors
            )
        )
        o, _, blocks_alone = attend_with_lse(document)
        torch.testing.assert_close(packed[a:b], o[0], rtol=1e-13, atol=1e-13)
        assert torch.equal(blocks[a:b], blocks_alone[0])


@pytest.mark.parametrize("lead", [(0, 5), (2, 0), (1, 1)])
def test_rows_01_02_03_empty_and_single(lead):
    tensors = inputs(CONFIG, *lead, requires_grad=True)
    o = attend(tensors)
    assert o.shape == (*lead, 4, 6)
    o.sum().backward()
    if o.numel():  # with one token, o_win and o_sel are v, and o_cmp is 0
        expected = tensors.gates[..., 1, None] * tensors.v[1].repeat_interleave(2, 2)
        expected = expected + tensors.gates[..., 2, None] * tensors.v[2].repeat_interleave(2, 2)
        torch.testing.assert_close(o, expected, rtol=1e-14, atol=1e-14)
        assert torch.equal(tensors.gates.grad[..., 0], torch.zeros_like(tensors.gates.grad[..., 0]))
    assert all(x.grad.shape == x.shape for x in (tensors.q, *tensors.k, *tensors.v))


def test_max_seqlen_may_exceed_the_longest_document():
    tensors, cu = inputs(CONFIG, 30), boundaries(20, 10)
    expected = attend(tensors, cu_seqlens=cu, max_seqlen=20)
    o = attend(tensors, cu_seqlens=cu, max_seqlen=500)
    torch.testing.assert_close(o, expected, rtol=1e-13, atol=1e-13)


def test_row_30_blocks_in_any_order_and_dtype_with_harmless_extras():
    tensors = inputs(CONFIG, 1, 37)
    expected, _, blocks = attend_with_lse(tensors)
    with record_dispatch() as calls:
        assert torch.equal(attend(tensors, blocks=blocks), expected)
    assert "select" not in [c.slot for c in calls]
    wide = blocks.long()
    shuffled = wide.flip(-1)
    junk = torch.tensor([-1, -5, 5, 2**31 + 1, 2**62]).expand(1, 37, 2, 5)  # 5: no such block
    future = (torch.arange(37) // 8 + 1).view(1, 37, 1, 1).expand(1, 37, 2, 1)
    for other in (
        wide,
        shuffled,
        torch.cat((shuffled, wide), -1),
        torch.cat((wide, junk, future), -1),
        blocks.to(torch.int8),
    ):
        torch.testing.assert_close(attend(tensors, blocks=other), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int16])
def test_row_30_large_integers_do_not_wrap_into_range(dtype):
    tensors = inputs(CONFIG, 1, 37)
    largest = torch.iinfo(dtype).max  # -1 if wrapped
    blocks = torch.tensor([0, largest]).to(dtype).expand(1, 37, 2, 2)
    expected = attend(tensors, blocks=torch.zeros(1, 37, 2, 1, dtype=torch.int32))
    assert torch.equal(attend(tensors, blocks=blocks), expected)


def test_plan_without_gradient_serves_inference():
    plan, tensors = sdpa_plan(CONFIG, needs_grad=False), inputs(CONFIG, 1, 12, requires_grad=True)
    with torch.no_grad():
        expected = attend(tensors, plan=plan)
    assert torch.equal(attend(tensors).detach(), expected)


def test_default_plan_is_resolved_once_for_all_grad_modes(planned):
    tensors = inputs(CONFIG, 1, 12, requires_grad=True)
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with mode():
            nsa_attention(*tensors, config=CONFIG)
    assert [(a["dtype"], a["varlen"], a["needs_grad"]) for a in planned] == [
        (torch.float64, False, True)
    ]
    nsa_attention(*inputs(CONFIG, 12), config=CONFIG, cu_seqlens=boundaries(12))
    assert [(a["varlen"], a["needs_grad"]) for a in planned[1:]] == [(True, True)]


def test_forward_only_plan_is_used_if_no_gradient_is_needed(planned, monkeypatch):
    resolve = nsa_core.plan.default_plan.resolve

    def cannot_train(config, options):
        if options.needs_grad:
            raise Unsupported("forward only")
        return resolve(config, options)

    monkeypatch.setattr(nsa_core.plan.default_plan, "resolve", cannot_train)
    tensors = inputs(CONFIG, 1, 12, requires_grad=True)
    with pytest.raises(Unsupported, match="forward only"):
        nsa_attention(*tensors, config=CONFIG)
    with torch.no_grad():
        assert torch.equal(nsa_attention(*tensors, config=CONFIG), attend(tensors))


def test_a_compiled_layer_needs_fewer_graphs_than_torch_compile_allows():
    """One for each planned length and grad mode, and the first one, of static sizes."""
    assert 2 * (1 + len(PLANNED_LENGTHS)) + 1 < torch._dynamo.config.recompile_limit


def test_long_sequences_have_their_own_plan(planned, monkeypatch):
    monkeypatch.setattr(nsa_core.plan.default_plan, "PLANNED_LENGTHS", (20, 30))
    layer = nsa_core.NSAttention(CONFIG).double()
    for length in (12, 30, 19, 20, 29, 40):
        nsa_attention(*inputs(CONFIG, 1, length), config=CONFIG)
        layer(torch.zeros(1, length, CONFIG.dim, dtype=torch.float64))
    assert [a["seq_len"] for a in planned] == [None, 30, 20]
    assert layer.plan is nsa_core.plan.default_plan.default_plan(
        CONFIG, torch.device("cpu"), torch.float64, False, True, None, 30
    )
    nsa_attention(*inputs(CONFIG, 40), config=CONFIG, cu_seqlens=boundaries(40))
    assert planned[-1]["seq_len"] is None
