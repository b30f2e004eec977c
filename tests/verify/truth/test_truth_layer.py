"""The oracle's phi, rotary embedding and layer equal explicit formulas and finite differences."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from nsa_core.config import COMPRESS_KINDS, NSAConfig
from nsa_core.errors import InvalidInput
from nsa_verify import oracle
from truth_cases import TINY, normal

CONFIG = NSAConfig(12, 4, 2, 6, 3, *dataclasses.astuple(TINY)[:4], window_size=5)


def by_hand(kind: str, p: dict[str, torch.Tensor], block: torch.Tensor) -> torch.Tensor:
    """Compute phi of one block [l, D] with torch.nn.functional."""
    f = torch.nn.functional
    if kind == "mean":
        return block.mean(0)
    if kind == "conv":
        return f.conv1d(block.T[None], p["weight"], p["bias"], groups=block.shape[1])[0, :, 0]
    placed = block + p["position"]
    if kind == "attn_pool":
        return f.scaled_dot_product_attention(p["query"][None], placed, placed)[0]
    if kind == "linear":
        return f.linear(placed.flatten(), p["proj.weight"], p["proj.bias"])
    return f.linear(
        f.gelu(f.linear(placed.flatten(), p["up.weight"], p["up.bias"])),
        p["down.weight"],
        p["down.bias"],
    )


def phi_parameters(kind: str, size: int, D: int, seed: int = 5) -> dict[str, torch.Tensor]:
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "mean": {},
        "conv": {"weight": (D, 1, size), "bias": (D,)},
        "attn_pool": {"position": (size, D), "query": (D,)},
        "linear": {"position": (size, D), "proj.weight": (D, size * D), "proj.bias": (D,)},
        "mlp": {
            "position": (size, D),
            "up.weight": (2 * D, size * D),
            "up.bias": (2 * D,),
            "down.weight": (D, 2 * D),
            "down.bias": (D,),
        },
    }
    return {
        name: normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes[kind].items())
    }


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
def test_every_phi_kind(kind: str) -> None:
    x, p = normal(2, 11, 2, 3), phi_parameters(kind, 4, 3)
    compressed = oracle.compress(kind, p, x, TINY)
    assert compressed.shape == (2, 4, 2, 3)
    for b, i, g in itertools.product(range(2), range(4), range(2)):
        assert torch.allclose(
            compressed[b, i, g], by_hand(kind, p, x[b, 2 * i : 2 * i + 4, g]), rtol=0, atol=1e-13
        )
    cu = torch.tensor([0, 0, 3, 11, 11, 22], dtype=torch.int32)
    packed = oracle.compress(kind, p, x.flatten(0, 1), TINY, cu_seqlens=cu)
    assert packed.shape == (11, 2, 3)
    assert torch.equal(packed[:3], oracle.compress(kind, p, x[:1, 3:], TINY)[0])
    assert torch.equal(packed[3:7], compressed[1])
    assert not packed[7:].any()


def test_rope_turns_half_split_pairs() -> None:
    x = normal(1, 5, 2, 6)
    y = oracle.rope(x, torch.tensor([0, 1, 2, 3, 40]), 100.0)
    assert torch.equal(y[:, 0], x[:, 0])
    pair = torch.complex(x[..., :3], x[..., 3:])
    angle = torch.tensor([0.0, 1, 2, 3, 40], dtype=torch.float64)[:, None, None] * 100.0 ** -(
        torch.arange(3).double() / 3
    )
    rotated = pair * torch.polar(torch.ones_like(angle), angle)
    assert torch.allclose(y, torch.cat([rotated.real, rotated.imag], -1), rtol=0, atol=1e-14)


def layer_state(config: NSAConfig) -> dict[str, torch.Tensor]:
    hq, groups, dk, dv = config.n_heads, config.n_kv_heads, config.qk_dim, config.v_dim
    pairs, hidden = 1 if config.shared_kv else 3, max(1, config.dim // 4)
    shapes = {
        "qkv.weight": (hq * dk + pairs * groups * (dk + dv), config.dim),
        "out.weight": (config.dim, hq * dv),
    }
    if config.gate == "mlp":
        shapes |= {"gate.0.weight": (hidden, config.dim), "gate.0.bias": (hidden,)}
        shapes |= {"gate.2.weight": (hq * 3, hidden), "gate.2.bias": (hq * 3,)}
    else:
        shapes |= {"gate.weight": (hq * 3, config.dim), "gate.bias": (hq * 3,)}
    if config.qk_norm:
        shapes |= {"q_norm.weight": (dk,), "k_norm.weight": (dk,)}
    state = {name: normal(*shape, seed=i) * 0.5 for i, (name, shape) in enumerate(shapes.items())}
    for side, width in (("phi_k", dk), ("phi_v", dv)):
        phi = phi_parameters(config.compress, config.compress_block_size, width, seed=50 + width)
        state |= {f"{side}.{name}": value * 0.3 for name, value in phi.items()}
    return state


VARIANTS = {
    **{kind: {"compress": kind} for kind in COMPRESS_KINDS},
    "gate-mlp": {"gate": "mlp"},
    "shared-kv": {"shared_kv": True},
    "no-rope": {"rope": False},
    "rope-first": {"rope_before_compress": True},
    "qk-norm": {"qk_norm": True, "scale": -0.7},
}


# The default run alternates between packed and dense variants; the slow run has both.
LAYOUTS = [
    pytest.param(
        v,
        packed,
        marks=[pytest.mark.slow] * ((i + packed) % 2),
        id=f"{v}-{'packed' if packed else 'dense'}",
    )
    for i, v in enumerate(VARIANTS)
    for packed in (False, True)
]


@pytest.mark.few_cases("attn_pool-dense")
@pytest.mark.parametrize(("variant", "packed"), LAYOUTS)
def test_layer_gradients_equal_finite_differences(variant: str, packed: bool) -> None:
    config = dataclasses.replace(CONFIG, num_selected_blocks=3, **VARIANTS[variant])
    state, S = layer_state(config), 35
    x = normal(S, config.dim, seed=9) if packed else normal(1, S, config.dim, seed=9)
    cu = torch.tensor([0, 2, 2, S], dtype=torch.int32) if packed else None
    p = oracle.project(state, x, config, cu_seqlens=cu)
    lse = oracle.cmp(
        p.q, p.k_cmp, p.v_cmp, config.geometry, config.softmax_scale, cu_seqlens=cu
    ).lse
    assert lse is not None
    blocks = oracle.select(p.q, p.k_cmp, lse, config.geometry, config.softmax_scale, cu_seqlens=cu)
    names = list(state)

    def y(*values: torch.Tensor) -> torch.Tensor:
        return oracle.layer(
            dict(zip(names, values[1:])), values[0], config, cu_seqlens=cu, blocks=blocks
        )

    assert torch.equal(y(x, *state.values()), oracle.layer(state, x, config, cu_seqlens=cu))
    leaves = [value.clone().requires_grad_() for value in (x, *state.values())]
    weight = normal(*y(*leaves).shape, seed=77)
    grads = torch.autograd.grad((y(*leaves) * weight).sum(), leaves)
    step = 1e-5
    for index, grad in enumerate(grads):
        direction, shifted = normal(*grad.shape, seed=index), [list(leaves), list(leaves)]
        for sign, values in zip((1, -1), shifted):
            values[index] = (leaves[index] + sign * step * direction).detach()
        loss = [(y(*values) * weight).sum().item() for values in shifted]
        slope = (loss[0] - loss[1]) / (2 * step)
        name = ["x", *names][index]
        assert grad.any(), name
        assert (grad * direction).sum().item() == pytest.approx(slope, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize(
    "options", [{}, {"gate": "mlp", "qk_norm": True}], ids=["default", "gate-mlp-qk-norm"]
)
def test_layer_equals_its_parts_composed_by_hand(options: dict[str, object]) -> None:
    """Covers rows of the fused projection, gate order, key rotation, and phi before rotary."""
    config, S, f = dataclasses.replace(CONFIG, **options), 13, torch.nn.functional
    state, x = layer_state(config), normal(1, 13, 12, seed=9)
    rows = state["qkv.weight"].split([24, 12, 12, 12, 6, 6, 6])
    q, k_c, k_s, k_w = ((x @ r.T).view(1, S, -1, 6) for r in rows[:4])
    v_c, v_s, v_w = ((x @ r.T).view(1, S, 2, 3) for r in rows[4:])
    if config.qk_norm:
        q = f.rms_norm(q, (6,), state["q_norm.weight"], 1e-6)
        k_c, k_s, k_w = (f.rms_norm(k, (6,), state["k_norm.weight"], 1e-6) for k in (k_c, k_s, k_w))
    positions = torch.arange(S)
    q, k_s, k_w = (oracle.rope(z, positions, 10000.0) for z in (q, k_s, k_w))
    phi = {
        s: {n.removeprefix(f"phi_{s}."): p for n, p in state.items() if n.startswith(f"phi_{s}")}
        for s in "kv"
    }
    k_cmp = oracle.rope(
        oracle.compress("mlp", phi["k"], k_c, config.geometry), 2 * torch.arange(5), 10000.0
    )
    v_cmp = oracle.compress("mlp", phi["v"], v_c, config.geometry)
    last = "gate.2" if config.gate == "mlp" else "gate"
    hidden = (
        f.silu(f.linear(x, state["gate.0.weight"], state["gate.0.bias"]))
        if config.gate == "mlp"
        else x
    )
    gates = (
        f.linear(hidden, state[f"{last}.weight"], state[f"{last}.bias"]).sigmoid().view(1, S, 4, 3)
    )
    args = (config.geometry, 6**-0.5)
    cmp_ = oracle.cmp(q, k_cmp, v_cmp, *args)
    assert cmp_.lse is not None
    sel = oracle.sel(q, k_s, v_s, oracle.select(q, k_cmp, cmp_.lse, *args), *args)
    win = oracle.win(q, k_w, v_w, *args)
    o = gates[..., 0:1] * cmp_.o + gates[..., 1:2] * sel.o + gates[..., 2:3] * win.o
    assert torch.allclose(
        oracle.layer(state, x, config), o.reshape(1, S, 12) @ state["out.weight"].T, atol=1e-13
    )


def test_attention_defaults_to_mean_compression_and_accepts_one_or_three_tensors() -> None:
    q, k, v, gates = (
        normal(1, 20, 4, 6),
        normal(1, 20, 2, 6),
        normal(1, 20, 2, 3),
        normal(1, 20, 4, 3),
    )
    one = oracle.attention(q, k, v, gates, CONFIG)
    means = [torch.stack([x[:, 2 * i : 2 * i + 4].mean(1) for i in range(9)], 1) for x in (k, v)]
    three = oracle.attention(
        q, (k + 9, k, k), [v + 9, v, v], gates, CONFIG, k_cmp=means[0], v_cmp=means[1]
    )
    assert torch.allclose(one, three, rtol=0, atol=1e-13)
    with pytest.raises(InvalidInput, match="one tensor or three"):
        oracle.attention(q, (k, k), v, gates, CONFIG)


def test_packed_equals_separate() -> None:
    state, lengths = layer_state(CONFIG), [0, 17, 3, 0, 24, 1, 0]
    x = normal(sum(lengths), CONFIG.dim, seed=4)
    bounds = [0, *itertools.accumulate(lengths)]
    packed = oracle.layer(state, x, CONFIG, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for a, b in itertools.pairwise(bounds):
        assert torch.allclose(
            packed[a:b], oracle.layer(state, x[None, a:b], CONFIG)[0], rtol=0, atol=1e-13
        )
