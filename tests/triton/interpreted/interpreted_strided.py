"""Integer metadata of any strides on the triton backend, and a strided bias of the gates."""

from __future__ import annotations

import torch

import strided_suite as suite
from nsa_backend_triton.decode.gates import gates


class TestTriton(suite.StridedMetadata):
    backend = "triton"
    decode_forms = frozenset({"append", "gates", "compress", "step"})


def test_gates_with_a_strided_bias() -> None:
    x, weight, bias = suite.tensors((2, 1, 8), (6, 8), (6,))
    actual = gates(x, weight, suite.column(bias), call=None)
    truth = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).sigmoid()
    suite.assert_right([actual], [truth.unflatten(-1, (2, 3))])
