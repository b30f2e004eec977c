"""Invalid arguments of the layer and nsa_attention are refused with an error that names them."""

from types import SimpleNamespace

import pytest
import torch

from cases import boundaries, inputs, layer_of, small
from nsa_core import InvalidInput, NSAttention, nsa_attention, resolve, unpad
from nsa_core.torch_ops.tensor_checks import check_cu_seqlens

CONFIG = small()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_max_seqlen_below_the_longest_document_is_refused(compiled):
    torch._dynamo.reset()
    attn, x = layer_of(), torch.randn(30, 24, dtype=torch.float64)
    run = torch.compile(attn, backend="aot_eager", fullgraph=True) if compiled else attn
    with pytest.raises(
        InvalidInput, match="max_seqlen must be at least the longest document's 20 tokens, got 16"
    ):
        run(x, boundaries(20, 10), 16)
    assert run(x, boundaries(20, 10), 20).shape == x.shape


def test_boundaries_on_a_gpu_are_read_with_nsa_check_only(monkeypatch):
    on_gpu = SimpleNamespace(device=torch.device("cuda"), tolist=lambda: [0, 20, 30])
    check_cu_seqlens(on_gpu, 30, 16)
    monkeypatch.setenv("NSA_CHECK", "1")
    with pytest.raises(InvalidInput, match="longest document's 20 tokens, got 16"):
        check_cu_seqlens(on_gpu, 30, 16)
    check_cu_seqlens(on_gpu, 30, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_unpad_refuses_floating_point_masks(dtype):
    x, additive = (
        torch.randn(1, 4, 2),
        torch.tensor([[0.0, 0.0, 0.0, torch.finfo(dtype).min]], dtype=dtype),
    )
    with pytest.raises(
        InvalidInput, match=f"got {str(dtype)[6:]}: pass mask == 0 for an additive mask"
    ):
        unpad(x, additive)
    assert torch.equal(unpad(x, additive == 0)[0], x[0, :3])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_unpad_accepts_bool_and_integer_masks(dtype):
    x = torch.randn(1, 4, 2)
    assert torch.equal(unpad(x, torch.tensor([[1, 1, 1, 0]]).to(dtype))[0], x[0, :3])


@pytest.mark.parametrize("argument", [None, [[1, 1, 1, 0]]])
def test_unpad_refuses_arguments_that_are_not_tensors(argument):
    with pytest.raises(
        InvalidInput, match=f"attention_mask must be a tensor, got {type(argument).__name__}"
    ):
        unpad(torch.randn(1, 4, 2), argument)
    with pytest.raises(InvalidInput, match="x must be a tensor, got list"):
        unpad([[1.0]], torch.ones(1, 1).bool())


PACKING = {
    "list": (
        {"cu_seqlens": [0, 9]},
        r"cu_seqlens must be an int32 tensor \[documents \+ 1\], got list",
    ),
    "int64": (
        {"cu_seqlens": torch.tensor([0, 9])},
        r"cu_seqlens must be an int32 .* cu_seqlens \[2\] int64",
    ),
    "matrix": (
        {"cu_seqlens": torch.tensor([[0, 9]]).int()},
        r"cu_seqlens must be an int32 .* got cu_seqlens \[1, 2\]",
    ),
    "empty": (
        {"cu_seqlens": torch.tensor([]).int()},
        r"cu_seqlens must hold at least one document, .* got \[0\]",
    ),
    "one": (
        {"cu_seqlens": torch.tensor([0]).int()},
        r"cu_seqlens must hold at least one document, .* got \[1\]",
    ),
    "device": ({"cu_seqlens": boundaries(9).to("meta")}, "cu_seqlens must be on cpu, got meta"),
    "text": (
        {"cu_seqlens": boundaries(9), "max_seqlen": "20"},
        "max_seqlen must be a host integer >= 0, got '20'",
    ),
    "float": (
        {"cu_seqlens": boundaries(9), "max_seqlen": 9.0},
        "max_seqlen must be a host integer >= 0, got 9.0",
    ),
    "less": (
        {"cu_seqlens": boundaries(9), "max_seqlen": -1},
        "max_seqlen must be a host integer >= 0, got -1",
    ),
}


@pytest.mark.parametrize("name", PACKING)
def test_invalid_packing_is_refused_by_layer_and_function(name):
    arguments, message = PACKING[name]
    with pytest.raises(InvalidInput, match=message):
        layer_of()(torch.randn(9, 24).double(), **arguments)
    with pytest.raises(InvalidInput, match=message):
        nsa_attention(*inputs(CONFIG, 9), config=CONFIG, **arguments)


@pytest.mark.slow
def test_max_seqlen_accepts_all_host_integers():
    torch._dynamo.reset()
    attn, x, cu = layer_of(), torch.randn(30, 24, dtype=torch.float64), boundaries(20, 10)
    expected, compiled = attn(x, cu), torch.compile(attn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        attn(x, cu, torch.tensor(20).numpy()[()]), expected, rtol=1e-12, atol=1e-12
    )
    for bound in (20, 21, 29):  # symbolic from the second call on
        torch.testing.assert_close(compiled(x, cu, bound), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "x", [None, torch.zeros(2, 9, 24).numpy(), [[[1.0]]]], ids=["None", "numpy", "list"]
)
def test_inputs_that_are_not_tensors_are_refused(x):
    for cache in ({}, {"cache": layer_of().new_cache(2, 16)}):
        with pytest.raises(InvalidInput, match=f"x must be a tensor, got {type(x).__name__}"):
            layer_of()(x, **cache)
    with pytest.raises(InvalidInput, match=f"q must be a tensor, got {type(x).__name__}"):
        nsa_attention(x, *inputs(CONFIG, 2, 9)[1:], config=CONFIG)


def test_decode_plan_is_refused_for_prefill():
    plan = resolve(CONFIG, dtype="float64", phase="decode")
    attn, x = layer_of().requires_grad_(False), torch.randn(2, 9, 24).double()
    message = "plan is for decode, but this call is a prefill: pass a plan resolved with"
    for cache in ({}, {"cache": attn.new_cache(2, 16)}):
        with pytest.raises(InvalidInput, match=message):
            attn(x, plan=plan, **cache)
    assert cache["cache"].host_lengths() == [0, 0]
    with pytest.raises(InvalidInput, match=message):
        nsa_attention(*inputs(CONFIG, 2, 9), config=CONFIG, plan=plan)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("plan", ["sdpa", 3])
def test_arguments_that_are_not_plans_are_refused(plan, check):
    attn, x = NSAttention(CONFIG, check=check).double(), torch.randn(2, 9, 24).double()
    cache, message = (
        attn.new_cache(2, 16),
        rf"plan must be what nsa_core.resolve\(\) returns, got {type(plan).__name__}",
    )
    for run in (
        lambda: attn(x, plan=plan),
        lambda: attn(x, cache=cache, plan=plan),
        lambda: attn(x[:, :1], cache=cache, plan=plan),
        lambda: attn.new_cache(2, 16, plan=plan),
        lambda: nsa_attention(*inputs(CONFIG, 2, 9), config=CONFIG, plan=plan),
    ):
        with pytest.raises(InvalidInput, match=message):
            run()
    assert cache.host_lengths() == [0, 0]


@pytest.mark.parametrize(
    "field", ["rope", "rope_before_compress", "qk_norm", "shared_kv", "causal"]
)
@pytest.mark.parametrize("value", ["false", 1, None, torch.tensor(True)])
def test_config_flags_must_be_bool(field, value):
    with pytest.raises(InvalidInput, match=rf"^{field} must be True or False, got "):
        small(**{field: value})


@pytest.mark.parametrize("field", ["scale", "rope_base", "dropout"])
@pytest.mark.parametrize("value", ["1", True, torch.tensor(1.0), 10**400, [1.0], 1j])
def test_config_numbers_must_be_finite(field, value):
    messages = {
        "scale": r"scale must be finite \(a number\) or None",
        "rope_base": "rope_base must be a finite number > 0",
    }
    with pytest.raises(
        InvalidInput, match=f"^{messages.get(field, 'dropout is not part of NSA')}, got "
    ):
        small(**{field: value})


def test_config_numbers_may_be_numpy_scalars():
    half = torch.tensor(0.5).numpy()[()]  # a numpy float32, not a Python float
    assert small(scale=half).softmax_scale == 0.5


@pytest.mark.parametrize(
    ("backends", "message"),
    [
        (
            ["sdpa"],
            r"backends must be None, a name, or a mapping of slots to names, got \['sdpa'\]",
        ),
        (3, "backends must be None, a name, or a mapping of slots to names, got 3"),
        ({"window": "sdpa"}, "unknown slot 'window'; did you mean 'win'"),
        ({"win": 3}, "the backend of slot 'win' must be a name, got 3"),
        ({3: "sdpa", "win": "sdpa"}, "unknown slot 3"),
    ],
)
def test_invalid_backends_are_refused_on_construction(backends, message):
    for construct in (NSAttention, resolve):
        with pytest.raises(InvalidInput, match=message):
            construct(CONFIG, backends=backends)


@pytest.mark.parametrize("config", [None, {"dim": 64}])
def test_arguments_that_are_not_configs_are_refused(config):
    tensors = inputs(CONFIG, 2, 9)
    attend = lambda config: nsa_attention(*tensors, config=config)  # noqa: E731
    for construct in (NSAttention, resolve, *([attend] if config else [])):
        with pytest.raises(
            InvalidInput, match=f"config must be an NSAConfig, got {type(config).__name__}"
        ):
            construct(config)


@pytest.mark.parametrize("name", ["gates", "q"])
def test_missing_q_and_gates_are_refused(name):
    with pytest.raises(InvalidInput, match=f"{name} must be a tensor, got NoneType"):
        nsa_attention(**inputs(CONFIG, 2, 9)._replace(**{name: None})._asdict(), config=CONFIG)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch", -1, "an integer >= 0 or None"),
        ("batch", 2.5, "an integer >= 0 or None"),
        ("seq_len", "20", "an integer >= 0 or None"),
        ("seq_len", True, "an integer >= 0 or None"),
        ("page_size", "64", "an integer >= 1 or None"),
        ("page_size", 0, "an integer >= 1 or None"),
        ("needs_grad", "no", "True or False"),
        ("deterministic", 1, "True or False"),
        ("varlen", None, "True or False"),
    ],
)
def test_resolve_refuses_options_of_a_wrong_type(field, value, message):
    with pytest.raises(InvalidInput, match=f"{field} must be {message}, got {value!r}"):
        resolve(CONFIG, **{field: value})


def test_cache_dtype_must_be_a_torch_dtype():
    with pytest.raises(InvalidInput, match=r"dtype must be a torch\.dtype such .* got 'float32'"):
        layer_of().new_cache(2, 16, dtype="float32")
