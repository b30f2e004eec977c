"""Sigmoid gates of the three branches, per token and query head, from the layer's input (arXiv
2502.11089, Eq. 5).

Gates are fp32 (fp64 for fp64 inputs), under autocast too. At initialisation the logits have zero
mean and a standard deviation of about a half over tokens of unit variance: no branch is preferred,
and no gate is constant.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from nsa_core.dtypes import stats_dtype
from nsa_core.errors import InvalidInput
from nsa_core.layer.plain_linear import are_plain_linear
from nsa_core.torch_ops.torch_state import no_autocast

_SPREAD = 0.5  # standard deviation of the initial logits: gates of 0.5 +- 0.12
_SILU_RMS = 0.6  # of SiLU over a standard normal


def _product(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    weight, bias = layer.weight, layer.bias
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _linear(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Apply ``layer`` in x's dtype. A layer that is not plain is called, with its tensors cast to
    that dtype.
    """
    if are_plain_linear(layer):
        assert isinstance(layer, nn.Linear)
        return _product(x, layer)
    tensors = itertools.chain(layer.named_parameters(), layer.named_buffers())
    cast = {n: t.to(x.dtype) for n, t in tensors if t.is_floating_point() and t.dtype != x.dtype}
    result: torch.Tensor = torch.func.functional_call(layer, cast, (x,)) if cast else layer(x)
    if cast and layer.training:  # spectral_norm updates its buffers in the call
        for name, buffer in layer.named_buffers():
            if name in cast:
                buffer.copy_(cast[name])
    return result


def _gates(logits: torch.Tensor) -> torch.Tensor:
    gates: torch.Tensor = logits.sigmoid().unflatten(-1, (-1, 3))
    return gates


class LinearGate(nn.Linear):
    """sigmoid(W x + b). Rows of W are head-major: head 0's (cmp, sel, win), head 1's, ..."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__(dim, n_heads * 3)

    def reset_parameters(self) -> None:
        """Logits of zero mean and a standard deviation of about a half for inputs of unit
        variance.
        """
        nn.init.normal_(self.weight, std=_SPREAD * self.in_features**-0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] -> gates [..., Hq, 3] in the order cmp, sel, win; fp32, or fp64 for fp64
        x.
        """
        with no_autocast(x.device):
            return _gates(_product(x.to(stats_dtype(x.dtype)), self))


class MLPGate(nn.Sequential):
    """sigmoid(W2 SiLU(W1 x + b1) + b2) with dim / 4 hidden units; rows of W2 as in
    :class:`LinearGate`.
    """

    def __init__(self, dim: int, n_heads: int) -> None:
        hidden = max(1, dim // 4)
        super().__init__(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, n_heads * 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As :meth:`LinearGate.reset_parameters`, over hidden units of unit variance before
        SiLU.
        """
        for layer, spread in zip((self[0], self[2]), (1.0, _SPREAD / _SILU_RMS)):
            assert isinstance(layer, nn.Linear)  # as __init__ made it
            nn.init.normal_(layer.weight, std=spread * layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] -> gates [..., Hq, 3] in the order cmp, sel, win; fp32, or fp64 for fp64
        x.
        """
        inner, activation, outer = self
        with no_autocast(x.device):
            return _gates(_linear(activation(_linear(x.to(stats_dtype(x.dtype)), inner)), outer))


def plain_linear_gate(gate: nn.Module) -> LinearGate | None:
    """``gate`` if a fused form may compute it from its weight and bias: a LinearGate without hooks
    or wrappers. Else None.
    """
    if not are_plain_linear(gate, kind=LinearGate):
        return None
    assert isinstance(gate, LinearGate)
    return gate


def gates_of(gate: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call ``gate`` on x [..., dim] and return gates [..., Hq, 3].

    Raises:
        InvalidInput: ``gate`` is an adapter around one of this module's gates. Its term would be
            added to the gates instead of the logits.
    """
    if not isinstance(gate, (LinearGate, MLPGate)):
        _refuse_adapter(gate)
    gates: torch.Tensor = gate(x)
    return gates


def _refuse_adapter(wrapper: nn.Module) -> None:
    """Refuse a wrapper that adds parameters to a gate. Wrappers of torch.compile and DDP add
    none.
    """
    inside = [m for m in wrapper.modules() if isinstance(m, (LinearGate, MLPGate))]
    own = {id(p) for gate in inside for p in gate.parameters()}
    added = [name for name, p in wrapper.named_parameters() if id(p) not in own]
    if inside and added:
        raise InvalidInput(
            f"gate: {type(wrapper).__name__} adds {', '.join(added)} to a"
            f" {type(inside[0]).__name__}, whose output is the sigmoid of a linear map: train the"
            " gate's own parameters (peft: modules_to_save), or configure gate='mlp' and adapt its"
            " linear layers gate.0 and gate.2"
        )


def make_gate(kind: str, dim: int, n_heads: int) -> LinearGate | MLPGate:
    """The gate of a kind in config.GATE_KINDS."""
    return LinearGate(dim, n_heads) if kind == "linear" else MLPGate(dim, n_heads)
