"""NSAttention: composition, state_dict, copies, packing and invalid inputs."""

import copy
import dataclasses
import inspect
import io
import pickle

import pytest
import torch

from cases import boundaries, layer_of, sdpa_plan, small
from nsa_core import NSAConfig, NSAttention, nsa_attention, pad, unpad
from nsa_core.config import COMPRESS_KINDS
from nsa_core.layer.rope import rope_table, rotate
from nsa_core.torch_ops.core_node import run_core

OPTIONS = {
    "default": {},
    "rope off": {"rope": False},
    "rope first": {"rope_before_compress": True},
    "shared": {"shared_kv": True},
    "shared, rope first": {"shared_kv": True, "rope_before_compress": True},
    "qk_norm": {"qk_norm": True},
    "mlp gate": {"gate": "mlp"},
    **{kind: {"compress": kind} for kind in COMPRESS_KINDS if kind != "mlp"},
}


def composed_layer(attn, x):
    """The layer composed from its parameters and parts that other tests check; x is [B, S, dim]."""
    c, state = attn.config, dict(attn.named_parameters())
    flat = x @ state["qkv.weight"].T

    def part(start, heads, width):
        return flat[..., start : start + heads * width].unflatten(
            -1, (heads, width)
        ), start + heads * width

    q, offset = part(0, c.n_heads, c.qk_dim)
    k, v = [], []
    for _ in range(1 if c.shared_kv else 3):
        head, offset = part(offset, c.n_kv_heads, c.qk_dim)
        k.append(head)
    for _ in range(1 if c.shared_kv else 3):
        head, offset = part(offset, c.n_kv_heads, c.v_dim)
        v.append(head)
    assert offset == flat.shape[-1]
    k, v = k * (3 // len(k)), v * (3 // len(v))
    if c.qk_norm:
        q, *k = (
            y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * state[name]
            for y, name in zip((q, *k), ("q_norm.weight", *["k_norm.weight"] * 3))
        )

    def rotated(y, step=1):
        if not c.rope:
            return y
        return rotate(
            y, rope_table(torch.arange(y.shape[1]) * step, c.qk_dim, c.rope_base, y.dtype)
        )

    k_cmp = (
        attn.phi_k(rotated(k[0]))
        if c.rope_before_compress
        else rotated(attn.phi_k(k[0]), c.compress_stride)
    )
    o = nsa_attention(
        rotated(q),
        (None, rotated(k[1]), rotated(k[2])),
        (None, v[1], v[2]),
        attn.gate(x),
        config=c,
        k_cmp=k_cmp,
        v_cmp=attn.phi_v(v[0]),
        plan=sdpa_plan(c, x.dtype),
    )
    return o.flatten(-2) @ state["out.weight"].T


@pytest.mark.parametrize("name", OPTIONS)
def test_layer_equals_its_composed_parts(name):
    attn, x = layer_of(**OPTIONS[name]), torch.randn(2, 37, 24, dtype=torch.float64)
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.testing.assert_close(attn(x), composed_layer(attn, x), rtol=1e-12, atol=1e-12)


EXPECTED_NAMES = {
    "mlp": {"position", "up.weight", "up.bias", "down.weight", "down.bias"},
    "linear": {"position", "proj.weight", "proj.bias"},
    "conv": {"weight", "bias"},
    "attn_pool": {"position", "query"},
    "mean": set(),
}


@pytest.mark.parametrize("v_head_dim", [6, 4])
@pytest.mark.parametrize("options", [{}, {"shared_kv": True}, {"qk_norm": True}], ids=str)
def test_heads_are_columns_of_the_projection(options, v_head_dim):
    config = NSAConfig(24, 4, 2, head_dim=6, v_head_dim=v_head_dim, **options)
    attn, x = NSAttention(config).double(), torch.randn(2, 3, 24, dtype=torch.float64)
    q, k, v = attn.heads(x)
    pairs = len(k)
    sizes = [4 * 6, *[2 * 6] * pairs, *[2 * v_head_dim] * pairs]
    columns = (x @ attn.qkv.weight.T).split(sizes, -1)
    norms = [attn.q_norm, *[attn.k_norm] * pairs, *[torch.nn.Identity()] * pairs]
    assert (pairs, len(v)) == ((1, 1) if config.shared_kv else (3, 3))
    for actual, part, norm in zip([q, *k, *v], columns, norms, strict=True):
        heads = 4 if actual is q else 2
        torch.testing.assert_close(
            actual, norm(part.unflatten(-1, (heads, -1))), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
@pytest.mark.parametrize("gate", ["linear", "mlp"])
@pytest.mark.parametrize("shared_kv", [False, True])
def test_state_dict_has_the_documented_names_and_shapes(kind, gate, shared_kv):
    state = layer_of(compress=kind, gate=gate, shared_kv=shared_kv, qk_norm=True).state_dict()
    phi = {f"{p}.{n}" for p in ("phi_k", "phi_v") for n in EXPECTED_NAMES[kind]}
    gates = (
        {"gate.weight", "gate.bias"}
        if gate == "linear"
        else {f"gate.{i}.{n}" for i in (0, 2) for n in ("weight", "bias")}
    )
    assert (
        set(state) == {"qkv.weight", "out.weight", "q_norm.weight", "k_norm.weight"} | phi | gates
    )
    pairs = 1 if shared_kv else 3
    assert state["qkv.weight"].shape == (4 * 8 + pairs * (2 * 8 + 2 * 6), 24)
    assert state["out.weight"].shape == (24, 4 * 6)
    assert state[max(gates)].shape == ((12, 24) if gate == "linear" else (12, 6))


@pytest.mark.parametrize("name", OPTIONS)
def test_state_dict_round_trip(name):
    first, second = layer_of(**OPTIONS[name]), layer_of(**OPTIONS[name])
    x = torch.randn(1, 30, 24, dtype=torch.float64)
    before = first(x)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    assert not torch.equal(second(x), before)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(second(x), before)


def test_copies_and_pickles_carry_no_plan():
    attn, x = (
        NSAttention(small(), backends={"win": "sdpa", "sel": "sdpa"}, layer=3).double(),
        torch.randn(1, 30, 24).double(),
    )
    before = attn(x)
    assert "plan" not in str(pickle.dumps(attn))
    for duplicate in (copy.deepcopy(attn), pickle.loads(pickle.dumps(attn))):
        assert torch.equal(duplicate(x), before)
        assert (duplicate.config, duplicate.backends, duplicate.layer) == (
            attn.config,
            attn.backends,
            3,
        )
        assert duplicate.qkv.weight is not attn.qkv.weight


def test_a_subclass_may_assign_the_config_that_the_layer_has():
    class Named(NSAttention):
        def __init__(self, config):
            super().__init__(config)
            self.config = config

    assert Named(small()).config == small()


def test_pickled_module_without_newer_options_runs():
    """A module that was saved whole by a version without ``recompute`` has no such attribute."""
    attn, x = layer_of(), torch.randn(1, 30, 24, dtype=torch.float64)
    before = attn(x)
    del attn.__dict__["recompute"]
    again = pickle.loads(pickle.dumps(attn))
    assert "recompute" not in vars(again)
    assert torch.equal(again(x), before)
    assert again.recompute is False


@pytest.mark.few_cases
@pytest.mark.parametrize("lengths", [(20, 1, 16), (0, 30, 0, 7)])
@pytest.mark.parametrize("name", OPTIONS)
def test_row_18_packed_equals_separate_forward_and_backward(name, lengths):
    attn, cu = layer_of(**OPTIONS[name]), boundaries(*lengths)
    x = torch.randn(37, 24, dtype=torch.float64, requires_grad=True)
    packed = attn(x, cu, max(lengths))
    separate = torch.cat([attn(x[a:b][None])[0] for a, b in zip(cu.tolist(), cu.tolist()[1:])])
    torch.testing.assert_close(packed, separate, rtol=1e-12, atol=1e-12)
    # Without max_seqlen, documents may be long, and sel selects blocks.
    torch.testing.assert_close(attn(x, cu), packed, rtol=1e-12, atol=1e-12)
    wrt, do = [x, *attn.parameters()], torch.randn_like(packed)
    grads = [torch.autograd.grad(y, wrt, do, materialize_grads=True) for y in (packed, separate)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_padded_batch_through_unpad_and_pad():
    attn, x = layer_of(), torch.randn(3, 20, 24, dtype=torch.float64)
    mask = torch.zeros(3, 20, dtype=torch.long)
    for row, (start, length) in enumerate(((0, 20), (5, 12), (17, 0))):
        mask[row, start : start + length] = 1
    rows, cu, longest, indices = unpad(x, mask)
    assert (rows.shape[0], cu.tolist(), longest) == (32, [0, 20, 32, 32], 20)
    y = pad(attn(rows, cu, longest), indices, 3, 20)
    torch.testing.assert_close(y[0], attn(x[:1])[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y[1, 5:17], attn(x[1:2, 5:17])[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(y[mask == 0], torch.zeros(28, 24, dtype=torch.float64))


def test_keywords_of_other_layers_without_effect_are_accepted():
    torch._dynamo.reset()
    attn, x = layer_of(), torch.randn(2, 9, 24).double()
    none = dict.fromkeys(("attention_mask", "context", "key_value_states", "past_key_values"))
    other = {**none, "is_causal": True, "need_weights": False, "dropout_p": 0.0, "use_cache": False}
    assert torch.equal(attn(x, **other), attn(x))
    compiled = torch.compile(attn, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, **other), attn(x))


def test_the_own_keywords_of_the_layer():
    parameters = inspect.signature(NSAttention.forward).parameters
    own = ["self", "x", "cu_seqlens", "max_seqlen", "plan", "cache", "new"]
    assert list(parameters) == [*own, "other"]


def test_replaced_config_keeps_its_head_widths_unless_none():
    config = NSAConfig(dim=256, n_heads=8, n_kv_heads=2)
    assert config == NSAConfig(dim=256, n_heads=8, n_kv_heads=2, head_dim=32, v_head_dim=32)
    assert dataclasses.replace(config, n_heads=16).head_dim == 32
    derived = dataclasses.replace(config, n_heads=16, head_dim=None, v_head_dim=None)
    assert derived == NSAConfig(dim=256, n_heads=16, n_kv_heads=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_runs_the_slots_in_low_precision_and_the_gates_in_fp32(
    dtype, planned, monkeypatch
):
    attn, x = layer_of(torch.float32, qk_norm=True), torch.randn(2, 37, 24, requires_grad=True)
    seen = {}

    def spy(plan, tensors, *options):
        seen.update(tensors._asdict())
        return run_core(plan, tensors, *options)

    monkeypatch.setattr("nsa_core.layer.projection.run_core", spy)
    with torch.autocast("cpu", dtype=dtype):
        y = attn(x)
    assert {n: t.dtype for n, t in seen.items()} == {
        **dict.fromkeys(seen, dtype),
        "gates": torch.float32,
    }
    assert y.dtype == dtype
    assert planned[-1]["dtype"] == dtype
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in attn.parameters())
    with torch.no_grad():
        assert (y - attn(x)).float().abs().mean() < 0.05 * y.float().abs().mean() + 0.02
