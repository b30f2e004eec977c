"""What the layer and nsa_attention refuse by name, and no raw error, whichever way they are called."""

from types import SimpleNamespace

import pytest
import torch

from cases import boundaries, layer_of, small
from nsa_core import InvalidInput, unpad
from nsa_core.validate import check_cu_seqlens

CONFIG = small()


@pytest.mark.parametrize("compiled", [False, True])
def test_max_seqlen_below_a_document_is_refused_compiled_too(compiled):
    torch._dynamo.reset()
    attn, x = layer_of(), torch.randn(30, 24, dtype=torch.float64)
    run = torch.compile(attn, backend="aot_eager", fullgraph=True) if compiled else attn
    with pytest.raises(InvalidInput, match="max_seqlen must be at least the longest document's 20 tokens, got 16"):
        run(x, boundaries(20, 10), 16)
    assert run(x, boundaries(20, 10), 20).shape == x.shape


def test_max_seqlen_on_a_device_is_read_only_when_asked(monkeypatch):
    on_gpu = SimpleNamespace(device=torch.device("cuda"), tolist=lambda: [0, 20, 30])
    check_cu_seqlens(on_gpu, 30, 16)
    monkeypatch.setenv("NSA_CHECK", "1")
    with pytest.raises(InvalidInput, match="longest document's 20 tokens, got 16"):
        check_cu_seqlens(on_gpu, 30, 16)
    check_cu_seqlens(on_gpu, 30, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_unpad_takes_no_mask_of_floats(dtype):
    x, additive = torch.randn(1, 4, 2), torch.tensor([[0.0, 0.0, 0.0, torch.finfo(dtype).min]], dtype=dtype)
    with pytest.raises(InvalidInput, match=f"got {str(dtype)[6:]}: pass mask == 0 for one that is added"):
        unpad(x, additive)
    assert torch.equal(unpad(x, additive == 0)[0], x[0, :3])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_unpad_takes_bool_and_integers(dtype):
    x = torch.randn(1, 4, 2)
    assert torch.equal(unpad(x, torch.tensor([[1, 1, 1, 0]]).to(dtype))[0], x[0, :3])


@pytest.mark.parametrize("wrong", [None, [[1, 1, 1, 0]]])
def test_unpad_names_what_is_no_tensor(wrong):
    with pytest.raises(InvalidInput, match=f"attention_mask must be a tensor, got {type(wrong).__name__}"):
        unpad(torch.randn(1, 4, 2), wrong)
    with pytest.raises(InvalidInput, match="x must be a tensor, got list"):
        unpad([[1.0]], torch.ones(1, 1).bool())
