"""Linear layers that initialise themselves, and not by the module that holds them."""

from __future__ import annotations

import torch
from torch import nn


class UnitLinear(nn.Linear):
    """An nn.Linear that is initialised to outputs of one variance for unit-variance inputs.

    Frameworks that build a model on the meta device call ``reset_parameters`` of every module, of
    outer modules first. So each layer must initialise its own parameters.

    Args:
        in_features: Width of the inputs.
        out_features: Width of the outputs.
        bias: Whether there is a bias, initially 0.
        gain: Initial standard deviation of the outputs.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, gain: float = 1.0
    ) -> None:
        self.gain = gain  # first, because the constructor calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Initialise the weight to normal values and the bias to 0."""
        nn.init.normal_(self.weight, std=self.gain * self.in_features**-0.5)
        if isinstance(self.bias, torch.Tensor):
            nn.init.zeros_(self.bias)


class Affine(nn.Module):
    """W x + b, with the parameters of nn.Linear and the initial values of :class:`UnitLinear`.

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
        """Initialise as UnitLinear does."""
        UnitLinear.reset_parameters(self)  # type: ignore[arg-type]
