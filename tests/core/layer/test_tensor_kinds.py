"""Sparse, nested and quantised tensors and wrong packing types are refused with the conversion."""

import re

import numpy as np
import pytest
import torch

from cases import boundaries, inputs, layer_of, small
from nsa_core import InvalidInput, nsa_attention

CONFIG = small()


def nested(*shape, **options):
    return torch.nested.nested_tensor([torch.randn(5, *shape), torch.randn(9, *shape)], **options)


def with_gaps():
    starts, lengths = torch.tensor([0, 0]), torch.tensor([3, 4])
    return torch.nested.narrow(torch.randn(2, 9, 24), 1, starts, lengths, layout=torch.jagged)


KINDS = {
    "coo": (lambda: torch.randn(2, 9, 24).to_sparse(), "sparse (torch.sparse_coo)", "x.to_dense()"),
    "csr": (lambda: torch.randn(9, 24).to_sparse_csr(), "sparse (torch.sparse_csr)", "to_dense()"),
    "quantised": (
        lambda: torch.quantize_per_tensor(torch.randn(2, 9, 24), 0.1, 0, torch.qint8),
        "quantised",
        "x.dequantize()",
    ),
    "jagged": (
        lambda: nested(24, layout=torch.jagged),
        "a nested tensor",
        "x.values() as x, and cu_seqlens=x.offsets().int()",
    ),
    "gaps": (with_gaps, "a nested tensor", "x.contiguous().values() as x"),
    "strided": (lambda: nested(24), "a nested tensor", "torch.cat(x.unbind()) as x"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_refuses_tensors_that_are_not_dense(kind, packed):
    make, name, fix = KINDS[kind]
    arguments = (boundaries(5, 9),) if packed else ()
    with pytest.raises(InvalidInput, match=f"^x is {re.escape(name)}: pass .*{re.escape(fix)}"):
        layer_of(torch.float32)(make(), *arguments)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["q", "gates"])
def test_function_refuses_tensors_that_are_not_dense(name):
    tensors = inputs(CONFIG, 2, 9, dtype=torch.float32)
    x = getattr(tensors, name)
    for wrong, fix in (
        (x.to_sparse(), f"sparse (torch.sparse_coo): pass {name}.to_dense()"),
        (nested(4, 8, layout=torch.jagged), f"a nested tensor: pass {name}.values() as {name}"),
        (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), f"quantised: pass {name}.dequantize()"),
    ):
        with pytest.raises(InvalidInput, match=f"^{name} is {re.escape(fix)}"):
            nsa_attention(*tensors._replace(**{name: wrong}), config=CONFIG)


@pytest.mark.filterwarnings("ignore")
def test_rows_of_a_jagged_tensor_run_as_the_message_says():
    attn, x = layer_of(torch.float32), nested(24, layout=torch.jagged)
    y = attn(x.values(), cu_seqlens=x.offsets().int())
    torch.testing.assert_close(y[:5], attn(x.values()[None, :5])[0], rtol=1e-5, atol=1e-5)


PACKING = {
    "list": (
        {"cu_seqlens": [0, 5, 9]},
        "got list: pass torch.tensor(cu_seqlens, dtype=",
    ),
    "numpy": ({"cu_seqlens": np.array([0, 9])}, "got ndarray: pass torch.tensor(cu_seqlens"),
    "int64": ({"cu_seqlens": torch.tensor([0, 9])}, "[2] int64 cpu: pass cu_seqlens.int()"),
    "sparse": ({"cu_seqlens": boundaries(9).to_sparse()}, "pass cu_seqlens.to_dense()"),
    "tensor": (
        {"cu_seqlens": boundaries(9), "max_seqlen": torch.tensor(9)},
        "max_seqlen must be a host integer >= 0, got a tensor: pass int(max_seqlen)",
    ),
    "bool": (
        {"cu_seqlens": boundaries(9), "max_seqlen": True},
        "max_seqlen must be a host integer >= 0, got True",
    ),
}


@pytest.mark.parametrize("name", PACKING)
def test_wrong_packing_arguments_are_refused_with_the_conversion(name):
    arguments, message = PACKING[name]
    with pytest.raises(InvalidInput, match=re.escape(message)):
        layer_of(torch.float32)(torch.randn(9, 24), **arguments)
    with pytest.raises(InvalidInput, match=re.escape(message)):
        nsa_attention(*inputs(CONFIG, 9), config=CONFIG, **arguments)


def test_max_seqlen_may_be_a_numpy_integer():
    attn, x, cu = layer_of(torch.float32), torch.randn(9, 24), boundaries(5, 4)
    assert torch.equal(attn(x, cu, np.int64(5)), attn(x, cu, 5))
