"""The layer against the oracle: output and all gradients in float64, and replay in other dtypes."""

import killers
import pytest
import torch

from cases import boundaries
from nsa_core import NSAConfig, NSAttention, nsa_attention
from nsa_core.config import COMPRESS_KINDS
from nsa_verify.judge.layer_gradients import golden_layer, judge_results, run_layer

SIZES = {
    "dim": 12,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 4,
    "v_head_dim": 6,
    "compress_block_size": 4,
    "compress_stride": 2,
    "select_block_size": 8,
    "num_selected_blocks": 3,
    "window_size": 10,
}
OPTIONS = {
    **{kind: {"compress": kind} for kind in COMPRESS_KINDS},
    "mlp gate, qk_norm": {"gate": "mlp", "qk_norm": True},
    "shared": {"shared_kv": True},
    "shared, qk_norm, rope first": {
        "shared_kv": True,
        "qk_norm": True,
        "rope_before_compress": True,
    },
    "rope first": {"rope_before_compress": True, "compress": "attn_pool"},
    "rope off": {"rope": False, "qk_norm": True},
    "h=1": {"n_kv_heads": 4},
    "scale": {"scale": 0.3, "rope_base": 50.0},
}


def layer_of(**options):
    attn = NSAttention(NSAConfig(**{**SIZES, **options}), backends="sdpa").double()
    with torch.no_grad():
        for name, parameter in attn.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return attn


def problem(packed):
    lead, cu = ((37,), boundaries(3, 0, 27, 7)) if packed else ((2, 27), None)
    return (
        torch.randn(*lead, 12, dtype=torch.float64),
        torch.randn(*lead, 12, dtype=torch.float64),
        cu,
    )


def judge_layer(attn, x, do, cu):
    return judge_results(run_layer(attn, x, do, cu), *golden_layer(attn, x, do, attn.plan, cu))


@pytest.mark.few_cases
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_output_and_every_gradient_against_the_oracle(name, packed):
    attn, (x, do, cu) = layer_of(**OPTIONS[name]), problem(packed)
    verdicts = judge_layer(attn, x, do, cu)
    assert set(verdicts) == {"y", "x", *dict(attn.named_parameters())}
    assert {n: v.why for n, v in verdicts.items() if not v} == {}


@pytest.mark.few_cases("mlp")
@pytest.mark.parametrize("name", ["mlp", "mlp gate, qk_norm", "attn_pool", "conv"])
def test_judge_rejects_a_gradient_error_of_2e_13(name, monkeypatch):
    attn, (x, do, cu) = layer_of(**OPTIONS[name]), problem(packed=False)
    for parameter in attn.parameters():
        parameter.register_hook(lambda grad: grad * (1 + 2e-13))
    verdicts = judge_layer(attn, x, do, cu)
    assert {n for n, v in verdicts.items() if v} == {"y", "x"}


def _unrotated(attn, monkeypatch):
    monkeypatch.setattr("nsa_core.layer.projection.rotate", lambda x, table: x)


def _shifted_block_angles(attn, monkeypatch):
    original = attn._rope_of_blocks

    def shifted(*args):
        cos, sin = original(*args)
        return type(original(*args))(cos.roll(1, 0), sin.roll(1, 0))

    monkeypatch.setattr(attn, "_rope_of_blocks", shifted)


def _untrained_key(attn, monkeypatch):
    attn.phi_k.register_forward_hook(lambda module, args, out: out.detach())


def _swapped_gates(attn, monkeypatch):
    attn.gate.register_forward_hook(lambda module, args, out: out.flip(-1))


def _swapped_branches(attn, monkeypatch):
    project = attn.project

    def swapped(x, cu_seqlens=None):
        p = project(x, cu_seqlens)
        return p._replace(v=(None, p.v[2], p.v[1]))

    monkeypatch.setattr(attn, "project", swapped)


FAULTS = (_unrotated, _shifted_block_angles, _untrained_key, _swapped_gates, _swapped_branches)


@pytest.mark.few_cases("_unrotated")
@pytest.mark.parametrize("fault", FAULTS)
def test_judge_rejects_planted_faults(fault, monkeypatch):
    attn, (x, do, cu) = layer_of(), problem(packed=True)
    fault(attn, monkeypatch)
    failed = [name for name, verdict in judge_layer(attn, x, do, cu).items() if not verdict]
    assert failed
    killers.expect("judge of a layer", fault.__name__, failed[0])


def replay_gradients(attn, x, do, cu):
    """Compute the parameter gradients by the layer's own backward, and by a replay.

    The replay feeds the graph of projections, phi and gates with the gradients that left
    nsa_attention. Both are equal bit for bit under deterministic algorithms.
    """
    parameters = dict(attn.named_parameters())

    def grads_of(run):
        outputs, output_grads = run()
        grads = torch.autograd.grad(
            outputs, list(parameters.values()), output_grads, allow_unused=True
        )
        return {n: g for n, g in zip(parameters, grads) if g is not None}

    own = grads_of(lambda: ([attn(x, cu)], [do]))
    p, gates = attn.project(x, cu), attn.gate(x)
    sources = [p.q, p.k[1], p.k[2], p.v[1], p.v[2], p.k_cmp, p.v_cmp, gates]
    q, k1, k2, v1, v2, k_cmp, v_cmp, g = leaves = [s.detach().requires_grad_() for s in sources]
    o = nsa_attention(
        q,
        (None, k1, k2),
        (None, v1, v2),
        g,
        config=attn.config,
        k_cmp=k_cmp,
        v_cmp=v_cmp,
        cu_seqlens=cu,
    )
    y = attn.out(o.flatten(-2))
    *source_grads, out_grad = torch.autograd.grad(y, [*leaves, attn.out.weight], do)
    return own, {**grads_of(lambda: (sources, source_grads)), "out.weight": out_grad}


@pytest.mark.parametrize(
    "packed", [pytest.param(False, marks=pytest.mark.slow), True], ids=["dense", "packed"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp", "attn_pool", "shared", "mlp gate, qk_norm"])
def test_replaying_the_shared_graph_gives_the_same_bits(name, dtype, packed, request):
    attn, (x, do, cu) = layer_of(**OPTIONS[name]).to(dtype), problem(packed)
    torch.use_deterministic_algorithms(True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    own, again = replay_gradients(attn, x.to(dtype), do.to(dtype), cu)
    assert set(own) == set(again) == set(dict(attn.named_parameters()))
    assert {n for n in own if not torch.equal(own[n], again[n])} == set()
