"""The alternatives to unsupported transforms in docs/how-to/transforms.md, and exports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export import Dim, export

from cases import boundaries, inputs, layer_of, small
from nsa_core import NSAConfig, block_attention


def test_packed_documents_in_a_loop_have_their_gradients() -> None:
    attn, cu = layer_of(), boundaries(9, 4)
    for sample in torch.randn(2, 13, 24, dtype=torch.float64):
        leaf = sample.clone().requires_grad_()
        (expected,) = torch.autograd.grad(attn(leaf, cu).square().sum(), leaf)
        actual = torch.func.grad(lambda x: attn(x, cu).square().sum())(sample)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_differences_of_gradients_converge() -> None:
    """Attention to all blocks is causal attention, which PyTorch differentiates twice."""
    i = inputs(small(), 1, 13)
    x, v, blocks = i.q, torch.randn_like(i.q), torch.arange(2).expand(1, 13, 2, 2)

    def causal(q: torch.Tensor) -> torch.Tensor:
        k, values = (t.repeat_interleave(2, 2).transpose(1, 2) for t in (i.k[0], i.v[0]))
        scores = q.transpose(1, 2) @ k.mT * 8**-0.5
        future = torch.ones(13, 13, dtype=torch.bool).triu(1)
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ values).transpose(1, 2)

    def gradient(q: torch.Tensor) -> torch.Tensor:
        q = q.detach().requires_grad_()
        o = block_attention(q, i.k[0], i.v[0], blocks, block_size=8)
        return torch.autograd.grad(o.square().sum(), q)[0]

    expected = torch.autograd.functional.hvp(lambda q: causal(q).square().sum(), x, v)[1]
    actual = (gradient(x + 1e-5 * v) - gradient(x - 1e-5 * v)) / 2e-5
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_the_minimum_length_of_an_export() -> None:
    geometry = NSAConfig(dim=32, n_heads=4, n_kv_heads=2).geometry
    least = geometry.compress_block_size + geometry.compress_stride
    counts = [geometry.num_compressed(length) for length in (least - 1, least)]
    assert (least, counts) == (48, [1, 2])


@pytest.mark.slow
def test_a_shorter_minimum_cannot_be_exported() -> None:
    shapes = {"x": {1: Dim("S", min=11, max=999)}}  # l + d is 12
    with pytest.raises(torch._dynamo.exc.UserError, match="min=12"):
        export(layer_of(torch.float32), (torch.randn(1, 40, 24),), dynamic_shapes=shapes)


@pytest.mark.slow
def test_another_process_resolves_the_plan_before_it_loads(tmp_path: Path) -> None:
    file = tmp_path / "program.pt2"
    torch.export.save(export(layer_of(torch.float32), (torch.randn(1, 40, 24),)), file)
    load = (
        f"import nsa_core, torch; torch.export.load({str(file)!r}).module()(torch.randn(1, 40, 24))"
    )
    plan = "from cases import layer_of; layer_of(torch.float32).plan; "
    run = {"capture_output": True, "text": True, "cwd": Path(__file__).parent}
    alone = subprocess.run([sys.executable, "-c", load], **run)
    assert alone.returncode == 1
    assert "deserializing the saved file" in alone.stderr
    text = load.replace("torch; ", f"torch; {plan}")
    done = subprocess.run([sys.executable, "-c", text], **run)
    assert done.returncode == 0, done.stderr
