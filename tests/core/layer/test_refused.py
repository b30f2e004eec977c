"""Arguments at the border of the refused ones: they are accepted, or refused where they can be."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cases import boundaries, layer_of, small
from nsa_core import InvalidInput, unpad
from nsa_core.torch_ops.packing_checks import check_cu_seqlens

CONFIG = small()


@pytest.mark.slow
def test_max_seqlen_below_the_longest_document_is_refused_when_compiled():
    torch._dynamo.reset()
    attn, x = layer_of(), torch.randn(30, 24, dtype=torch.float64)
    run = torch.compile(attn, backend="aot_eager", fullgraph=True)
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


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.uint64, torch.int64])
def test_unpad_accepts_bool_and_integer_masks(dtype):
    x = torch.randn(1, 4, 2)
    assert torch.equal(unpad(x, torch.tensor([[1, 1, 1, 0]]).to(dtype))[0], x[0, :3])


@pytest.mark.slow
def test_max_seqlen_may_be_a_symbolic_integer():
    torch._dynamo.reset()
    attn, x, cu = layer_of(), torch.randn(30, 24, dtype=torch.float64), boundaries(20, 10)
    expected, compiled = attn(x, cu), torch.compile(attn, backend="aot_eager", fullgraph=True)
    for bound in (20, 21, 29):  # symbolic from the second call on
        torch.testing.assert_close(compiled(x, cu, bound), expected, rtol=1e-12, atol=1e-12)


def test_config_numbers_may_be_numpy_scalars():
    half = torch.tensor(0.5).numpy()[()]  # a numpy float32, not a Python float
    assert small(scale=half).softmax_scale == 0.5


@pytest.mark.filterwarnings("ignore")
def test_rows_of_a_jagged_tensor_run_as_the_message_says():
    attn, rows = layer_of(torch.float32), [torch.randn(5, 24), torch.randn(9, 24)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    y = attn(x.values(), cu_seqlens=x.offsets().int())
    torch.testing.assert_close(y[:5], attn(rows[0][None])[0], rtol=1e-5, atol=1e-5)


def test_max_seqlen_may_be_a_numpy_integer():
    attn, x, cu = layer_of(torch.float32), torch.randn(9, 24), boundaries(5, 4)
    assert torch.equal(attn(x, cu, np.int64(5)), attn(x, cu, 5))
