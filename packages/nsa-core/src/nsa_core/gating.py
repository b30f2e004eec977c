"""Sigmoid gates of the three branches, per token and query head, from the layer's input (arXiv 2502.11089, Eq. 5).

Gates are computed and kept in fp32 (fp64 for fp64 inputs), under autocast too. At the start the logits have zero
mean and a spread of about a half over tokens of unit variance: no branch is preferred, and no gate is a constant.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from nsa_core.ops import stats_dtype
from nsa_core.surroundings import no_autocast

_SPREAD = 0.5  # of the logits at the start: gates of 0.5 +- 0.12
_SILU_RMS = 0.6  # of SiLU over a standard normal


def _linear(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


def _gates(logits: torch.Tensor) -> torch.Tensor:
    gates: torch.Tensor = logits.sigmoid().unflatten(-1, (-1, 3))
    return gates


class LinearGate(nn.Linear):
    """sigmoid(W x + b). Rows of W are head-major: head 0's (cmp, sel, win), head 1's, ..."""

    def __init__(self, dim: int, n_heads: int) -> None:
        super().__init__(dim, n_heads * 3)

    def reset_parameters(self) -> None:
        """Logits of zero mean and a spread of about a half for inputs of unit variance."""
        nn.init.normal_(self.weight, std=_SPREAD * self.in_features**-0.5)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] -> gates [..., Hq, 3] in the order cmp, sel, win; fp32, or fp64 for fp64 x."""
        with no_autocast(x.device):
            return _gates(_linear(x.to(stats_dtype(x.dtype)), self))


class MLPGate(nn.Sequential):
    """sigmoid(W2 SiLU(W1 x + b1) + b2) with dim / 4 hidden units; rows of W2 as in :class:`LinearGate`."""

    def __init__(self, dim: int, n_heads: int) -> None:
        hidden = max(1, dim // 4)
        super().__init__(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, n_heads * 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As :meth:`LinearGate.reset_parameters`, over hidden units of unit variance before SiLU."""
        for layer, spread in zip(self._layers(), (1.0, _SPREAD / _SILU_RMS)):
            nn.init.normal_(layer.weight, std=spread * layer.in_features**-0.5)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] -> gates [..., Hq, 3] in the order cmp, sel, win; fp32, or fp64 for fp64 x."""
        inner, outer = self._layers()
        with no_autocast(x.device):
            return _gates(_linear(F.silu(_linear(x.to(stats_dtype(x.dtype)), inner)), outer))

    def _layers(self) -> tuple[nn.Linear, nn.Linear]:
        inner, outer = self[0], self[2]
        assert isinstance(inner, nn.Linear)  # as __init__ made them
        assert isinstance(outer, nn.Linear)
        return inner, outer


def as_it_was_made(gate: nn.Module) -> LinearGate | None:
    """``gate``, where a fused form may compute it in its stead: a LinearGate, its forward its own, without hooks."""
    if type(gate) is not LinearGate or "forward" in gate.__dict__ or gate._forward_hooks or gate._forward_pre_hooks:
        return None
    # Neither a shard of one nor a quantised one, which know their own product.
    return gate if type(gate.weight) is nn.Parameter and type(gate.bias) is nn.Parameter else None


def make_gate(kind: str, dim: int, n_heads: int) -> LinearGate | MLPGate:
    """The gate of a kind in config.GATE_KINDS."""
    return LinearGate(dim, n_heads) if kind == "linear" else MLPGate(dim, n_heads)
