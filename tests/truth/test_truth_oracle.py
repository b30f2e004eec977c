"""The oracle itself, held against formulas written out by hand and against torch.autograd."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import pathlib

import pytest
import torch

from nsa_core import oracle
from nsa_core.config import COMPRESS_KINDS, NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_core.verify import dense_selection

TINY = BlockGeometry(4, 2, 8, 4, 1, 2, 5)
CONFIG = NSAConfig(12, 4, 2, 6, 3, *dataclasses.astuple(TINY)[:4], window_size=5)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_imports_nothing_it_judges() -> None:
    allowed = {"nsa_core.errors", "nsa_core.layout", "nsa_core.config", "torch"}
    for path in pathlib.Path(oracle.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                inside = name.startswith("nsa_core.oracle") or not name.startswith(("nsa", "torch."))
                assert inside or name in allowed, (path.name, name)


def test_oracle_uses_no_helper_of_the_geometry() -> None:
    methods = {n for n in vars(BlockGeometry) if not n.startswith("_")} - set(BlockGeometry.__dataclass_fields__)
    for path in pathlib.Path(oracle.__file__).parent.glob("*.py"):
        used = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        assert not used & methods, (path.name, used & methods)


def masked_softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of one head by torch.autograd; rows without a key are 0."""
    s = (q @ k.T * scale).masked_fill(~seen, -math.inf)
    return torch.where(seen.any(-1, keepdim=True), s.softmax(-1).nan_to_num(0.0) @ v, 0.0)


@pytest.mark.parametrize("slot", ["cmp", "sel", "win"])
def test_gradients_equal_autograd(slot: str) -> None:
    S, h = 11, 2
    keys = 4 if slot == "cmp" else S
    q, k, v, do = normal(1, S, h, 3), normal(1, keys, 1, 3, seed=1), normal(1, keys, 1, 2, seed=2), normal(1, S, h, 2)
    blocks = torch.tensor([[0, 0], [1, -1], [9, 0]], dtype=torch.int32).repeat(4, 1)[:S].view(1, S, 1, 2)
    t, j = torch.arange(S)[:, None], torch.arange(keys)[None]
    member = ((j[..., None] // 8) == blocks[0, :, 0][:, None]).any(-1)
    seen = {"cmp": j * 2 + 3 <= t, "sel": (j <= t) & member, "win": (j <= t) & (t - j < 5)}[slot]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = torch.stack(
        [masked_softmax(leaves[0][0, :, i], leaves[1][0, :, 0], leaves[2][0, :, 0], seen, 0.7) for i in (0, 1)], 1
    )
    expected = torch.autograd.grad(o, leaves, do[0])
    args = (q, k, v, blocks) if slot == "sel" else (q, k, v)
    truth = getattr(oracle, slot)(*args, TINY, 0.7, do=do)
    assert torch.allclose(truth.o[0], o, rtol=0, atol=1e-14)
    for got, want in zip(truth.grads.values(), expected, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-13)


def test_row_4_nothing_visible_is_exactly_nothing() -> None:
    q, k, v = normal(1, 3, 2, 4), normal(1, 0, 1, 4), normal(1, 0, 1, 4)
    truth = oracle.cmp(q, k, v, TINY, 0.5, do=torch.ones(1, 3, 2, 4))
    assert not truth.o.any()
    assert bool((truth.lse == -math.inf).all())
    assert not truth.grads["dq"].any()


def test_row_5_a_compressed_token_is_visible_from_its_last_token_on() -> None:
    q, k, v = normal(1, 7, 1, 4), normal(1, 2, 1, 4), normal(1, 2, 1, 1)
    o = oracle.cmp(q, k, v, TINY, 0.5).o[0, :, 0, 0]
    assert not o[:3].any()
    assert torch.equal(o[3:5], v[0, 0, 0].expand(2))
    assert bool((o[5:] != v[0, 0, 0]).all())


def eq9(p: list[float], j: int, geometry: BlockGeometry, first: int) -> float:
    """Eq. 9 as printed, p_slc[j] = sum_m sum_n p_cmp[(l'/d) j - m - n], with indices counted from ``first``."""
    ratio = geometry.select_block_size // geometry.compress_stride
    total = 0.0
    for m, n in itertools.product(range(ratio), range(geometry.compress_block_size // geometry.compress_stride)):
        i = ratio * (j + first) - m - n - first
        total += p[i] if 0 <= i < len(p) else 0.0
    return total


@pytest.mark.parametrize("sizes", [(32, 16, 64), (4, 2, 8), (4, 4, 8), (6, 2, 6), (3, 1, 7), (8, 4, 16)])
def test_eq9_read_from_1_is_the_overlap_and_read_from_0_is_not(sizes: tuple[int, int, int]) -> None:
    geometry = BlockGeometry(*sizes, 4, 0, 0, 8)
    S = 5 * sizes[2]
    n_c = (S - sizes[0]) // sizes[1] + 1
    q, k = normal(1, S, 1, 2), normal(1, n_c, 1, 2, seed=1)
    lse = oracle.cmp(q, k, k, geometry, 1.0).lse
    assert lse is not None
    score = oracle.scores(q, k, lse, geometry, 1.0)[0, -1, 0]
    p = (k[0, :, 0] @ q[0, -1, 0] - lse[0, 0, -1]).exp().tolist()
    from_one = torch.tensor([eq9(p, j, geometry, 1) for j in range(5)], dtype=torch.float64)
    from_zero = torch.tensor([eq9(p, j, geometry, 0) for j in range(5)], dtype=torch.float64)
    assert torch.allclose(score, from_one, rtol=0, atol=1e-14)
    assert not torch.allclose(score, from_zero, rtol=0, atol=1e-2)


def test_eq9_read_from_0_picks_another_block() -> None:
    geometry = BlockGeometry(32, 16, 64, 1, 0, 0, 8)
    q = torch.ones(1, 320, 1, 1)
    k = torch.zeros(1, 19, 1, 1)
    k[0, 9] = 5.0  # tokens 144 .. 175, inside selection block 2 = tokens 128 .. 191
    lse = oracle.cmp(q, k, k, geometry, 1.0).lse
    assert lse is not None
    assert oracle.select(q, k, lse, geometry, 1.0)[0, -1, 0].tolist() == [2]
    p = (k[0, :, 0, 0].double() - lse[0, 0, -1]).exp().tolist()
    assert max(range(5), key=lambda j: eq9(p, j, geometry, 1)) == 2
    assert max(range(5), key=lambda j: eq9(p, j, geometry, 0)) == 3


@pytest.mark.parametrize(
    ("score", "t", "expected"),
    [
        ([0.0] * 6, 47, [0, 1, 4, 5]),  # row 39: equal scores go to the lower index
        ([0, 1, 9, 2, 0, 0], 47, [0, 2, 4, 5]),
        ([0, math.nan, 0, 0, 0, 0], 47, [0, 2, 4, 5]),  # NaN below everything
        ([math.nan] * 6, 47, [0, 1, 4, 5]),
        ([5, 5, 5, 5, 5, 5], 9, [0, 1]),  # a block in both forced groups counts once
        ([0, 0, 1, 5, 9, 9], 24, [0, 1, 2, 3]),  # the future is no candidate
        ([1.0], 0, [0]),
    ],
)
def test_row_39_choice(score: list[float], t: int, expected: list[int]) -> None:
    assert oracle.choose(score, t, TINY) == expected
    every = torch.tensor(score, dtype=torch.float64).expand(t + 1, 1, -1)
    assert [j for j in dense_selection.choose(every, TINY)[t, 0].tolist() if j >= 0] == expected


def test_a_freed_place_goes_to_the_next_score() -> None:
    geometry = dataclasses.replace(TINY, init_blocks=2, num_selected_blocks=4)
    assert oracle.choose([0, 0, 1, 9], 23, geometry) == [0, 1, 2]
    assert oracle.choose([0, 0, 1, 9, 0, 0], 47, geometry) == [0, 1, 4, 5]
    assert oracle.choose([0, 0, 0, 5], 31, dataclasses.replace(geometry, local_blocks=1)) == [0, 1, 2, 3]


def test_row_48_refuses_the_absurd_with_its_bytes_and_names_the_sampled_mode() -> None:
    S, geometry = 131072, BlockGeometry()
    q = torch.zeros(1, 1, 12, 64).expand(1, S, 12, 64)
    k = torch.zeros(1, 1, 2, 64).expand(1, S, 2, 64)
    k_cmp = k[:, : S // 16 - 1]
    size = S * S * 12 * 8
    with pytest.raises(InvalidInput, match=rf"{size} bytes .* sampled rows .*rows=") as caught:
        oracle.win(q, k, k, geometry, 0.125)
    assert str(131072) in str(caught.value)
    blocks = torch.zeros(1, 1, 2, 16, dtype=torch.int32).expand(1, S, 2, 16)
    lse = torch.zeros(1, 12, S)
    for call in (
        lambda rows: oracle.cmp(q, k_cmp, k_cmp, geometry, 0.125, rows=rows),
        lambda rows: oracle.sel(q, k, k, blocks, geometry, 0.125, rows=rows),
        lambda rows: oracle.select(q, k_cmp, lse, geometry, 0.125, rows=rows),
    ):
        with pytest.raises(InvalidInput, match=r"\d{9,} bytes .* sampled rows"):
            call(None)


def test_row_48_the_sampled_mode_answers() -> None:
    S, geometry, rows = 131072, BlockGeometry(), [0, 31, 131071]
    q = torch.ones(1, 1, 1, 1).expand(1, S, 1, 1)
    v = torch.arange(S, dtype=torch.float32).view(1, S, 1, 1)
    o = oracle.win(q, torch.zeros(1, S, 1, 1), v, geometry, 1.0, rows=rows).o[0, :, 0, 0]
    assert o[rows].tolist() == pytest.approx([0, 15.5, 131071 - 255.5])
    assert o.count_nonzero() == 2


def by_hand(kind: str, p: dict[str, torch.Tensor], block: torch.Tensor) -> torch.Tensor:
    """phi of one block [l, D] with torch.nn.functional."""
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
    return f.linear(f.gelu(f.linear(placed.flatten(), p["up.weight"], p["up.bias"])), p["down.weight"], p["down.bias"])


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
    return {name: normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes[kind].items())}


@pytest.mark.parametrize("kind", COMPRESS_KINDS)
def test_every_phi_kind(kind: str) -> None:
    x, p = normal(2, 11, 2, 3), phi_parameters(kind, 4, 3)
    got = oracle.compress(kind, p, x, TINY)
    assert got.shape == (2, 4, 2, 3)
    for b, i, g in itertools.product(range(2), range(4), range(2)):
        assert torch.allclose(got[b, i, g], by_hand(kind, p, x[b, 2 * i : 2 * i + 4, g]), rtol=0, atol=1e-13)
    cu = torch.tensor([0, 0, 3, 11, 11, 22], dtype=torch.int32)
    packed = oracle.compress(kind, p, x.flatten(0, 1), TINY, cu_seqlens=cu)
    assert packed.shape == (11, 2, 3)
    assert torch.equal(packed[:3], oracle.compress(kind, p, x[:1, 3:], TINY)[0])
    assert torch.equal(packed[3:7], got[1])
    assert not packed[7:].any()


def test_rope_turns_half_split_pairs() -> None:
    x = normal(1, 5, 2, 6)
    y = oracle.rope(x, torch.tensor([0, 1, 2, 3, 40]), 100.0)
    assert torch.equal(y[:, 0], x[:, 0])
    pair = torch.complex(x[..., :3], x[..., 3:])
    angle = torch.tensor([0.0, 1, 2, 3, 40], dtype=torch.float64)[:, None, None] * 100.0 ** -(
        torch.arange(3).double() / 3
    )
    turned = pair * torch.polar(torch.ones_like(angle), angle)
    assert torch.allclose(y, torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-14)


def layer_state(config: NSAConfig) -> dict[str, torch.Tensor]:
    hq, groups, dk, dv = config.n_heads, config.n_kv_heads, config.qk_dim, config.v_dim
    pairs, hidden = 1 if config.shared_kv else 3, max(1, config.dim // 4)
    shapes = {"qkv.weight": (hq * dk + pairs * groups * (dk + dv), config.dim), "out.weight": (config.dim, hq * dv)}
    if config.gate == "mlp":
        shapes |= {"gate.0.weight": (hidden, config.dim), "gate.0.bias": (hidden,)}
        shapes |= {"gate.2.weight": (hq * 3, hidden), "gate.2.bias": (hq * 3,)}
    else:
        shapes |= {"gate.weight": (hq * 3, config.dim), "gate.bias": (hq * 3,)}
    if config.qk_norm:
        shapes |= {"q_norm.weight": (dk,), "k_norm.weight": (dk,)}
    state = {name: normal(*shape, seed=i) * 0.5 for i, (name, shape) in enumerate(shapes.items())}
    for side, width in (("phi_k", dk), ("phi_v", dv)):
        of_phi = phi_parameters(config.compress, config.compress_block_size, width, seed=50 + width)
        state |= {f"{side}.{name}": value * 0.3 for name, value in of_phi.items()}
    return state


VARIANTS = {
    **{kind: {"compress": kind} for kind in COMPRESS_KINDS},
    "gate-mlp": {"gate": "mlp"},
    "shared-kv": {"shared_kv": True},
    "no-rope": {"rope": False},
    "rope-first": {"rope_before_compress": True},
    "qk-norm": {"qk_norm": True, "scale": -0.7},
}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_gradients_equal_finite_differences(variant: str, packed: bool) -> None:
    config = dataclasses.replace(CONFIG, num_selected_blocks=3, **VARIANTS[variant])
    state, S = layer_state(config), 35
    x = normal(S, config.dim, seed=9) if packed else normal(1, S, config.dim, seed=9)
    cu = torch.tensor([0, 2, 2, S], dtype=torch.int32) if packed else None
    p = oracle.project(state, x, config, cu_seqlens=cu)
    lse = oracle.cmp(p.q, p.k_cmp, p.v_cmp, config.geometry, config.softmax_scale, cu_seqlens=cu).lse
    assert lse is not None
    blocks = oracle.select(p.q, p.k_cmp, lse, config.geometry, config.softmax_scale, cu_seqlens=cu)
    names = list(state)

    def y(*values: torch.Tensor) -> torch.Tensor:
        return oracle.layer(dict(zip(names, values[1:])), values[0], config, cu_seqlens=cu, blocks=blocks)

    assert torch.equal(y(x, *state.values()), oracle.layer(state, x, config, cu_seqlens=cu))
    leaves = [value.clone().requires_grad_() for value in (x, *state.values())]
    weight = normal(*y(*leaves).shape, seed=77)
    grads = torch.autograd.grad((y(*leaves) * weight).sum(), leaves)
    step = 1e-5
    for index, grad in enumerate(grads):
        along, moved = normal(*grad.shape, seed=index), [list(leaves), list(leaves)]
        for sign, values in zip((1, -1), moved):
            values[index] = (leaves[index] + sign * step * along).detach()
        rise = [(y(*values) * weight).sum().item() for values in moved]
        slope = (rise[0] - rise[1]) / (2 * step)
        assert grad.any(), ["x", *names][index]
        assert (grad * along).sum().item() == pytest.approx(slope, rel=1e-6, abs=1e-6), ["x", *names][index]


def test_layer_is_its_parts_put_together_by_hand() -> None:
    """Row order of the fused projection, gate order, rotation of each key, phi before rotary: written out once more."""
    config, S = CONFIG, 13
    state, x = layer_state(CONFIG), normal(1, 13, 12, seed=9)
    rows = state["qkv.weight"].split([24, 12, 12, 12, 6, 6, 6])
    q, k_c, k_s, k_w = ((x @ r.T).view(1, S, -1, 6) for r in rows[:4])
    v_c, v_s, v_w = ((x @ r.T).view(1, S, 2, 3) for r in rows[4:])
    at = torch.arange(S)
    q, k_s, k_w = (oracle.rope(z, at, 10000.0) for z in (q, k_s, k_w))
    phi = {s: {n.removeprefix(f"phi_{s}."): p for n, p in state.items() if n.startswith(f"phi_{s}")} for s in "kv"}
    k_cmp = oracle.rope(oracle.compress("mlp", phi["k"], k_c, config.geometry), 2 * torch.arange(5), 10000.0)
    v_cmp = oracle.compress("mlp", phi["v"], v_c, config.geometry)
    gates = torch.sigmoid(x @ state["gate.weight"].T + state["gate.bias"]).view(1, S, 4, 3)
    args = (config.geometry, 6**-0.5)
    cmp_ = oracle.cmp(q, k_cmp, v_cmp, *args)
    assert cmp_.lse is not None
    sel = oracle.sel(q, k_s, v_s, oracle.select(q, k_cmp, cmp_.lse, *args), *args)
    win = oracle.win(q, k_w, v_w, *args)
    o = gates[..., 0:1] * cmp_.o + gates[..., 1:2] * sel.o + gates[..., 2:3] * win.o
    assert torch.allclose(oracle.layer(state, x, config), o.reshape(1, S, 12) @ state["out.weight"].T, atol=1e-13)


def test_functional_form_compresses_by_the_mean_and_takes_one_or_three() -> None:
    q, k, v, gates = normal(1, 20, 4, 6), normal(1, 20, 2, 6), normal(1, 20, 2, 3), normal(1, 20, 4, 3)
    one = oracle.attention(q, k, v, gates, CONFIG)
    means = [torch.stack([x[:, 2 * i : 2 * i + 4].mean(1) for i in range(9)], 1) for x in (k, v)]
    three = oracle.attention(q, (k + 9, k, k), [v + 9, v, v], gates, CONFIG, k_cmp=means[0], v_cmp=means[1])
    assert torch.allclose(one, three, rtol=0, atol=1e-13)
    with pytest.raises(InvalidInput, match="one tensor or three"):
        oracle.attention(q, (k, k), v, gates, CONFIG)


def test_packed_equals_separate() -> None:
    state, lengths = layer_state(CONFIG), [0, 17, 3, 0, 24, 1, 0]
    x = normal(sum(lengths), CONFIG.dim, seed=4)
    bounds = [0, *itertools.accumulate(lengths)]
    packed = oracle.layer(state, x, CONFIG, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    for a, b in itertools.pairwise(bounds):
        assert torch.allclose(packed[a:b], oracle.layer(state, x[None, a:b], CONFIG)[0], rtol=0, atol=1e-13)
