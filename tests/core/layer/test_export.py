"""torch.export with a dynamic batch and length: one graph equals the layer at every length."""

import io

import pytest
import torch
from torch.export import Dim, export

from cases import boundaries, inputs, layer_of, small
from nsa_core import Unsupported, nsa_attention
from nsa_core.contract import PLANNED_LENGTHS
from nsa_core.plan import default_plan

CONFIG = small()
# Two compressed tokens, borders of selection blocks and strides, and lengths between them.
LENGTHS = (12, 13, 15, 16, 17, 24, 41, 64, 100)
# The range crosses the lengths from which calls use other plans.
DYNAMIC = {0: Dim("B", min=1, max=16), 1: Dim("S", min=12, max=2 * PLANNED_LENGTHS[-1])}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("strict", "options"),
    [
        pytest.param(False, {"compress": "mlp"}, marks=SLOW),
        pytest.param(
            False, {"compress": "mean", "rope_before_compress": True, "qk_norm": True}, marks=SLOW
        ),
        pytest.param(False, {"compress": "attn_pool", "shared_kv": True}, marks=SLOW),
        pytest.param(False, {"compress": "conv", "rope": False}, marks=SLOW),
        pytest.param(False, {"compress": "linear", "gate": "mlp"}, marks=SLOW),
        pytest.param(True, {"compress": "mlp"}, marks=SLOW),
    ],
)
def test_exported_layer_equals_the_layer_at_every_length(strict, options):
    attn = layer_of(torch.float32, **options)
    program = export(attn, (torch.randn(2, 40, 24),), dynamic_shapes={"x": DYNAMIC}, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for length in LENGTHS:
        x = torch.randn(1 + length % 3, length, 24)
        torch.testing.assert_close(loaded(x), attn(x), rtol=1e-5, atol=1e-5)


class Attention(torch.nn.Module):
    """nsa_attention as a module, which torch.export requires."""

    def forward(self, q, k, v, gates):
        return nsa_attention(q, k, v, gates, config=CONFIG)


@pytest.mark.slow
def test_exported_function_equals_eager_and_has_the_plan_of_short_sequences(monkeypatch):
    def arguments(batch, length):
        tensors = inputs(CONFIG, batch, length, dtype=torch.float32)
        return tensors.q, tensors.k[0], tensors.v[0], tensors.gates

    planned = []
    resolve = default_plan.resolve
    monkeypatch.setattr(
        default_plan, "_plans", default_plan.ObjectCache(default_plan._resolve_default)
    )
    monkeypatch.setattr(
        default_plan, "resolve", lambda config, o: planned.append(o.seq_len) or resolve(config, o)
    )
    program = export(Attention(), arguments(2, 40), dynamic_shapes=(DYNAMIC,) * 4)
    assert planned == [None]
    slots = [str(node.target) for node in program.graph.nodes if "nsa_" in str(node.target)]
    assert slots == [f"nsa_sdpa.{s}.default" for s in ("cmp", "select", "sel", "win", "combine")]
    for length in LENGTHS:
        x = arguments(1 + length % 3, length)
        torch.testing.assert_close(program.module()(*x), Attention()(*x))


def test_packed_calls_with_dynamic_rows_cannot_be_exported():
    dynamic = {"x": {0: Dim("T", min=12, max=999)}, "cu_seqlens": {0: Dim("N", min=2, max=99)}}
    attn, arguments = layer_of(torch.float32), (torch.randn(30, 24), boundaries(20, 10))
    with pytest.raises(
        Unsupported, match=r"^packed documents \(cu_seqlens\) cannot be exported"
    ) as error:
        export(attn, arguments, dynamic_shapes=dynamic)
    assert "export the call on [B, S, ...] without cu_seqlens" in str(error.value)
