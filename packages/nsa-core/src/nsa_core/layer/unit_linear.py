"""Linear layers that initialise themselves, and not by the module that holds them.

Frameworks that build a model on the meta device call ``reset_parameters`` of every module, of outer
modules first. So each layer must initialise its own parameters.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn


def unit_linear(in_features: int, out_features: int) -> nn.Linear:
    """Return an nn.Linear without a bias, with outputs of variance 1 for unit-variance inputs.

    It is no subclass, because quantisers such as that of bitsandbytes replace none. Its
    ``reset_parameters`` is therefore an attribute of its own.

    Args:
        in_features: Width of the inputs.
        out_features: Width of the outputs.
    """
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")  # draws no numbers
    linear.weight = nn.Parameter(torch.empty(out_features, in_features))
    linear.reset_parameters = _UnitReset(linear)  # type: ignore[method-assign]
    linear.reset_parameters()
    return linear


class _UnitReset(weakref.ref[nn.Linear]):
    """Initialise the layer that has this attribute; a deep copy of the layer gets its own.

    A strong reference would be a cycle: only the garbage collector would free a deleted layer.
    """

    def __call__(self) -> None:
        if (layer := super().__call__()) is None:
            raise ReferenceError("the layer of this copy is deleted; copy layers by copy.deepcopy")
        _reset(layer, 1.0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _UnitReset, (super().__call__(),)


def _reset(layer: nn.Linear | Affine, gain: float) -> None:
    """Initialise the weight to normal values, for outputs of std ``gain``, and the bias to 0."""
    nn.init.normal_(layer.weight, std=gain * layer.in_features**-0.5)
    if isinstance(layer.bias, torch.Tensor):
        nn.init.zeros_(layer.bias)


class Affine(nn.Module):
    """W x + b, with the parameters of nn.Linear and initial values for outputs of one variance.

    It is no nn.Linear on purpose. Adapters and quantisers replace every nn.Linear that they find.
    But phi and the gates are few parameters, in a converted model without any training, so they
    train whole. And the output of a gate is a sigmoid, not a linear map.

    Args:
        in_features: Width of the inputs.
        out_features: Width of the outputs.
        gain: Initial standard deviation of the outputs.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, in_features: int, out_features: int, gain: float = 1.0) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gain = in_features, out_features, gain
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    forward = nn.Linear.forward  # one function, so that are_plain() finds both classes
    extra_repr = nn.Linear.extra_repr

    def reset_parameters(self) -> None:
        """Initialise the weight to normal values and the bias to 0."""
        _reset(self, self.gain)
