"""Sigmoid gates of the three branches per token and query head (arXiv 2502.11089, Eq. 5).

Gates are computed from the layer's input in fp32 (fp64 for fp64 inputs), also under autocast. At
initialisation, over tokens of unit variance, the logits have mean 0 and a standard deviation of
about 0.5: no branch is preferred, and no gate is constant.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from nsa_core.dtypes import stats_dtype
from nsa_core.errors import InvalidInput
from nsa_core.layer.fp32_product import fp32_linear, takes_fp32_product
from nsa_core.layer.plain_linear import are_plain_linear
from nsa_core.layer.unit_linear import Affine
from nsa_core.torch_ops.torch_state import no_autocast

_LOGIT_STD = 0.5  # standard deviation of the initial logits: gates of 0.5 +- 0.12
_SILU_RMS = 0.6  # root mean square of SiLU over a standard normal
_NEAR_DENSE = (0.1, 0.8, 0.1)  # gates of cmp, sel and win


def _plain_linear(x: torch.Tensor, layer: Affine | nn.Linear) -> torch.Tensor:
    weight, bias = layer.weight, layer.bias
    if takes_fp32_product(x, weight):
        return fp32_linear(x, weight, bias)
    x = x.to(stats_dtype(x.dtype))
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _any_linear(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Apply ``layer`` in fp32, or fp64 for fp64 x.

    A layer that is not plain is called as a module, with its tensors cast to this
    dtype.
    """
    if are_plain_linear(layer):
        assert isinstance(layer, (Affine, nn.Linear))
        return _plain_linear(x, layer)
    x = x.to(stats_dtype(x.dtype))
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


class LinearGate(Affine):
    """Gates sigmoid(W x + b).

    Rows of W are head-major: (cmp, sel, win) of head 0, then of head 1, and so on.
    """

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__(dim, n_heads * 3, gain=_LOGIT_STD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the gates [..., Hq, 3] of x [..., dim], in the order cmp, sel, win.

        They are fp32, or fp64 for fp64 x.
        """
        with no_autocast(x.device):
            return _gates(_plain_linear(x, self))


class MLPGate(nn.Sequential):
    """Gates sigmoid(W2 SiLU(W1 x + b1) + b2) with dim / 4 hidden units.

    Rows of W2 are head-major, as in :class:`LinearGate`.
    """

    def __init__(self, dim: int, n_heads: int) -> None:
        hidden = max(1, dim // 4)
        super().__init__(
            Affine(dim, hidden),
            nn.SiLU(),
            Affine(hidden, n_heads * 3, gain=_LOGIT_STD / _SILU_RMS),  # as for LinearGate
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the gates [..., Hq, 3] of x [..., dim], in the order cmp, sel, win.

        They are fp32, or fp64 for fp64 x.
        """
        up, activation, down = self
        with no_autocast(x.device):
            return _gates(_any_linear(activation(_any_linear(x, up)), down))


@torch.no_grad()
def start_near_dense(gate: LinearGate | MLPGate) -> None:
    """Set the gates of every token and head to 0.1, 0.8 and 0.1 for cmp, sel and win.

    With the weights of a trained dense layer, each branch approximates dense attention, and sel
    does so best: it is dense attention as long as all blocks are selected. So the gates add up to
    1, and sel has most of it. The weight of the last layer is 0, so that this holds whatever the
    scale of the inputs.
    """
    last = gate if isinstance(gate, LinearGate) else gate[-1]
    assert isinstance(last, Affine)
    last.weight.zero_()
    gates = torch.tensor(_NEAR_DENSE, dtype=torch.float64, device=last.bias.device)
    last.bias.view(-1, 3).copy_(gates.logit())


def plain_linear_gate(gate: nn.Module) -> LinearGate | None:
    """Return ``gate`` if a fused form may compute it from its weight and bias, else None.

    This requires a LinearGate without hooks and wrappers.
    """
    if not are_plain_linear(gate, kind=LinearGate):
        return None
    assert isinstance(gate, LinearGate)
    return gate


def has_sigmoid(gate: nn.Module) -> bool:
    """Return whether the gates are a sigmoid: a gate of this module, which nothing has altered."""
    return (
        type(gate).forward in (LinearGate.forward, MLPGate.forward)
        and "forward" not in vars(gate)
        and not gate._forward_hooks
        and not nn.modules.module._global_forward_hooks
    )


def compute_gates(gate: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the gates [..., Hq, 3] of x [..., dim].

    Raises:
        InvalidInput: ``gate`` is an adapter around a gate of this module. The adapter's term would
            be added to the gates instead of the logits.
    """
    if not isinstance(gate, (LinearGate, MLPGate)):
        _refuse_adapter(gate)
    gates: torch.Tensor = gate(x)
    return gates


def _refuse_adapter(wrapper: nn.Module) -> None:
    """Raise InvalidInput for a wrapper that adds parameters to a gate.

    Wrappers of torch.compile and DDP add none.
    """
    gates = [m for m in wrapper.modules() if isinstance(m, (LinearGate, MLPGate))]
    own = {id(p) for gate in gates for p in gate.parameters()}
    added = [name for name, p in wrapper.named_parameters() if id(p) not in own]
    if gates and added:
        raise InvalidInput(
            f"gate: {type(wrapper).__name__} adds {', '.join(added)} to a"
            f" {type(gates[0]).__name__}, whose output is a sigmoid, not a linear map: train the"
            " gate's own parameters (peft: modules_to_save)"
        )


def make_gate(kind: str, dim: int, n_heads: int) -> LinearGate | MLPGate:
    """Create a gate; ``kind`` is one of config.GATE_KINDS."""
    return LinearGate(dim, n_heads) if kind == "linear" else MLPGate(dim, n_heads)
